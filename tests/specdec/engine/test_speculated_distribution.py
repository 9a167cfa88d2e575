"""What an engine delivers under speculation is distributed as p, for every parameter that changes p.

A Markov model over five tokens makes p of three tokens enumerable: chi-square over all 125 outcomes, with a
draft model that is often wrong. The controls deliver something else and must fail.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from scipy import stats

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.request import Request
from specdec.core.sampling_params import Grammar, SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, ToyTokenizer
from specdec.model.loader import LoadedModel
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.sampling.grammar import GrammarState
from specdec.sampling.noise import choice_seed
from specdec.sampling.sampler import RowSpec, Sampler, SamplingRows, target_distribution
from specdec.sampling.shaping import LogitShaper, shaper_for
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.verification.registry import capabilities_of, rule_named

VOCAB = 5
EOS = 4
PROMPT = (0, 1, 2)
NUM_TOKENS = 3
NUM_STREAMS = 7_000
"""Of three tokens: more than 20,000 draws."""
TARGET = ToyModel(VOCAB, seed=3, sharpness=0.8, perturbation=0.0)
DRAFT = ToyModel(VOCAB, seed=4, sharpness=0.8, perturbation=0.0)

PATTERN = "(a[bc]+|ca?|d){1,2}"
"""Which letters may follow depends on those before, and so does whether the text may end."""
KINDS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.8},
    "logit_bias": {"logit_bias": ((1, 1.0), (2, -0.7))},
    "bad_words": {"bad_words": ((1, 1), (2, 3), (0, 3, 0))},
    "min_tokens": {"min_tokens": 2},
    "allowed_token_ids": {"allowed_token_ids": (0, 2, 3)},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.25},
    "grammar": {"grammar": Grammar("regex", PATTERN)},
    "grammar and penalty": {"grammar": Grammar("regex", PATTERN), "frequency_penalty": -0.8},
    "all": {
        "temperature": 1.3,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logit_bias": ((3, 0.8),),
        "bad_words": ((3, 3),),
    },
}


def params_of(kind: str) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=False, **KINDS[kind]).checked()


class LetterTokenizer(ToyTokenizer):
    """Letters from a, and an end of text; grammars know them by a tokenizer.json."""

    def to_json(self) -> str | None:
        vocab = {"abcd"[index] if index != EOS else "<eos>": index for index in range(VOCAB)}
        end = {"id": EOS, "content": "<eos>", "special": True, "normalized": False}
        end |= {"single_word": False, "lstrip": False, "rstrip": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return json.dumps(
            {
                "version": "1.0",
                "added_tokens": [end],
                "pre_tokenizer": byte_level,
                "decoder": byte_level,
                "model": {"type": "BPE", "vocab": vocab, "merges": []},
            }
        )


def runner_of(model: ToyModel) -> Any:
    runner = ToyRunner(model)
    nothing: Any = None
    runner.loaded = LoadedModel(  # type: ignore[attr-defined]
        path=Path("toy"),
        model=nothing,
        config=nothing,
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        max_model_len=1 << 20,
        eos_token_ids=(EOS,),
        revision="toy",
        layers=(),
    )
    return runner


class BlindDrafter(DraftModelProposer):
    """Sees no grammar."""

    def propose(
        self, sequences: Sequence[Any], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        return super().propose([_Unconstrained(one) for one in sequences], num_draft_tokens)


class _Unconstrained:
    constraint = None
    kv_budget = 0

    def __init__(self, view: SequenceView) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def engine_with(drafter: str, num_draft_tokens: int, rule: str = "sample_and_match") -> Engine:
    """`drafter`: "blind" is a draft model that sees no grammar, as when it could not be compiled for it."""
    proposer: Any = NoProposer()
    if drafter == "ngram":
        proposer = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=2)
    elif drafter in ("draft_model", "blind"):
        proposer = (BlindDrafter if drafter == "blind" else DraftModelProposer)(
            cast(Any, ToyRunner(DRAFT)),
            DraftChoice(
                sampler=Sampler(),
                vocab_size=VOCAB,
                eos_token_ids=(EOS,),
                sampling=DraftSampling.under(capabilities_of(rule)),
            ),
        )
    return Engine.from_parts(
        target=LocalTarget(runner_of(TARGET), Sampler(), rule=rule_named(rule)),
        proposer=proposer,
        tokenizer=LetterTokenizer.of_letters(VOCAB),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
        controller=FixedController(num_draft_tokens),
    )


def delivered(
    drafter: str, num_draft_tokens: int, params: SamplingParams, rule: str = "sample_and_match"
) -> Counter[tuple[int, ...]]:
    """How often each output came."""
    streams: dict[str, list[int]] = {}
    to_add = iter(range(NUM_STREAMS))
    with engine_with(drafter, num_draft_tokens, rule) as engine:
        while len(streams) < NUM_STREAMS or engine.has_work:
            for number in itertools.islice(to_add, 64 if not engine.has_work else 0):
                streams[f"s{number}"] = []
                engine.add_request(
                    Request(
                        request_id=RequestId(f"s{number}"),
                        prompt_token_ids=PROMPT,
                        params=params,
                        seed=choice_seed(11, number),
                    )
                )
            for output in engine.step():
                streams[output.request_id].extend(output.token_ids)
    return Counter(tuple(stream) for stream in streams.values())


def allowed_by_grammar(output: tuple[int, ...]) -> list[int]:
    """Tokens that may follow, by trying all texts of some length."""
    text = "".join("abcd"[token_id] for token_id in output)

    def can_go_on(begin: str) -> bool:
        endings = ("".join(end) for length in range(4) for end in itertools.product("abcd", repeat=length))
        return any(re.fullmatch(PATTERN, begin + ending) for ending in endings)

    letters = [token_id for token_id in range(EOS) if can_go_on(text + "abcd"[token_id])]
    return [*letters, EOS] if re.fullmatch(PATTERN, text) else letters


def enumerated(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every output, position by position from the definition."""
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    finished: dict[tuple[int, ...], float] = {}
    rows = SamplingRows.build([RowSpec(params, 0, 0, 1)])
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for output, probability in outcomes.items():
            prefix = (*PROMPT, *output)
            logits = torch.from_numpy(TARGET.logits(prefix[-1], 0)).float()[None].clone()
            shaper = shaper_for(params, eos_token_ids=(EOS,), num_prompt_tokens=len(PROMPT))
            if shaper is not None:
                shaper.commit(prefix)
                shaper.shape(logits, [()])
            if params.grammar is not None:
                allowed = allowed_by_grammar(output)
                logits[0, [token_id for token_id in range(VOCAB) if token_id not in allowed]] = -math.inf
            for token_id, p in enumerate(target_distribution(logits, rows)[0].tolist()):
                if p > 0:
                    (finished if token_id == EOS else longer)[*output, token_id] = probability * p
        outcomes = longer
    return finished | outcomes


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square test; outcomes that are expected fewer than five times count as one."""
    assert math.isclose(sum(expected.values()), 1.0, rel_tol=1e-5)
    assert counts.keys() <= expected.keys(), "something came that has no probability"
    total = counts.total()
    often = [outcome for outcome, p in expected.items() if p * total >= 5]
    observed = [float(counts[outcome]) for outcome in often]
    wanted = [expected[outcome] * total for outcome in often]
    rest = total - sum(wanted)
    if rest >= 5:
        observed.append(total - sum(observed))
        wanted.append(rest)
    scale = sum(observed) / sum(wanted)
    return float(stats.chisquare(observed, [one * scale for one in wanted]).pvalue)


COVER = [
    (kind, ("draft_model", "ngram")[number % 2], 1 + (3 * number) % 4) for number, kind in enumerate(KINDS)
]
QUICK_KINDS = ("presence_penalty", "min_p", "grammar")
"""Of each way in which logits are changed, or the choice limited."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "drafter", "num_draft_tokens"),
    [pytest.param(*one, marks=[] if one[0] in QUICK_KINDS else [pytest.mark.full]) for one in COVER],
)
def test_delivered_under_speculation_as_p_says(kind: str, drafter: str, num_draft_tokens: int) -> None:
    params = params_of(kind)
    assert p_value(delivered(drafter, num_draft_tokens, params), enumerated(params)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("rejection", "blind"),
        pytest.param("block", "blind", marks=pytest.mark.full),
        pytest.param("rejection", "draft_model", marks=pytest.mark.full),
        pytest.param("block", "ngram", marks=pytest.mark.full),
    ],
)
def test_grammars_under_other_rules(rule: str, drafter: str) -> None:
    """A drafter that sees no grammar drafts what is forbidden: the rule has to see that, and reject it."""
    params = params_of("grammar")
    assert p_value(delivered(drafter, 2, params, rule), enumerated(params)) > 1e-4


