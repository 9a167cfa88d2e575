"""Engines that draft with a part of the K/V, whose prompts are read before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from benchmarks.inflate import read_config
from benchmarks.measured_engine import MeasuredEngine
from specdec.engine.config import EngineConfig
from specdec.kv.block_table import num_blocks_for
from specdec.kv.pool import KvShape, bytes_per_block
from specdec.kv.selection import KvSelectionConfig
from specdec.proposers.config import Method, SpeculativeConfig

BLOCK_SIZE = 16
_BATCHED_TOKENS = 512
_DRAFT_BYTES_PER_TOKEN = 1024
"""More than the demo's draft model takes."""


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


class LongEngine(MeasuredEngine):
    """One that drafts with a part of the K/V, with room for long sequences."""

    def __init__(self, drafter: Drafter, target: Path, draft: Path, room: Room) -> None:
        super().__init__(_config(drafter, target, draft, room))
        for pool in (self.target.runner.pool, *([self.draft_runner.pool] if self.draft_runner else ())):
            for tensor in (*pool.keys, *pool.values):
                tensor.fill_(0.01)  # pages that were never written all lie in one place


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
