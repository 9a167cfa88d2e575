"""Answers ZeroMQ's question whether a public key may open a link."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.z85 import encode as z85_encode

logger = logging.getLogger(__name__)

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"


class Gate:
    """Answers ZeroMQ's authentication requests (RFC 27, ZAP) in a thread of its own."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        is_allowed: Callable[[str], bool],
        on_refusal: Callable[[], None],
    ) -> None:
        """`is_allowed` judges a public key (Z85 text); both are called in the gate's thread."""
        self._is_allowed = is_allowed
        self._on_refusal = on_refusal
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        # A thread cannot wait on a socket that another closes: it is told to end by a message instead.
        self._stop = context.socket(zmq.PAIR)
        self._stop.setsockopt(zmq.LINGER, 0)
        self._stop.bind("inproc://gate-stop")
        self._stopped = context.socket(zmq.PAIR)
        self._stopped.setsockopt(zmq.LINGER, 0)
        self._stopped.connect("inproc://gate-stop")
        self._thread = threading.Thread(target=self._run, name="zmq-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                self._socket.close(0)
                self._stopped.close(0)
                return
            self._answer(self._socket.recv_multipart())

    def _answer(self, request: list[bytes]) -> None:
        version, request_id, _domain, address, _identity, mechanism, *credentials = request
        key = ""
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            key = z85_encode(credentials[0]).decode()
        if key and self._is_allowed(key):
            verdict = (b"200", b"OK", key.encode())
        else:
            # Logged quietly: a member that has just joined is refused until this process hears of it.
            logger.debug("refused a link from %s: not a member", address.decode(errors="replace"))
            self._on_refusal()
            verdict = (b"400", b"not a member", b"")
        self._socket.send_multipart((version, request_id, *verdict, b""))
