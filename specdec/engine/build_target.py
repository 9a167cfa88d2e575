"""From a configuration to the target in this process: whole, or a rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from specdec.kv.block_scores import MAX_WINDOW
from specdec.kv.block_table import num_blocks_for
from specdec.kv.selection import KvSelection
from specdec.model.checkpoint import LoadProgress
from specdec.proposers.tree_config import tree_shape
from specdec.verification.base import VerificationRule
from specdec.verification.registry import make_rule

# Loading torch and transformers takes seconds and hundreds of megabytes: a coordinator, which has neither
# model in its process, never does, and so they are imported where a model is built.
if TYPE_CHECKING:
    from specdec.core.idle_work import IdleWork
    from specdec.engine.ranks.leader import LeadingTarget
    from specdec.engine.targets.local_target import LocalTarget
    from specdec.model.exit_states import ExitTap
    from specdec.model.loader import LoadedModel
    from specdec.model.parallel.group import RankGroup
    from specdec.model.runner import ModelRunner
    from specdec.proposers.heads_factory import LoadedDrafter
    from specdec.sampling.sampler import TokenChooser

_LOOKS_EVERY_ON_GPUS = 16
"""Committed tokens between two rounds that policy `verified` looks at, unless it is told."""


def build_target(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    ranks: RankGroup | None = None,
    *,
    reserved_bytes: int = 0,
) -> LocalTarget | LeadingTarget:
    """Load the target alone, as a target worker does.

    When the target is divided (`ModelConfig.num_ranks`) this process is rank 0 of `ranks`; without them, the
    other ranks are started here, as processes of this machine. `reserved_bytes` of the memory are left to
    others when the size of the KV cache is to be found out.

    Raises:
        UserError: as `build_parts`.
        TransportError: another rank died.
    """
    takes_trees = config.speculative_config.drafts_trees
    config = seen_at_target(config)
    if config.target.num_ranks == 1 and ranks is None:
        return _build_whole_target(config, progress, reserved_bytes, takes_trees=takes_trees)
    from specdec.engine.ranks.launch import leading
    from specdec.engine.ranks.leader import LeadingTarget

    if ranks is None:
        from specdec.model.on_paper import check_servable

        check_servable(config.target)  # starting ranks takes long, for an error that all of them would have
    size, device = config.target.num_ranks, config.target.device
    with leading("target", config, size, device, ranks) as (group, followers):
        part = build_target_part(config, group, progress, reserved_bytes=reserved_bytes)
        return LeadingTarget(part, group, followers)


def seen_at_target(config: EngineConfig) -> EngineConfig:
    """Return a configuration as the target needs it: of several drafters with those that draft there."""
    return config.model_copy(update={"speculative_config": config.speculative_config.at_target})


def build_target_part(
    config: EngineConfig, ranks: RankGroup, progress: LoadProgress | None = None, *, reserved_bytes: int = 0
) -> LocalTarget:
    """Load this rank's part of the target; all ranks do at the same time.

    Raises:
        UserError: as `build_parts`; in all ranks.
        TransportError: another rank died.
    """
    from specdec.engine.targets.local_target import LocalTarget
    from specdec.engine.targets.stage_target import StageTarget
    from specdec.model.acceleration import settle
    from specdec.model.hidden_taps import places_of
    from specdec.model.loader import load_model
    from specdec.model.parallel.group import same_fate
    from specdec.model.rank_graphs import compile_over_ranks, resume_over_ranks

    config = seen_at_target(config)
    loaded = load_model(config.target, progress, ranks)
    with same_fate(ranks):
        heads = _heads_of(config, loaded)
        hidden_layers = _hidden_layers_of(config, loaded, heads)
        places_of(loaded, hidden_layers)  # all ranks hear of layers that are not here
        view = _view_of(config, loaded)
    if heads is not None:
        reserved_bytes += heads.later_bytes
    runner = _part_runner(loaded, config, reserved_bytes, hidden_layers)
    _require_length(config, runner)
    compile_over_ranks(runner, config.target.compile)
    settle(runner, config.target.compile)
    view_runner = None if view is None else runner.of_view(view, _exit_tap_of(config, loaded))
    resumed = None
    if view_runner is not None:
        compile_over_ranks(view_runner, config.target.compile, like=runner.graphs)
        if view_runner.exit_tap is not None:
            resumed = resume_over_ranks(runner, view_runner, config.target.compile)
    if loaded.stage is not None and not loaded.stage.is_last:
        return StageTarget(runner)
    target = LocalTarget(
        runner,
        _chooser(loaded, config),
        rule=_rule_of(config),
        self_drafting=_self_drafting_of(config, loaded),
        self_tree=tree_shape(config.speculative_config.tree),
        view=view_runner,
        resumed=resumed,
        make_drafter=heads.proposer if heads is not None and ranks.rank == 0 else None,
    )
    for work in target.idle_work:  # of what drafts here: later, the other ranks would be waiting for it
        while work.pending():
            work.run_next()
    return target


def _build_whole_target(
    config: EngineConfig, progress: LoadProgress | None, reserved_bytes: int, *, takes_trees: bool
) -> LocalTarget:
    from specdec.engine.targets.local_target import LocalTarget
    from specdec.model.acceleration import accelerate, attention_of, later_bytes, packed_by
    from specdec.model.loader import load_model
    from specdec.model.resumed_forward import ResumedForward
    from specdec.model.runner import ModelRunner
    from specdec.proposers.draft_graph import GraphedDraftLoop, loop_bytes
    from specdec.sampling.sampler import Sampler

    loaded = load_model(config.target, progress)
    heads = _heads_of(config, loaded)
    hidden_layers = _hidden_layers_of(config, loaded, heads)
    view = _view_of(config, loaded)
    backend = attention_of(loaded, config.target.attention_backend, config.target.compile)
    self_drafting, self_tree = _self_drafting_of(config, loaded), tree_shape(config.speculative_config.tree)
    drafts_chains = self_drafting is not None and self_tree is None
    if drafts_chains:
        reserved_bytes += loop_bytes(loaded, config.target.compile, config.scheduler.max_num_seqs)
    runner = ModelRunner(
        loaded,
        config.cache,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        reserved_bytes=reserved_bytes
        + _observed_bytes(config, loaded)
        + later_bytes(loaded, config.target.compile, backend)
        + (0 if heads is None else heads.later_bytes),
        backend=backend,
        hidden_layers=hidden_layers,
        drafts_packed=config.speculative_config.kv.is_packed,
    )
    _require_length(config, runner)
    graphs = accelerate(runner, config.target.compile, takes_trees=takes_trees)
    idle_work: list[IdleWork] = [graphs]
    view_runner = None if view is None else runner.of_view(view, _exit_tap_of(config, loaded))
    resumed = None
    if view_runner is not None:
        of_view = accelerate(
            view_runner, config.target.compile, like=graphs, takes_trees=self_tree is not None
        )
        idle_work.append(of_view)
        if view_runner.exit_tap is not None:
            resumed = ResumedForward(runner, view_runner, config.target.compile)
            idle_work.append(resumed)
    self_loop = None
    if drafts_chains and loaded.device.type == "cuda":
        self_loop = GraphedDraftLoop(
            view_runner or runner,
            config.target.compile,
            vocab_size=runner.vocab_size,
            num_draft_tokens=config.speculative_config.num_speculative_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_read=1,  # of what is verified K/V are there, up to the last token
        )
        idle_work.append(self_loop)
    sampler = Sampler(config.target.compile.cache_dir)
    sampler.warm_up()
    return LocalTarget(
        runner,
        sampler,
        rule=_rule_of(config),
        idle_work=idle_work,
        self_drafting=self_drafting,
        self_tree=self_tree,
        view=view_runner,
        resumed=resumed,
        self_loop=self_loop,
        make_drafter=None if heads is None else partial(heads.proposer, of_target=lambda: packed_by(graphs)),
    )


def _heads_of(config: EngineConfig, loaded: LoadedModel) -> LoadedDrafter | None:
    """Return the heads that draft beside a target, or beside its last stage: one drafter, or several."""
    choices = config.speculative_config.choices
    here = [one for one in choices if one.has_heads and not one.has_remote_heads]
    if not here or (loaded.stage is not None and not loaded.stage.is_last):
        return None
    from specdec.proposers.heads_factory import load_heads
    from specdec.proposers.several.heads import SeveralLoaded

    each = [
        load_heads(
            one,
            loaded,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            drafts_here=loaded.ranks is None or loaded.ranks.rank == 0,
        )
        for one in here
    ]
    return each[0] if len(each) == 1 else SeveralLoaded(tuple(each))


def _hidden_layers_of(
    config: EngineConfig, loaded: LoadedModel, heads: LoadedDrafter | None
) -> tuple[int, ...]:
    """Return which hidden states are kept: for the heads that are here, or for those in draft workers."""
    if heads is not None:
        return heads.hidden_layers
    if not config.speculative_config.has_remote_heads:
        return ()
    from specdec.proposers.heads_factory import layers_read_by_heads

    return layers_read_by_heads(config.speculative_config, loaded)


def _view_of(config: EngineConfig, loaded: LoadedModel) -> LoadedModel | None:
    """Return the form of the target that drafts for it; None: another drafts, or the target as it is."""
    speculative = config.speculative_config
    if speculative.method == "layerskip":
        from specdec.model.views import early_exit

        assert speculative.exit_layer is not None
        return early_exit(loaded, speculative.exit_layer)
    if speculative.method == "quantized":
        from specdec.model.views import with_fewer_bits

        assert speculative.quantization is not None
        return with_fewer_bits(loaded, speculative.quantization)
    return loaded if speculative.kv.is_packed else None


def _exit_tap_of(config: EngineConfig, loaded: LoadedModel) -> ExitTap | None:
    """Return where drafts leave what verification can go on from, bit for bit as if it began anew."""
    speculative = config.speculative_config
    attends_alike = speculative.kv.policy == "full" and not speculative.kv.is_packed
    drafts_chains = tree_shape(speculative.tree) is None
    is_on_cpu = loaded.device.type == "cpu"
    if speculative.method != "layerskip" or not (attends_alike and drafts_chains and is_on_cpu):
        return None
    from specdec.model.views import exit_tap

    assert speculative.exit_layer is not None
    return exit_tap(loaded, speculative.exit_layer)


def _part_runner(
    loaded: LoadedModel, config: EngineConfig, reserved_bytes: int, hidden_layers: Sequence[int]
) -> ModelRunner:
    from specdec.model.acceleration import attention_of
    from specdec.model.graphs import packed_weight_bytes
    from specdec.model.pipeline import StageRunner
    from specdec.model.runner import ModelRunner

    make: Callable[..., ModelRunner] = partial(
        ModelRunner, drafts_packed=config.speculative_config.kv.is_packed
    )
    if loaded.stage is not None:
        make = partial(StageRunner, micro_batch_tokens=config.target.pipeline_micro_batch_tokens)
    return make(
        loaded,
        config.cache,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        reserved_bytes=reserved_bytes
        + _observed_bytes(config, loaded)
        + packed_weight_bytes(loaded, config.target.compile),
        backend=attention_of(loaded, config.target.attention_backend, config.target.compile),
        hidden_layers=hidden_layers,
    )


def _chooser(loaded: LoadedModel, config: EngineConfig) -> TokenChooser:
    """Return what chooses tokens where this rank's logits come out."""
    from specdec.sampling.parallel import ParallelSampler
    from specdec.sampling.sampler import Sampler

    if loaded.grid is not None and loaded.grid.tensor is not None:
        assert loaded.vocab is not None
        return ParallelSampler(loaded.grid.tensor, loaded.vocab)
    sampler = Sampler(config.target.compile.cache_dir)
    sampler.warm_up()
    return sampler


