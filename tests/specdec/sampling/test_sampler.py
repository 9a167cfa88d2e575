from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.attention.native import NativeUnavailable
from specdec.core.outputs import TokenLogprobs
from specdec.core.proposal import NoiseStream
from specdec.core.sampling_params import SamplingParams
from specdec.sampling import noise, sampler
from specdec.sampling.native import NativeTokenFunction
from specdec.sampling.sampler import (
    RowSpec,
    SampledRows,
    Sampler,
    SamplingRows,
    logprobs_of,
    noisy_scores,
    ranked_tokens,
    sample_eager,
    target_distribution,
)
from specdec.sampling.transforms import scores_of

GREEDY = SamplingParams(temperature=0.0)
PARAMS = (
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=1e-4),
    SamplingParams(temperature=1e4),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(temperature=1.3, top_p=0.3),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.9, min_p=1e-3),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> NativeTokenFunction:
    try:
        return NativeTokenFunction(tmp_path_factory.mktemp("compiled"))
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["plain", "compiled"])
def ready(request: pytest.FixtureRequest) -> Sampler:
    made = Sampler()
    if request.param == "compiled":
        made._native = request.getfixturevalue("compiled")
    return made


def rows_at(params: SamplingParams, num_rows: int, seed: int = 11, position: int = 100) -> SamplingRows:
    return SamplingRows.build([RowSpec(params, seed, position, num_rows)])


def assert_same(first: SampledRows, second: SampledRows) -> None:
    assert torch.equal(first.finite, second.finite)
    assert torch.equal(first.token_ids, second.token_ids)


# ---- the definition -----------------------------------------------------------------------------


@pytest.mark.parametrize("params", PARAMS[1:])
def test_the_token_function_is_its_definition(ready: Sampler, params: SamplingParams) -> None:
    vocab_size, seed, position = 300, (1 << 64) - 5, 12345
    logits = torch.randn(4, vocab_size) * 3
    rows = rows_at(params, 4, seed, position)
    log_p = target_distribution(logits, rows).double().log()
    for row, token_id in enumerate(ready.sample(logits, rows).token_ids.tolist()):
        g = [noise.gumbel(seed, position + row, token, "target") for token in range(vocab_size)]
        scores = log_p[row] + torch.tensor(g, dtype=torch.float64)
        assert token_id == scores.argmax().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_ties_go_to_the_lowest_id(ready: Sampler, dtype: torch.dtype) -> None:
    vocab_size = 1000
    logits = torch.randn(64, vocab_size).clamp(max=2.0)
    tied = torch.rand(64, vocab_size) < 0.01
    tied[:, 999] = True
    logits = logits.masked_fill(tied, 3.0).to(dtype)
    expected = [int(row.nonzero()[0]) for row in tied]
    assert ready.sample(logits, rows_at(GREEDY, 64)).token_ids.tolist() == expected
    mixed = [GREEDY, SamplingParams(temperature=0.5)] * 32
    sampled = ready.sample(logits, SamplingRows.build([RowSpec(one, 1, 2, 1) for one in mixed]))
    assert sampled.token_ids[::2].tolist() == expected[::2]


def test_negative_and_positive_zero_are_a_tie(ready: Sampler) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]])
    assert ready.sample(logits, rows_at(GREEDY, 2)).token_ids.tolist() == [1, 1]


def test_bad_rows_are_told_and_do_not_touch_others(ready: Sampler) -> None:
    for params in (GREEDY, SamplingParams(), SamplingParams(top_k=3, top_p=0.9)):
        logits = torch.randn(6, 100)
        rows = rows_at(params, 6)
        good = ready.sample(logits, rows)
        assert good.finite.all()
        logits[0, 50] = math.nan
        logits[1, 99] = -math.nan
        logits[2, 0] = math.inf
        logits[3] = -math.inf
        logits[4, int(good.token_ids[4] == 0)] = -math.inf
        sampled = ready.sample(logits, rows)
        assert sampled.finite.tolist() == [False, False, False, False, True, True]
        assert sampled.token_ids.tolist() == [0, 0, 0, 0, *good.token_ids[4:].tolist()]


def test_a_banned_token_is_never_chosen(ready: Sampler) -> None:
    logits = torch.zeros(500, 64)
    logits[:, 1:] = -math.inf
    for params in PARAMS:
        assert not ready.sample(logits, rows_at(params, 500)).token_ids.any()


