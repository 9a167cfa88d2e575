"""What is said of prompts, and choosing the best of several choices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from msgspec.structs import replace

from specdec.core.errors import InputError
from specdec.core.outputs import TokenLogprobs
from specdec.core.plan import TargetStep
from specdec.core.sampling_params import LogprobsMode, SamplingParams
from specdec.engine.best_of import best_choices
from specdec.engine.engine import Engine
from specdec.engine.offline import GenerationResult, choice_requests
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.targets.toy_target import ToyTarget
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.loader import load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.ngram import NgramProposer
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.architectures import save_model
from tests.specdec.engine.toy_engines import MODEL, ToyTokenizer, toy_engine

PROMPT = [(7 * step) % 100 + 2 for step in range(200)]
OTHERS = [[5, 9, 23, 5, 9, 23, 5, 9], [40] * 6]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("scored")
    return save_model(folder), folder


@pytest.fixture
def engine(reference: tuple[Any, Path]) -> Iterator[Engine]:
    loaded = load_model(
        ModelConfig(model=str(reference[1]), dtype="float32", compile=CompileConfig(mode="off"))
    )
    with Engine.from_parts(
        target=LocalTarget(
            ModelRunner(loaded, CacheConfig(block_size=4, num_blocks=90), max_num_seqs=4), Sampler()
        ),
        proposer=NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3),
        tokenizer=ToyTokenizer.of_letters(128),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=160),
        controller=FixedController(3),
    ) as engine:
        yield engine


def expected_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def check_scores(result: GenerationResult, model: Any, num_top: int) -> None:
    scores = result.prompt_logprobs
    prompt = list(result.prompt_token_ids)
    assert scores is not None
    assert [score.token_id for score in scores] == prompt[1:]
    assert all(len(score.top) == num_top for score in scores)
    found = torch.tensor([score.logprob for score in scores])
    torch.testing.assert_close(found, expected_logprobs(model, prompt), atol=1e-4, rtol=0)


def test_prompt_logprobs_are_the_models(engine: Engine, reference: tuple[Any, Path]) -> None:
    """Read in several chunks, beside others, and again where a prefix cache could have spared the work."""
    plain = SamplingParams(max_tokens=6, seed=1)
    scored = SamplingParams(max_tokens=6, seed=1, prompt_logprobs=2)
    alone = engine.generate([PROMPT], plain)[0]
    for _ in range(2):
        results = engine.generate([PROMPT, *OTHERS, PROMPT], [scored, plain, scored, plain])
        engine.check_integrity()
        check_scores(results[0], reference[0], 2)
        check_scores(results[2], reference[0], 2)
        assert results[1].prompt_logprobs is None
        assert results[0].token_ids == results[3].token_ids == alone.token_ids


def test_nothing_is_generated_where_no_token_is_wanted(engine: Engine, reference: tuple[Any, Path]) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    results = engine.generate([PROMPT, OTHERS[0], [7]], params)
    engine.check_integrity()
    assert engine.metrics().kv_cache_usage == 0.0
    for result in results:
        assert result.token_ids == ()
        assert result.choices[0].finish_reason == "length"
        check_scores(result, reference[0], 0)


def test_a_prompt_that_is_only_scored_may_fill_the_context(
    engine: Engine, reference: tuple[Any, Path]
) -> None:
    prompt = (PROMPT * 2)[: engine.max_sequence_len]
    assert len(prompt) == engine.max_sequence_len == 256
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    check_scores(result, reference[0], 0)
    with pytest.raises(InputError, match="at most 255 fit"):
        engine.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(InputError, match="at most 256 fit"):
        engine.generate([[*prompt, 5]], SamplingParams(max_tokens=0, prompt_logprobs=0))


def test_preemption_scores_each_position_once() -> None:
    """Eight prompts in a pool that does not hold them; the toy model's scores depend on the whole prefix."""
    prompts = [[1 + (step * (index + 2)) % 14 for step in range(60)] for index in range(12)]
    params = SamplingParams(max_tokens=60, prompt_logprobs=1, seed=3, ignore_eos=True)
    expected = [toy_engine().generate([prompt], params)[0] for prompt in prompts]
    engine = toy_engine(max_num_seqs=12)
    results = engine.generate(prompts, params)
    assert [one.prompt_logprobs for one in results] == [one.prompt_logprobs for one in expected]
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    assert engine.metrics().num_preemptions > 0


def test_a_prompt_is_scored_for_its_first_choice_alone() -> None:
    """The others find what that one has read, and say what they say without."""
    prompt = [1 + (3 * step) % 14 for step in range(60)]
    plain = SamplingParams(max_tokens=6, n=3, seed=3, ignore_eos=True)
    scored = replace(plain, prompt_logprobs=1)
    engine = toy_engine()
    result = engine.generate([prompt], scored)[0]
    assert engine.metrics().prefix_cache_hits == 2 * 56, "full blocks before the last token"
    assert result.prompt_logprobs == toy_engine().generate([prompt], replace(scored, n=1))[0].prompt_logprobs
    expected = toy_engine().generate([prompt], plain)[0]
    assert [one.token_ids for one in result.choices] == [one.token_ids for one in expected.choices]


