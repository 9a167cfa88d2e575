"""From a configuration to the parts of an engine in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import build_controller, drafters_of
from specdec.engine.synthetic import SilentTokenizer, SyntheticTarget, require_real
from specdec.engine.target import Target
from specdec.engine.tokenizer import HuggingFaceTokenizer, Tokenizer
from specdec.kv.selection import KvBudgets, KvSelection, budgets_of
from specdec.model.checkpoint import LoadProgress
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import create_proposer, with_fallback
from specdec.proposers.target_facts import LEAST_READ_TOKENS, TargetFacts
from specdec.proposers.tree_config import tree_shape
from specdec.sampling.config import GrammarConfig
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import SpeculationController
from specdec.scheduling.speculation.drafter_shares import DrafterSet
from specdec.verification.base import VerificationRule
from specdec.verification.registry import make_rule

logger = logging.getLogger(__name__)

# Loading torch and transformers takes seconds and hundreds of megabytes: a coordinator, which has neither
# model in its process, never does, and so they are imported where a model is built.
if TYPE_CHECKING:
    from specdec.core.description import TargetDescription
    from specdec.core.idle_work import IdleWork
    from specdec.engine.draft_grammar import DraftGrammars
    from specdec.engine.local_target import LocalTarget
    from specdec.engine.rank_leader import LeadingTarget
    from specdec.model.loader import LoadedModel
    from specdec.model.parallel.group import RankGroup
    from specdec.model.runner import ModelRunner
    from specdec.proposers.draft_model import DraftModelProposer
    from specdec.proposers.heads_factory import LoadedDrafter
    from specdec.sampling.sampler import TokenChooser


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    target: Target
    proposer: Proposer
    tokenizer: Tokenizer
    scheduler: SchedulerConfig
    controller: SpeculationController
    prefix_caching: bool
    """Whether K/V of common prefixes are shared and kept."""
    grammar: GrammarConfig
    max_branches: int
    """Continuations that are drafted ahead for one request, at most."""
    kv_budgets: KvBudgets | None = None
    """How much drafts attend to; None: everything."""
    drafters: DrafterSet | None = None
    """Those that requests may get; None: there is but one."""


def build_parts(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    *,
    is_measuring: bool = False,
    around_drafter: Callable[[Proposer], Proposer] | None = None,
) -> EngineParts:
    """Load models and tokenizer; `progress` hears of the target's.

    Only who `is_measuring` gets an engine whose output is made up (`synthetic_acceptance`). What
    `around_drafter` makes of the drafter drafts in its place, and owns it; whoever has it learn gives it.

    Raises:
        UserError: a checkpoint, a device or the memory is not as the configuration says.
    """
    if not is_measuring:
        require_real(config)
    config = config.in_one_process()
    target = build_target(config, progress, reserved_bytes=draft_bytes(config.speculative_config))
    try:
        proposer = _build_proposer(config, target.description)
        if around_drafter is not None:
            proposer = around_drafter(proposer)
        elif config.speculative_config.online is not None:
            logger.warning("speculative_config.online: nothing is learnt by an engine in this process")
    except BaseException:
        target.close()
        raise
    try:
        controller = build_controller(
            config, target, proposer, draft_devices=draft_devices_of(config.speculative_config)
        )
    except BaseException:
        proposer.close()
        target.close()
        raise
    made_up = config.speculative_config.synthetic_acceptance
    tokenizer = build_tokenizer(config)
    return EngineParts(
        target=target if made_up is None else SyntheticTarget(target, made_up),
        proposer=with_fallback(proposer, config.speculative_config),
        tokenizer=tokenizer if made_up is None else SilentTokenizer(tokenizer),
        scheduler=config.scheduler,
        controller=controller,
        prefix_caching=config.cache.enable_prefix_caching,
        grammar=config.grammar,
        max_branches=config.speculative_config.max_branches,
        kv_budgets=kv_budgets_of(config.speculative_config),
        drafters=drafters_of(config.speculative_config),
    )


def _build_proposer(config: EngineConfig, target: TargetDescription) -> Proposer:
    if config.speculative_config.draft_tensor_parallel_size > 1:
        return build_draft_proposer(config)
    facts = TargetFacts(
        vocab_size=target.vocab_size,
        dtype=target.dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        model=config.target.model,
        max_model_len=target.max_model_len,
        max_read_tokens=max(LEAST_READ_TOKENS, config.scheduler.max_num_batched_tokens),
    )
    return create_proposer(config.speculative_config, facts)


def draft_devices_of(config: SpeculativeConfig) -> tuple[str, ...]:
    """Return what draft models run on that are loaded in this process."""
    from specdec.model.devices import device_name, resolve_device

    names = (device_name(resolve_device(one.device)) for one in config.choices if one.model is not None)
    return tuple(sorted(set(names)))


def draft_bytes(config: SpeculativeConfig) -> int:
    """Return about how much memory draft models take that are loaded beside the target."""
    return sum(map(_draft_model_bytes, config.every_drafter))


def _draft_model_bytes(config: SpeculativeConfig) -> int:
    if config.method != "draft_model" or config.model is None or config.draft_tensor_parallel_size > 1:
        return 0  # heads are loaded before the memory is looked at
    from specdec.model.checkpoint import open_checkpoint

    weights = open_checkpoint(config.model).weight_bytes  # an upper bound, when they are to be quantized
    is_packed = config.compile.mode != "off" and config.quantization is None
    packed = min(weights, config.compile.max_frozen_bytes) if is_packed else 0
    return weights + packed + (config.cache.memory_bytes or 0)


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
    config = seen_at_target(config)
    if config.target.num_ranks == 1 and ranks is None:
        return _build_whole_target(config, progress, reserved_bytes)
    from specdec.engine.rank_launch import leading
    from specdec.engine.rank_leader import LeadingTarget

    if ranks is None:
        from specdec.model.on_paper import check_servable

        check_servable(config.target)  # starting ranks takes long, for an error that all of them would have
    size, device = config.target.num_ranks, config.target.device
    with leading("target", config, size, device, ranks) as (group, followers):
        part = build_target_part(config, group, progress, reserved_bytes=reserved_bytes)
        return LeadingTarget(part, group, followers)


def seen_at_target(config: EngineConfig) -> EngineConfig:
    """Return a configuration as the target needs it: of several drafters with the one that drafts there."""
    return config.model_copy(update={"speculative_config": config.speculative_config.at_target})


def _build_whole_target(
    config: EngineConfig, progress: LoadProgress | None, reserved_bytes: int
) -> LocalTarget:
    from specdec.engine.local_target import LocalTarget
    from specdec.model.acceleration import accelerate, attention_of, later_bytes, packed_by
    from specdec.model.loader import load_model
    from specdec.model.runner import ModelRunner
    from specdec.proposers.draft_graph import GraphedDraftLoop, loop_bytes
    from specdec.sampling.sampler import Sampler

    loaded = load_model(config.target, progress)
    heads = _heads_of(config, loaded)
    hidden_layers = _hidden_layers_of(config, loaded, heads)
    view = _view_of(config, loaded)
    backend = attention_of(loaded, config.target.attention_backend)
    self_drafting, self_tree = _self_drafting_of(config), tree_shape(config.speculative_config.tree)
    drafts_chains = self_drafting is not None and self_tree is None
    if drafts_chains:
        reserved_bytes += loop_bytes(loaded, config.target.compile, config.scheduler.max_num_seqs)
    runner = ModelRunner(
        loaded,
        config.cache,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        reserved_bytes=reserved_bytes
        + later_bytes(loaded, config.target.compile, backend)
        + (0 if heads is None else heads.later_bytes),
        backend=backend,
        hidden_layers=hidden_layers,
        drafts_packed=config.speculative_config.kv.is_packed,
    )
    _require_length(config, runner)
    graphs = accelerate(runner, config.target.compile)
    idle_work: list[IdleWork] = [graphs]
    view_runner = None if view is None else runner.of_view(view)
    if view_runner is not None:
        idle_work.append(accelerate(view_runner, config.target.compile, like=graphs))
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
        self_loop=self_loop,
        make_drafter=None if heads is None else partial(heads.proposer, of_target=lambda: packed_by(graphs)),
    )


def build_target_part(
    config: EngineConfig, ranks: RankGroup, progress: LoadProgress | None = None, *, reserved_bytes: int = 0
) -> LocalTarget:
    """Load this rank's part of the target; all ranks do at the same time.

    Raises:
        UserError: as `build_parts`; in all ranks.
        TransportError: another rank died.
    """
    from specdec.engine.local_target import LocalTarget
    from specdec.engine.stage_target import StageTarget
    from specdec.model.acceleration import settle
    from specdec.model.hidden_taps import places_of
    from specdec.model.loader import load_model
    from specdec.model.parallel.group import same_fate
    from specdec.model.rank_graphs import compile_over_ranks

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
    view_runner = None if view is None else runner.of_view(view)
    if view_runner is not None:
        compile_over_ranks(view_runner, config.target.compile, like=runner.graphs)
    if loaded.stage is not None and not loaded.stage.is_last:
        return StageTarget(runner)
    target = LocalTarget(
        runner,
        _chooser(loaded, config),
        rule=_rule_of(config),
        self_drafting=_self_drafting_of(config),
        self_tree=tree_shape(config.speculative_config.tree),
        view=view_runner,
        make_drafter=heads.proposer if heads is not None and ranks.rank == 0 else None,
    )
    for work in target.idle_work:  # of what drafts here: later, the other ranks would be waiting for it
        while work.pending():
            work.run_next()
    return target


def _heads_of(config: EngineConfig, loaded: LoadedModel) -> LoadedDrafter | None:
    """Return the heads that draft beside a target, or beside its last stage."""
    speculative = config.speculative_config
    if not speculative.has_heads or speculative.has_remote_heads:
        return None
    if loaded.stage is not None and not loaded.stage.is_last:
        return None
    from specdec.proposers.heads_factory import load_heads

    return load_heads(
        speculative,
        loaded,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        drafts_here=loaded.ranks is None or loaded.ranks.rank == 0,
    )


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
        reserved_bytes=reserved_bytes + packed_weight_bytes(loaded, config.target.compile),
        backend=attention_of(loaded, config.target.attention_backend),
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


def kv_budgets_of(config: SpeculativeConfig) -> KvBudgets | None:
    """Return how much the drafts of an engine attend to; None: everything."""
    place, drafters = config.budgeted_choice, drafters_of(config)
    if place is None:
        return None
    own = config.choices[place]
    name = None if drafters is None else drafters.names[place]
    return budgets_of(own.kv, own.num_speculative_tokens, drafter=name)


def _rule_of(config: EngineConfig) -> VerificationRule:
    speculative = config.speculative_config
    return make_rule(
        speculative.rejection_sample_method,
        posterior_threshold=speculative.posterior_threshold,
        posterior_alpha=speculative.posterior_alpha,
    )


def _self_drafting_of(config: EngineConfig) -> KvSelection | None:
    """Return what the target's own drafts attend to; None: it makes none."""
    speculative = config.speculative_config
    return speculative.kv.make(config.cache.block_size) if speculative.is_self_drafting else None


