"""Loads the heads that a configuration names, beside the target that they read or elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.registry import choose_backend
from specdec.core.errors import ConfigError, ResourceError
from specdec.core.idle_work import IdleWork
from specdec.drafters.base import Drafter, FeatureDrafter, IndependentHeads, SequentialHeads
from specdec.drafters.checkpoints.registry import load_opened
from specdec.kv.config import CacheConfig
from specdec.model.checkpoint import open_folder
from specdec.model.config import ModelConfig
from specdec.model.loader import LoadedModel
from specdec.model.stated_positions import positions_of
from specdec.proposers.base import Proposer
from specdec.proposers.compiled_drafters import (
    CompiledHeads,
    DrafterCompilation,
    PackedOfTarget,
    packed_bytes,
)
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import NativeDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_positions import heads_warning
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.draft_window import draft_window, small_pool_warning
from specdec.proposers.drafter_pool import DrafterPool
from specdec.proposers.feature_runner import FeatureRunner
from specdec.proposers.head_graph import GraphedHeads, head_loop_bytes
from specdec.proposers.head_rows import HeadRows, PrefixRows, StateRows
from specdec.proposers.head_target import HeadTarget
from specdec.proposers.head_trees import TreeHeadProposer
from specdec.proposers.heads import HeadProposer, Heads
from specdec.proposers.heads_folder import open_heads
from specdec.proposers.hidden import HiddenSource, PrefixStates
from specdec.proposers.module_runner import ModuleRunner
from specdec.proposers.tree_config import tree_shape
from specdec.sampling.sampler import Sampler
from specdec.verification.registry import capabilities_of

logger = logging.getLogger(__name__)


class LoadedDrafter(Protocol):
    """Weights that are ready to draft for a target."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What the target has to keep for them."""
        ...

    @property
    def state_width(self) -> int:
        """Numbers in a row of these states."""
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
    target: HeadTarget
    max_num_seqs: int
    max_read_tokens: int

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.heads.hidden_layers

    @property
    def state_width(self) -> int:
        return len(self.hidden_layers) * self.target.parts.hidden_size

    @property
    def later_bytes(self) -> int:
        pool_bytes = 0 if self.pool is None else _later_bytes(self.pool.kv.num_bytes, self.target)
        recorded_bytes = head_loop_bytes(self.heads, self.config.compile, self.max_num_seqs)
        return pool_bytes + packed_bytes(self.heads, self.config.compile) + recorded_bytes

    def proposer(self, source: HiddenSource, of_target: PackedOfTarget | None = None) -> HeadProposer:
        config, shape = self.config, tree_shape(self.config.tree)
        sampling, compiled, graphed = _sampling(config), None, None
        if self.target.device.type != "cuda":
            compiled = CompiledHeads(self.heads, _compilation(config, self.target, of_target), self.pool)
        elif shape is None:
            graphed = GraphedHeads(
                self.heads,
                config.compile,
                name=config.method,
                vocab_size=self.target.vocab_size,
                num_draft_tokens=config.num_speculative_tokens,
                max_num_seqs=self.max_num_seqs,
                stream=sampling.noise_stream,
            )
        rows: HeadRows = StateRows(self.heads, source)
        if self.pool is not None:
            rows = PrefixRows(
                self.heads,
                source,
                self.pool,
                max_read_tokens=self.max_read_tokens,
                max_context=config.max_model_len,
                window=draft_window(config),
                compiled=compiled,
            )
        make: Callable[..., HeadProposer] = partial(HeadProposer, graphed=graphed)
        if shape is not None:
            make = partial(TreeHeadProposer, shape=shape)
        return make(
            self.heads,
            rows,
            _sampler(config),
            name=config.method,
            sampling=sampling,
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
    target: HeadTarget
    max_num_seqs: int
    max_read_tokens: int

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.drafter.hidden_layers

    @property
    def state_width(self) -> int:
        return len(self.hidden_layers) * self.target.parts.hidden_size

    @property
    def later_bytes(self) -> int:
        pool_bytes = _later_bytes(self.runner.num_bytes, self.target)
        if not self.runner.can_be_native:
            return pool_bytes
        if self.runner.device.type == "cuda":
            return pool_bytes + self.runner.recording_bytes(self.config.compile, self.max_num_seqs)
        return pool_bytes + packed_bytes(self.drafter, self.config.compile)

    def proposer(self, source: HiddenSource, of_target: PackedOfTarget | None = None) -> DraftModelProposer:
        config, shape = self.config, tree_shape(self.config.tree)
        runner, sampler, sampling = self.runner, _sampler(config), _sampling(config)
        idle_work: tuple[IdleWork, ...] = ()
        on_gpu = runner.can_be_native and runner.device.type == "cuda"
        if on_gpu:
            idle_work = (runner.record(config.compile, takes_trees=shape is not None),)
        elif runner.can_be_native:
            idle_work = (runner.compile(_compilation(config, self.target, of_target)),)
        make: Callable[..., DraftModelProposer]
        if shape is not None:
            make = partial(TreeDraftProposer, shape=shape, generating=runner)
        elif on_gpu:
            graphed = runner.record_loop(
                config.compile,
                vocab_size=self.target.vocab_size,
                num_draft_tokens=config.num_speculative_tokens,
                max_num_seqs=self.max_num_seqs,
                stream=sampling.noise_stream,
            )
            idle_work = (graphed, *idle_work)
            make = partial(DraftModelProposer, fused_loop=graphed)
        else:
            loop = NativeDraftLoop(runner, sampler, self.target.vocab_size, sampling.noise_stream)
            make = partial(DraftModelProposer, fused_loop=loop)
        choice = DraftChoice(
            sampler=sampler,
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.target.eos_token_ids,
            sampling=sampling,
        )
        reading = DraftReading(
            max_read_tokens=self.max_read_tokens,
            max_context=config.max_model_len,
            prefix_caching=False,
            window=draft_window(config),
        )
        return make(
            runner,
            choice,
            reading=reading,
            idle_work=idle_work,
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
    cache = config.cache if drafts_here else CacheConfig(block_size=1, num_blocks=2)
    return _load(config, HeadTarget.beside(target), cache, max_num_seqs, max_num_batched_tokens)


def load_remote_heads(
    config: SpeculativeConfig, target: ModelConfig, *, max_num_seqs: int, max_num_batched_tokens: int
) -> LoadedDrafter:
    """Load what drafts for a target that other processes run; of that only the folder is looked at.

    Args:
        config: which, how large its K/V cache is, and where it runs.
        target: what it drafts for.
        max_num_seqs: sequences that a target runs at once.
        max_num_batched_tokens: tokens that a target reads in a step.

    Raises:
        CheckpointError, ConfigError, ResourceError: as `load_heads`.
    """
    beside = HeadTarget.elsewhere(target, device=config.device, dtype=config.dtype)
    return _load(config, beside, config.cache, max_num_seqs, max_num_batched_tokens)


def layers_read_by_heads(config: SpeculativeConfig, target: LoadedModel) -> tuple[int, ...]:
    """Return which hidden states `target` has to keep for heads in other processes.

    The heads are loaded to know it, checked against the target, and let go.

    Raises:
        CheckpointError, ConfigError: as `load_heads`.
    """
    return _drafter_of(config, HeadTarget.beside(target)).hidden_layers


def _load(
    config: SpeculativeConfig,
    target: HeadTarget,
    cache: CacheConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> LoadedDrafter:
    drafter = _drafter_of(config, target)
    drafter.to(target.device).requires_grad_(requires_grad=False)
    if isinstance(drafter, FeatureDrafter):
        runner = _feature_runner(drafter, config, cache, target, max_num_seqs)
        _warn_of_lengths(config, runner.num_blocks, target)
        return LoadedFeatureDrafter(config, drafter, runner, target, max_num_seqs, max_num_batched_tokens)
    assert isinstance(drafter, IndependentHeads | SequentialHeads)
    _warn_of_depth(drafter, config)
    pool: DrafterPool | None = None
    if layers := drafter.attention_layers:
        pool = DrafterPool(
            drafter,
            layers,
            cache,
            backend=_backend_of(layers, config, target),
            max_num_seqs=max_num_seqs,
            max_model_len=target.max_model_len,
            max_held_tokens=_held_tokens(config, target),
        )
        _warn_of_lengths(config, pool.num_blocks, target)
    elif config.kv.policy != "full":
        raise ConfigError(
            f"speculative_config.kv.policy: {config.kv.policy} is about the K/V that drafting attends to; "
            f"the heads in {config.model} have none: leave out kv"
        )
    elif config.max_model_len is not None:
        raise ConfigError(
            f"speculative_config.max_model_len: {config.max_model_len} is about heads with K/V of their own; "
            f"the heads in {config.model} have none: leave it out"
        )
    elif config.attention_backend != "auto":
        raise ConfigError(
            f"speculative_config.attention_backend: {config.attention_backend} is about heads with K/V of "
            f"their own; the heads in {config.model} have none: leave it out"
        )
    return LoadedHeads(config, drafter, pool, target, max_num_seqs, max_num_batched_tokens)


def _feature_runner(
    drafter: FeatureDrafter,
    config: SpeculativeConfig,
    cache: CacheConfig,
    target: HeadTarget,
    max_num_seqs: int,
) -> FeatureRunner:
    """Return what runs as many of the drafter's modules as there are depths to draft at."""
    make: Callable[..., FeatureRunner] = FeatureRunner
    if drafter.num_modules > 1:
        shape = tree_shape(config.tree)
        most_depth = config.num_speculative_tokens if shape is None else shape.max_depth
        make = partial(ModuleRunner, num_kept=max(1, min(drafter.num_modules, most_depth)))
    return make(
        drafter,
        cache,
        backend=_backend_of(drafter.attention_layers, config, target),
        max_num_seqs=max_num_seqs,
        max_model_len=target.max_model_len,
        max_held_tokens=_held_tokens(config, target),
    )


def _held_tokens(config: SpeculativeConfig, target: HeadTarget) -> int | None:
    """Return how many tokens of a sequence have K/V of the drafter at the same time; None: all."""
    window = draft_window(config)
    return None if window is None else window.max_held_tokens(target.max_model_len, config.cache.block_size)


def _warn_of_lengths(config: SpeculativeConfig, num_blocks: int, target: HeadTarget) -> None:
    """Say so where texts are too long for the pool, or for what the heads were made for."""
    texts = [small_pool_warning(config, num_blocks, target.max_model_len)]
    if config.model is not None:  # modules in the target's own folder are as long as the target
        folder = open_folder(config.model)
        stated = positions_of(folder.config)
        texts.append(heads_warning(config, folder.path.name, stated, target.max_model_len))
    for text in filter(None, texts):
        logger.warning("%s", text)


def _drafter_of(config: SpeculativeConfig, target: HeadTarget) -> Drafter:
    """Load the drafter that is asked for, with all that it borrows of the target."""
    folder = open_heads(config, target.path)
    if config.method in ("eagle", "mtp"):
        # Whether copies in a checkpoint are the target's own could not be told by a part of them.
        target = target.whole()
    # Nor could this of an EAGLE-3 head, which may have an LM head of its own: the target's stays where it is.
    known = target.with_embeddings() if config.method == "eagle3" else target
    if config.method == "mtp":
        known = known.with_stored_head()
    drafter = load_opened(folder, known.parts, target.dtype)
    target.lend(drafter)
    return drafter


def _backend_of(
    layers: Sequence[LayerAttention], config: SpeculativeConfig, target: HeadTarget
) -> AttentionBackend:
    try:
        return choose_backend(
            config.attention_backend,
            device=target.device,
            dtype=target.dtype,
            layers=layers,
            max_context=target.max_model_len,
            cache_dir=config.compile.cache_dir,
        )
    except (ConfigError, ResourceError) as error:
        raise type(error)(f"speculative_config.{error}") from error


def _later_bytes(num_bytes: int, target: HeadTarget) -> int:
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
    config: SpeculativeConfig, target: HeadTarget, of_target: PackedOfTarget | None
) -> DrafterCompilation:
    return DrafterCompilation(
        name=f"{config.method} ({target.path.name if config.model is None else config.model})",
        config=config.compile,
        is_quantized=target.is_quantized,
        of_target=of_target or (lambda: None),
    )


def _sampler(config: SpeculativeConfig) -> Sampler:
    sampler = Sampler(config.compile.cache_dir)
    sampler.warm_up()
    return sampler


def _sampling(config: SpeculativeConfig) -> DraftSampling:
    return DraftSampling.under(capabilities_of(config.rejection_sample_method), config.draft_top_k)
