"""Loads the heads that a configuration names, beside the target that they read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from specdec.attention.registry import choose_backend
from specdec.core.errors import ConfigError
from specdec.drafters.base import Drafter, FeatureDrafter, IndependentHeads, SequentialHeads, TargetParts
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.kv.config import CacheConfig
from specdec.model.loader import LoadedModel
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.feature_runner import FeatureRunner
from specdec.proposers.heads import HeadProposer
from specdec.proposers.hidden import HiddenSource, PrefixStates
from specdec.proposers.tree_config import tree_shape
from specdec.sampling.sampler import Sampler
from specdec.verification.registry import capabilities_of

logger = logging.getLogger(__name__)

_KINDS: Mapping[str, type[Drafter]] = {
    "medusa": Medusa,
    "hydra": Hydra,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": Mtp,
}
"""What a folder has to hold, by method."""


class LoadedDrafter(Protocol):
    """Weights that are ready to draft for a target."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What the target has to keep for them."""
        ...

    @property
    def later_bytes(self) -> int:
        """Memory that they are going to take, beside what they have taken by now."""
        ...

    def proposer(self, source: HiddenSource) -> Proposer:
        """Return what drafts with them, given where the hidden states are."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Implements `LoadedDrafter` for heads without K/V of their own."""

    config: SpeculativeConfig
    heads: IndependentHeads | SequentialHeads
    target: LoadedModel

    @property
    def later_bytes(self) -> int:
        return 0

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.heads.hidden_layers

    def proposer(self, source: HiddenSource) -> HeadProposer:
        config = self.config
        return HeadProposer(
            self.heads,
            source,
            _sampler(config),
            name=config.method,
            sampling=_sampling(config),
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.target.eos_token_ids,
        )


@dataclass(frozen=True, slots=True)
class LoadedFeatureDrafter:
    """Implements `LoadedDrafter` for drafters with K/V of their own."""

    config: SpeculativeConfig
    drafter: FeatureDrafter
    runner: FeatureRunner
    target: LoadedModel
    max_read_tokens: int

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.drafter.hidden_layers

    @property
    def later_bytes(self) -> int:
        # A CPU's memory is taken as it is written.
        return self.runner.num_bytes if self.target.device.type == "cpu" else 0

    def proposer(self, source: HiddenSource) -> DraftModelProposer:
        config, shape = self.config, tree_shape(self.config.tree)
        make: Callable[..., DraftModelProposer] = DraftModelProposer
        if shape is not None:
            make = partial(TreeDraftProposer, shape=shape)
        return make(
            self.runner,
            _sampler(config),
            vocab_size=self.target.vocab_size,
            max_read_tokens=self.max_read_tokens,
            max_context=config.max_model_len,
            eos_token_ids=self.target.eos_token_ids,
            sampling=_sampling(config),
            prefix_caching=False,
            name=config.method,
            states=PrefixStates(source, self.hidden_layers),
        )


def load_heads(
    config: SpeculativeConfig,
    target: LoadedModel,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    drafts_here: bool = True,
) -> LoadedDrafter:
    """Load what drafts beside `target`, or this rank's part of it, in its dtype and on its device.

    Args:
        config: which, and how large its K/V cache is.
        target: what it drafts for.
        max_num_seqs: sequences that the target runs at once.
        max_num_batched_tokens: tokens that the target reads in a step: the drafter keeps up with that.
        drafts_here: False where another rank drafts: what drafts is loaded and checked, but gets no cache.

    Raises:
        CheckpointError: the folder holds no drafter of that kind, or one for another target.
        ConfigError: the method does not go with how the target is divided.
        ResourceError: the memory of the cache does not hold a single block.
    """
    path = target.path if config.model is None else config.model
    parts = TargetParts.of(target.model)
    if target.vocab is not None:
        parts = replace(parts, vocab_size=target.vocab_size)  # this rank has a part of the head
    drafter = load_drafter(path, parts, target.dtype)
    wanted = _KINDS[config.method]
    if not isinstance(drafter, wanted):
        named = next((name for name, kind in _KINDS.items() if isinstance(drafter, kind)), None)
        hint = f"write method: {named}" if named else "no method drafts with that yet"
        raise ConfigError(
            f"speculative_config.method: {config.method}, but {path} holds {type(drafter).__name__}: {hint}"
        )
    drafter.to(target.device).requires_grad_(requires_grad=False)
    if isinstance(drafter, FeatureDrafter):
        _require_runnable(drafter, config, target)
        runner = FeatureRunner(
            drafter,
            config.cache if drafts_here else CacheConfig(block_size=1, num_blocks=2),
            max_num_seqs=max_num_seqs,
            max_model_len=target.max_model_len,
            backend=choose_backend(
                config.attention_backend,
                device=target.device,
                dtype=target.dtype,
                layers=drafter.attention_layers,
                max_context=target.max_model_len,
            ),
        )
        return LoadedFeatureDrafter(config, drafter, runner, target, max_num_batched_tokens)
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
    return LoadedHeads(config, drafter, target)


def _sampler(config: SpeculativeConfig) -> Sampler:
    sampler = Sampler(config.compile.cache_dir)
    sampler.warm_up()
    return sampler


def _sampling(config: SpeculativeConfig) -> DraftSampling:
    return DraftSampling.under(capabilities_of(config.rejection_sample_method), config.draft_top_k)


def _require_runnable(drafter: FeatureDrafter, config: SpeculativeConfig, target: LoadedModel) -> None:
    if isinstance(drafter, Mtp) and len(drafter.mtp_modules) > 1:
        raise ConfigError(
            f"speculative_config.method: mtp drafts with one module; {config.model or target.path} has "
            f"{len(drafter.mtp_modules)}, each for a depth of its own, which nothing drafts with yet"
        )
    # Whether copies in an MTP checkpoint are the target's own could not be told by a part of them.
    if target.vocab is not None and (drafter.borrows_weights or isinstance(drafter, Mtp)):
        raise ConfigError(
            f"speculative_config.method: {config.method} computes with the target's embeddings or LM head "
            f"here ({config.model or target.path} has none of its own), of which a rank has a part: it does "
            "not go with target.tensor_parallel_size yet: write 1"
        )


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
