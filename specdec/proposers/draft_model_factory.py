"""Loads the draft model that a configuration names."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

from specdec.core.idle_work import IdleWork
from specdec.model.acceleration import accelerate, attention_of, later_bytes
from specdec.model.config import ModelConfig
from specdec.model.graphs import packed_weight_bytes
from specdec.model.loader import LoadedModel, load_model
from specdec.model.parallel.group import RankGroup
from specdec.model.rank_graphs import compile_over_ranks
from specdec.model.rotary import RotaryRule
from specdec.model.runner import ModelRunner
from specdec.model.tokenizer import check_same_tokenizer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_graph import GraphedDraftLoop, loop_bytes
from specdec.proposers.draft_loop import FusedDraftLoop, NativeDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_positions import (
    DraftReach,
    pool_warning,
    require_positions,
    warnings_about,
    with_positions,
)
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.draft_window import ANY_LENGTH, DraftWindow, draft_window
from specdec.proposers.target_facts import TargetFacts
from specdec.proposers.tree_config import tree_shape
from specdec.sampling.made_up import MadeUpChooser
from specdec.sampling.parallel import ParallelSampler
from specdec.sampling.sampler import Sampler, TokenChooser
from specdec.verification.registry import capabilities_of

logger = logging.getLogger(__name__)


def load_draft_model(
    config: SpeculativeConfig, target: TargetFacts, ranks: RankGroup | None = None
) -> DraftModelProposer:
    """Load the draft model, or this rank's part of it, its cache and its sampler.

    Raises:
        CheckpointError: the folder or a file in it is missing, corrupt or of an unsupported kind, or its
            tokenizer is not the target's.
        ResourceError: the cache's memory does not hold a single block.
    """
    assert config.model is not None, "checked by SpeculativeConfig"
    if target.model is not None:
        require_same_tokenizer(
            config.model,
            target.model,
            trust_draft_code=config.trust_remote_code,
            trust_target_code=target.trust_remote_code,
        )
    loaded = load_model(draft_model_config(config, target), None, ranks, is_draft=True)
    if ranks is None:
        return make_draft_model_proposer(loaded, config, target)
    assert loaded.vocab is not None
    reach = _reach_of(loaded, config, target)
    runner = ModelRunner(
        loaded,
        config.cache,
        max_num_seqs=target.max_num_seqs,
        max_held_tokens=reach.max_held_tokens,
        reserved_bytes=packed_weight_bytes(loaded, config.compile),
        backend=attention_of(loaded, config.attention_backend, config.compile),
    )
    reach.warn_of_pool(runner.num_blocks)
    compile_over_ranks(runner, config.compile)
    sampler = ParallelSampler(ranks, loaded.vocab, vocab_size=min(target.vocab_size, loaded.vocab_size))
    shape = tree_shape(config.tree)
    make = DraftModelProposer if shape is None else partial(TreeDraftProposer, shape=shape)
    choice = _choice(sampler, loaded, config, target)
    return make(runner, choice, reading=reach.reading(target.max_read_tokens))


def draft_model_config(config: SpeculativeConfig, target: TargetFacts) -> ModelConfig:
    """Return how the draft model is loaded."""
    return ModelConfig.model_validate(
        {
            "model": config.model,
            "dtype": target.dtype if config.dtype == "auto" else config.dtype,
            "device": config.device,
            "trust_remote_code": config.trust_remote_code,
            "quantization": config.quantization,
            "num_threads": config.num_threads,
            "tensor_parallel_size": config.draft_tensor_parallel_size,
            "attention_backend": config.attention_backend,
            "compile": config.compile,
        }
    )


def make_draft_model_proposer(
    loaded: LoadedModel, config: SpeculativeConfig, target: TargetFacts
) -> DraftModelProposer:
    """Return the proposer over a draft model that is loaded already."""
    backend = attention_of(loaded, config.attention_backend, config.compile)
    reach = _reach_of(loaded, config, target)
    runner = ModelRunner(
        loaded,
        config.cache,
        max_num_seqs=target.max_num_seqs,
        max_held_tokens=reach.max_held_tokens,
        reserved_bytes=later_bytes(loaded, config.compile, backend)
        + loop_bytes(loaded, config.compile, target.max_num_seqs),
        backend=backend,
    )
    reach.warn_of_pool(runner.num_blocks)
    shape = tree_shape(config.tree)
    graphs = accelerate(runner, config.compile, takes_trees=shape is not None)
    kind = Sampler if config.synthetic_acceptance is None else MadeUpChooser
    sampler = kind(config.compile.cache_dir)
    sampler.warm_up()
    choice = _choice(sampler, loaded, config, target)
    reading = reach.reading(target.max_read_tokens)
    if shape is not None:
        return TreeDraftProposer(
            runner, choice, shape, reading=reading, idle_work=(graphs,), generating=runner
        )
    fused_loop: FusedDraftLoop
    idle_work: tuple[IdleWork, ...]
    if loaded.device.type == "cuda":
        fused_loop = graphed_loop = GraphedDraftLoop(
            runner,
            config.compile,
            vocab_size=target.vocab_size,
            num_draft_tokens=config.num_speculative_tokens,
            max_num_seqs=target.max_num_seqs,
            stream=choice.sampling.noise_stream,
        )
        idle_work = (graphed_loop, graphs)
    else:
        fused_loop = NativeDraftLoop(runner, sampler, target.vocab_size, choice.sampling.noise_stream)
        idle_work = (graphs,)
    return DraftModelProposer(runner, choice, reading=reading, fused_loop=fused_loop, idle_work=idle_work)


def _choice(
    sampler: TokenChooser, loaded: LoadedModel, config: SpeculativeConfig, target: TargetFacts
) -> DraftChoice:
    return DraftChoice(
        sampler=sampler,
        vocab_size=target.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        sampling=draft_sampling(config),
    )


class _Reach(NamedTuple):
    """What of a text a draft model keeps, and how long texts may be."""

    window: DraftWindow | None
    max_context: int | None
    """As for `DraftReading`."""
    max_held_tokens: int | None
    """As for `ModelRunner`."""
    rotary: RotaryRule | None
    """How K/V depend on the length of a text."""
    config: SpeculativeConfig
    """With `kv.positions` decided."""
    positions: DraftReach
    """By which they were."""

    def reading(self, max_read_tokens: int) -> DraftReading:
        """Return what is read of texts, so many tokens in a call."""
        return DraftReading(
            max_read_tokens=max_read_tokens,
            max_context=self.max_context,
            prefix_caching=self.config.cache.enable_prefix_caching,
            rotary=self.rotary,
            window=self.window,
        )

    def warn_of_pool(self, num_blocks: int) -> None:
        """Say so if the pool turned out smaller than one window."""
        text = pool_warning(self.config, self.positions, num_blocks)
        if text is not None:
            logger.warning("%s", text)


def _reach_of(loaded: LoadedModel, config: SpeculativeConfig, target: TargetFacts) -> _Reach:
    """Return how far a draft model reaches; say so where the target reaches further.

    Raises:
        ConfigError: `kv.positions` or `max_model_len` does not go with the models.
    """
    require_positions(loaded.path.name, loaded.max_model_len, config.max_model_len)
    limit = config.max_model_len or loaded.max_model_len
    reach = DraftReach(
        name=loaded.path.name,
        num_positions=limit,
        target_len=target.max_model_len,
        num_of_one_kind=None if loaded.rotary is None else loaded.rotary.variants.original_len,
    )
    config = with_positions(config, reach)
    for text in warnings_about(config, reach):
        logger.warning("%s", text)
    block_size, held = config.cache.block_size, None
    if config.kv.positions == "in_cache":
        window = draft_window(config, reach.num_in_cache)
        assert window is not None, "checked by SpeculativeConfig"
        # No rotary: below the length from which K/V depend on it, they never do.
        return _Reach(window, None, window.max_held_tokens(ANY_LENGTH, block_size), None, config, reach)
    window = draft_window(config)
    if window is not None:
        held = window.max_held_tokens(loaded.max_model_len, block_size)
    return _Reach(window, config.max_model_len, held, loaded.rotary, config, reach)


def draft_sampling(config: SpeculativeConfig) -> DraftSampling:
    """Return how the draft model is to draw under the configured verification rule."""
    return DraftSampling.under(capabilities_of(config.rejection_sample_method), config.draft_top_k)


def require_same_tokenizer(
    draft_folder: str,
    target_folder: str,
    *,
    trust_draft_code: bool = False,
    trust_target_code: bool = False,
) -> None:
    """Check that both models mean the same text by the same token ids; log what else differs.

    Raises:
        CheckpointError: naming the first token id on which they differ, or what cannot be loaded.
    """
    differences = check_same_tokenizer(
        target_folder, draft_folder, trust_target_code=trust_target_code, trust_draft_code=trust_draft_code
    )
    for difference in differences:
        logger.warning("speculative_config.model: %s", difference)