def test_a_row_does_not_depend_on_its_batch(ready: Sampler) -> None:
    specs = [RowSpec(params, 1000 + i, 7 * i, 3) for i, params in enumerate(PARAMS)]
    logits = torch.randn(3 * len(specs), 4096) * 3
    together = ready.sample(logits, SamplingRows.build(specs)).token_ids.tolist()
    for i, spec in enumerate(specs):
        for row in range(3):
            alone = SamplingRows.build([spec._replace(first_position=spec.first_position + row, num_rows=1)])
            where = 3 * i + row
            assert ready.sample(logits[where : where + 1], alone).token_ids.tolist() == [together[where]]


def test_position_seed_and_stream_all_matter(ready: Sampler) -> None:
    logits = torch.zeros(32, 500)
    base = ready.sample(logits, rows_at(SamplingParams(), 32)).token_ids
    assert len(set(base.tolist())) > 25
    others = [
        ready.sample(logits, rows_at(SamplingParams(), 32, seed=12)),
        ready.sample(logits, rows_at(SamplingParams(), 32, position=101)),
        ready.sample(logits, rows_at(SamplingParams(), 32), "draft"),
    ]
    for other in others:
        assert (other.token_ids == base).sum() < 5
    assert torch.equal(others[1].token_ids[:-1], base[1:])


def test_logits_that_do_not_fit_the_rows_are_refused(ready: Sampler) -> None:
    for logits in (torch.zeros(3, 5), torch.zeros(5)):
        with pytest.raises(ValueError, match="for 2 rows"):
            ready.sample(logits, rows_at(GREEDY, 2))


def test_sampling_does_not_write_to_the_logits(ready: Sampler) -> None:
    logits = torch.randn(5, 100)
    before = logits.clone()
    ready.sample(logits, rows_at(PARAMS[-1], 5))
    assert torch.equal(logits, before)


def test_no_rows_at_all(ready: Sampler) -> None:
    sampled = ready.sample(torch.zeros(0, 100), SamplingRows.build([]))
    assert sampled.token_ids.shape == sampled.finite.shape == (0,)


# ---- compiled code against plain ops ------------------------------------------------------------

Logits = Callable[[int, int], torch.Tensor]
KINDS: dict[str, Logits] = {
    "random": lambda num_rows, vocab_size: torch.randn(num_rows, vocab_size) * 3,
    "flat": torch.zeros,
    "peaked": lambda num_rows, vocab_size: torch.randn(num_rows, vocab_size).exp() * 20,
    "wide": lambda num_rows, vocab_size: torch.randn(num_rows, vocab_size) * 1e6,
    "tied": lambda num_rows, vocab_size: torch.randn(num_rows, vocab_size).mul(2).round(),
    "bfloat16": lambda num_rows, vocab_size: (torch.randn(num_rows, vocab_size) * 4).bfloat16(),
    "banned": lambda num_rows, vocab_size: torch.randn(num_rows, vocab_size).where(
        torch.rand(num_rows, vocab_size) < 0.3, torch.tensor(-math.inf)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000])
def test_compiled_choices_are_the_same(compiled: NativeTokenFunction, kind: str, vocab_size: int) -> None:
    specs = [RowSpec(params, 77 * i, 1000 * i, 16) for i, params in enumerate(PARAMS)]
    rows = SamplingRows.build(specs)
    logits = KINDS[kind](rows.num_rows, vocab_size).float()
    for stream in ("target", "draft"):
        assert_same(SampledRows(*compiled(logits, rows, stream)), sample_eager(logits, rows, stream))


def test_compiled_choices_are_the_same_on_a_large_vocabulary(compiled: NativeTokenFunction) -> None:
    specs = [RowSpec(params, 5 * i, i, 1) for i, params in enumerate(PARAMS)]
    rows = SamplingRows.build(specs)
    torch.set_num_threads(2)
    for scale in (0.01, 1.0, 4.0):
        logits = torch.randn(rows.num_rows, 131_072) * scale
        expected = sample_eager(logits, rows, "target")
        assert_same(SampledRows(*compiled(logits, rows, "target")), expected)


