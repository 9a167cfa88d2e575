"""From a configuration to the parts of an engine in this process."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.engine.config import EngineConfig
from specdec.engine.local_target import LocalTarget
from specdec.engine.target import Target
from specdec.engine.tokenizer import HuggingFaceTokenizer, Tokenizer
from specdec.model.loader import load_model, load_tokenizer
from specdec.model.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import TargetFacts, create_proposer
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    target: Target
    proposer: Proposer
    tokenizer: Tokenizer
    scheduler: SchedulerConfig
    controller: SpeculationController


def build_parts(config: EngineConfig) -> EngineParts:
    """Load models and tokenizer.

    Raises:
        UserError: a checkpoint, a device or the memory is not as the configuration says.
    """
    target_config = config.target
    tokenizer = load_tokenizer(target_config.model, trust_remote_code=target_config.trust_remote_code)
    loaded = load_model(target_config)
    runner = ModelRunner(loaded, config.cache, max_num_seqs=config.scheduler.max_num_seqs)
    sampler = Sampler()
    sampler.warm_up()
    target = LocalTarget(runner, sampler)
    facts = TargetFacts(
        vocab_size=target.description.vocab_size,
        dtype=target.description.dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        model=target_config.model,
    )
    speculative = config.speculative_config
    return EngineParts(
        target=target,
        proposer=create_proposer(speculative, facts),
        tokenizer=HuggingFaceTokenizer(tokenizer),
        scheduler=config.scheduler,
        controller=controller_for(speculative),
    )


def controller_for(config: SpeculativeConfig) -> SpeculationController:
    """Return the controller that a `speculative_config` block asks for."""
    return FixedController(0 if config.method == "none" else config.num_speculative_tokens)