def test_where_nothing_is_generated_every_choice_scores_the_prompt() -> None:
    params = SamplingParams(max_tokens=0, n=3, prompt_logprobs=1)
    assert [one.params for one in choice_requests((1, 2, 3), params, "r")] == [params] * 3
    result = toy_engine().generate([[1, 2, 3]], params)[0]
    assert [one.finish_reason for one in result.choices] == ["length"] * 3


class FailingLate(ToyTarget):
    """Fails a request behind so many of its tokens, prompt included."""

    def __init__(self, request_id: str, num_tokens: int) -> None:
        super().__init__(MODEL)
        self._request_id, self._last = request_id, num_tokens - 1

    def submit(self, step: TargetStep) -> None:
        self.failing_requests = {
            work.request_id
            for work in step.works
            if work.request_id == self._request_id and work.start == self._last
        }
        super().submit(step)


def test_a_choice_that_failed_is_behind_all_others() -> None:
    """However likely its tokens were until then."""
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=12, n=6, logprobs=0, seed=4)
    every = toy_engine().generate([prompt], params)[0].choices
    mean = {
        (one.index, length): sum(token.logprob for token in (one.logprobs or ())[:length]) / length
        for one in every
        for length in range(1, 13)
    }
    failed, length = max(mean, key=lambda place: mean[place])
    assert length < 12, "this shows nothing"
    engine = toy_engine(target=FailingLate(f"offline-0-{failed}", len(prompt) + length))
    cut = engine.generate([prompt], params)[0].choices[failed]
    assert (cut.finish_reason, cut.token_ids) == ("error", every[failed].token_ids[:length])
    best = engine.generate([prompt], replace(params, n=5, best_of=6))[0].choices
    good = sorted(set(range(6)) - {failed}, key=lambda index: -mean[index, 12])
    assert [one.token_ids for one in best] == [every[index].token_ids for index in good]


def test_best_of_returns_the_best_of_the_same_choices() -> None:
    engine = toy_engine()
    every = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12, n=6, logprobs=0, seed=4))[0].choices
    best = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12, n=2, best_of=6, seed=4))[0].choices
    assert [one.logprobs for one in best] == [None, None], "nobody asked for them"
    ranking = best_choices([one.logprobs or () for one in every], 6)
    assert ranking == list(range(6)), "all are wanted"
    mean = [sum(token.logprob for token in one.logprobs or ()) / len(one.token_ids) for one in every]
    ranked = sorted(range(6), key=lambda index: -mean[index])
    assert [one.token_ids for one in best] == [every[index].token_ids for index in ranked[:2]]
    assert [one.index for one in best] == [0, 1]


def test_the_best_are_chosen_by_raw_log_probabilities(engine: Engine) -> None:
    """Also where others would be reported, if any were: here by such that penalties change."""
    params = SamplingParams(max_tokens=12, n=8, logprobs=0, seed=5, temperature=4.0, presence_penalty=2.0)
    orders = {
        mode: ranked(engine.generate([[1, 2, 3]], replace(params, logprobs_mode=mode))[0])
        for mode in get_args(LogprobsMode)
    }
    assert set(orders["raw"][:3]) != set(orders["processed"][:3]), "this shows nothing"
    params = replace(params, n=3, best_of=8, logprobs=None, logprobs_mode="processed")
    best = engine.generate([[1, 2, 3]], params)[0].choices
    assert [one.token_ids for one in best] == orders["raw"][:3]
    assert [one.logprobs for one in best] == [None] * 3


def ranked(result: GenerationResult) -> list[tuple[int, ...]]:
    """The tokens of all choices, those with the highest mean log-probability first."""
    means = [
        sum(token.logprob for token in one.logprobs or ()) / len(one.token_ids) for one in result.choices
    ]
    order = sorted(range(len(means)), key=lambda index: -means[index])
    return [result.choices[index].token_ids for index in order]


def test_best_choices() -> None:
    def tokens(*logprobs: float) -> list[TokenLogprobs]:
        return [TokenLogprobs(1, logprob, ()) for logprob in logprobs]

    choices = [tokens(-1.0, -3.0), tokens(-1.5), tokens(-1.5, -1.5), tokens(-0.5, -0.5, -9.0), []]
    assert best_choices(choices, 2) == [1, 2]
    assert best_choices(choices, 5) == [0, 1, 2, 3, 4]
    assert best_choices(choices, 4) == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "logprobs": 0, "logprobs_mode": "processed"}, "logprobs_mode"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs": 1000}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_bad_parameters(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**fields).checked()
    assert caught.value.param == param
