"""Proposers by the name of their method."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specdec.core.errors import ConfigError
from specdec.proposers.at_target import DraftsAtTarget
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.fallback import FallbackProposer
from specdec.proposers.lookahead.proposer import LookaheadProposer
from specdec.proposers.lookup_first import LookupFirst
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.proposers.self_speculation import SelfSpeculation
from specdec.proposers.several.proposer import SeveralProposers, ShadowDrafter
from specdec.proposers.suffix import SuffixProposer
from specdec.proposers.target_facts import TargetFacts
from specdec.proposers.tree_config import tree_shape
from specdec.tree.growth import levels_of
from specdec.verification.registry import capabilities_of


def create_proposer(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    """Make the proposer that `config.method` names, loading what it needs.

    Raises:
        ConfigError: there is no such method.
        CheckpointError: its model cannot be loaded, or has another tokenizer than the target.
    """
    factory = FACTORIES.get(config.method)
    if factory is None:
        known = ", ".join(sorted(FACTORIES))
        raise ConfigError(f"speculative_config.method: there is no {config.method!r}; known are {known}")
    return factory(config, target)


def with_fallback(proposer: Proposer, config: SpeculativeConfig) -> Proposer:
    """Return the proposer with what `config.fallback` names standing in for it, and a lookup before it where
    `config.lookup_first` asks for one; they then own the proposer.
    """
    if config.fallback != "none":
        other = _ngram(config) if config.fallback == "ngram" else SuffixProposer(config.lookup)
        proposer = FallbackProposer(proposer, other)
    if config.lookup_first is not None:
        first = config.lookup.model_copy(update={"min_match_tokens": config.lookup_first})
        proposer = LookupFirst(proposer, SuffixProposer(first))
    return proposer


def _create_none(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    return NoProposer()


def _create_self(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    return SelfSpeculation(config.method, tree_shape(config.tree))


def _create_ngram(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    return _ngram(config)


def _create_suffix(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    return SuffixProposer(config.lookup)


def _create_lookahead(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    return LookaheadProposer(config.lookahead)


def _create_retrieval(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    from specdec.proposers.corpus import open_corpus  # needs numpy
    from specdec.proposers.retrieval import RetrievalProposer

    if config.retrieval is None or target.model is None:
        raise ConfigError("method retrieval needs a corpus (`retrieval`) and a target with a folder")
    return RetrievalProposer(config.retrieval, open_corpus(config.retrieval, target.model))


def _ngram(config: SpeculativeConfig) -> NgramProposer:
    return NgramProposer(
        prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max
    )


def _create_draft_model(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    from specdec.proposers.draft_model_factory import load_draft_model  # needs torch and transformers

    return load_draft_model(config, target)


def _create_heads(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    """What drafts is in the target's process (`heads_factory`), where the hidden states are."""
    rule, shape = capabilities_of(config.rejection_sample_method), tree_shape(config.tree)
    return DraftsAtTarget(
        ProposerCapabilities(
            name=config.method,
            sampled=True,
            noise_stream=rule.draft_stream,
            gives_q_rows=rule.needs_q_rows,
            hidden_layers=(-1,),  # or others: whoever has the weights knows
            shape="chain" if shape is None else "tree",
            tree_levels=levels_of(shape),
        )
    )


def _create_several(config: SpeculativeConfig, target: TargetFacts) -> Proposer:
    return create_each(config, lambda one: create_proposer(one, target))


def create_each(
    config: SpeculativeConfig, create: Callable[[SpeculativeConfig], Proposer]
) -> SeveralProposers:
    """Make the proposers of several drafters with `create`; none is left behind where one cannot be made."""
    made: list[Proposer] = []
    shadows: list[ShadowDrafter] = []
    try:
        for drafter in config.drafters:
            alone = config.alone(drafter)
            proposer = create(alone)
            if drafter.shadow is None:
                made.append(proposer)
                continue
            shadow = ShadowDrafter(
                name=drafter.name,
                proposer=proposer,
                share=drafter.shadow,
                num_draft_tokens=alone.num_speculative_tokens,
            )
            shadows.append(shadow)
    except BaseException:
        for one in (*made, *(shadow.proposer for shadow in shadows)):
            one.close()
        raise
    return SeveralProposers(made, shadows=shadows)


FACTORIES: Mapping[str, Callable[[SpeculativeConfig, TargetFacts], Proposer]] = {
    "none": _create_none,
    "ngram": _create_ngram,
    "suffix": _create_suffix,
    "retrieval": _create_retrieval,
    "lookahead": _create_lookahead,
    "self": _create_self,
    "layerskip": _create_self,
    "quantized": _create_self,
    "medusa": _create_heads,
    "hydra": _create_heads,
    "eagle": _create_heads,
    "eagle3": _create_heads,
    "mtp": _create_heads,
    "parallel_heads": _create_heads,
    "draft_model": _create_draft_model,
    "several": _create_several,
}
"""Constructors by method."""
