"""A target and a proposer that take known times on a clock that stands still otherwise, and a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.profiling.plan import ProfilePlan
from specdec.engine.targets.toy_target import ToyTarget
from specdec.proposers.base import ProposerCapabilities
from tests.specdec.engine.toy_engines import MODEL


class TimedTarget:
    """A toy target whose steps take a known time on a clock that stands still otherwise."""

    def __init__(self, clock: ManualClock, *, per_row_s: float = 0.001, **options: int) -> None:
        self.inner = ToyTarget(MODEL, **options)  # type: ignore[arg-type]
        self.description = self.inner.description
        self.clock = clock
        self.per_row_s = per_row_s
        self.num_rows: list[int] = []

    def submit(self, step: TargetStep) -> None:
        self.inner.submit(step)
        rows = sum(len(work.token_ids) for work in step.works)
        self.num_rows.append(rows)
        context = sum(work.start for work in step.works)
        self.clock.advance(0.004 + self.per_row_s * rows + 1e-6 * context)

    def collect(self) -> TargetResult:
        return self.inner.collect()

    def close(self) -> None:
        self.inner.close()


class TimedProposer:
    """Takes 1 ms, and 2 ms for each step, for any number of sequences; catches up 100 tokens a call."""

    capabilities = ProposerCapabilities(name="timed", kv="own", max_context=600)

    def __init__(self, clock: ManualClock, *, is_there: bool = True) -> None:
        self.clock = clock
        self.is_there = is_there
        self.num_read: dict[RequestId, int] = {}
        self.salts: set[str | None] = set()

    def num_steps(self, num_draft_tokens: int) -> int:
        return num_draft_tokens

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        self.clock.advance(0.001 + 0.002 * self.num_steps(max(num_draft_tokens.values(), default=0)))
        found = {}
        for one in sequences:
            self.salts.add(one.cache_salt)
            read = min(one.committed_len, self.num_read.get(one.request_id, 0) + 100)
            self.num_read[one.request_id] = read
            if self.is_there and read == one.committed_len:
                found[one.request_id] = Proposal(
                    request_id=one.request_id,
                    committed_len=one.committed_len,
                    prefix_hash=one.prefix_hash,
                    token_ids=(1,) * num_draft_tokens[one.request_id],
                )
        return found

    def release(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self.num_read.pop(request_id, None)

    def close(self) -> None:
        pass


def plan(**changes: float) -> ProfilePlan:
    fields: dict[str, float] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "max_draft_tokens": 4,
        "budget_s": 60.0,
    }
    return ProfilePlan(key="key", **(fields | changes))  # type: ignore[arg-type]


def big_target(clock: ManualClock, **options: float) -> TimedTarget:
    return TimedTarget(clock, num_blocks=2048, max_model_len=2048, **options)  # type: ignore[arg-type]
