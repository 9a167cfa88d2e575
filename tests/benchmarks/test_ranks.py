"""The arithmetic of the comparison, and that its configurations are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.in_process import RunRecord
from benchmarks.ranks import FULL, QUICK, SYSTEMS, headlines, summarise, system_config


def run(decode_s: float, token_ids: tuple[int, ...] = (1, 2, 3), **more: Any) -> RunRecord:
    numbers = {"num_rounds": 11, "num_prefill_rounds": 1, "verify_s": 0.05, **more}
    return RunRecord(
        token_ids=(token_ids,),
        seconds=decode_s + 0.5,
        prefill_s=0.5,
        draft_s=0.0,
        coordinator_s=0.01,
        num_drafts=0,
        num_accepted=0,
        **numbers,
    )


def runs(**decode_s: float) -> dict[str, list[RunRecord]]:
    return {name: [run(99.0), run(decode_s.get(name, 0.1)), run(0.1)] for name in SYSTEMS}


def test_rounds_are_compared_pair_by_pair_without_the_first() -> None:
    result = summarise(runs(pp2_eager=0.4, pp2=0.2, one_1_thread=0.1))
    assert result["round_ms"]["pp2"].values == pytest.approx((20.0, 10.0))
    assert result["pp2_vs_eager"].values == pytest.approx((2.0, 1.0))
    assert result["pp2_vs_one"].values == pytest.approx((0.5, 1.0))
    assert result["pp2_added_ms"].values == pytest.approx((10.0, 0.0))
    assert result["tokens_per_s"]["tp2"].values == pytest.approx((20.0, 20.0))


def test_texts_are_compared() -> None:
    records = runs()
    assert all(summarise(records)["same_text"].values())
    records["tp2"][1] = run(0.1, (1, 2, 4))
    same = summarise(records)["same_text"]
    assert not same["tp2"]
    assert same["pp2"]


def test_every_cell_has_headlines_of_its_own() -> None:
    cells = [{"batch": batch, "k": k, **summarise(runs())} for batch in (1, 8) for k in (0, 4)]
    numbers = headlines({"cells": cells})
    assert len(numbers) == 16
    assert numbers["pp2_vs_eager_b8_draft"] == pytest.approx(1.0)


def test_ranks_of_every_system_fit_two_cores() -> None:
    for system in SYSTEMS.values():
        config = system_config(system, FULL, Path("target"), Path("draft"))
        assert config.target.num_ranks == system.tensor * system.stages
        assert config.target.num_ranks * system.num_threads <= 2
        assert config.target.compile.mode == ("auto" if system.compiled else "off")
    assert QUICK.rounds < FULL.rounds