@pytest.mark.full
@pytest.mark.slow
def test_control_a_sampled_draft_that_is_cut_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    constrain = GrammarState.constrain

    def cutting(self: GrammarState, drafted: Sequence[int], room: int, **how: bool) -> Any:
        kept = constrain(self, drafted, room, **how)
        if kept.masks[-1].strip(b"\xff"):
            return kept
        return kept._replace(token_ids=kept.token_ids[:-1], masks=kept.masks[:-1])

    monkeypatch.setattr(GrammarState, "constrain", cutting)
    params = params_of("grammar")
    assert p_value(delivered("blind", 2, params, "rejection"), enumerated(params)) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4])
def test_delivered_under_speculation_as_p_says_in_every_setting(
    kind: str, drafter: str, num_draft_tokens: int
) -> None:
    test_delivered_under_speculation_as_p_says(kind, drafter, num_draft_tokens)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["presence_penalty", "frequency_penalty"])
def test_control_penalties_without_the_draft_are_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of(kind)
    expected = enumerated(params)
    shape = LogitShaper.shape

    def forgetful(self: LogitShaper, logits: Any, paths: Sequence[Sequence[int]], **where: int) -> None:
        shape(self, logits, [()] * len(paths), **where)

    monkeypatch.setattr(LogitShaper, "shape", forgetful)
    assert p_value(delivered("draft_model", 4, params), expected) < 1e-6


