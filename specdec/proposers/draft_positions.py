"""Which positions a draft model is given: those of the text, or its own among what it keeps (`kv.positions`).

Pure: facts of both models in, a configuration in which `auto` is decided out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from specdec.core.errors import ConfigError
from specdec.model.stated_positions import StatedPositions
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_window import ANY_LENGTH, small_pool_warning


class DraftReach(NamedTuple):
    """How far a draft model reaches, and the target that it drafts for."""

    name: str
    """Of the draft model."""
    num_positions: int
    """Those of a text that it can be given: its own, or `speculative_config.max_model_len` of them."""
    target_len: int | None
    """Longest sequence of the target, in tokens; None: not known."""
    num_of_one_kind: int | None = None
    """Positions before its K/V depend on the length of the text; None: they never do, as far as is known."""

    @property
    def is_short(self) -> bool:
        """Whether the target serves texts that are longer."""
        return self.target_len is not None and self.num_positions < self.target_len

    @property
    def longest(self) -> int:
        """Longest text that it can have to draft behind with the positions of the text."""
        return min(self.num_positions, self.target_len or self.num_positions)

    @property
    def num_in_cache(self) -> int:
        """Positions that tokens can be given among what is kept."""
        return min(self.num_positions, self.num_of_one_kind or self.num_positions)


def require_positions(name: str, num_positions: int, wanted: int | None) -> None:
    """Check that a draft model has as many positions as are asked for (`speculative_config.max_model_len`).

    Raises:
        ConfigError: it has fewer.
    """
    if wanted is not None and wanted > num_positions:
        raise ConfigError(
            f"speculative_config.max_model_len: {wanted} is more than the {num_positions} positions that "
            f"{name} has: write at most {num_positions}, or leave it out"
        )


def with_positions(config: SpeculativeConfig, reach: DraftReach) -> SpeculativeConfig:
    """Return the configuration of a draft model with `kv.positions` as it will be, never `auto`.

    Raises:
        ConfigError: what was written does not go with the models; names the setting.
    """
    positions, fault = config.kv.positions, _window_fault(config, reach)
    if positions == "in_cache" and fault is not None:
        raise ConfigError(fault)
    if positions == "absolute" and reach.is_short:
        raise ConfigError(
            f"speculative_config.kv.positions: absolute, with which {reach.name} drafts behind texts of up "
            f"to {reach.num_positions} tokens (its positions, or speculative_config.max_model_len), and the "
            f"target serves up to {reach.target_len}: leave it out and write kv.policy: streaming, or write "
            f"target.max_model_len: {reach.num_positions}"
        )
    if positions == "auto":
        is_moved = reach.is_short and config.kv.policy != "full" and fault is None
        positions = "in_cache" if is_moved else "absolute"
    return config.model_copy(update={"kv": config.kv.model_copy(update={"positions": positions})})


def warnings_about(config: SpeculativeConfig, reach: DraftReach) -> Iterator[str]:
    """Say what the draft model's positions mean for the texts that the target serves.

    `config` is from `with_positions`.
    """
    is_moved = config.kv.positions == "in_cache"
    if not is_moved and reach.is_short:
        reason = None if config.kv.policy == "full" else _window_fault(config, reach)
        yield (
            f"{reach.name} drafts behind texts of up to {reach.num_positions} tokens (its positions, or "
            f"speculative_config.max_model_len); the target serves up to {reach.target_len}: longer ones go "
            "on without its drafts. "
            + (reason or "With speculative_config.kv.policy: streaming it drafts behind any (kv.positions)")
        )
    budget = config.kv.largest_budget(reach.num_in_cache).amount
    if is_moved and isinstance(budget, int) and 2 * budget > reach.num_in_cache:
        yield (
            f"speculative_config.kv.budget: {budget} is more than half of the {reach.num_in_cache} positions "
            f"of {reach.name}: with kv.positions: in_cache the window is read again after every "
            f"{reach.num_in_cache - budget - config.num_beside_budget + 1} tokens"
        )


def heads_warning(
    config: SpeculativeConfig, name: str, stated: StatedPositions, target_len: int | None
) -> str | None:
    """Say that heads with K/V of their own draft behind longer texts than they were made for; None: they do
    not, or do not say (`stated`).

    They are given the positions of the text, be it as long as the target's (`target_len`) may be.
    """
    longest = min(target_len, config.max_model_len or target_len) if target_len is not None else None
    if not config.keeps_kv or longest is None or stated.num_positions is None:
        return None
    if longest <= stated.num_positions:
        return None
    return (
        f"{name} was made for texts of up to {stated.num_positions} tokens (max_position_embeddings in its "
        f"config.json), and drafts behind up to {longest} here: behind longer ones its drafts may be "
        f"accepted less often. With speculative_config.max_model_len: {stated.num_positions} these go on "
        "without them"
    )


def pool_warning(config: SpeculativeConfig, reach: DraftReach, num_blocks: int) -> str | None:
    """Say that the draft model's pool is smaller than one window; None: it is not.

    `config` is from `with_positions`.
    """
    if config.kv.positions == "in_cache":
        return small_pool_warning(config, num_blocks, reach.target_len or ANY_LENGTH, reach.num_in_cache)
    return small_pool_warning(config, num_blocks, reach.longest)


def _window_fault(config: SpeculativeConfig, reach: DraftReach) -> str | None:
    """Say why what `kv` keeps has no room in the draft model's positions; None: it has."""
    budget = max(config.kv.budgets, key=lambda one: one.smallest)
    if budget.smallest + config.num_beside_budget <= reach.num_in_cache:
        return None
    return (
        f"speculative_config.kv.{budget.least_setting}: {budget.smallest} tokens do not fit into the "
        f"{reach.num_in_cache} positions of {reach.name} (its own, or speculative_config.max_model_len) with "
        f"kv.positions: in_cache, beside {config.num_beside_budget} for two blocks and drafts: "
        f"give at most {max(0, reach.num_in_cache - config.num_beside_budget)}"
    )
