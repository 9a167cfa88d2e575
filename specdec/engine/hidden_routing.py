"""At the coordinator: what is asked of a draft worker is wished of the target worker on its behalf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from specdec.transport.base import Channel, PeerAddress, PeerId
from specdec.transport.messages import HiddenWish, Message, ProposeRequest
from specdec.transport.wrapped import WrappedChannel

SendWishes: TypeAlias = Callable[[PeerId, PeerAddress, Sequence[HiddenWish]], None]
"""Such as `RemoteTarget.send_hidden`."""


class HiddenRouting(WrappedChannel):
    """The channel to the draft workers, for a proposer that declares `hidden_layers`; others need none of it.

    Tokens that travel to a draft worker take along, from the target worker and not by this way, the hidden
    states of the tokens before them. The wish leaves before the question: they are on their way together.
    """

    def __init__(self, inner: Channel, send_wishes: SendWishes) -> None:
        super().__init__(inner)
        self._send_wishes = send_wishes
        self._inboxes: Mapping[PeerId, PeerAddress] = {}

    def set_inboxes(self, inboxes: Mapping[PeerId, PeerAddress]) -> None:
        """Say where each draft worker takes tensors (any thread)."""
        self._inboxes = dict(inboxes)

    def send(self, peer_id: PeerId, message: Message) -> None:
        """Send a message; before a `ProposeRequest`, the wishes that go with it."""
        inbox = self._inboxes.get(peer_id)
        if inbox is not None and isinstance(message, ProposeRequest):
            wishes = [
                HiddenWish(
                    request_id=entry.request_id,
                    epoch=entry.epoch,
                    committed_len=entry.committed_len,
                    prefix_hash=entry.prefix_hash,
                    first_row=max(0, entry.base_len - 1),
                )
                for entry in message.entries
                if entry.token_ids
            ]
            if wishes:
                self._send_wishes(self.address.peer_id, inbox, wishes)
        self.inner.send(peer_id, message)