@pytest.mark.slow
def test_control_masks_without_the_draft_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    constrain = GrammarState.constrain

    def forgetful(self: GrammarState, drafted: Sequence[int], room: int, **how: bool) -> Any:
        kept = constrain(self, drafted, room, **how)
        return kept._replace(masks=kept.masks[:1] * len(kept.masks))

    monkeypatch.setattr(GrammarState, "constrain", forgetful)
    counts = delivered("draft_model", 3, params_of("grammar"))
    expected = enumerated(params_of("grammar"))
    assert counts.keys() - expected.keys() or p_value(counts, expected) < 1e-6


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["repetition_penalty", "logit_bias", "top_p", "temperature"])
def test_control_a_parameter_left_out_is_noticed(kind: str) -> None:
    plain = SamplingParams(max_tokens=NUM_TOKENS)
    counts = delivered("ngram", 2, plain)
    expected = enumerated(params_of(kind))
    assert counts.keys() - expected.keys() or p_value(counts, expected) < 1e-6


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_drafts_are_both_right_and_wrong(kind: str, drafter: str) -> None:
    """Otherwise the above would show little."""
    with engine_with(drafter, 2) as engine:
        engine.generate([PROMPT * 2] * 200, params_of(kind))
        metrics = engine.metrics()
    assert 0 < metrics.num_accepted_tokens < 0.95 * metrics.num_draft_tokens
