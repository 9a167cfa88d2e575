"""How two processes meet: one knocks at the other's door, and a member is let in: a Gloo group of two.

A door is a TCP store on its owner's address. Who knocks leaves its name and key there, and a proof that it
knows the key of whom it knocks at. Once they have met, the store is done with.

With its knock it says by what tensors could travel (`transport.lane_choice`); the answer says by what they
do. Who says nothing of it is of an older version, and has Gloo alone.

Whoever connects to a store has PyTorch (2.13) ask the resolver for the name of its address, 127.0.0.1 too
(as ::ffff:127.0.0.1, for which /etc/hosts does not answer). No option changes that: with a resolver that
leaves reverse look-ups unanswered, opening a link takes the resolver's timeout, often 5 s, or fails.

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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import msgspec
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from specdec.core.errors import UNDECODABLE, ConfigError
from specdec.model.parallel.listening_store import open_store
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.device_lane import DeviceLanes, Pipe, open_pipe
from specdec.transport.lane_choice import KEY, LaneEnd, use_device_lane

logger = logging.getLogger(__name__)

# torch types its process groups too narrowly to be of use.
_GLOO: Any = ProcessGroupGloo
_KNOCKS: Final = "knocks"
_WELCOME: Final = b"welcome"
_WELCOME_WITH_LANE: Final = b"welcome, with a device lane"
"""Said only to who has offered one."""
_REFUSED: Final = b"refused"
_GLOO_ALONE: Final = LaneEnd("gloo")
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
    end: LaneEnd | None = None
    """By what tensors could travel. An older door does not read it; of an older guest it is None."""

    @property
    def answer_key(self) -> str:
        """Where the answer is left."""
        return f"answer-{self.link_id}"


_decoder = msgspec.msgpack.Decoder(Knock)


class Meeting(NamedTuple):
    """What two peers have once they have met."""

    group: Any
    """The Gloo group of two."""
    pipe: Pipe | None
    """By which tensors travel; None: by the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingTerms:
    """How an end meets others."""

    timeout_s: float
    """How long a member may take to come in."""
    lane_timeout_s: float
    """How long a device lane may then take to be opened."""
    lanes: DeviceLanes | None
    """How they are opened here, if at all."""

    @property
    def end(self) -> LaneEnd:
        """What is said of it."""
        return _GLOO_ALONE if self.lanes is None else self.lanes.end


class Door:
    """Lets members in, and nobody else."""

    def __init__(
        self,
        host: str,
        *,
        is_member: Callable[[PeerId, str], bool],
        let_in: Callable[[Knock, Meeting], None],
        on_guest: Callable[[threading.Thread], None],
        on_dropped: Callable[[str], None],
        terms: MeetingTerms,
    ) -> None:
        """Open at a free port of `host`.

        Args:
            host: the only address listened on.
            is_member: judges a name and its key.
            let_in: is given a member's knock and what it has with it, in a thread of its own.
            on_guest: is told of that thread as soon as it runs.
            on_dropped: is told why somebody was not let in, or has no device lane.
            terms: how members are met.

        Raises:
            ResourceError: the address cannot be bound.
        """
        self._host = host
        self._is_member = is_member
        self._let_in = let_in
        self._on_guest = on_guest
        self._on_dropped = on_dropped
        self._terms = terms
        self.key = secrets.token_hex(32)
        """What who knocks must know."""
        self._store: Any
        self._store = open_store(host)
        self.port: int = self._store.port
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
            except UNDECODABLE:
                self._on_dropped("malformed")
                continue
            answer = self._answer_to(knock)
            if answer == _REFUSED:
                self._on_dropped("refused_link")
            else:
                # Not by this thread: whoever knocks and does not come must not keep others waiting.
                arguments = (self._store.clone(), knock, answer == _WELCOME_WITH_LANE)
                guest = threading.Thread(target=self._meet, args=arguments, name="gloo-guest", daemon=True)
                guest.start()
                self._on_guest(guest)
            store.set(knock.answer_key, answer)

    def _answer_to(self, knock: Knock) -> bytes:
        if not self._is_welcome(knock):
            logger.debug("refused a link to %s: not a member", knock.peer_id)
            return _REFUSED
        try:
            with_lane = use_device_lane(self._terms.end, knock.end)
        except ConfigError as error:
            _complain(str(error))
            return _REFUSED
        return _WELCOME_WITH_LANE if with_lane else _WELCOME

    def _is_welcome(self, knock: Knock) -> bool:
        proof = _proof(self.key, knock.link_id, knock.peer_id, knock.public_key)
        return hmac.compare_digest(proof, knock.proof) and self._is_member(knock.peer_id, knock.public_key)

    def _meet(self, store: Store, knock: Knock, with_lane: bool) -> None:
        try:
            meeting = _meet(store, knock, HOST_RANK, self._host, self._terms, with_lane=with_lane)
        except RuntimeError as error:
            logger.debug("%s knocked and did not come: %s", knock.peer_id, error)
            return
        if with_lane and meeting.pipe is None:
            self._on_dropped("no_lane")
        self._let_in(knock, meeting)


