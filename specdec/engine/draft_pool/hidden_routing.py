"""At the coordinator: what is asked of a draft worker is wished of the target worker on its behalf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from specdec.core.ids import RequestId
from specdec.transport.base import Channel, Envelope, PeerAddress, PeerId
from specdec.transport.messages import HiddenWish, Message, ProposeEntry, ProposeReply, ProposeRequest
from specdec.transport.wrapped import WrappedChannel

SendWishes: TypeAlias = Callable[[PeerId, PeerAddress, Sequence[HiddenWish]], None]
"""Such as `RemoteTarget.send_hidden`."""

_MAX_LOST: Final = 4096
"""Calls for states that are remembered; some are of sequences that have ended meanwhile."""


class _Attempt(NamedTuple):
    """A sequence at a draft worker."""

    worker: PeerId
    request_id: RequestId
    epoch: int


class HiddenRouting(WrappedChannel):
    """The channel to the draft workers, for a proposer that declares `hidden_layers`; others need none of it.

    Tokens that travel to a draft worker take along, from the target worker and not by this way, the hidden
    states of the tokens before them. The wish leaves before the question: they are on their way together.
    A draft worker that takes a sequence over is told all its tokens, and so gets all its states. One that
    says that states were lost (`ProposeAnswer.rows_from`) gets those again with what it is told next.
    """

    def __init__(self, inner: Channel, send_wishes: SendWishes) -> None:
        super().__init__(inner)
        self._send_wishes = send_wishes
        self._inboxes: Mapping[PeerId, PeerAddress] = {}
        self._lost: dict[_Attempt, int] = {}
        """The first row that a draft worker has asked for again."""

    def set_inboxes(self, inboxes: Mapping[PeerId, PeerAddress]) -> None:
        """Say where each draft worker takes tensors (any thread)."""
        self._inboxes = dict(inboxes)

    def send(self, peer_id: PeerId, message: Message) -> None:
        """Send a message; before a `ProposeRequest`, the wishes that go with it."""
        inbox = self._inboxes.get(peer_id)
        if inbox is not None and isinstance(message, ProposeRequest):
            wishes = [wish for entry in message.entries if (wish := self._wish(peer_id, entry)) is not None]
            if wishes:
                self._send_wishes(self.address.peer_id, inbox, wishes)
        self.inner.send(peer_id, message)

    def receive(self, timeout_s: float | None) -> Envelope:
        """Return the next arrival; remember which states were lost."""
        envelope = self.inner.receive(timeout_s)
        if isinstance(envelope.message, ProposeReply) and envelope.sender in self._inboxes:
            for answer in envelope.message.answers:
                if answer.rows_from >= 0:
                    if len(self._lost) >= _MAX_LOST:
                        del self._lost[next(iter(self._lost))]
                    attempt = _Attempt(envelope.sender, answer.request_id, answer.epoch)
                    self._lost[attempt] = answer.rows_from
        return envelope

    def _wish(self, worker: PeerId, entry: ProposeEntry) -> HiddenWish | None:
        lost = self._lost.pop(_Attempt(worker, entry.request_id, entry.epoch), None)
        first_row = max(0, entry.base_len - 1) if entry.token_ids else entry.committed_len
        if lost is not None:
            first_row = min(first_row, lost)
        if first_row >= entry.committed_len:
            return None
        return HiddenWish(
            request_id=entry.request_id,
            epoch=entry.epoch,
            committed_len=entry.committed_len,
            prefix_hash=entry.prefix_hash,
            first_row=first_row,
        )
