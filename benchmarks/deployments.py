"""Ways to run two models with a controller that is exchanged between two batches of requests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.groups import TwoGroups
from benchmarks.in_process import open_engine
from specdec.engine.build import build_parts
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import controller_for, cost_profile_of, modes_of
from specdec.engine.engine import Engine
from specdec.engine.synthetic import SyntheticTarget
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.synthetic_config import SyntheticAcceptance
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import (
    FixedController,
    RoundObservation,
    SpeculationController,
)
from specdec.scheduling.speculation.cost_profile import CostProfile
from specdec.scheduling.speculation.explanation import ControllerState
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.state import Schedulable

_SURE = SyntheticAcceptance(acceptance=(1.0,), bonus_after_miss=(1.0,), bonus_after_all=(1.0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a fixed controller does."""

    num_draft_tokens: int
    mode: OverlapMode = "lockstep"
    num_branches: int = 0
    """In draft_ahead: for how many verdicts of a request something is prepared."""

    @property
    def name(self) -> str:
        """As results name it."""
        if self.num_draft_tokens == 0:
            return "plain"
        branches = f", {self.num_branches} ahead" if self.num_branches else ""
        return f"{self.mode}, k = {self.num_draft_tokens}{branches}"

    def controller(self) -> FixedController:
        """Return one that does this."""
        if self.num_branches:
            return _BranchingController(self.num_draft_tokens, self.mode, self.num_branches)
        return FixedController(self.num_draft_tokens, self.mode)


class _BranchingController(FixedController):
    """Prepares for fewer verdicts than the engine would allow."""

    def __init__(self, num_draft_tokens: int, mode: OverlapMode, num_branches: int) -> None:
        super().__init__(num_draft_tokens, mode)
        self._num_branches = num_branches

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """Share out its own number."""
        most = min(max_branches, self._num_branches)
        return super().fan_out(request, num_pending, most, is_foreign=is_foreign)


class ExchangedController:
    """Implements `SpeculationController` by another one, which may be exchanged while nothing runs."""

    def __init__(self) -> None:
        self.current: SpeculationController = FixedController(0)

    @property
    def mode(self) -> OverlapMode:
        """That of the present one."""
        return self.current.mode

    @property
    def state(self) -> ControllerState:
        """That of the present one."""
        return self.current.state

    @property
    def minds_targets(self) -> bool:
        """Whether the present one does."""
        return self.current.minds_targets

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> Sequence[int]:
        """Ask the present one."""
        return self.current.choose(decoding, elsewhere)

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """Ask the present one."""
        return self.current.fan_out(request, num_pending, max_branches, is_foreign=is_foreign)

    def observe(self, observation: RoundObservation) -> None:
        """Tell the present one."""
        self.current.observe(observation)

    def think(self) -> None:
        """Have the present one think."""
        self.current.think()


class Deployment(Protocol):
    """An engine over two models, and what may be exchanged of it."""

    @property
    def name(self) -> str:
        """As results name it."""
        ...

    @property
    def engine(self) -> Engine:
        """Has no requests of its own."""
        ...

    @property
    def synthetic(self) -> SyntheticTarget:
        """Decides what is accepted."""
        ...

    @property
    def exchanged(self) -> ExchangedController:
        """The engine's controller."""
        ...

    @property
    def profile(self) -> CostProfile:
        """What was measured at the start."""
        ...

    @property
    def settings(self) -> Sequence[Setting]:
        """Fixed settings that make sense here, plain decoding first."""
        ...

    def controller(self) -> SpeculationController:
        """Return a new goodput controller, as it would begin after a start."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large batches and sequences may become."""

    max_num_seqs: int
    max_model_len: int
    lengths: tuple[int, ...]
    """Draft tokens of fixed settings; the largest is also the controller's bound."""
    target_cache_bytes: int
    draft_cache_bytes: int