def knock_at(
    peer: PeerAddress, own: PeerAddress, *, terms: MeetingTerms, given_up: Callable[[], bool]
) -> Meeting | None:
    """Meet a peer; None when it cannot be reached in time, or refuses, or we have given up."""
    host, port = host_and_port(peer.endpoint)
    link_id = secrets.token_hex(16)
    proof = _proof(peer.public_key, link_id, own.peer_id, own.public_key)
    knock = Knock(link_id, own.peer_id, own.public_key, proof, terms.end)
    try:
        # TCPStore would try for the whole of its timeout, and say so at length.
        socket.create_connection((host, port), terms.timeout_s).close()
        timeout = timedelta(seconds=terms.timeout_s)
        store: Any = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        store.queue_push(_KNOCKS, msgspec.msgpack.encode(knock))
        answer = _answer_of(store, knock, terms.timeout_s, given_up)
        if answer not in {_WELCOME, _WELCOME_WITH_LANE} or given_up():
            return None
        own_host, _ = host_and_port(own.endpoint)
        return _meet(store, knock, GUEST_RANK, own_host, terms, with_lane=answer == _WELCOME_WITH_LANE)
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


def _meet(
    store: Any, knock: Knock, rank: int, own_host: str, terms: MeetingTerms, *, with_lane: bool
) -> Meeting:
    """Return what the two have now.

    Raises:
        RuntimeError: the other did not come in time; or has no device lane, and nothing else may be used.
    """
    options: Any = _GLOO._Options()
    options._devices = [_device(own_host)]
    options._timeout = timedelta(seconds=terms.timeout_s)
    group = _GLOO(PrefixStore(knock.link_id, store), rank, 2, options)
    if not with_lane or terms.lanes is None:
        if terms.end.wanted == "nccl":
            _complain(f"{KEY} is nccl, and tensors go by Gloo to workers of an older version")
        return Meeting(group, None)
    lane_store = PrefixStore(f"{knock.link_id}-lane", store)
    lane_store.set_timeout(timedelta(seconds=2 * terms.lane_timeout_s))
    pipe = open_pipe(terms.lanes, lane_store, rank, terms.lane_timeout_s)
    if pipe is None:
        if terms.lanes.end.wanted == "nccl":
            raise RuntimeError(f"no device lane to {knock.peer_id}, and {KEY} is nccl")
        logger.warning("tensors on the link that %s has opened go by Gloo", knock.peer_id)
    else:
        logger.info("tensors on the link that %s has opened go from device to device", knock.peer_id)
    return Meeting(group, pipe)


@functools.lru_cache(maxsize=64)
def _complain(text: str) -> None:
    """Once: links are opened again and again."""
    logger.error(text)


@functools.cache
def _device(host: str) -> Any:
    """Gloo's sockets on an address, and the one thread that serves them."""
    return _GLOO.create_device(hostname=host)


def _answer_of(store: TCPStore, knock: Knock, timeout_s: float, given_up: Callable[[], bool]) -> bytes | None:
    """Wait for the answer to a knock. By polling: a wait that times out says so at length on stderr."""
    until_s = time.monotonic() + timeout_s
    while not store.check([knock.answer_key]):
        if time.monotonic() >= until_s or given_up():
            return None
        time.sleep(_POLL_S)
    answer: bytes = store.get(knock.answer_key)
    store.delete_key(knock.answer_key)
    return answer


def _proof(key: str, link_id: str, peer_id: PeerId, public_key: str) -> bytes:
    return hmac.digest(key.encode(), f"{link_id} {public_key} {peer_id}".encode(), hashlib.sha256)
