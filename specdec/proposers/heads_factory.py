"""Loads the heads that a configuration names, beside the target that they read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypedDict

from torch import nn

from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.registry import choose_backend
from specdec.core.errors import ConfigError
from specdec.core.idle_work import IdleWork
from specdec.drafters.base import (
    Borrowed,
    Drafter,
    FeatureDrafter,
    IndependentHeads,
    SequentialHeads,
    TargetParts,
)
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.kv.config import CacheConfig
from specdec.model.loader import LoadedModel
from specdec.model.whole_ends import read_end
from specdec.proposers.base import Proposer
from specdec.proposers.compiled_drafters import (
    CompiledHeads,
    DrafterCompilation,
    PackedOfTarget,
    packed_bytes,
)
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_loop import NativeDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.drafter_pool import DrafterPool
from specdec.proposers.feature_runner import FeatureRunner
from specdec.proposers.head_rows import HeadRows, PrefixRows, StateRows
from specdec.proposers.head_trees import TreeHeadProposer
from specdec.proposers.heads import HeadProposer, Heads
from specdec.proposers.hidden import HiddenSource, PrefixStates
from specdec.proposers.module_runner import ModuleRunner
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
    "parallel_heads": ParallelHeads,
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

    def proposer(self, source: HiddenSource, of_target: PackedOfTarget | None = None) -> Proposer:
        """Return what drafts with them, given where the hidden states are.

        `of_target` tells what the target has packed, so that what they share is not packed again.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Implements `LoadedDrafter` for heads of a depth each."""

    config: SpeculativeConfig
    heads: Heads
    pool: DrafterPool | None
    """Of K/V of their layers, where they have any."""
    target: LoadedModel
    max_read_tokens: int

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.heads.hidden_layers

    @property
    def later_bytes(self) -> int:
        pool_bytes = 0 if self.pool is None else _later_bytes(self.pool.kv.num_bytes, self.target)
        return pool_bytes + packed_bytes(self.heads, self.config.compile)

    def proposer(self, source: HiddenSource, of_target: PackedOfTarget | None = None) -> HeadProposer:
        config, shape = self.config, tree_shape(self.config.tree)
        compiled = CompiledHeads(self.heads, _compilation(config, self.target, of_target), self.pool)
        rows: HeadRows = StateRows(self.heads, source)
        if self.pool is not None:
            rows = PrefixRows(
                self.heads,
                source,
                self.pool,
                max_read_tokens=self.max_read_tokens,
                max_context=config.max_model_len,
                compiled=compiled,
            )
        make: Callable[..., HeadProposer] = HeadProposer
        if shape is not None:
            make = partial(TreeHeadProposer, shape=shape)
        return make(
            self.heads,
            rows,
            _sampler(config),
            name=config.method,
            sampling=_sampling(config),
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.target.eos_token_ids,
            compiled=compiled,
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
        pool_bytes = _later_bytes(self.runner.num_bytes, self.target)
        if not self.runner.can_be_native:
            return pool_bytes
        return pool_bytes + packed_bytes(self.drafter, self.config.compile)

    def proposer(self, source: HiddenSource, of_target: PackedOfTarget | None = None) -> DraftModelProposer:
        config, shape = self.config, tree_shape(self.config.tree)
        runner, sampler, sampling = self.runner, _sampler(config), _sampling(config)
        idle_work: tuple[IdleWork, ...] = ()
        if runner.can_be_native:
            idle_work = (runner.compile(_compilation(config, self.target, of_target)),)
        make: Callable[..., DraftModelProposer]
        if shape is not None:
            make = partial(TreeDraftProposer, shape=shape, generating=runner)
        else:
            loop = NativeDraftLoop(runner, sampler, self.target.vocab_size, sampling.noise_stream)
            make = partial(DraftModelProposer, fused_loop=loop)
        return make(
            runner,
            sampler,
            vocab_size=self.target.vocab_size,
            max_read_tokens=self.max_read_tokens,
            max_context=config.max_model_len,
            eos_token_ids=self.target.eos_token_ids,
            sampling=sampling,
            idle_work=idle_work,
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
    drafter = _drafter_of(config, target)
    drafter.to(target.device).requires_grad_(requires_grad=False)
    cache = config.cache if drafts_here else CacheConfig(block_size=1, num_blocks=2)
    limits = _Limits(max_num_seqs=max_num_seqs, max_model_len=target.max_model_len)
    if isinstance(drafter, FeatureDrafter):
        backend = _backend_of(drafter.attention_layers, config, target)
        runner = _feature_runner(drafter, config, cache, backend, limits)
        return LoadedFeatureDrafter(config, drafter, runner, target, max_num_batched_tokens)
    assert isinstance(drafter, IndependentHeads | SequentialHeads)
    _warn_of_depth(drafter, config)
    pool: DrafterPool | None = None
    if layers := drafter.attention_layers:
        backend = _backend_of(layers, config, target)
        pool = DrafterPool(drafter, layers, cache, backend=backend, **limits)
    return LoadedHeads(config, drafter, pool, target, max_num_batched_tokens)


def _feature_runner(
    drafter: FeatureDrafter,
    config: SpeculativeConfig,
    cache: CacheConfig,
    backend: AttentionBackend,
    limits: _Limits,
) -> FeatureRunner:
    """Return what runs as many of the drafter's modules as there are depths to draft at."""
    shape = tree_shape(config.tree)
    most_depth = config.num_speculative_tokens if shape is None else shape.max_depth
    if drafter.num_modules == 1:
        return FeatureRunner(drafter, cache, backend=backend, **limits)
    num_kept = max(1, min(drafter.num_modules, most_depth))
    return ModuleRunner(drafter, cache, backend=backend, num_kept=num_kept, **limits)


