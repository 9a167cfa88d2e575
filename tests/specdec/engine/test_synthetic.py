"""Made-up verdicts: as often right as asked for, and for nobody but benchmarks."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from cluster.config import ClusterConfig
from cluster.target_group import TargetGroup
from specdec.core.errors import ConfigError
from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.synthetic import SilentTokenizer, SyntheticTarget, verdict
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.synthetic_config import SyntheticAcceptance
from specdec.sampling.made_up import MadeUpChooser
from specdec.sampling.made_up_tokens import NUM_TOKENS, guess
from specdec.scheduling.speculation.controller import FixedController
from specdec.transport.base import PeerId
from specdec.transport.zmq import KeyPair

ACCEPTANCE = SyntheticAcceptance(
    acceptance=(0.9, 0.6, 0.3), bonus_after_miss=(0.2, 0.5), bonus_after_all=(0.4, 0.7, 0.8)
)


@pytest.mark.parametrize(
    ("row", "num_drafted", "expected"),
    [
        (0, 3, {0: 0.9, 1: 0.1 * 0.2, 2: 0.1 * 0.3, 3: 0.1 * 0.5}),
        (1, 3, {0: 0.6, 1: 0.4 * 0.2, 2: 0.4 * 0.3, 3: 0.4 * 0.5}),
        (2, 5, {0: 0.3, 1: 0.7 * 0.2, 2: 0.7 * 0.3, 3: 0.7 * 0.5}),
        (4, 5, {0: 0.3, 1: 0.7 * 0.2, 2: 0.7 * 0.3, 3: 0.7 * 0.5}),
        (3, 3, {0: 0.4, 1: 0.3, 2: 0.1, 3: 0.2}),
        (0, 0, {0: 0.4, 1: 0.3, 2: 0.1, 3: 0.2}),
    ],
)
def test_verdicts_have_the_probabilities_asked_for(
    row: int, num_drafted: int, expected: dict[int, float]
) -> None:
    num_positions = 20_000
    ranks = Counter(
        (verdict(ACCEPTANCE, 7, position, row, num_drafted) - guess(7, position)) % NUM_TOKENS
        for position in range(num_positions)
    )
    assert ranks.keys() == expected.keys()
    for rank, probability in expected.items():
        assert ranks[rank] / num_positions == pytest.approx(probability, abs=0.015)


def test_guesses_differ_and_depend_on_seed_and_position() -> None:
    assert len({guess(1, 5, rank) for rank in range(NUM_TOKENS)}) == NUM_TOKENS
    assert len({guess(seed, position) for seed in range(8) for position in range(8)}) > 40


def _engine(acceptance: SyntheticAcceptance, k: int) -> Engine:
    model = ToyModel(NUM_TOKENS + 4, seed=1)
    drafter = DraftModelProposer(
        ToyRunner(model, num_blocks=256), DraftChoice(sampler=MadeUpChooser(), vocab_size=model.vocab_size)
    )
    return Engine.from_parts(
        target=SyntheticTarget(ToyTarget(model), acceptance),
        proposer=drafter,
        tokenizer=SilentTokenizer(ToyTokenizer.of_letters(model.vocab_size)),
        controller=FixedController(k),
    )


def test_an_engine_accepts_as_often_as_asked_and_shows_no_text() -> None:
    engine = _engine(ACCEPTANCE, 3)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for number in range(6):
        engine.add_request(
            Request(
                request_id=RequestId(f"r{number}"),
                prompt_token_ids=(1, 2, number),
                params=params,
                seed=number,
            )
        )
    lengths: Counter[str] = Counter()
    while engine.has_work:
        for output in engine.step():
            assert output.text == ""
            lengths[output.request_id] += len(output.token_ids)
    assert set(lengths.values()) == {200}
    metrics = engine.metrics()
    stood = [count / metrics.num_drafts for count in metrics.num_accepted_tokens_per_pos]
    assert stood == pytest.approx([0.9, 0.9 * 0.6, 0.9 * 0.6 * 0.3], abs=0.06)


def test_a_target_that_knows_too_few_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="256 different tokens, but the target knows 16"):
        SyntheticTarget(ToyTarget(ToyModel(16, seed=1)), ACCEPTANCE)


def _config() -> EngineConfig:
    speculative = SpeculativeConfig(
        method="draft_model",
        model="models/demo/draft",
        controller="fixed",
        synthetic_acceptance=ACCEPTANCE,
    )
    return EngineConfig.model_validate(
        {"target": {"model": "models/demo/target"}, "speculative_config": speculative}
    )


def test_only_who_measures_gets_it() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance: what comes out is made up"):
        Engine(_config())
    with pytest.raises(ConfigError, match="synthetic_acceptance: what comes out is made up"):
        TargetGroup(_config(), ClusterConfig(), PeerId("c"), KeyPair.generate())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"method": "ngram", "model": None}, "makes up the drafts of method draft_model"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method sample_and_match"),
        ({"draft_tensor_parallel_size": 2}, "not with draft_tensor_parallel_size"),
        ({"synthetic_acceptance": {"acceptance": []}}, "at least 1 item"),
        ({"synthetic_acceptance": {"acceptance": [1.5]}}, "less than or equal to 1"),
        ({"synthetic_acceptance": {"acceptance": [0.5], "bonus_after_all": [0.5, 0.4]}}, "rising numbers"),
    ],
)
def test_contradictions_are_refused(more: dict[str, object], message: str) -> None:
    given = {"method": "draft_model", "model": "d", "synthetic_acceptance": {"acceptance": [0.5]}, **more}
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig.model_validate(given)


def test_compiled_code_makes_up_the_same_tokens() -> None:
    """Through a real model's fused draft loop: `drafthouse_choose_made_up`."""
    engine = Engine(_config(), is_measuring=True)
    with engine:
        engine.warm_up()
        prompt = engine.tokenizer.encode("def quicksort(")
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        results = engine.generate([prompt], [params])
    assert results[0].text == ""
    metrics = engine.metrics()
    # Only if both sides make up the same tokens do drafts stand more often than by chance.
    assert metrics.num_accepted_tokens_per_pos[0] / metrics.num_drafts > 0.6