@given(
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
            top_k=st.none() | st.integers(1, 200),
            top_p=st.just(1.0) | st.floats(0.001, 1.0),
            min_p=st.just(0.0) | st.floats(0.0, 1.0),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 200),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from(sorted(KINDS)),
)
def test_compiled_choices_are_the_same_for_any_parameters(
    compiled: NativeTokenFunction, params: list[SamplingParams], vocab_size: int, seed: int, kind: str
) -> None:
    rows = SamplingRows.build([RowSpec(one, seed, 10, 8) for one in params])
    torch.manual_seed(seed & 0xFFFF)
    logits = KINDS[kind](rows.num_rows, vocab_size).float()
    assert_same(SampledRows(*compiled(logits, rows, "target")), sample_eager(logits, rows, "target"))


def test_strided_logits(ready: Sampler) -> None:
    wide = torch.randn(20, 300)
    rows = rows_at(PARAMS[-1], 10)
    for view in (wide[::2, :100], wide[:10, ::3], wide[:10, 7:107]):
        assert_same(ready.sample(view, rows), sample_eager(view.contiguous(), rows, "target"))


@pytest.mark.gpu
def test_a_gpu_chooses_the_same_tokens() -> None:
    specs = [RowSpec(params, 5 * i, i, 16) for i, params in enumerate(PARAMS)]
    rows = SamplingRows.build(specs)
    logits = torch.randn(rows.num_rows, 4096) * 3
    there = sample_eager(logits.cuda(), SamplingRows.build(specs, "cuda"), "target")
    assert_same(SampledRows(*(tensor.cpu() for tensor in there)), sample_eager(logits, rows, "target"))


# ---- warming up ---------------------------------------------------------------------------------


def test_warm_up_compiles(compiled: NativeTokenFunction, tmp_path: Path) -> None:
    del compiled  # skips where there is no compiler
    made = Sampler(tmp_path)
    assert not made.is_compiled
    made.warm_up()
    assert made.is_compiled
    rows, logits = rows_at(SamplingParams(), 4), torch.randn(4, 100)
    assert_same(made.sample(logits, rows), sample_eager(logits, rows, "target"))


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    made = Sampler(tmp_path)
    with caplog.at_level(logging.WARNING):
        made.warm_up()
    assert not made.is_compiled
    assert len(caplog.records) == 1
    assert "no C++ compiler" in caplog.text


def test_code_that_chooses_other_tokens_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong:
        def __init__(self, cache_dir: str | Path | None) -> None:
            del cache_dir

        def __call__(
            self, logits: torch.Tensor, rows: SamplingRows, stream: NoiseStream
        ) -> tuple[torch.Tensor, torch.Tensor]:
            sampled = sample_eager(logits, rows, stream)
            return sampled.token_ids.clone().index_fill_(0, torch.tensor([3]), 0), sampled.finite

    monkeypatch.setattr(sampler, "NativeTokenFunction", Wrong)
    made = Sampler()
    made.warm_up()
    assert not made.is_compiled
    assert "chooses other tokens" in caplog.text


# ---- distributions and log-probabilities --------------------------------------------------------