def _require_length(config: EngineConfig, runner: ModelRunner) -> None:
    """Raise ResourceError when the pool does not hold one request of the length that was asked for."""
    asked = config.target.max_model_len
    if asked is not None and runner.max_model_len < asked:
        raise ResourceError(
            f"target.max_model_len = {asked}, but the KV cache holds {runner.max_model_len} tokens: give it "
            f"more (cache.num_blocks, cache.memory_bytes or cache.memory_fraction), or lower max_model_len"
        )


def build_draft_proposer(config: EngineConfig, ranks: RankGroup | None = None) -> Proposer:
    """Load the drafter alone, as a draft worker does; of the target only its folder is looked at.

    `ranks` as for `build_target`, with `speculative_config.draft_tensor_parallel_size`.

    Raises:
        UserError: as `build_parts`.
        TransportError: another rank died.
    """
    speculative = config.speculative_config
    if speculative.draft_tensor_parallel_size == 1 and ranks is None:
        return create_proposer(speculative, _facts_of_folder(config))
    from specdec.engine.rank_launch import leading
    from specdec.engine.rank_leader import LeadingProposer

    if ranks is None:
        from specdec.model.on_paper import check_servable
        from specdec.proposers.draft_model_factory import draft_model_config

        check_servable(draft_model_config(speculative, _facts_of_folder(config)))
    size = speculative.draft_tensor_parallel_size
    with leading("draft", config, size, speculative.device, ranks) as (group, followers):
        return LeadingProposer(build_draft_part(config, group), group, followers)


