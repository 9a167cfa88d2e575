"""Hidden states on their way to an inbox, where row r holds r; the senders are played by the test."""

from __future__ import annotations

from typing import Any

import torch

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import Sequence
from specdec.engine.draft_pool.hidden_inbox import HiddenInbox
from specdec.engine.draft_pool.server import sequence_name
from specdec.transport.base import PeerId
from specdec.transport.memory import MemoryChannel, MemoryNetwork
from specdec.transport.messages import HiddenRun, HiddenStates, Message
from tests.specdec.engine.hidden_toy import LAYERS, WIDTH

OURS, OTHERS = PeerId("coordinator"), PeerId("other-coordinator")
INBOX = PeerId("inbox")
TOKENS = tuple(range(40))


def view(committed_len: int, *, request_id: str = "r", epoch: int = 0) -> Sequence:
    """The sequence of the first so many TOKENS, as a draft server shows it."""
    return Sequence(
        Request(
            request_id=sequence_name(OURS, RequestId(request_id), epoch),
            prompt_token_ids=TOKENS[:committed_len],
            params=SamplingParams(),
            seed=1,
        )
    )


def run_of(
    first_row: int, end_row: int, *, epoch: int = 0, request_id: str = "r", prefix_hash: int | None = None
) -> HiddenRun:
    own_hash = extend_prefix_hash(EMPTY_PREFIX, TOKENS[: end_row + 1])
    return HiddenRun(
        request_id=RequestId(request_id),
        epoch=epoch,
        committed_len=end_row + 1,
        prefix_hash=own_hash if prefix_hash is None else prefix_hash,
        first_row=first_row,
        num_rows=end_row - first_row,
    )


def rows(first_row: int, end_row: int) -> torch.Tensor:
    """Row r holds r."""
    return torch.arange(first_row, end_row).float()[:, None].expand(-1, WIDTH)


class Wire:
    """An inbox, the target worker of its coordinator, and that of another."""

    def __init__(self, **limits: Any) -> None:
        self.network = MemoryNetwork(clock=ManualClock())
        channel = self.network.open(INBOX)
        self.target = self.network.open(PeerId("target"))
        self.other = self.network.open(PeerId("other-target"))
        self.inbox = HiddenInbox(channel, layers=LAYERS, width=WIDTH, clock=self.network.clock, **limits)
        self.inbox.admit([(self.target.address, OURS), (self.other.address, OTHERS)])
        for sender in (self.target, self.other):
            sender.connect(channel.address)

    def send(self, *runs: HiddenRun, sender: MemoryChannel | None = None, coordinator: PeerId = OURS) -> None:
        hidden = torch.cat([rows(run.first_row, run.first_row + run.num_rows) for run in runs])
        self.send_as(HiddenStates(coordinator, LAYERS, runs), hidden, sender=sender)

    def send_as(
        self, message: Message, hidden: torch.Tensor | None, *, sender: MemoryChannel | None = None
    ) -> None:
        tensors = {} if hidden is None else {"hidden": hidden}
        (sender or self.target).send_tensors(INBOX, message, tensors)

    def dropped(self) -> dict[str, int]:
        ends = "_dropped"
        counters = self.inbox.counters.items()
        return {name.removesuffix(ends): count for name, count in counters if name.endswith(ends)}

    def rows_of(self, sequence: Sequence) -> torch.Tensor | None:
        found = self.inbox.await_rows([sequence]).get(sequence.request_id)
        return None if found is None else found.since(found.first_row)[:, 0]
