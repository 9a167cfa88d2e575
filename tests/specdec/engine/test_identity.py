"""Guarantee B on real (tiny, random, fp32) models: nothing that serves a request changes its tokens.

Greedy streams are compared with `generate` of transformers, prompt by prompt. Sampled streams are compared
with the engine itself, one request alone without speculation. What may vary: drafter, number of draft
tokens, batch, chunking of prompts, preemption, replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from specdec.core.sampling_params import SamplingParams
from specdec.engine.offline import choice_requests
from specdec.engine.requests.live_request import LiveRequest
from specdec.sampling.shaping import LogitShaper
from tests.architectures import (
    ARCHITECTURES,
    CORE_ARCHITECTURES,
    ORIGINAL_POSITIONS,
    OTHER_ARCHITECTURES,
    VARIED_ARCHITECTURES,
)
from tests.pairwise import mostly_full
from tests.specdec.engine.identity_settings import Setting, alone, check_greedy, check_sampled, taking_turns
from tests.specdec.engine.sampling_kinds import SAMPLING, SHAPING
from tests.specdec.engine.tiny_models import NUM_TOKENS, Models, ragged_prompts
from tests.specdec.engine.toy_engines import tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")
DRAFTERS = ("none", "ngram", "suffix", "suffix tree", "retrieval", "other model", "same model")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


COVER = [
    Setting("none", batch=1),
    Setting("none", batch=8, chunk=8, num_blocks=24),
    Setting("ngram", num_draft_tokens=3, batch=3, chunk=9),
    Setting("ngram", num_draft_tokens=8, batch=12, num_blocks=24),
    Setting("suffix", num_draft_tokens=6, batch=12, num_blocks=24),
    Setting("suffix tree", num_draft_tokens=9, batch=8, chunk=16, compiled=True),
    Setting("retrieval", num_draft_tokens=7, batch=12, chunk=16, num_blocks=24),
    Setting("other model", num_draft_tokens=2, batch=5, num_blocks=24),
    Setting("other model", num_draft_tokens=5, batch=2, chunk=7),
    Setting("same model", num_draft_tokens=1, batch=6, chunk=16, num_blocks=24),
    Setting("same model", num_draft_tokens=7, batch=4),
    Setting("none", batch=8, chunk=8, num_blocks=24, compiled=True),
    Setting("other model", num_draft_tokens=3, batch=6, chunk=16, num_blocks=24, compiled=True),
    Setting("same model", num_draft_tokens=6, batch=4, compiled=True),
]


@pytest.mark.cover(1, "architecture", "setting.drafter", "setting.compiled", "setting.num_blocks")
@pytest.mark.parametrize(("architecture", "setting"), taking_turns(CORE_ARCHITECTURES, COVER), ids=str)
def test_greedy_equals_transformers(models: Models, architecture: str, setting: Setting) -> None:
    engine = check_greedy(models, architecture, setting)
    metrics = engine.metrics()
    if setting.num_blocks == 24 and setting.batch >= 5:
        assert metrics.num_preemptions > 0
    if setting.drafter == "same model" and setting.num_blocks > 24:
        assert metrics.num_accepted_tokens > 0.9 * metrics.num_draft_tokens > 0


def largest_logprob_error(models: Models, setting: Setting) -> float:
    """How far log-probabilities of a stream that outgrows the original rotary length are from a forward's."""
    prompt = ragged_prompts(3)[2]
    assert len(prompt) < ORIGINAL_POSITIONS < len(prompt) + NUM_TOKENS
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True)
    (request,) = choice_requests(prompt, params, "growing")
    tokens, found = list(prompt), []
    with setting.engine(models, "phi3_longrope") as engine:
        engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids
                found += [one.logprob for one in output.logprobs or ()]
        engine.check_integrity()
    error = 0.0
    for index, logprob in enumerate(found):
        end = len(prompt) + index
        with torch.inference_mode():
            logits = models.reference("phi3_longrope")(torch.tensor([tokens[:end]])).logits[0, -1]
        error = max(error, abs(float(logits.log_softmax(-1)[tokens[end]]) - logprob))
    return error


@pytest.mark.parametrize(
    "setting",
    [
        Setting("none", batch=1),
        Setting("same model", num_draft_tokens=5, batch=1, chunk=9),
        Setting("ngram", num_draft_tokens=8, batch=1, compiled=True),
    ],
    ids=str,
)
def test_a_sequence_that_outgrows_its_rotary_table_is_computed_anew(models: Models, setting: Setting) -> None:
    assert largest_logprob_error(models, setting) < 1e-4


def test_control_going_on_with_the_old_cache_shows(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveRequest, "has_outgrown_cache", False)
    assert largest_logprob_error(models, Setting("none", batch=1)) > 1e-3


EVERYTHING_AT_ONCE = [
    Setting("ngram", num_draft_tokens=3, batch=8, chunk=9, num_blocks=18),
    Setting("same model", num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, compiled=True),
]
"""Prompts in chunks, longer than the sliding window (12), and preemption."""


