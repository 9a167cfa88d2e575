"""The token function draws from p: chi-square over 20,000 draws, with controls that must fail."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from specdec.attention.native import NativeUnavailable
from specdec.core.proposal import NoiseStream
from specdec.core.sampling_params import SamplingParams
from specdec.sampling.native import NativeTokenFunction
from specdec.sampling.noise import choice_seed
from specdec.sampling.sampler import RowSpec, Sampler, SamplingRows, target_distribution

NUM_DRAWS = 20_000
VOCAB = 12
PARAMS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(top_k=4),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.5, top_k=8, top_p=0.9, min_p=0.05),
}
PLACES = {
    "positions": lambda params: [RowSpec(params, 99, 0, NUM_DRAWS)],
    "seeds": lambda params: [RowSpec(params, seed, 5, 1) for seed in range(NUM_DRAWS)],
    "choices": lambda params: [RowSpec(params, choice_seed(1, i), 5, 1) for i in range(NUM_DRAWS)],
}


@pytest.fixture(scope="module", params=["plain", "compiled"])
def ready(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    made = Sampler()
    if request.param == "compiled":
        try:
            made._native = NativeTokenFunction(tmp_path_factory.mktemp("compiled"))
        except NativeUnavailable as error:
            pytest.skip(str(error))
    return made


def logits_of(seed: int, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def draw(sampler: Sampler, logits: torch.Tensor, specs: list[RowSpec], stream: NoiseStream) -> torch.Tensor:
    return sampler.sample(logits.expand(NUM_DRAWS, VOCAB), SamplingRows.build(specs), stream).token_ids


def p_value(token_ids: torch.Tensor, p: torch.Tensor) -> float:
    counts = token_ids.bincount(minlength=VOCAB)
    possible = p > 0
    assert counts[~possible].sum() == 0
    expected = p[possible].double()
    return float(stats.chisquare(counts[possible], (expected / expected.sum() * NUM_DRAWS)).pvalue)


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return target_distribution(logits[None], SamplingRows.build([RowSpec(params, 0, 0, 1)]))[0]


@pytest.mark.cover(1)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("place", PLACES)
def test_draws_follow_p(ready: Sampler, params: SamplingParams, place: str) -> None:
    logits = logits_of(3)
    token_ids = draw(ready, logits, PLACES[place](params), "target")
    assert p_value(token_ids, distribution(logits, params)) > 1e-4


def test_control_another_temperature_is_noticed(ready: Sampler) -> None:
    logits = logits_of(3)
    token_ids = draw(ready, logits, PLACES["positions"](SamplingParams()), "target")
    assert p_value(token_ids, distribution(logits, SamplingParams(temperature=1.15))) < 1e-10


def test_consecutive_draws_are_independent(ready: Sampler) -> None:
    logits = logits_of(4, scale=0.5)
    token_ids = draw(ready, logits, PLACES["positions"](SamplingParams()), "target")
    pairs = (token_ids[:-1] * VOCAB + token_ids[1:]).bincount(minlength=VOCAB**2).view(VOCAB, VOCAB)
    assert stats.chi2_contingency(pairs.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_same_noise_drafts_match_as_often_as_promised(ready: Sampler, seed: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    specs = PLACES["positions"](params)
    target_logits = logits_of(seed)
    draft_logits = target_logits + logits_of(seed + 50, scale=0.7)
    wanted = draw(ready, target_logits, specs, "target")
    match_rate = (draw(ready, draft_logits, specs, "target") == wanted).double().mean().item()
    p, q = distribution(target_logits, params), distribution(draft_logits, params)
    distance = (p - q).abs().sum().item() / 2
    noise = 4 * 0.5 / NUM_DRAWS**0.5
    assert (1 - distance) / (1 + distance) - noise < match_rate < 1 - distance + noise
    # With noise of their own, drafts match as rarely as independent draws do.
    unrelated = (draw(ready, draft_logits, specs, "draft") == wanted).double().mean().item()
    assert abs(unrelated - (p * q).sum().item()) < noise < match_rate - unrelated
