"""A toy whose hidden states are all that its next tokens depend on, and a drafter that knows nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from specdec.core.ids import RequestId
from specdec.core.plan import TargetStep, TargetWork, WorkResult
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.targets.toy_target import ToyTarget, slot_value
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.hidden import HiddenSource
from specdec.sampling.noise import MASK_64
from tests.specdec.engine.remote_cluster import MODEL

LAYERS = (1, 3)
WIDTH = 4
CAPABILITIES = ProposerCapabilities(name="toy-hidden", sampled=True, hidden_layers=LAYERS, remote=True)


class HiddenToyTarget(ToyTarget):
    """Keeps the sum of the cache after every token: half of it is the "hidden state" of layer 1, half of 3.

    With the last token, that sum decides what comes next (`ToyModel.logits`).
    """

    layers = LAYERS
    max_kept = 1000
    """Rows of each sequence."""
    is_corrupt = False

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(MODEL, num_blocks=num_blocks)
        self.kept: dict[RequestId, dict[int, int]] = {}

    def submit(self, step: TargetStep) -> None:
        for request_id in step.released:
            self.kept.pop(request_id, None)
        super().submit(step)

    def _run(self, work: TargetWork) -> WorkResult:
        result = super()._run(work)
        size = self.description.block_size
        blocks = self._sequences[work.request_id].block_ids
        values = [self._slots[block * size + offset] for block in blocks for offset in range(size)]
        kept = self.kept.setdefault(work.request_id, {})
        for position in range(work.start, work.start + len(work.token_ids)):
            kept[position] = sum(values[: position + 1]) & MASK_64
            kept.pop(position - self.max_kept, None)
        return result

    def hidden_rows(self, request_id: RequestId, first_row: int, end_row: int) -> torch.Tensor | None:
        kept = self.kept.get(request_id, {})
        begin = end_row
        while begin > first_row and begin - 1 in kept:
            begin -= 1
        if begin == end_row:
            return None
        rows = torch.tensor([as_row(kept[row]) for row in range(begin, end_row)], dtype=torch.float32)
        return rows + 1 if self.is_corrupt else rows


def as_row(number: int) -> list[float]:
    return [float(number >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]


def as_number(row: torch.Tensor) -> int:
    return sum(
        (int(part) & 0xFFFF) << shift for part, shift in zip(row.tolist(), (0, 16, 32, 48), strict=True)
    )


class HiddenToyDrafter:
    """Continues a prefix from the newest hidden row and the last token: it never reads earlier tokens."""

    capabilities = CAPABILITIES

    def __init__(self, source: HiddenSource) -> None:
        self.source = source
        self.counters: Counter[str] = Counter()

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        wanted = [
            one for one in sequences if num_draft_tokens.get(one.request_id, 0) and one.committed_len > 1
        ]
        rows = self.source.await_rows(wanted)
        return {
            one.request_id: Proposal(
                request_id=one.request_id,
                committed_len=one.committed_len,
                prefix_hash=one.prefix_hash,
                token_ids=continuation(
                    one,
                    rows[one.request_id].since(one.committed_len - 2)[-1],
                    num_draft_tokens[one.request_id],
                ),
                noise_stream="target",
            )
            for one in wanted
            if one.request_id in rows
        }

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self.source.release(tuple(request_ids))

    def close(self) -> None:
        """Nothing to free."""


def continuation(sequence: SequenceView, row: torch.Tensor, num_tokens: int) -> tuple[int, ...]:
    total = as_number(row)
    last, position = sequence.token_ids[-1], sequence.committed_len
    drafted: list[int] = []
    for _ in range(num_tokens):
        total = (total + slot_value(total, position - 1, last)) & MASK_64
        last = MODEL.choose(MODEL.logits(last, total), sequence.params, sequence.seed, position)
        drafted.append(last)
        position += 1
    return tuple(drafted)