@dataclass(slots=True, kw_only=True)
class Colocated:
    """Both models in this process, with all its cores."""

    engine: Engine
    synthetic: SyntheticTarget
    exchanged: ExchangedController
    profile: CostProfile
    settings: Sequence[Setting]
    config: EngineConfig
    name: str = "colocated"

    def controller(self) -> SpeculationController:
        """See `Deployment`."""
        return controller_for(self.config, self.profile)

    def close(self) -> None:
        """See `Deployment`."""
        self.engine.close()


@dataclass(slots=True, kw_only=True)
class Apart:
    """Target and draft model in processes of their own, with a core each."""

    groups: TwoGroups
    exchanged: ExchangedController
    profile: CostProfile
    settings: Sequence[Setting]
    config: EngineConfig
    name: str = "two groups"
    engine: Engine = field(init=False)
    synthetic: SyntheticTarget = field(init=False)

    def __post_init__(self) -> None:
        assert self.groups.synthetic is not None
        self.engine = self.groups.engine
        self.synthetic = self.groups.synthetic

    def controller(self) -> SpeculationController:
        """See `Deployment`."""
        modes = modes_of(self.groups.proposer.capabilities)
        return controller_for(self.config, self.profile, modes, is_target_elsewhere=True)

    def close(self) -> None:
        """See `Deployment`."""
        self.groups.close()


def start_colocated(target: Path, draft: Path, scale: Scale, num_threads: int) -> Colocated:
    """Load and compile both models here, and measure what rounds cost, as a real start does."""
    torch.set_num_threads(num_threads)
    config = _config(target, draft, scale, num_threads)
    fixed = config.speculative_config.model_copy(update={"controller": "fixed"})
    parts = build_parts(config.model_copy(update={"speculative_config": fixed}), is_measuring=True)
    assert isinstance(parts.target, SyntheticTarget)
    exchanged = ExchangedController()
    return Colocated(
        engine=open_engine(parts, exchanged),
        synthetic=parts.target,
        exchanged=exchanged,
        profile=cost_profile_of(config, parts.target, parts.proposer),
        settings=[Setting(num_draft_tokens=k) for k in (0, *scale.lengths)],
        config=config,
    )


def start_apart(target: Path, draft: Path, scale: Scale) -> Apart:
    """Start both groups, and measure what rounds cost."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    config = _config(target, draft, scale, 1)
    exchanged = ExchangedController()
    groups = TwoGroups(config, target_cores=cores[:1], draft_cores=cores[1:], controller=exchanged)
    return Apart(
        groups=groups,
        exchanged=exchanged,
        profile=cost_profile_of(config, groups.target, groups.proposer),
        settings=[
            *(Setting(num_draft_tokens=k) for k in (0, *scale.lengths)),
            *(Setting(num_draft_tokens=k, mode="ping_pong") for k in scale.lengths[1:]),
            *(
                Setting(num_draft_tokens=k, mode="draft_ahead", num_branches=branches)
                for k, branches in itertools.product(scale.lengths[1:3], (1, 4))
            ),
        ],
        config=config,
    )


def _config(target: Path, draft: Path, scale: Scale, num_threads: int) -> EngineConfig:
    """Prompts are kept in both caches: they are read once."""
    return EngineConfig(
        target=ModelConfig(
            model=str(target),
            dtype="bfloat16",
            max_model_len=scale.max_model_len,
            num_threads=num_threads,
        ),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            controller="goodput",
            model=str(draft),
            num_speculative_tokens=max(scale.lengths),
            num_threads=num_threads,
            cache=CacheConfig(memory_bytes=scale.draft_cache_bytes),
            compile=CompileConfig(),
            synthetic_acceptance=_SURE,
            profile_dir=str(target.parent / "profiles"),
        ),
        cache=CacheConfig(memory_bytes=scale.target_cache_bytes),
        scheduler=SchedulerConfig(
            max_num_seqs=scale.max_num_seqs,
            max_num_batched_tokens=max(512, scale.max_num_seqs * (1 + max(scale.lengths))),
        ),
    )
