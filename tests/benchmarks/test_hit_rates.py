"""The counting of hits."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.hit_rates import BEYOND, Tally, headlines, num_standing, rank_of, summarise
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal


def proposal(committed_len: int, prefix_hash: int) -> Proposal:
    return Proposal(
        request_id=RequestId("a"), committed_len=committed_len, prefix_hash=prefix_hash, token_ids=(1,)
    )


def test_rank_among_the_guesses_behind_the_same_tokens() -> None:
    proposals = [proposal(7, 1), proposal(8, 2), proposal(7, 3), proposal(8, 4), proposal(7, 5)]
    assert [rank_of(proposals, 7, prefix_hash) for prefix_hash in (1, 3, 5)] == [0, 1, 2]
    assert rank_of(proposals, 8, 4) == 1
    assert rank_of(proposals, 8, 5) == BEYOND
    assert rank_of(proposals, 9, 1) == BEYOND


def test_standing_tokens() -> None:
    assert num_standing((1, 2, 3), (1, 2, 3, 4)) == 3
    assert num_standing((1, 2, 3), (1, 5, 3)) == 1
    assert num_standing((1, 2, 3), (1, 2)) == 2
    assert num_standing((), (1, 2)) == 0


def tally(miss: dict[int, int], full: dict[int, int]) -> Tally:
    return Tally(ranks={"miss": Counter(miss), "full": Counter(full)}, accepted=Counter({0: 1}))


def test_hit_rates() -> None:
    one = tally({0: 2, 2: 1, BEYOND: 1}, {0: 3, 1: 1})
    assert one.hit_rate(1) == 5 / 8
    assert one.hit_rate(1, ("miss",)) == 0.5
    assert one.hit_rate(3, ("miss",)) == 0.75
    assert one.hit_rate(10, ("full",)) == 1.0
    assert tally({}, {}).hit_rate(1) is None


def test_rates_are_those_of_all_verdicts_and_errors_those_of_streams() -> None:
    tallies = [tally({0: 8, BEYOND: 2}, {0: 1}), tally({BEYOND: 2}, {0: 1}), tally({}, {0: 1})]
    summary = summarise(tallies)
    assert summary["num_verdicts"] == {"miss": 12, "full": 3}
    assert summary["hit_rates"]["miss_1"]["mean"] == pytest.approx(8 / 12)
    assert summary["hit_rates"]["miss_1"]["error"] == pytest.approx(0.4)  # of 0.8 and 0, one has none
    assert summary["hit_rates"]["full_1"] == {"mean": 1.0, "error": 0.0}
    cells = [{"temperature": 1.0, "by": by, **summary} for by in ("noise", "probability")]
    numbers = headlines({"cells": cells})
    assert numbers["hit_miss_1_t1_noise"] == pytest.approx(8 / 12)
    assert numbers["hit_any_3_t1_probability"] == pytest.approx(11 / 15)