def test_target_distribution_of_greedy_rows_is_one_hot() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 1.0, 2.0]])
    rows = SamplingRows.build([RowSpec(GREEDY, 1, 0, 1), RowSpec(SamplingParams(), 1, 0, 1)])
    p = target_distribution(logits, rows)
    assert p[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(p[1], logits[1].softmax(-1))


def test_noisy_scores_rank_the_choice_first() -> None:
    logits = torch.randn(8, 100)
    rows = rows_at(SamplingParams(temperature=0.6, top_k=20), 8)
    scores = noisy_scores(logits, rows)
    assert torch.equal(scores.argmax(-1), sample_eager(logits, rows, "target").token_ids)
    assert (scores.isfinite().sum(-1) == 20).all()
    greedy = noisy_scores(logits, rows_at(GREEDY, 8))
    assert torch.equal(greedy.argsort(stable=True, dim=-1), logits.argsort(stable=True, dim=-1))


@pytest.mark.cover(1)
@pytest.mark.parametrize("stream", ["target", "draft", None])
@pytest.mark.parametrize("params", PARAMS)
def test_ranked_tokens_are_in_the_order_of_their_scores(
    ready: Sampler, params: SamplingParams, stream: NoiseStream | None
) -> None:
    """Those that a cut leaves out come behind, in the same order; rank 0 is what is sampled."""
    rows = rows_at(params, 6)
    logits = torch.randn(6, 100) * 2
    logits[1, 90:] = -math.inf
    logits[2, 5] = math.nan
    logits[3, ::3] = logits[3, 7]  # ties
    ranked = ready.ranked(logits, rows, 97, stream)
    assert [len(ids) for ids in ranked] == [97, 90, 0, 97, 97, 97]
    plain = dataclasses.replace(rows, largest_top_k=0, has_top_p=False, has_min_p=False)
    for row in (0, 1, 3, 4, 5):
        if stream is None:
            kept, scores = scores_of(logits, rows)[row], scores_of(logits, plain)[row]
        else:
            kept, scores = noisy_scores(logits, rows, stream)[row], noisy_scores(logits, plain, stream)[row]
        order = sorted(range(100), key=lambda v: (-int(kept[v].isfinite()), -float(scores[v]), v))
        assert ranked[row] == [v for v in order if logits[row, v] > -math.inf][:97]
        assert [ids[:3] for ids in ready.ranked(logits, rows, 3, stream)] == [ids[:3] for ids in ranked]
    if stream is not None:
        sampled = ready.sample(logits, rows, stream)
        firsts = [ids[0] if ids else 0 for ids in ranked]
        assert firsts == sampled.token_ids.tolist()


def test_compiled_code_ranks_as_the_tensor_ops(compiled: NativeTokenFunction) -> None:
    """Rows of all kinds side by side, vocabularies that are no whole number of blocks, strided logits."""
    specs = [RowSpec(one, 5 + i, 1000 * i, 4) for i, one in enumerate(PARAMS)]
    rows = SamplingRows.build(specs)
    for vocab_size in (1, 2, 63, 64, 65, 1000, 5003):
        wide = torch.randn(rows.num_rows, vocab_size + 7) * 4
        logits = wide.bfloat16().float()[:, :vocab_size]  # with ties
        for stream in ("target", None):
            for num in (0, 1, 3, 20, 70):
                expected = ranked_tokens(logits, rows, num, stream)
                assert compiled.ranked(logits, rows, num, stream) == expected
    assert compiled.ranked(logits, rows, 9, "target") != compiled.ranked(logits, rows, 9, "draft")


def test_raw_logprobs_ignore_the_transforms() -> None:
    logits = torch.randn(3, 50) * 3
    found = logprobs_of(logits, [4, 9, 49], 5, "raw", rows_at(SamplingParams(temperature=0.3, top_k=2), 3))
    expected = logits.log_softmax(-1)
    for row, one in enumerate(found):
        assert one.token_id == [4, 9, 49][row]
        assert one.logprob == pytest.approx(expected[row, one.token_id].item())
        values, ids = expected[row].sort(descending=True)
        assert [token for token, _ in one.top] == ids[:5].tolist()
        assert [value for _, value in one.top] == pytest.approx(values[:5].tolist())


def test_processed_logprobs_follow_the_transforms() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 2)
    rows = SamplingRows.build(
        [RowSpec(SamplingParams(temperature=0.5, top_k=2), 1, 0, 1), RowSpec(GREEDY, 1, 1, 1)]
    )
    sampled, greedy = logprobs_of(logits, [1, 0], 4, "processed", rows)
    expected = torch.tensor([6.0, 4.0]).log_softmax(-1).tolist()
    assert sampled.logprob == pytest.approx(expected[1], rel=1e-5)
    assert [token for token, _ in sampled.top] == [0, 1]
    assert greedy == TokenLogprobs(token_id=0, logprob=0.0, top=((0, 0.0),))


@pytest.mark.parametrize("num_top", [0, 1, 3, 20])
def test_ties_in_the_top_are_ordered_by_id(num_top: int) -> None:
    logits = torch.randn(4, 3000).mul(2).round()
    logits[:, 5], logits[:, 6] = 0.0, -0.0
    for row, one in enumerate(logprobs_of(logits, [0] * 4, num_top, "raw", rows_at(GREEDY, 4))):
        values = logits[row].tolist()
        order = sorted(range(3000), key=lambda token: (-values[token], token))
        assert [token for token, _ in one.top] == order[:num_top]


def test_more_top_entries_than_tokens() -> None:
    (one,) = logprobs_of(torch.zeros(1, 3), [2], 20, "raw", rows_at(GREEDY, 1))
    assert [token for token, _ in one.top] == [0, 1, 2]