class _Limits(TypedDict):
    """Of what a drafter's cache is for."""

    max_num_seqs: int
    max_model_len: int


def _drafter_of(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    """Load the drafter that is asked for, with all that it borrows of the target."""
    path = target.path if config.model is None else config.model
    parts = TargetParts.of(target.model)
    if target.vocab is not None:
        parts = replace(parts, vocab_size=target.vocab_size)  # this rank has a part of the head
    is_divided = target.vocab is not None or target.stage is not None
    if is_divided and config.method == "mtp":
        # Whether copies in a checkpoint are the target's own could not be told by a part of them.
        parts = _with_whole(parts, ("embeddings", "head"), target)
    drafter = load_drafter(path, parts, target.dtype)
    wanted = _KINDS[config.method]
    if not isinstance(drafter, wanted):
        named = next(name for name, kind in _KINDS.items() if isinstance(drafter, kind))
        raise ConfigError(
            f"speculative_config.method: {config.method}, but {path} holds {type(drafter).__name__}: "
            f"write method: {named}"
        )
    if is_divided and config.method != "mtp":
        drafter.target = _with_whole(parts, drafter.borrowed, target)
    return drafter


def _with_whole(parts: TargetParts, names: Iterable[Borrowed], target: LoadedModel) -> TargetParts:
    """Return the parts of a target with some of which this rank has a part, or none, in full."""
    ends: dict[Borrowed, nn.Module] = {name: read_end(target, name) for name in names}
    return replace(
        parts,
        embeddings=ends.get("embeddings", parts.embeddings),
        head=ends.get("head", parts.head),
    )


def _backend_of(
    layers: Sequence[LayerAttention], config: SpeculativeConfig, target: LoadedModel
) -> AttentionBackend:
    return choose_backend(
        config.attention_backend,
        device=target.device,
        dtype=target.dtype,
        layers=layers,
        max_context=target.max_model_len,
    )


def _later_bytes(num_bytes: int, target: LoadedModel) -> int:
    # A CPU's memory is taken as it is written.
    return num_bytes if target.device.type == "cpu" else 0


def _warn_of_depth(heads: Heads, config: SpeculativeConfig) -> None:
    """Say so where more is asked for than there are heads."""
    shape = tree_shape(config.tree)
    asked = config.num_speculative_tokens if shape is None else shape.max_depth
    if heads.max_depth < asked:
        logger.warning(
            "speculative_config.%s: %d tokens one behind the other, but %s has %d heads: no more are drafted",
            "num_speculative_tokens" if shape is None else "tree",
            asked,
            config.model,
            heads.max_depth,
        )


def _compilation(
    config: SpeculativeConfig, target: LoadedModel, of_target: PackedOfTarget | None
) -> DrafterCompilation:
    return DrafterCompilation(
        name=f"{config.method} ({target.path.name if config.model is None else config.model})",
        config=config.compile,
        is_quantized=target.quantization is not None,
        of_target=of_target or (lambda: None),
    )


def _sampler(config: SpeculativeConfig) -> Sampler:
    sampler = Sampler(config.compile.cache_dir)
    sampler.warm_up()
    return sampler


def _sampling(config: SpeculativeConfig) -> DraftSampling:
    return DraftSampling.under(capabilities_of(config.rejection_sample_method), config.draft_top_k)