def _rule_of(config: EngineConfig) -> VerificationRule:
    speculative = config.speculative_config
    return make_rule(
        speculative.rejection_sample_method,
        posterior_threshold=speculative.posterior_threshold,
        posterior_alpha=speculative.posterior_alpha,
    )


def _self_drafting_of(config: EngineConfig, loaded: LoadedModel) -> KvSelection | None:
    """Return what the target's own drafts attend to; None: it makes none."""
    speculative = config.speculative_config
    if not speculative.is_self_drafting:
        return None
    kv = speculative.kv
    if kv.policy == "verified" and kv.rescore_every is None and loaded.device.type == "cuda":
        # Rounds that are looked at run outside of recorded graphs there, and look in a pass of its own.
        kv = kv.model_copy(update={"rescore_every": _LOOKS_EVERY_ON_GPUS})
    return kv.make(config.cache.block_size)


def _observed_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return what the masses of one observed round take at most (`attention.observation`)."""
    from specdec.attention.observation import masses_bytes

    speculative = config.speculative_config
    if not (speculative.is_self_drafting and speculative.kv.is_scored):
        return 0
    # Ends of prompts are observed by either policy, and nobody observes more rows than there are in a round.
    of_one = max(speculative.num_speculative_tokens + 1, MAX_WINDOW)
    num_rows = min(config.scheduler.max_num_seqs * of_one, config.scheduler.max_num_batched_tokens)
    num_blocks = num_blocks_for(loaded.max_model_len, config.cache.block_size)
    return masses_bytes(num_rows, num_blocks=num_blocks, layers=loaded.layers)


def _require_length(config: EngineConfig, runner: ModelRunner) -> None:
    """Raise ResourceError when the pool does not hold one request of the length that was asked for."""
    asked = config.target.max_model_len
    if asked is not None and runner.max_model_len < asked:
        raise ResourceError(
            f"target.max_model_len = {asked}, but the KV cache holds {runner.max_model_len} tokens: give it "
            f"more (cache.num_blocks, cache.memory_bytes or cache.memory_fraction), or lower max_model_len"
        )