@pytest.mark.parametrize(
    ("architecture", "setting"),
    taking_turns(OTHER_ARCHITECTURES, EVERYTHING_AT_ONCE, VARIED_ARCHITECTURES),
    ids=str,
)
def test_greedy_equals_transformers_for_every_architecture(
    models: Models, architecture: str, setting: Setting
) -> None:
    metrics = check_greedy(models, architecture, setting).metrics()
    assert metrics.num_preemptions > 0
    assert metrics.num_accepted_tokens > 0


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_greedy_equals_transformers_in_every_setting(
    models: Models,
    architecture: str,
    drafter: str,
    num_draft_tokens: int,
    batch: int,
    chunk: int,
    num_blocks: int,
) -> None:
    check_greedy(models, architecture, Setting(drafter, num_draft_tokens, batch, chunk, num_blocks))


SEEDED_COVER = [
    ("plain", Setting("ngram", num_draft_tokens=1, batch=2)),
    ("cut", Setting("ngram", num_draft_tokens=6, batch=8, chunk=9, num_blocks=24)),
    ("cut", Setting("suffix tree", num_draft_tokens=8, batch=8, chunk=9, num_blocks=24)),
    ("plain", Setting("suffix", num_draft_tokens=4, batch=6, compiled=True)),
    ("plain", Setting("retrieval", num_draft_tokens=4, batch=6)),
    ("hot", Setting("other model", num_draft_tokens=2, batch=5)),
    ("plain", Setting("other model", num_draft_tokens=8, batch=8, num_blocks=24)),
    ("cut", Setting("same model", num_draft_tokens=3, batch=1, chunk=7)),
    ("hot", Setting("same model", num_draft_tokens=7, batch=6, chunk=16, num_blocks=24)),
    ("plain", Setting("none", batch=8, chunk=8, num_blocks=24)),
    ("cut", Setting("other model", num_draft_tokens=5, batch=6, chunk=16, num_blocks=24, compiled=True)),
    ("hot", Setting("same model", num_draft_tokens=4, batch=3, compiled=True)),
]


@pytest.mark.cover(1, "kind", "setting.drafter", "setting.compiled", "setting.num_blocks")
@pytest.mark.parametrize(("kind", "setting"), SEEDED_COVER, ids=str)
def test_same_seed_same_tokens(models: Models, kind: str, setting: Setting) -> None:
    check_sampled(models, "llama", setting, SAMPLING[kind])


@pytest.mark.full
@pytest.mark.parametrize("architecture", CORE_ARCHITECTURES)
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_same_seed_same_tokens_in_every_setting(
    models: Models, architecture: str, kind: str, drafter: str, num_draft_tokens: int
) -> None:
    setting = Setting(drafter, num_draft_tokens, batch=6, chunk=16, num_blocks=24)
    check_sampled(models, architecture, setting, SAMPLING[kind])


SHAPED_COVER = [
    ("penalties", Setting("ngram", num_draft_tokens=5, batch=6, chunk=16, num_blocks=24)),
    ("penalties", Setting("same model", num_draft_tokens=3, batch=3)),
    ("penalties", Setting("other model", num_draft_tokens=7, batch=5, chunk=9, num_blocks=24, compiled=True)),
    ("greedy penalties", Setting("ngram", num_draft_tokens=8, batch=2, chunk=7)),
    ("greedy penalties", Setting("same model", num_draft_tokens=4, batch=4)),
    ("bias", Setting("ngram", num_draft_tokens=2, batch=3)),
    ("bias", Setting("same model", num_draft_tokens=6, batch=6, chunk=16, num_blocks=24)),
    ("bad words", Setting("ngram", num_draft_tokens=4, batch=5)),
    ("bad words", Setting("same model", num_draft_tokens=1, batch=4, chunk=16, num_blocks=24)),
    ("bad words", Setting("other model", num_draft_tokens=8, batch=2)),
    ("min tokens", Setting("ngram", num_draft_tokens=6, batch=6, num_blocks=24)),
    ("min tokens", Setting("same model", num_draft_tokens=5, batch=3, compiled=True)),
    ("allowed", Setting("ngram", num_draft_tokens=3, batch=8, chunk=16, num_blocks=24)),
    ("allowed", Setting("same model", num_draft_tokens=7, batch=2)),
]


@pytest.mark.cover(1, "kind", "setting.drafter", "setting.compiled", "setting.num_blocks")
@pytest.mark.parametrize(("kind", "setting"), SHAPED_COVER, ids=str)
def test_same_tokens_with_shaped_logits(models: Models, kind: str, setting: Setting) -> None:
    check_sampled(models, "llama", setting, SHAPING[kind])


@pytest.mark.full
@pytest.mark.parametrize("kind", SHAPING)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("compiled", [False, True])
def test_same_tokens_with_shaped_logits_in_every_setting(
    models: Models, kind: str, drafter: str, num_draft_tokens: int, compiled: bool
) -> None:
    setting = Setting(drafter, num_draft_tokens, batch=6, chunk=16, num_blocks=24, compiled=compiled)
    check_sampled(models, "llama", setting, SHAPING[kind])


