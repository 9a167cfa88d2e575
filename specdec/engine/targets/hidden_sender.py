"""At the target worker: hidden states for draft workers, sent as soon as they have been computed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import torch

from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId
from specdec.transport.base import PeerAddress, PeerId, PeerLost, TensorChannel
from specdec.transport.messages import HiddenRun, HiddenStates, HiddenWish, SendHidden

_PARCEL_BYTES: Final = 8 << 20
"""Rows of one message: those of a long prompt are sent in several, beside others' rather than before them."""


class HiddenTaps(Protocol):
    """A target that keeps hidden states of what it computes, for a while."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Which, in the order in which they are side by side in a row."""
        ...

    def hidden_rows(self, request_id: RequestId, first_row: int, end_row: int) -> torch.Tensor | None:
        """Return rows [n, len(layers) * hidden size] that end with row end_row - 1.

        n is end_row - first_row, or less when early rows are no longer kept. None: row end_row - 1 has not
        been computed (yet). The newest computation of a position counts: what a rejected draft left behind
        is overwritten before it is wished for.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Receiver:
    coordinator: str
    peer_id: PeerId


class HiddenSender:
    """Fulfils the wishes of the present owner of a target worker. Owns its channel."""

    def __init__(self, channel: TensorChannel, taps: HiddenTaps) -> None:
        self._channel = channel
        self._taps = taps
        self._wishes: defaultdict[_Receiver, dict[RequestId, HiddenWish]] = defaultdict(dict)
        self._attempts: dict[tuple[_Receiver, RequestId], int] = {}
        """The newest attempt at a sequence that rows were wished for."""
        self._new: set[tuple[_Receiver, RequestId]] = set()
        """Whose first wish came after the last step: the target may not have heard yet that its sequence is
        not another one that ended under the same name."""
        self.counters: Counter[str] = Counter()
        """hidden_rows_sent, hidden_rows_missing (wished for, and no longer kept)."""

    @property
    def address(self) -> PeerAddress:
        """By which draft workers know it."""
        return self._channel.address

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages that its channel has dropped, by reason."""
        return self._channel.counters.dropped

    @property
    def num_waiting(self) -> int:
        """Wishes whose rows have not been computed."""
        return sum(len(wishes) for wishes in self._wishes.values())

    def take(self, order: SendHidden) -> None:
        """Note wishes, and fulfil those that can be."""
        receiver = _Receiver(order.coordinator, PeerId(order.receiver))
        address = PeerAddress(peer_id=receiver.peer_id, endpoint=order.endpoint, public_key=order.public_key)
        self._channel.connect(address)
        wishes = self._wishes[receiver]
        for wish in order.wishes:
            name = (receiver, wish.request_id)
            if self._attempts.get(name) != wish.epoch:
                self._attempts[name] = wish.epoch
                self._new.add(name)
            waiting = wishes.get(wish.request_id)
            if waiting is not None and waiting.epoch == wish.epoch:
                wish = msgspec.structs.replace(wish, first_row=min(wish.first_row, waiting.first_row))
            wishes[wish.request_id] = wish
        self.fulfil()
        self._forget_lost_receivers()

    def fulfil(self) -> None:
        """Send what is wished for and has been computed: one message to each draft worker."""
        for receiver in list(self._wishes):
            self._fulfil(receiver, self._wishes[receiver])
            if not self._wishes[receiver]:
                del self._wishes[receiver]

    def step_done(self, known: Collection[RequestId]) -> None:
        """After a step: fulfil what it has made possible; drop wishes for sequences that are not `known`."""
        self._new.clear()
        for name in [name for name in self._attempts if name[1] not in known]:
            del self._attempts[name]
        self._forget_lost_receivers()
        if not self._wishes:
            return
        self.fulfil()
        for wishes in self._wishes.values():
            for request_id in wishes.keys() - known:
                del wishes[request_id]

    def forget_all(self) -> None:
        """Drop all wishes: the worker has another owner."""
        self._wishes.clear()
        self._attempts.clear()
        self._new.clear()

    def close(self) -> None:
        """Close the channel. Idempotent."""
        self._channel.close()

    def _fulfil(self, receiver: _Receiver, wishes: dict[RequestId, HiddenWish]) -> None:
        parcel = _Parcel()
        for wish in list(wishes.values()):
            if (receiver, wish.request_id) in self._new:
                continue
            end_row = wish.committed_len - 1
            if end_row <= wish.first_row:
                del wishes[wish.request_id]
                continue
            rows = self._taps.hidden_rows(wish.request_id, wish.first_row, end_row)
            if rows is None:
                continue
            del wishes[wish.request_id]
            self.counters["hidden_rows_missing"] += end_row - wish.first_row - len(rows)
            first_row = end_row - len(rows)
            while len(rows):
                part = rows[: parcel.num_free(rows)]
                parcel.add(wish, first_row, part)
                rows, first_row = rows[len(part) :], first_row + len(part)
                if parcel.num_free(part) == 0:
                    self._send(receiver, parcel)
                    parcel = _Parcel()
        if parcel.runs:
            self._send(receiver, parcel)

    def _send(self, receiver: _Receiver, parcel: _Parcel) -> None:
        hidden = torch.cat(parcel.parts)
        self.counters["hidden_rows_sent"] += len(hidden)
        message = HiddenStates(receiver.coordinator, self._taps.layers, tuple(parcel.runs))
        self._channel.send_tensors(receiver.peer_id, message, {"hidden": hidden})

    def _forget_lost_receivers(self) -> None:
        """A draft worker that is gone is called again only when somebody wishes it.

        That may be once more after its end, before coordinators hear of it: nothing then breaks, and only a
        channel that reports whom it cannot reach ends the calls, and what they hold.
        """
        while True:
            try:
                envelope = self._channel.receive(0)
            except ChannelTimeout:
                return
            if isinstance(envelope.message, PeerLost):
                self._channel.disconnect(envelope.sender)
                for receiver in [one for one in self._wishes if one.peer_id == envelope.sender]:
                    del self._wishes[receiver]


class _Parcel:
    """Rows for one message."""

    def __init__(self) -> None:
        self.runs: list[HiddenRun] = []
        self.parts: list[torch.Tensor] = []
        self._num_rows = 0

    def num_free(self, rows: torch.Tensor) -> int:
        """Return how many more rows like these there is room for."""
        most = max(1, _PARCEL_BYTES // max(1, rows[0].nbytes))
        return most - self._num_rows

    def add(self, wish: HiddenWish, first_row: int, rows: torch.Tensor) -> None:
        """Put in the rows of a sequence from `first_row` on."""
        self._num_rows += len(rows)
        self.parts.append(rows)
        self.runs.append(
            HiddenRun(
                request_id=wish.request_id,
                epoch=wish.epoch,
                committed_len=wish.committed_len,
                prefix_hash=wish.prefix_hash,
                first_row=first_row,
                num_rows=len(rows),
            )
        )
