"""Penalties, bias and forbidden tokens: against a definition written out token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.core.errors import InputError
from specdec.core.sampling_params import SamplingParams
from specdec.sampling.shaping import LogitShaper, shaper_for

VOCAB = 20
EOS = 3
NEVER = float("-inf")

KINDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "encouraged": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.25},
    "frequency": {"frequency_penalty": -0.75},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"logit_bias": ((2, 5.0), (19, -100.0), (0, 0.25))},
    "bad_words": {"bad_words": ((4,), (5, 6), (6, 6), (1, 2, 3), (2, 2, 2, 2))},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (7, 11)},
    "min_tokens without EOS": {"min_tokens": 4, "stop_token_ids": (7,), "ignore_eos": True},
    "allowed": {"allowed_token_ids": (1, 5, 6, 18)},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": ((2, 3.0), (6, -1.0)),
        "bad_words": ((5, 6), (9,)),
        "min_tokens": 3,
        "allowed_token_ids": tuple(range(1, 18)),
    },
}


def written_out(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """The definition, for one position behind `prompt` and `output`."""
    shaped = logits.clone()
    bias = dict(params.logit_bias)
    for token in range(VOCAB):
        value = shaped[token]
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value = value - output.count(token) * torch.tensor(params.frequency_penalty)
        value = value - float(token in output) * torch.tensor(params.presence_penalty)
        value = value + bias.get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = torch.tensor(NEVER)
        if token in params.stop_ids((EOS,)) and len(output) < params.min_tokens:
            value = torch.tensor(NEVER)
        for *begin, last in params.bad_words:
            if (
                token == last
                and list(output[len(output) - len(begin) :]) == begin
                and len(output) >= len(begin)
            ):
                value = torch.tensor(NEVER)
        shaped[token] = value
    return shaped


def shaper_of(params: SamplingParams, prompt: Sequence[int]) -> LogitShaper:
    shaper = shaper_for(params, eos_token_ids=(EOS,), num_prompt_tokens=len(prompt))
    assert shaper is not None
    return shaper


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [(0, VOCAB), (0, 7), (7, VOCAB)], ids=str)
def test_equals_the_definition_at_every_position(kind: str, shard: tuple[int, int]) -> None:
    params = SamplingParams(**KINDS[kind]).checked()
    generator = random.Random(kind)
    first, end = shard
    for _ in range(40):
        prompt = generator.choices(range(VOCAB), k=generator.randrange(1, 8))
        output = generator.choices(range(8), k=generator.randrange(0, 9))
        drafts = [generator.choices(range(8), k=4) for _ in range(2)]
        shaper = shaper_of(params, prompt)
        whole = [*prompt, *output]
        while shaper.num_committed < len(whole):  # however the tokens are grouped
            size = generator.randrange(1, 4)
            shaper.commit(whole[shaper.num_committed : shaper.num_committed + size])
        # Two branches of a tree, and rows of a chain.
        paths = [draft[:length] for draft in drafts for length in range(5)]
        logits = torch.randn(len(paths), VOCAB) * 3
        shaped = logits[:, first:end].clone()
        shaper.shape(shaped, paths, first_token_id=first)
        for row, path in enumerate(paths):
            expected = written_out(logits[row], params, prompt, [*output, *path])[first:end]
            assert torch.allclose(shaped[row], expected, rtol=1e-6, atol=1e-6), (path, expected, shaped[row])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_company_or_shard(kind: str) -> None:
    """Bitwise: several rows at once, one at a time, and by columns."""
    params = SamplingParams(**KINDS[kind])
    shaper = shaper_of(params, (1, 2))
    shaper.commit((1, 2, 5, 6, 6))
    paths = [(), (5,), (5, 6), (5, 6, 1)]
    logits = torch.randn(len(paths), VOCAB) * 3
    together = logits.clone()
    shaper.shape(together, paths)
    for row, path in enumerate(paths):
        alone = logits[row : row + 1].clone()
        shaper_again = shaper_of(params, (1, 2))
        shaper_again.commit((1, 2, 5, 6, 6, *path))
        shaper_again.shape(alone, [()])
        assert torch.equal(alone[0], together[row])
    for first, end in ((0, 9), (9, VOCAB)):
        shard_shaper = shaper_of(params, (1, 2))
        shard_shaper.commit((1, 2, 5, 6, 6))
        part = logits[:, first:end].clone()
        shard_shaper.shape(part, paths, first_token_id=first)
        assert torch.equal(part, together[:, first:end])


def test_shaping_does_not_advance_the_state() -> None:
    """The negative control of the above: a shaper that counted drafts as committed would differ."""
    params = SamplingParams(frequency_penalty=1.0)
    shaper = shaper_of(params, (1,))
    shaper.commit((1, 2))
    for _ in range(3):
        rows = torch.zeros(2, VOCAB)
        shaper.shape(rows, [(), (2,)])
        assert rows[:, 2].tolist() == [-1.0, -2.0]
    shaper.commit((2,))
    rows = torch.zeros(1, VOCAB)
    shaper.shape(rows, [()])
    assert rows[0, 2] == -2.0


def test_lists_are_taken_as_tuples_are() -> None:
    params = SamplingParams(bad_words=[[4], [5, 6], [2, 2, 2]]).checked()  # type: ignore[arg-type]
    shaper = shaper_of(params, [1])
    shaper.commit([1, 2, 5])
    logits = torch.zeros(3, VOCAB)
    shaper.shape(logits, [(), (2, 2), (2, 2, 2)])
    forbidden = [row.isneginf().nonzero().flatten().tolist() for row in logits]
    assert forbidden == [[4, 6], [2, 4], [2, 4]]


def test_nothing_asked_for_needs_no_shaper() -> None:
    plain = SamplingParams(temperature=0.5, top_k=3, logprobs=2, stop=("a",))
    assert shaper_for(plain, eos_token_ids=(EOS,), num_prompt_tokens=1) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": tuple((token, 1.0) for token in range(1025))}, "logit_bias"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((1,) * 65,)}, "bad_words"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**fields).checked()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
)
def test_unknown_tokens_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    params = SamplingParams(**fields).checked()
    params.check_vocabulary(VOCAB + 1)
    with pytest.raises(InputError) as caught:
        params.check_vocabulary(VOCAB)
    assert caught.value.param == param
