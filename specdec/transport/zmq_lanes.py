"""The lanes of a `ZmqChannel`: opened, watched, used and given up beside its links."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import zmq

from specdec.transport.base import PeerId
from specdec.transport.lane import Lane
from specdec.transport.messages import LaneMoved, LaneOffer, encode

logger = logging.getLogger(__name__)


class LaneOwner(Protocol):
    """A ZeroMQ link that may have a lane beside it."""

    lane: Lane | None

    @property
    def peer_id(self) -> PeerId:
        """Who is at the other end."""
        ...


Owner = TypeVar("Owner", bound=LaneOwner)


class Lanes(Generic[Owner]):
    """Looks after the lanes of one channel, in the channel's thread."""

    def __init__(
        self,
        events: select.epoll,
        *,
        send_by_zmq: Callable[[Owner, bytes], None],
        take: Callable[[Owner, bytes], None],
        max_frame_bytes: int,
        max_queued: int,
        max_queued_bytes: int,
    ) -> None:
        """Lanes are watched by `events`; `take` gets every frame that comes by one.

        At most `max_queued` frames, and `max_queued_bytes` of them, wait to be sent by each lane.
        `send_by_zmq` may raise zmq.ZMQError: the queue is full, or the link is gone.
        """
        self._events = events
        self._send_by_zmq = send_by_zmq
        self._take = take
        self._max_frame_bytes = max_frame_bytes
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._owners: dict[int, Owner] = {}

    @property
    def num_open(self) -> int:
        """Lanes that carry frames in both directions."""
        lanes = [owner.lane for owner in self._owners.values()]
        return sum(lane is not None and lane.is_open and lane.peer_has_moved for lane in lanes)

    def offer(self, owner: Owner) -> None:
        """Listen for the peer, and tell it."""
        try:
            lane = Lane.listen(self._max_frame_bytes)
        except OSError as error:
            logger.warning("no lane to %s: %s", owner.peer_id, error)
            return
        self._keep(owner, lane)
        self._tell(owner, lane.offer)

    def take_up(self, owner: Owner, offer: LaneOffer) -> None:
        """Open the lane that the peer offers, in place of an earlier one; send by it from now on."""
        self.read(owner)
        self.drop(owner)
        lane = Lane.take_up(offer, self._max_frame_bytes)
        if lane is not None:
            self._keep(owner, lane)
            self._tell(owner, LaneMoved(offer.name))

    def note_moved(self, owner: Owner, name: str) -> None:
        """All that the peer sent by ZeroMQ before it sent by this lane has arrived."""
        if owner.lane is not None and owner.lane.offer.name == name:
            owner.lane.peer_has_moved = True
            self._watch(owner.lane)

    def try_send(self, owner: Owner, frame: bytes) -> bool:
        """Send by the lane; False when there is none (any more).

        Raises:
            BlockingIOError: too much waits already.
        """
        lane = owner.lane
        if lane is None or not lane.is_open:
            return False
        if not lane.send(frame, self._max_queued, self._max_queued_bytes):
            self.drop(owner)
            return False
        if lane.has_backlog:
            self._watch(lane)
        return True

    def attend(self, fd: int) -> bool:
        """See to the lane that an event is about: let the peer in, or read and send; False if it is none."""
        owner = self._owners.get(fd)
        if owner is None:
            return False
        lane = owner.lane
        assert lane is not None
        if not lane.is_open:
            self._let_in(owner, lane)
        elif lane.has_backlog:
            if not lane.flush() or not self.read(owner):
                self.drop(owner)
            else:
                self._watch(lane)
        elif not self.read(owner):
            self.drop(owner)
        return True

    def read(self, owner: Owner) -> bool:
        """Take in what has come by a link's lane, if it has one; return whether the lane still stands."""
        lane = owner.lane
        if lane is None or not lane.is_open or not lane.peer_has_moved:
            return True
        frames, stands = lane.receive()
        for frame in frames:
            self._take(owner, frame)
        return stands

    def drop(self, owner: Owner) -> None:
        """Give a link's lane up, with what is queued on it."""
        lane, owner.lane = owner.lane, None
        if lane is not None:
            self._events.unregister(lane.fileno())
            del self._owners[lane.fileno()]
            lane.close()

    def close(self, flush_s: float) -> None:
        """Close all, allowing each `flush_s` for what is queued."""
        for owner in self._owners.values():
            if owner.lane is not None:
                owner.lane.close(flush_s)
                owner.lane = None
        self._owners.clear()

    def _keep(self, owner: Owner, lane: Lane) -> None:
        owner.lane = lane
        self._owners[lane.fileno()] = owner
        self._events.register(lane.fileno(), _interest(lane))

    def _let_in(self, owner: Owner, lane: Lane) -> None:
        """The listening socket gives way to the connected one."""
        listening = lane.fileno()
        self._events.unregister(listening)
        del self._owners[listening]
        is_open = lane.accept()
        self._keep(owner, lane)
        if is_open:
            self._tell(owner, LaneMoved(lane.offer.name))

    def _tell(self, owner: Owner, message: LaneOffer | LaneMoved) -> None:
        try:
            self._send_by_zmq(owner, encode(message))
        except zmq.ZMQError:  # full, or gone: not the time for a lane
            self.drop(owner)

    def _watch(self, lane: Lane) -> None:
        self._events.modify(lane.fileno(), _interest(lane))


def _interest(lane: Lane) -> int:
    """What to be told of: somebody who connects, frames that may be read, room for the backlog.

    While nothing may be read yet, it is told once that a peer has hung up: the last frames wait for
    `LaneMoved`, which may never come.
    """
    listens = not lane.is_open or lane.peer_has_moved
    return (select.EPOLLIN if listens else select.EPOLLET) | (select.EPOLLOUT if lane.has_backlog else 0)
