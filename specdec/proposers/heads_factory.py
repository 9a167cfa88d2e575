"""Loads the heads that a configuration names, beside the target that they read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from specdec.core.errors import ConfigError
from specdec.drafters.base import Drafter, IndependentHeads, SequentialHeads, TargetParts
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.model.loader import LoadedModel
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.heads import HeadProposer, Heads
from specdec.proposers.hidden import HiddenSource
from specdec.sampling.sampler import Sampler
from specdec.verification.registry import capabilities_of

logger = logging.getLogger(__name__)

_KINDS: Mapping[str, type[Drafter]] = {"medusa": Medusa, "hydra": Hydra}
"""What a folder has to hold, by method."""


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Heads, ready to draft for a target."""

    config: SpeculativeConfig
    heads: Heads
    target: LoadedModel

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What the target has to keep for them."""
        return self.heads.hidden_layers

    def proposer(self, source: HiddenSource) -> HeadProposer:
        """Return what drafts with them, given where the hidden states are."""
        config = self.config
        sampler = Sampler(config.compile.cache_dir)
        sampler.warm_up()
        return HeadProposer(
            self.heads,
            source,
            sampler,
            name=config.method,
            sampling=DraftSampling.under(capabilities_of(config.rejection_sample_method), config.draft_top_k),
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.target.eos_token_ids,
        )


def load_heads(config: SpeculativeConfig, target: LoadedModel) -> LoadedHeads:
    """Load what drafts beside `target`, or this rank's part of it, in its dtype and on its device.

    Raises:
        CheckpointError: the folder holds no drafter of that kind, or one for another target.
        ConfigError: the method does not go with how the target is divided.
    """
    assert config.model is not None, "checked by SpeculativeConfig"
    parts = TargetParts.of(target.model)
    if target.vocab is not None:
        parts = replace(parts, vocab_size=target.vocab_size)  # this rank has a part of the head
    drafter = load_drafter(config.model, parts, target.dtype)
    wanted = _KINDS[config.method]
    if not isinstance(drafter, wanted):
        named = next((name for name, kind in _KINDS.items() if isinstance(drafter, kind)), None)
        hint = f"write method: {named}" if named else "no method drafts with that yet"
        raise ConfigError(
            f"speculative_config.method: {config.method}, but {config.model} holds {type(drafter).__name__}: "
            f"{hint}"
        )
    assert isinstance(drafter, IndependentHeads | SequentialHeads)
    if isinstance(drafter, SequentialHeads):
        _require_drawable(drafter, config, target)
    if drafter.max_depth is not None and drafter.max_depth < config.num_speculative_tokens:
        logger.warning(
            "speculative_config.num_speculative_tokens: %d, but %s has %d heads: no more are drafted",
            config.num_speculative_tokens,
            config.model,
            drafter.max_depth,
        )
    drafter.to(target.device).requires_grad_(requires_grad=False)
    return LoadedHeads(config, drafter, target)


def _require_drawable(heads: SequentialHeads, config: SpeculativeConfig, target: LoadedModel) -> None:
    if heads.attention_layers:
        raise ConfigError(
            f"speculative_config.model: {config.model} has a prefix layer (Hydra++) with K/V of its own, "
            "which nothing drafts with yet: take heads of hydra_head_arch mlp"
        )
    if target.vocab is not None:
        raise ConfigError(
            "speculative_config.method: hydra reads the target's embeddings, of which a rank has a part, so "
            "it does not go with target.tensor_parallel_size yet: write 1, or method: medusa"
        )
