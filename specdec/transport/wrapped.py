"""A channel around a channel: for those that look at, or tamper with, what passes."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.transport.base import Channel, ChannelCounters, Envelope, PeerAddress, PeerId
from specdec.transport.messages import Message


class WrappedChannel:
    """Implements `Channel` by another one that it owns; override what shall differ."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner

    @property
    def address(self) -> PeerAddress:
        """Of the inner channel."""
        return self.inner.address

    @property
    def counters(self) -> ChannelCounters:
        """Of the inner channel."""
        return self.inner.counters

    def connect(self, peer: PeerAddress) -> None:
        """See `Channel.connect`."""
        self.inner.connect(peer)

    def disconnect(self, peer_id: PeerId) -> None:
        """See `Channel.disconnect`."""
        self.inner.disconnect(peer_id)

    def admit(self, peers: Iterable[PeerAddress]) -> None:
        """See `Channel.admit`."""
        self.inner.admit(peers)

    def send(self, peer_id: PeerId, message: Message) -> None:
        """See `Channel.send`."""
        self.inner.send(peer_id, message)

    def receive(self, timeout_s: float | None) -> Envelope:
        """See `Channel.receive`."""
        return self.inner.receive(timeout_s)

    def wake(self) -> None:
        """See `Channel.wake`."""
        self.inner.wake()

    def close(self, flush_s: float = 0.0) -> None:
        """See `Channel.close`."""
        self.inner.close(flush_s)
