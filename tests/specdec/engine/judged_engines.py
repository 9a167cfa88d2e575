"""Toy engines under every rule of verification, and drafters that fit the rule."""

from __future__ import annotations

from specdec.engine.engine import Engine
from specdec.engine.targets.judge import Judge
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, ToyTarget
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sampling import DraftSampling
from specdec.sampling.sampler import Sampler
from specdec.verification.registry import capabilities_of, rule_named
from tests.specdec.engine import toy_engines

JUDGED = ("rejection", "block", "multi_round", "typical")
LOSSLESS = JUDGED[:3]


def judge_of(rule: str) -> Judge | None:
    return Judge(rule_named(rule)) if capabilities_of(rule).needs_p_rows else None


def drafter_for(
    rule: str, model: ToyModel, *, top_k: int | None = None, **options: int
) -> DraftModelProposer:
    return DraftModelProposer(
        ToyRunner(model, **options),
        DraftChoice(
            sampler=Sampler(),
            vocab_size=model.vocab_size,
            sampling=DraftSampling.under(capabilities_of(rule), top_k),
        ),
    )


def engine_of(rule: str, target: ToyModel, proposer: Proposer, **options: int) -> Engine:
    return toy_engines.toy_engine(proposer, target=ToyTarget(target, judge=judge_of(rule)), **options)
