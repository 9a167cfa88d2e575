"""From a configuration to what drafts apart from the target, as draft workers load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.engine.config import EngineConfig
from specdec.engine.text.tokenizer import build_tokenizer
from specdec.proposers.base import Proposer
from specdec.proposers.registry import create_proposer
from specdec.proposers.target_facts import TargetFacts

# Loading torch and transformers takes seconds and hundreds of megabytes: a coordinator, which has neither
# model in its process, never does, and so they are imported where a model is built.
if TYPE_CHECKING:
    from specdec.engine.draft_pool.grammar import DraftGrammars
    from specdec.model.parallel.group import RankGroup
    from specdec.proposers.draft_model import DraftModelProposer
    from specdec.proposers.heads_factory import LoadedDrafter


def build_draft_proposer(config: EngineConfig, ranks: RankGroup | None = None) -> Proposer:
    """Load the drafter alone, as a draft worker does; of the target only its folder is looked at.

    `ranks` as for `build_target`, with `speculative_config.draft_tensor_parallel_size`.

    Raises:
        UserError: as `build_parts`.
        TransportError: another rank died.
    """
    speculative = config.speculative_config
    if speculative.draft_tensor_parallel_size == 1 and ranks is None:
        return create_proposer(speculative, facts_of_folder(config))
    from specdec.engine.ranks.launch import leading
    from specdec.engine.ranks.leader import LeadingProposer

    if ranks is None:
        from specdec.model.on_paper import check_servable
        from specdec.proposers.draft_model_factory import draft_model_config

        check_servable(draft_model_config(speculative, facts_of_folder(config)), is_draft=True)
    size = speculative.draft_tensor_parallel_size
    with leading("draft", config, size, speculative.device, ranks) as (group, followers):
        return LeadingProposer(build_draft_part(config, group), group, followers)


def build_draft_part(config: EngineConfig, ranks: RankGroup) -> DraftModelProposer:
    """Load this rank's part of the draft model; all ranks do at the same time.

    Raises:
        UserError: as `build_parts`; in all ranks.
        TransportError: another rank died.
    """
    from specdec.proposers.draft_model_factory import load_draft_model

    return load_draft_model(config.speculative_config, facts_of_folder(config), ranks)


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


def build_draft_grammars(config: EngineConfig) -> DraftGrammars:
    """Return what lets a draft model of this process keep to the grammars of a target elsewhere.

    Nothing is loaded before the first grammar comes: the target's tokenizer then is, in a thread.

    Raises:
        CheckpointError: the target's folder is not as it should be.
    """
    from specdec.engine.draft_pool.grammar import DraftGrammars
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

    facts = facts_of_folder(config)
    model = draft_model_config(config.speculative_config, facts)
    return DraftCheckpoint(
        folder=Path(model.model).expanduser(), dtype=model.dtype, vocab_size=facts.vocab_size
    )


def longest_draft_message(config: EngineConfig) -> int | None:
    """Return how many bytes a coordinator's messages to a draft worker have at most; None: not known.

    Raises:
        CheckpointError: the target's folder is not as it should be.
    """
    from specdec.engine.draft_pool.message_lengths import longest_message_bytes
    from specdec.model.facts import read_facts

    facts = read_facts(config.target)
    if facts.max_model_len is None:
        return None
    return longest_message_bytes(
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        grammar_bytes=config.grammar.max_bytes,
    )


def facts_of_folder(config: EngineConfig) -> TargetFacts:
    """Return what a drafter has to know of the target, from its folder: nothing of it is loaded.

    Raises:
        UserError: as `read_facts`.
    """
    from specdec.model.facts import read_facts

    facts = read_facts(config.target)
    return TargetFacts(
        vocab_size=facts.vocab_size,
        dtype=facts.dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        model=config.target.model,
        trust_remote_code=config.target.trust_remote_code,
        max_model_len=facts.max_model_len,
    )
