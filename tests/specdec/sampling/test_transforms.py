"""Cuts against a slow reading of their definition, and against the warpers of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.core.sampling_params import SamplingParams
from specdec.sampling import transforms
from specdec.sampling.rows import KEEP_ALL_TOP_K, RowSpec, SamplingRows
from specdec.sampling.sampler import target_distribution
from specdec.sampling.transforms import scores_of


def rows_of(*params: SamplingParams) -> SamplingRows:
    return SamplingRows.build([RowSpec(one, 1, 0, 1) for one in params])


def kept_slowly(scores: list[float], params: SamplingParams) -> set[int]:
    """The text of `specdec.sampling.transforms`, one token at a time."""
    kept = set(range(len(scores)))
    if params.top_k is not None and params.top_k < len(scores):
        cut = sorted(scores, reverse=True)[params.top_k - 1]
        kept = {token for token in kept if scores[token] >= cut}
    if params.top_p < 1.0:
        total = math.fsum(math.exp(scores[token]) for token in kept)
        taken: list[float] = []
        for score in sorted((scores[token] for token in kept), reverse=True):
            taken.append(score)
            if math.fsum(map(math.exp, taken)) >= params.top_p * total:
                break
        kept = {token for token in kept if scores[token] >= taken[-1]}
    if params.min_p > 0.0:
        cut = float(torch.tensor(math.log(params.min_p), dtype=torch.float32))
        kept = {token for token in kept if scores[token] >= cut}
    return kept


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
)


@given(
    st.lists(params_strategy, min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 1000), st.booleans()
)
def test_cuts_follow_their_definition(
    params: list[SamplingParams], vocab_size: int, seed: int, with_ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), vocab_size, generator=generator) * 2
    if with_ties:
        logits = logits.round()
    logits[:, 1:].masked_fill_(torch.rand(logits[:, 1:].shape, generator=generator) < 0.1, float("-inf"))
    scores = scores_of(logits, rows_of(*params))
    plain = [SamplingParams(temperature=one.temperature) for one in params]
    uncut = scores_of(logits, rows_of(*plain))
    for row, one in enumerate(params):
        kept = kept_slowly(uncut[row].tolist(), one)
        assert scores[row].argmax().item() in kept
        expected = [value if token in kept else -math.inf for token, value in enumerate(uncut[row].tolist())]
        assert scores[row].tolist() == expected, one


def test_ties_at_a_cut_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.75), SamplingParams(min_p=math.exp(-2.0))):
        assert scores_of(logits, rows_of(params)).isfinite().tolist() == [[True, True, True, True, False]]


def test_top_p_takes_the_token_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, num_kept in ((0.4, 1), (0.51, 2), (0.74, 2), (0.76, 4), (0.9, 4)):
        assert scores_of(logits, rows_of(SamplingParams(top_p=top_p))).isfinite().sum() == num_kept
    uniform = torch.zeros(1, 8)
    assert scores_of(uniform, rows_of(SamplingParams(top_p=0.5))).isfinite().all()


def test_top_p_looks_at_what_top_k_kept() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the first two, .4/.7 = .57 reaches .55; of all four it does not.
    assert scores_of(logits, rows_of(SamplingParams(top_k=2, top_p=0.55))).isfinite().sum() == 1
    assert scores_of(logits, rows_of(SamplingParams(top_p=0.55))).isfinite().sum() == 2


def test_rows_are_cut_alike_however_many_are_sorted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 4
    specs = [RowSpec(SamplingParams(top_p=0.1 + 0.15 * row), 0, row, 1) for row in range(6)]
    rows = SamplingRows.build([*specs, RowSpec(SamplingParams(), 0, 6, 1)])
    expected = scores_of(logits, rows)
    for most in (1, 100, 149, 350):
        monkeypatch.setattr(transforms, "_SORTED_AT_ONCE", most)
        assert torch.equal(scores_of(logits, rows), expected)


def test_low_temperatures_keep_their_precision() -> None:
    logits = torch.tensor([[1000.0, 1000.0 - 2.0**-13]])
    scores = scores_of(logits, rows_of(SamplingParams(temperature=1e-4)))
    assert scores[0, 1].item() == pytest.approx(-(2.0**-13) / 1e-4, rel=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.05),
        SamplingParams(temperature=1.7, top_k=30, top_p=0.9, min_p=0.02),
    ],
)
def test_without_ties_the_warpers_of_transformers_agree(params: SamplingParams) -> None:
    logits = torch.randn(16, 200) * 2
    ids = torch.zeros(16, 1, dtype=torch.long)
    expected = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k is not None:
        expected = TopKLogitsWarper(params.top_k)(ids, expected)
    if params.top_p < 1.0:
        expected = TopPLogitsWarper(params.top_p)(ids, expected)
    if params.min_p > 0.0:
        expected = MinPLogitsWarper(params.min_p)(ids, expected)
    rows = SamplingRows.build([RowSpec(params, 1, 0, 16)])
    torch.testing.assert_close(target_distribution(logits, rows), expected.softmax(-1))


def test_building_rows() -> None:
    specs = [
        RowSpec(SamplingParams(temperature=0.0, top_k=3, top_p=0.5), (1 << 64) - 1, 10, 2),
        RowSpec(SamplingParams(temperature=0.5, top_k=7), 1 << 63, 20, 3),
        RowSpec(SamplingParams(min_p=0.5), 5, 30, 0),
        RowSpec(SamplingParams(min_p=0.25), 6, 40, 1),
    ]
    rows = SamplingRows.build(specs)
    assert rows.num_rows == 6
    assert rows.seeds.tolist() == [-1, -1, *[-(1 << 63)] * 3, 6]
    assert rows.positions.tolist() == [10, 11, 20, 21, 22, 40]
    assert rows.top_k.tolist() == [3, 3, 7, 7, 7, KEEP_ALL_TOP_K]
    assert rows.temperature.tolist() == [0.0, 0.0, 0.5, 0.5, 0.5, 1.0]
    assert rows.top_p.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert rows.log_min_p.exp().tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 0.25]
    assert (rows.has_greedy, rows.has_sampled, rows.has_top_p, rows.has_min_p) == (True, True, False, True)
    assert rows.largest_top_k == 7


def test_rows_of_a_tree_stand_at_their_depths() -> None:
    params = SamplingParams()
    rows = SamplingRows.build([RowSpec(params, 1, 100, 4, (0, 1, 1, 2)), RowSpec(params, 1, 7, 2)])
    assert rows.positions.tolist() == [100, 101, 101, 102, 7, 8]
    with pytest.raises(ValueError, match="4 rows with 1 depths"):
        SamplingRows.build([RowSpec(params, 1, 100, 4, (0,))])


def test_no_rows() -> None:
    assert SamplingRows.build([]).num_rows == 0
    assert SamplingRows.build([RowSpec(SamplingParams(), 1, 0, 0)]).num_rows == 0