def build_remote_heads(config: EngineConfig) -> LoadedDrafter:
    """Load heads as a draft worker does, which then needs a source of hidden states for them.

    Raises:
        UserError: as `build_parts`.
    """
    from specdec.proposers.heads_factory import load_remote_heads

    return load_remote_heads(
        config.speculative_config,
        config.target,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )


def build_draft_part(config: EngineConfig, ranks: RankGroup) -> DraftModelProposer:
    """Load this rank's part of the draft model; all ranks do at the same time.

    Raises:
        UserError: as `build_parts`; in all ranks.
        TransportError: another rank died.
    """
    from specdec.proposers.draft_model_factory import load_draft_model

    return load_draft_model(config.speculative_config, _facts_of_folder(config), ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckpoint:
    """A draft model as who trains it needs to know it."""

    folder: Path
    dtype: str
    """Numbers that it is served in, by their name in torch."""
    vocab_size: int
    """The target's."""


def draft_checkpoint(config: EngineConfig) -> DraftCheckpoint:
    """Return what is known of the draft model without loading it.

    Raises:
        CheckpointError: a folder is not as it should be.
    """
    from specdec.proposers.draft_model_factory import draft_model_config

    facts = _facts_of_folder(config)
    model = draft_model_config(config.speculative_config, facts)
    return DraftCheckpoint(
        folder=Path(model.model).expanduser(), dtype=model.dtype, vocab_size=facts.vocab_size
    )


def build_draft_grammars(config: EngineConfig) -> DraftGrammars:
    """Return what lets a draft model of this process keep to the grammars of a target elsewhere.

    Nothing is loaded before the first grammar comes: the target's tokenizer then is, in a thread.

    Raises:
        CheckpointError: the target's folder is not as it should be.
    """
    from specdec.engine.draft_grammar import DraftGrammars
    from specdec.model.facts import read_facts
    from specdec.sampling.grammar import GrammarCompiler

    facts = read_facts(config.target)
    return DraftGrammars(
        GrammarCompiler(
            lambda: build_tokenizer(config).to_json(),
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            config=config.grammar,
        )
    )


def longest_draft_message(config: EngineConfig) -> int | None:
    """Return how many bytes a coordinator's messages to a draft worker have at most; None: not known.

    Raises:
        CheckpointError: the target's folder is not as it should be.
    """
    from specdec.engine.draft_messages import longest_message_bytes
    from specdec.model.facts import read_facts

    facts = read_facts(config.target)
    if facts.max_model_len is None:
        return None
    return longest_message_bytes(
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        grammar_bytes=config.grammar.max_bytes,
    )


def _facts_of_folder(config: EngineConfig) -> TargetFacts:
    from specdec.model.facts import read_facts

    facts = read_facts(config.target)
    return TargetFacts(
        vocab_size=facts.vocab_size,
        dtype=facts.dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        model=config.target.model,
        max_model_len=facts.max_model_len,
    )


def build_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the target's tokenizer.

    Raises:
        CheckpointError: it is missing or unreadable.
    """
    from specdec.model.tokenizer import load_tokenizer

    target = config.target
    return HuggingFaceTokenizer(load_tokenizer(target.model, trust_remote_code=target.trust_remote_code))
