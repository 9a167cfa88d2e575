"""The contract of a channel: typed messages between named peers, best effort, in order per link.

A channel may lose what was in flight when a link broke; everything above keys its messages so that a lost,
late or doubled one does no harm. Who may speak is decided by public keys, not by names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NewType, Protocol

import msgspec

from specdec.transport.messages import Message

if TYPE_CHECKING:  # whoever sends no tensors need not load torch
    import torch

PeerId = NewType("PeerId", str)
"""One process in one incarnation, as the directory knows it."""

MAX_MESSAGE_BYTES = 16 << 20
"""Default bound on one encoded message."""
MAX_QUEUED_BYTES = 64 << 20
"""Default bound on what has arrived from one peer and has not been read."""
MAX_UNSENT_BYTES = 256 << 20
"""Default bound on what is to be sent to one peer and has not left. More than one round may ask of a target,
in however many parts: what is dropped of that costs seconds."""


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a peer, and how to know that it is the one."""

    peer_id: PeerId
    endpoint: str
    """Transport's own form, such as `tcp://10.0.0.3:41123`."""
    public_key: str
    """The peer's CURVE public key (Z85 text)."""


class PeerLost(msgspec.Struct, frozen=True):
    """Never sent: a channel reports with it that the link to a connected peer broke.

    `torch.distributed` reports, too, that none could be opened for long. The channel keeps trying to
    re-establish the link until `disconnect`.
    """


class PeerFound(msgspec.Struct, frozen=True):
    """Never sent: a channel reports with it that a link stands again whose loss it has reported.

    So the peer's process is there; whether it works, or has heard what was sent meanwhile, is not said. Over
    `torch.distributed` it is not reported: nobody there waits for one peer alone.
    """


LinkNews = PeerLost | PeerFound
"""What a channel itself says of a peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One arrival."""

    sender: PeerId
    message: Message | LinkNews
    tensors: Mapping[str, torch.Tensor] | None = None
    """What came beside the message, by name; only over a `TensorChannel`. On the CPU, but for what came by a
    device lane: that is on the lane's device, complete, and is read on the device's default stream."""
    num_bytes: int = field(default=0, compare=False)
    """Length of the message's frame: about what it cost to understand, and costs to keep."""


@dataclass(slots=True)
class ChannelCounters:
    """What happened on one channel since it was opened."""

    sent: int = 0
    received: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Messages that were not delivered, by reason (malformed, version, foreign, full, too_large,
    unknown_peer), links that were not let in (refused_link), that ended because tensors were not taken or did
    not come from device to device (lane_broken), and that could not be opened so (no_lane)."""


def dropped_series(
    channel: Literal["draft", "target", "hidden"],
    dropped_by: Literal["coordinator", "draft_worker", "target_worker"],
    dropped: Mapping[str, int],
) -> dict[str, int]:
    """Return what was dropped at one end of a channel of workers, by reason, as it is exported.

    `channel`: between coordinators and draft workers, or target workers, or (hidden states) between these.
    """
    return {
        f'worker_messages_dropped{{channel="{channel}",dropped_by="{dropped_by}",reason="{reason}"}}': count
        for reason, count in list(dropped.items())
    }


class Channel(Protocol):
    """One process's end of its links. Owned by one thread, except where a method says otherwise."""

    @property
    def address(self) -> PeerAddress:
        """How others reach this channel."""
        ...

    @property
    def counters(self) -> ChannelCounters:
        """Live counters; read them from any thread."""
        ...

    def connect(self, peer: PeerAddress) -> None:
        """Open a link to a peer, or replace the one to an earlier address of it.

        Does not wait. A link that the peer refuses, because it has not yet been told of us, is tried again
        during `receive`, and what was sent on it meanwhile is kept.
        """
        ...

    def disconnect(self, peer_id: PeerId) -> None:
        """Close the link opened by `connect`, dropping what is queued on it. Unknown peers are ignored."""
        ...

    def admit(self, peers: Iterable[PeerAddress]) -> None:
        """Let exactly these peers open links to this channel (any thread). Others are refused and unheard."""
        ...

    def send(self, peer_id: PeerId, message: Message) -> None:
        """Queue a message for a connected peer, or for one that has spoken on a link of its own.

        Never blocks: when the peer is unknown or its queue is full the message is dropped and counted. What
        the kernel has no room for leaves during `receive`, which every owner keeps calling.

        Raises:
            ChannelClosed: this end is closed.
            MessageTooLong: the message exceeds the size bound (a programmer's or a user's limit is missing).
        """
        ...

    def receive(self, timeout_s: float | None) -> Envelope:
        """Return the next arrival; wait at most `timeout_s` (0: do not wait, None: for ever).

        Malformed, foreign and wrong-version arrivals are counted and dropped, never returned.

        Raises:
            ChannelTimeout: nothing arrived in time, or another thread called `wake`.
            ChannelClosed: this end is closed.
        """
        ...

    def wake(self) -> None:
        """Make a `receive` that waits now, or the next one, return early (any thread)."""
        ...

    def close(self, flush_s: float = 0.0) -> None:
        """Close all links, allowing `flush_s` for what is queued to leave. Idempotent."""
        ...


class TensorChannel(Channel, Protocol):
    """A channel that carries tensors beside messages."""

    def send_tensors(self, peer_id: PeerId, message: Message, tensors: Mapping[str, torch.Tensor]) -> None:
        """Queue a message and named tensors, as `send` does; what receives them gets all or nothing.

        The tensors may change as soon as this returns.
        dtypes: float32, float16, bfloat16, int64, int32, uint8.

        Raises:
            ChannelClosed: this end is closed.
            MessageTooLong: all together exceeds the size bound.
        """
        ...
