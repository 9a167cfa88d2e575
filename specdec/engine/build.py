"""From a configuration to the parts of an engine in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from specdec.engine.build_drafter import build_draft_proposer
from specdec.engine.build_target import build_target
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import build_controller, drafters_of
from specdec.engine.synthetic import SilentTokenizer, SyntheticTarget, require_real
from specdec.engine.targets.target import Target
from specdec.engine.text.tokenizer import Tokenizer, build_tokenizer
from specdec.kv.selection import KvBudgets, budgets_of
from specdec.model.checkpoint import LoadProgress
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import create_proposer, with_fallback
from specdec.proposers.target_facts import LEAST_READ_TOKENS, TargetFacts
from specdec.sampling.config import GrammarConfig
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import SpeculationController
from specdec.scheduling.speculation.drafter_shares import DrafterSet

logger = logging.getLogger(__name__)

# Loading torch and transformers takes seconds and hundreds of megabytes: a coordinator, which has neither
# model in its process, never does, and so they are imported where a model is built.
if TYPE_CHECKING:
    from specdec.core.description import TargetDescription


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
            config, target, proposer, draft_devices=partial(draft_devices_of, config.speculative_config)
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
        trust_remote_code=config.target.trust_remote_code,
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
    from specdec.model.devices import resolve_device

    weights = open_checkpoint(config.model).weight_bytes  # an upper bound, when they are to be quantized
    is_on_cpu = resolve_device(config.device).type == "cpu"  # elsewhere nothing is packed
    is_packed = is_on_cpu and config.compile.mode != "off" and config.quantization is None
    packed = min(weights, config.compile.max_frozen_bytes) if is_packed else 0
    return weights + packed + (config.cache.memory_bytes or 0)


def kv_budgets_of(config: SpeculativeConfig) -> KvBudgets | None:
    """Return how much the drafts of an engine attend to; None: everything."""
    place, drafters = config.budgeted_choice, drafters_of(config)
    if place is None:
        return None
    own = config.choices[place]
    name = None if drafters is None else drafters.names[place]
    return budgets_of(own.kv, own.num_speculative_tokens, drafter=name)
