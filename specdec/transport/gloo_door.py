"""How two processes meet: one knocks at the other's door, and a member is let in: a Gloo group of two.

A door is a TCP store on its owner's address. Who knocks leaves its name and key there, and a proof that it
knows the key of whom it knocks at. Once they have met, the store is done with.

Keys are secrets that the members of the directory share: they keep strangers and other deployments out. They
do not protect from somebody who can read or change what is on the network. Neither the store nor Gloo
encrypts, and whoever can write to their ports can break a link or end the process: both belong on a private
network.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import msgspec
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from specdec.core.errors import ResourceError
from specdec.transport.base import PeerAddress, PeerId

logger = logging.getLogger(__name__)

# torch types its process groups too narrowly to be of use.
_GLOO: Any = ProcessGroupGloo
_KNOCKS: Final = "knocks"
_WELCOME: Final = b"welcome"
_REFUSED: Final = b"refused"
_FOREVER: Final = timedelta(days=365)
_POLL_S: Final = 0.005
HOST_RANK: Final = 0
GUEST_RANK: Final = 1


class Knock(msgspec.Struct, frozen=True, array_like=True):
    """Who wants a link, and what shows that it may have one."""

    link_id: str
    peer_id: PeerId
    public_key: str
    proof: bytes

    @property
    def answer_key(self) -> str:
        """Where the answer is left."""
        return f"answer-{self.link_id}"


_decoder = msgspec.msgpack.Decoder(Knock)


class Door:
    """Lets members in, and nobody else."""

    def __init__(
        self,
        host: str,
        *,
        is_member: Callable[[PeerId, str], bool],
        let_in: Callable[[Knock, Any], None],
        on_dropped: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        """Open at a free port of `host`.

        Args:
            host: the only address listened on.
            is_member: judges a name and its key.
            let_in: is given a member's knock and the group with it, in a thread of its own.
            on_dropped: is told why somebody was not let in.
            timeout_s: how long a member may take to come in.

        Raises:
            ResourceError: the address cannot be bound.
        """
        self._host = host
        self._is_member = is_member
        self._let_in = let_in
        self._on_dropped = on_dropped
        self._timeout_s = timeout_s
        self.key = secrets.token_hex(32)
        """What who knocks must know."""
        self._store: Any
        self._store, self.port = _serve_store(host)
        self._closed = False
        self._thread = threading.Thread(target=self._answer, name="gloo-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shut it."""
        self._closed = True
        self._store.queue_push(_KNOCKS, b"")
        self._thread.join()
        self._store = None  # it ends with its last reference

    def _answer(self) -> None:
        store: Any = self._store.clone()
        store.set_timeout(_FOREVER)
        while True:
            content = store.queue_pop(_KNOCKS)
            if self._closed:
                return
            try:
                knock = _decoder.decode(content)
            except msgspec.DecodeError:
                self._on_dropped("malformed")
                continue
            welcome = self._is_welcome(knock)
            if welcome:
                # Not by this thread: whoever knocks and does not come must not keep others waiting.
                arguments = (self._store.clone(), knock)
                threading.Thread(target=self._meet, args=arguments, name="gloo-guest", daemon=True).start()
            else:
                logger.debug("refused a link to %s: not a member", knock.peer_id)
                self._on_dropped("refused_link")
            store.set(knock.answer_key, _WELCOME if welcome else _REFUSED)

    def _is_welcome(self, knock: Knock) -> bool:
        proof = _proof(self.key, knock.link_id, knock.peer_id, knock.public_key)
        return hmac.compare_digest(proof, knock.proof) and self._is_member(knock.peer_id, knock.public_key)

    def _meet(self, store: Store, knock: Knock) -> None:
        try:
            group = _meet(store, knock, HOST_RANK, self._host, self._timeout_s)
        except RuntimeError as error:
            logger.debug("%s knocked and did not come: %s", knock.peer_id, error)
            return
        self._let_in(knock, group)


def knock_at(
    peer: PeerAddress, own: PeerAddress, *, timeout_s: float, given_up: Callable[[], bool]
) -> Any | None:
    """Return a group with a peer; None when it cannot be reached in time, or refuses, or we have given up."""
    host, port = host_and_port(peer.endpoint)
    link_id = secrets.token_hex(16)
    proof = _proof(peer.public_key, link_id, own.peer_id, own.public_key)
    knock = Knock(link_id, own.peer_id, own.public_key, proof)
    try:
        # TCPStore would try for the whole of its timeout, and say so at length.
        socket.create_connection((host, port), timeout_s).close()
        timeout = timedelta(seconds=timeout_s)
        store: Any = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        store.queue_push(_KNOCKS, msgspec.msgpack.encode(knock))
        if not _awaits_us(store, knock, timeout_s, given_up):
            return None
        return _meet(store, knock, GUEST_RANK, host_and_port(own.endpoint)[0], timeout_s)
    except (OSError, RuntimeError) as error:
        logger.debug("cannot reach %s: %s", peer.peer_id, error)
        return None


def endpoint_of(host: str, port: int) -> str:
    """The form in which a door's address is told."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Return what `endpoint_of` put together."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _meet(store: Store, knock: Knock, rank: int, own_host: str, timeout_s: float) -> Any:
    """Return the group of two.

    Raises:
        RuntimeError: the other did not come in time.
    """
    options: Any = _GLOO._Options()
    options._devices = [_device(own_host)]
    options._timeout = timedelta(seconds=timeout_s)
    return _GLOO(PrefixStore(knock.link_id, store), rank, 2, options)


@functools.cache
def _device(host: str) -> Any:
    """Gloo's sockets on an address, and the one thread that serves them."""
    return _GLOO.create_device(hostname=host)


def _serve_store(host: str) -> tuple[TCPStore, int]:
    """Return a store that listens on `host` alone, and its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as listener:  # by itself, the store listens on all addresses
            listener.bind((host, 0))
            port = int(listener.getsockname()[1])
            listener.listen()
            store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()
            )
            listener.detach()
            return store, port
    except (OSError, RuntimeError) as error:
        raise ResourceError(f"cannot bind a channel to {host}: {error}") from error


def _awaits_us(store: TCPStore, knock: Knock, timeout_s: float, given_up: Callable[[], bool]) -> bool:
    """Wait for the answer to a knock. By polling: a wait that times out says so at length on stderr."""
    until_s = time.monotonic() + timeout_s
    while not store.check([knock.answer_key]):
        if time.monotonic() >= until_s or given_up():
            return False
        time.sleep(_POLL_S)
    answer = store.get(knock.answer_key)
    store.delete_key(knock.answer_key)
    return answer == _WELCOME


def _proof(key: str, link_id: str, peer_id: PeerId, public_key: str) -> bytes:
    return hmac.digest(key.encode(), f"{link_id} {public_key} {peer_id}".encode(), hashlib.sha256)
