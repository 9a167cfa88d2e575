"""Engines that draft with a part of the K/V, whose prompts are read before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from benchmarks.deployments import ExchangedController
from benchmarks.in_process import RunRecord, open_engine, run_batch
from benchmarks.inflate import read_config
from benchmarks.steady import Batch, Counted, decode_for, read
from specdec.core.request import Request
from specdec.core.sequence import Sequence as TokenSequence
from specdec.core.sequence import TokenConstraint
from specdec.engine.build import build_parts, controller_for, cost_profile_of
from specdec.engine.config import EngineConfig
from specdec.engine.local_target import LocalTarget
from specdec.kv.block_table import num_blocks_for
from specdec.kv.pool import KvShape, bytes_per_block
from specdec.kv.selection import KvSelectionConfig
from specdec.model.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.config import Method, SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.cost_profile import CostProfile

BLOCK_SIZE = 16
_BATCHED_TOKENS = 512
_DRAFT_BYTES_PER_TOKEN = 1024
"""More than the demo's draft model takes."""
_MOST_IDLE_CALLS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """Who drafts, and what it attends to."""

    method: Method
    policy: str = "full"
    budget: int | float = 256

    @property
    def name(self) -> str:
        """As results name it."""
        who = "self" if self.method == "self" else "draft model"
        if self.policy == "full":
            return f"{who}, full"
        budget = f"{self.budget}" if isinstance(self.budget, int) else f"{100 * self.budget:g} %"
        return f"{who}, {self.policy} {budget}"

    @property
    def kv(self) -> KvSelectionConfig:
        """As the configuration says it."""
        if self.policy == "full":
            return KvSelectionConfig()
        return KvSelectionConfig.model_validate({"policy": self.policy, "budget": self.budget, "floor": 64})

    @property
    def is_supported(self) -> bool:
        """Whether there is this policy for this method."""
        model = {"model": "unread"} if self.method == "draft_model" else {}
        try:
            SpeculativeConfig.model_validate({"method": self.method, "kv": self.kv, **model})
        except ValidationError:
            return False
        return True

    def kept_tokens(self, context: int) -> int:
        """Return about how many tokens a draft attends to, whole blocks."""
        if self.policy == "full":
            return context
        return min(
            context, (num_blocks_for(self.kv.token_budget.tokens(context), BLOCK_SIZE) + 1) * BLOCK_SIZE
        )


ORDINARY = Drafter(method="draft_model")
"""What everybody does: a draft model that attends to everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What has to fit."""

    max_num_seqs: int
    num_tokens: int
    """K/V of all sequences that are there at once."""
    max_draft_tokens: int
    num_threads: int


class LongEngine:
    """One engine whose controller is exchanged between two batches of requests."""

    def __init__(self, drafter: Drafter, target: Path, draft: Path, room: Room) -> None:
        self.drafter = drafter
        self._config = _config(drafter, target, draft, room)
        parts = build_parts(self._config)
        assert isinstance(parts.target, LocalTarget)
        self.target = parts.target
        self.proposer: Proposer = parts.proposer
        self._exchanged = ExchangedController()
        self.engine = open_engine(parts, self._exchanged)
        self._profile: CostProfile | None = None
        for pool in (self.target.runner.pool, *([self.draft_runner.pool] if self.draft_runner else ())):
            for tensor in (*pool.keys, *pool.values):
                tensor.fill_(0.01)  # pages that were never written all lie in one place

    @property
    def draft_runner(self) -> ModelRunner | None:
        """What runs the draft model; None: the target drafts."""
        if not isinstance(self.proposer, DraftModelProposer):
            return None
        assert isinstance(self.proposer.runner, ModelRunner)
        return self.proposer.runner

    def measure_costs(self) -> None:
        """Measure what rounds cost, as a start does; before any request, for `controller`."""
        goodput = self._config.speculative_config.model_copy(update={"controller": "goodput"})
        config = self._config.model_copy(update={"speculative_config": goodput})
        self._profile = cost_profile_of(config, self.target, self.proposer)

    def controller(self) -> SpeculationController:
        """Return a goodput controller that has only just started."""
        assert self._profile is not None
        goodput = self._config.speculative_config.model_copy(update={"controller": "goodput"})
        return controller_for(self._config.model_copy(update={"speculative_config": goodput}), self._profile)

    def read(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Have the target read prompts, as far as they are not in its cache any more."""
        self._exchanged.current = FixedController(0)
        read(self.engine, prompts, lambda: None)

    def decode(self, batch: Batch, controller: SpeculationController, seconds: float) -> Counted:
        """Decode for about so many seconds."""
        self._exchanged.current = controller
        return decode_for(self.engine, batch, seconds, prepare=self._read_along)

    def run(self, requests: Sequence[Request]) -> RunRecord:
        """Run requests that say their own k, each to its end."""
        self._exchanged.current = FixedController(0)
        self._read_along(requests)
        return run_batch(self.engine, requests)

    def close(self) -> None:
        """Free everything."""
        self.engine.close()

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


def _config(drafter: Drafter, target: Path, draft: Path, room: Room) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {"model": str(target), "dtype": "bfloat16", "num_threads": room.num_threads},
            "speculative_config": {
                "method": drafter.method,
                "controller": "fixed",
                "num_speculative_tokens": room.max_draft_tokens,
                "profile_dir": str(target.parent / "profiles"),
                "kv": drafter.kv,
                **(_draft_keys(draft, room) if drafter.method == "draft_model" else {}),
            },
            "cache": {"block_size": BLOCK_SIZE, "memory_bytes": room.num_tokens * _kv_bytes(target)},
            "scheduler": {
                "max_num_seqs": max(4, room.max_num_seqs),
                "max_num_batched_tokens": max(
                    _BATCHED_TOKENS, room.max_num_seqs * (1 + room.max_draft_tokens)
                ),
            },
        }
    )


def _draft_keys(draft: Path, room: Room) -> Mapping[str, Any]:
    return {
        "model": str(draft),
        "num_threads": room.num_threads,
        "cache": {"block_size": BLOCK_SIZE, "memory_bytes": room.num_tokens * _DRAFT_BYTES_PER_TOKEN},
    }


def _kv_bytes(folder: Path) -> int:
    """Bytes of K and V of one token in bf16."""
    config = read_config(folder)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    shape = KvShape(num_kv_heads=config["num_key_value_heads"], head_dim=head_dim)
    return bytes_per_block([shape] * config["num_hidden_layers"], 1, torch.bfloat16)