@pytest.mark.parametrize("kind", mostly_full(SHAPING, ["penalties", "bad words"]))
def test_shaping_shows(models: Models, kind: str) -> None:
    """The control: without what the kind asks for, the stream is another one."""
    params = SHAPING[kind]
    plain = SamplingParams(
        temperature=params.temperature, top_p=params.top_p, max_tokens=NUM_TOKENS, seed=params.seed
    )
    streams = [
        (alone(models, "llama", prompt, params), alone(models, "llama", prompt, plain))
        for prompt in ragged_prompts(4, seed=1)
    ]
    assert any(shaped != unshaped for shaped, unshaped in streams)
    for shaped, _ in streams:
        assert not any(
            shaped[start : start + len(word)] == word
            for word in params.bad_words
            for start in range(NUM_TOKENS)
        )
        assert not {0, 9} & set(shaped[: params.min_tokens])
        assert params.allowed_token_ids is None or set(shaped) <= {0, *params.allowed_token_ids}


@pytest.mark.parametrize("kind", ["penalties", "bad words", "min tokens"])
def test_control_ignoring_the_draft_shows(models: Models, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that evaluated all positions behind the committed tokens alone would be found out."""
    shape = LogitShaper.shape

    def forgetful(self: LogitShaper, logits: Any, paths: Sequence[Sequence[int]], **where: int) -> None:
        shape(self, logits, [()] * len(paths), **where)

    prompts = ragged_prompts(8, seed=1)
    expected = [alone(models, "llama", prompt, SHAPING[kind]) for prompt in prompts]
    monkeypatch.setattr(LogitShaper, "shape", forgetful)
    with Setting("same model", num_draft_tokens=6, batch=8).engine(models, "llama") as engine:
        results = engine.generate(prompts, SHAPING[kind])
    assert [result.token_ids for result in results] != expected


@pytest.mark.parametrize("kind", SHAPING)
def test_draft_model_shapes_alike(models: Models, kind: str) -> None:
    """The target drafting for itself is right with shaped logits too (acceptance, not exactness)."""
    with Setting("same model", num_draft_tokens=4, batch=4).engine(models, "llama") as engine:
        engine.generate(ragged_prompts(4), SHAPING[kind])
        metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0.8 * metrics.num_draft_tokens > 0


@pytest.mark.parametrize("drafter", ["none", "same model"])
def test_what_forbids_every_token_ends_that_request_alone(models: Models, drafter: str) -> None:
    """min_tokens forbids the stop tokens, and nothing else is allowed: there is no third token."""
    impossible = SamplingParams(allowed_token_ids=(5, 9), bad_words=((5, 5), (9,)), max_tokens=8, seed=1)
    plain = SAMPLING["plain"]
    prompts = ragged_prompts(4, seed=1)
    with Setting(drafter, batch=4).engine(models, "llama") as engine:
        results = engine.generate(prompts, [plain, impossible, plain, plain])
        engine.check_integrity()
    assert results[1].token_ids == (5,)
    choice = results[1].choices[0]
    assert choice.finish_reason == "error"
    assert choice.error is not None
    assert "forbids every token" in choice.error
    for index in (0, 2, 3):
        assert results[index].token_ids == alone(models, "llama", prompts[index], plain)


@pytest.mark.parametrize("drafter", ["none", "same model"])
@pytest.mark.parametrize(
    "params",
    [SAMPLING["plain"], SHAPING["penalties"], SHAPING["bad words"]],
    ids=["plain", "penalties", "bad"],
)
def test_replay_continues_the_stream(models: Models, drafter: str, params: SamplingParams) -> None:
    prompt = ragged_prompts(3)[2]
    whole = alone(models, "llama", prompt, params)
    (request,) = choice_requests(prompt, params, "replayed")
    with Setting(drafter, batch=8).engine(models, "llama") as engine:
        for cut in (1, 5, len(whole) - 1):
            engine.add_request(msgspec.structs.replace(request, delivered_token_ids=whole[:cut]))
            outputs = []
            while engine.has_work:
                outputs += engine.step()
            assert (*whole[:cut], *tokens_of(outputs)) == whole


def test_sampling_is_not_greedy_and_seeds_differ(models: Models) -> None:
    """The negative control: what these tests compare would differ with another seed."""
    prompt = ragged_prompts(3)[2]
    params = SAMPLING["plain"]
    streams = {
        alone(models, "llama", prompt, msgspec.structs.replace(params, seed=seed)) for seed in range(4)
    }
    streams.add(alone(models, "llama", prompt, msgspec.structs.replace(params, temperature=0.0)))
    assert len(streams) == 5


def test_draft_model_shares_the_noise(models: Models) -> None:
    """The target drafting for itself is right at temperature 1 too: same transforms, same noise."""
    setting = Setting("same model", num_draft_tokens=4, batch=4)
    with setting.engine(models, "llama") as engine:
        engine.generate(ragged_prompts(4), SAMPLING["cut"])
        metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0.9 * metrics.num_draft_tokens > 0
