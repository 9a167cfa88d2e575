"""Tokens chosen over shards of the vocabulary are those that one process chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.core.sampling_params import SamplingParams
from specdec.model.parallel.cuts import vocab_shard
from specdec.model.parallel.group import RankGroup
from specdec.sampling.parallel import ParallelSampler
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import SampledRows, logprobs_of, ranked_tokens, sample_eager
from tests.rank_pool import Pools, RankPool

ROWS_EACH = 6

KINDS = {
    "greedy": [SamplingParams(temperature=0.0)],
    "plain": [SamplingParams(temperature=1.0), SamplingParams(temperature=0.1)],
    "plain and greedy": [SamplingParams(temperature=0.0), SamplingParams(temperature=1.3)],
    "min-p": [SamplingParams(temperature=2.0, min_p=0.05), SamplingParams(temperature=0.5)],
    "top-k": [SamplingParams(top_k=1), SamplingParams(top_k=40), SamplingParams(top_k=10_000)],
    "top-p": [
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.05),
        SamplingParams(temperature=0.3, top_p=0.5),
    ],
    "all": [
        SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.0, top_p=0.5),
        SamplingParams(temperature=0.8, top_p=0.99),
        SamplingParams(temperature=0.8, top_k=3),
    ],
}


def rows_of(params: list[SamplingParams]) -> SamplingRows:
    return SamplingRows.build([RowSpec(one, 77 + i, 5000 * i, ROWS_EACH) for i, one in enumerate(params)])


def logits_of(num_rows: int, vocab_size: int, *, spread: float = 3.0, rounded: bool = False) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    return logits.bfloat16() if rounded else logits


def choose(
    group: RankGroup, logits: torch.Tensor, rows: SamplingRows, vocab_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    shard = vocab_shard(logits.shape[1], group.rank, group.size)
    sampler = ParallelSampler(group, shard, vocab_size=vocab_size)
    sampled = sampler.sample(logits[:, shard.first : shard.end], rows)
    return (*sampled, sampler.num_full_gathers)


def check(pool: RankPool, logits: torch.Tensor, rows: SamplingRows, vocab_size: int | None = None) -> int:
    """Compare every rank's choice with one process's; return how often rows were gathered in full."""
    expected = sample_eager(logits[:, :vocab_size], rows, "target")
    results = pool.run(choose, logits, rows, vocab_size)
    for token_ids, finite, _ in results:
        assert torch.equal(finite, expected.finite)
        assert torch.equal(token_ids, expected.token_ids)
    return int(results[0][2])


@pytest.mark.cover(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounded", [False, True], ids=["fp32", "bf16"])
def test_same_choice_as_one_process(rank_pool: Pools, size: int, kind: str, rounded: bool) -> None:
    rows = rows_of(KINDS[kind])
    num_full = check(rank_pool(size), logits_of(rows.num_rows, 2003, rounded=rounded), rows)
    assert num_full == 0


def test_flat_rows_are_gathered_in_full_for_top_p(rank_pool: Pools) -> None:
    rows = rows_of([SamplingParams(top_p=0.95), SamplingParams(temperature=0.0)])
    assert check(rank_pool(2), logits_of(rows.num_rows, 2003, spread=0.1), rows) == 1


def test_ties_go_to_the_lowest_id_across_shards(rank_pool: Pools) -> None:
    rows = rows_of([SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, top_k=2)])
    logits = torch.zeros(rows.num_rows, 90)
    logits[1, [40, 50, 80]] = 1.0
    logits[2, [44, 45]] = 1.0
    logits[3, [88, 89]] = 1.0
    check(rank_pool(2), logits, rows)
    check(rank_pool(4), logits, rows)


@pytest.mark.parametrize("kind", ["plain and greedy", "all"])
def test_rows_that_are_not_finite(rank_pool: Pools, kind: str) -> None:
    rows = rows_of(KINDS[kind])
    logits = logits_of(rows.num_rows, 203)
    logits[0, 150] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[4, :150] = float("-inf")
    logits[5, 1:] = float("-inf")
    check(rank_pool(2), logits, rows)


def test_ids_that_the_target_does_not_know_are_never_chosen(rank_pool: Pools) -> None:
    rows = rows_of(KINDS["all"] + KINDS["plain"])
    logits = logits_of(rows.num_rows, 203)
    logits[:, 190:] += 20.0
    logits[:, 60] = 15.0
    for vocab_size in (190, 61, 40):
        check(rank_pool(4), logits, rows, vocab_size)


def test_hardly_any_ids_per_rank(rank_pool: Pools) -> None:
    rows = rows_of(KINDS["all"])
    check(rank_pool(4), logits_of(rows.num_rows, 5), rows)


def ranked(group: RankGroup, logits: torch.Tensor, rows: SamplingRows, num: int, stream: Any) -> Any:
    shard = vocab_shard(logits.shape[1], group.rank, group.size)
    return ParallelSampler(group, shard).ranked(logits[:, shard.first : shard.end], rows, num, stream)


@pytest.mark.parametrize("stream", ["target", None])
@pytest.mark.parametrize("kind", ["plain and greedy", "all"])
def test_ranked_tokens(rank_pool: Pools, kind: str, stream: Any) -> None:
    """Every rank guesses the same; fewer where there are fewer, none where nothing is finite."""
    rows = rows_of(KINDS[kind])
    logits = logits_of(rows.num_rows, 23)
    logits[1] = torch.nan
    logits[2, 4:] = float("-inf")
    expected = ranked_tokens(logits, rows, 9, stream)
    assert [len(ids) for ids in expected[:4]] == [9, 0, 4, 9]
    assert rank_pool(4).run(ranked, logits, rows, 9, stream) == [expected] * 4


def listed(group: RankGroup, logits: torch.Tensor, rows: SamplingRows, ids: list[int], mode: Any) -> Any:
    shard = vocab_shard(logits.shape[1], group.rank, group.size)
    return ParallelSampler(group, shard).logprobs(logits[:, shard.first : shard.end], ids, 5, mode, rows)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("vocab_size", [7, 2003])
def test_logprobs(rank_pool: Pools, mode: Any, vocab_size: int) -> None:
    rows = rows_of(KINDS["all"])
    logits = logits_of(rows.num_rows, vocab_size, rounded=True)  # with ties
    logits[0, 2:] = float("-inf")
    token_ids = [(37 * row) % vocab_size for row in range(rows.num_rows)]
    expected = logprobs_of(logits, token_ids, 5, mode, rows)
    for answers in rank_pool(4).run(listed, logits, rows, token_ids, mode):
        for ours, theirs in zip(answers, expected, strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
            assert [value for _, value in ours.top] == pytest.approx([v for _, v in theirs.top], abs=1e-5)


def choose_by_own_scores(group: RankGroup, logits: torch.Tensor, rows: SamplingRows) -> list[int]:
    """What goes wrong without care: noise numbered from 0 in every shard."""
    shard = vocab_shard(logits.shape[1], group.rank, group.size)
    sampled: SampledRows = sample_eager(logits[:, shard.first : shard.end], rows, "target")
    return [shard.first + token_id for token_id in sampled.token_ids.tolist()]


def test_negative_control(rank_pool: Pools) -> None:
    rows = rows_of(KINDS["plain"])
    logits = logits_of(rows.num_rows, 2003)
    expected = sample_eager(logits, rows, "target").token_ids.tolist()
    first, second = rank_pool(2).run(choose_by_own_scores, logits, rows)
    assert any(token_id not in pair for token_id, *pair in zip(expected, first, second, strict=True))
