"""From a configuration to the parts of an engine in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.engine.config import EngineConfig
from specdec.engine.target import Target
from specdec.engine.tokenizer import HuggingFaceTokenizer, Tokenizer
from specdec.model.checkpoint import LoadProgress
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import create_proposer
from specdec.proposers.target_facts import TargetFacts
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController

# Loading torch and transformers takes seconds and hundreds of megabytes: a coordinator, which has neither
# model in its process, never does, and so they are imported where a model is built.
if TYPE_CHECKING:
    from specdec.engine.local_target import LocalTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    target: Target
    proposer: Proposer
    tokenizer: Tokenizer
    scheduler: SchedulerConfig
    controller: SpeculationController


def build_parts(config: EngineConfig, progress: LoadProgress | None = None) -> EngineParts:
    """Load models and tokenizer; `progress` hears of the target's.

    Raises:
        UserError: a checkpoint, a device or the memory is not as the configuration says.
    """
    target = build_target(config, progress)
    facts = TargetFacts(
        vocab_size=target.description.vocab_size,
        dtype=target.description.dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        model=config.target.model,
    )
    speculative = config.speculative_config
    return EngineParts(
        target=target,
        proposer=create_proposer(speculative, facts),
        tokenizer=build_tokenizer(config),
        scheduler=config.scheduler,
        controller=controller_for(speculative),
    )


def build_target(config: EngineConfig, progress: LoadProgress | None = None) -> LocalTarget:
    """Load the target alone, as a target worker does.

    Raises:
        UserError: as `build_parts`.
    """
    from specdec.engine.local_target import LocalTarget
    from specdec.model.graphs import CompiledForward
    from specdec.model.loader import load_model
    from specdec.model.runner import ModelRunner
    from specdec.sampling.sampler import Sampler

    loaded = load_model(config.target, progress)
    runner = ModelRunner(loaded, config.cache, max_num_seqs=config.scheduler.max_num_seqs)
    compiled = runner.graphs = CompiledForward(runner, config.target.compile)
    sampler = Sampler(config.target.compile.cache_dir)
    sampler.warm_up()
    return LocalTarget(runner, sampler, idle_work=(compiled,))


def build_draft_proposer(config: EngineConfig) -> Proposer:
    """Load the drafter alone, as a draft worker does; of the target only its folder is looked at.

    Raises:
        UserError: as `build_parts`.
    """
    from specdec.model.facts import read_facts

    facts = read_facts(config.target)
    return create_proposer(
        config.speculative_config,
        TargetFacts(
            vocab_size=facts.vocab_size,
            dtype=facts.dtype,
            max_num_seqs=config.scheduler.max_num_seqs,
            model=config.target.model,
        ),
    )


def build_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the target's tokenizer.

    Raises:
        CheckpointError: it is missing or unreadable.
    """
    from specdec.model.loader import load_tokenizer

    target = config.target
    return HuggingFaceTokenizer(load_tokenizer(target.model, trust_remote_code=target.trust_remote_code))


def controller_for(config: SpeculativeConfig) -> SpeculationController:
    """Return the controller that a `speculative_config` block asks for."""
    return FixedController(0 if config.method == "none" else config.num_speculative_tokens)
