"""An engine whose controller is exchanged between two batches of requests."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.deployments import ExchangedController
from benchmarks.in_process import RunRecord, open_engine, run_batch
from benchmarks.steady import Batch, Counted, decode_for, decode_tokens, read
from specdec.core.request import Request
from specdec.core.sequence import Sequence as TokenSequence
from specdec.core.sequence import TokenConstraint
from specdec.engine.build import build_parts
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import controller_for, cost_profile_of
from specdec.engine.targets.local_target import LocalTarget
from specdec.model.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.cost_profile import CostProfile

_MOST_IDLE_CALLS = 3


class MeasuredEngine:
    """Target and drafter in this process. A draft model has read all prompts before anything is counted."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        parts = build_parts(config)
        assert isinstance(parts.target, LocalTarget)
        self.target = parts.target
        self.proposer: Proposer = parts.proposer
        self._exchanged = ExchangedController()
        self.engine = open_engine(parts, self._exchanged)
        self._profile: CostProfile | None = None

    @property
    def draft_runner(self) -> ModelRunner | None:
        """What runs the draft model; None: another kind drafts."""
        if not isinstance(self.proposer, DraftModelProposer):
            return None
        assert isinstance(self.proposer.runner, ModelRunner)
        return self.proposer.runner

    def measure_costs(self) -> None:
        """Measure what rounds cost, as a start does; before any request, for `controller`."""
        self._profile = cost_profile_of(self._with_goodput(), self.target, self.proposer)

    def controller(self) -> SpeculationController:
        """Return a goodput controller that has only just started."""
        assert self._profile is not None
        return controller_for(self._with_goodput(), self._profile)

    def read(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Have the target read prompts, as far as they are not in its cache any more."""
        self._exchanged.current = FixedController(0)
        read(self.engine, prompts, lambda: None)

    def decode(self, batch: Batch, controller: SpeculationController, seconds: float) -> Counted:
        """Decode for about so many seconds."""
        self._exchanged.current = controller
        return decode_for(self.engine, batch, seconds, prepare=self._read_along)

    def decode_tokens(self, batch: Batch, controller: SpeculationController, num_tokens: int) -> Counted:
        """Decode about so many tokens, of all requests together."""
        self._exchanged.current = controller
        return decode_tokens(self.engine, batch, num_tokens, prepare=self._read_along)

    def run(self, requests: Sequence[Request]) -> RunRecord:
        """Run requests that say their own k, each to its end."""
        self._exchanged.current = FixedController(max(one.num_draft_tokens or 0 for one in requests))
        self._read_along(requests)
        return run_batch(self.engine, requests)

    def close(self) -> None:
        """Free everything."""
        self.engine.close()

    def _with_goodput(self) -> EngineConfig:
        goodput = self._config.speculative_config.model_copy(update={"controller": "goodput"})
        return self._config.model_copy(update={"speculative_config": goodput})

    def _read_along(self, requests: Sequence[Request]) -> None:
        """Have the draft model read prompts, which takes it many rounds."""
        if not isinstance(self.proposer, DraftModelProposer):
            return
        views = [_Unread(request) for request in requests]
        num_idle, unread = 0, -1
        while num_idle < _MOST_IDLE_CALLS:
            left = sum(self.proposer.num_unread(view) for view in views)
            if left == 0:
                return
            num_idle = num_idle + 1 if left == unread else 0
            unread = left
            self.proposer.propose(views, {})
        raise AssertionError(f"the draft model has no room for {len(views)} prompts")


class _Unread(TokenSequence):
    """A request's prompt as a proposer sees it."""

    __slots__ = ()
    constraint: TokenConstraint | None = None
    kv_budget: int = 0
