"""The arithmetic of the comparison, its checkpoints and texts, and that a cell is measured as it says."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks import long_context_plots
from benchmarks.kv_costs import Step, Stream, inputs_of, kv_bytes
from benchmarks.long_context import (
    FULL,
    LONG,
    MAIN,
    QUICK,
    Bench,
    Beside,
    Cell,
    Plan,
    Runs,
    acceptance_of_tokens,
    failures_of,
    growth_with_batch,
    headlines_of,
    only,
    summarise,
    table_of,
)
from benchmarks.long_context_engines import ORDINARY, Drafter, LongEngine, Room
from benchmarks.long_texts import LongTexts
from benchmarks.multi_head import repeat_kv_heads
from benchmarks.report import to_plain
from benchmarks.steady import Batch, Counted
from benchmarks.turns import Turns
from specdec.core.errors import CheckpointError, ConfigError, UserError
from specdec.kv.selection import KvPolicyName
from specdec.scheduling.speculation.controller import FixedController

DEMO = Path(__file__).parents[2] / "models" / "demo"
CONTROLLED = Cell(heads="gqa", drafter=MAIN, batch=32, context=LONG, with_controller=True)


def test_every_query_head_gets_its_keys_and_values(small: Path, tmp_path: Path) -> None:
    assert repeat_kv_heads(small, tmp_path / "wide") == 4
    before = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    assert after.config.num_key_value_heads == 4
    tokens = torch.arange(24)[None] % 64
    with torch.inference_mode():
        torch.testing.assert_close(after(tokens).logits, before(tokens).logits, rtol=1e-5, atol=1e-5)
        weight = after.model.layers[0].self_attn.k_proj.weight
        weight.copy_(weight.roll(8, dims=0))  # heads in another order are another function
        assert not torch.allclose(after(tokens).logits, before(tokens).logits, rtol=1e-3, atol=1e-3)
    with pytest.raises(ConfigError, match="not empty"):
        repeat_kv_heads(small, tmp_path / "wide")
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError):
        repeat_kv_heads(tmp_path / "none", tmp_path / "other")


def test_pieces_of_texts_differ_and_come_from_all_files() -> None:
    texts = LongTexts(files=[tuple(range(100)), tuple(range(1000, 1025)), tuple(range(2000, 2060))])
    pieces = texts.prompts(8, 20)
    assert len(set(pieces)) == 8
    assert {piece[0] // 1000 for piece in pieces[:3]} == {0, 1, 2}
    assert texts.prompts(3, 20) == pieces[:3]
    assert len(texts.prompts(20, 20)) == 20, "overlapping ones, where others do not do"
    with pytest.raises(UserError, match="pieces of 90 tokens"):
        texts.prompts(5, 90)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_acceptance_is_that_of_the_tokens_per_round(rate: float, k: int) -> None:
    omega = sum(rate**i for i in range(k + 1))
    assert acceptance_of_tokens(omega, k) == pytest.approx(rate, abs=1e-6)


def runs(best: float, plain: float, controller: float | None = None, pairs: int = 4) -> Runs:
    def counted(rate: float, tokens_per_round: float, wobble: float) -> list[Counted]:
        return [
            Counted(
                num_tokens=round(32 * tokens_per_round * 100),
                seconds=32 * tokens_per_round * 100 / rate * (1.0 + wobble * (index % 2)),
                num_rounds=100,
            )
            for index in range(pairs)
        ]

    part = {"plain_s": 0.02, "verify_s": 0.03, "draft_s": 0.002, "plain_kv_s": 0.018, "verify_kv_s": 0.02}
    turns = Turns(
        {
            "plain": counted(plain, 1.0, 0.01),
            "best": counted(best, 3.8, 0.02),
            "ordinary": counted(plain * 1.1, 1.5, 0.01),
        }
    )
    if controller is not None:
        turns.counted["controller"] = counted(controller, 3.0, 0.01)
    return Runs(
        turns=turns,
        parts=[{**part, "stream_s": 0.02, "kv_bytes": 500e6}] * pairs,
    )


def a_cell(best: float, plain: float, controller: float | None, **changes: Any) -> dict[str, Any]:
    fields = {"heads": "gqa", "drafter": MAIN, "batch": 32, "context": LONG, **changes}
    return {
        "cell": Cell(**fields),
        "k": 4,
        "tried": {"4": best},
        **summarise(32, 4, runs(best, plain, controller)),
    }


def test_predicted_is_what_parts_and_acceptance_allow() -> None:
    cell = a_cell(2400.0, 1600.0, None)
    assert cell["predicted"].median == pytest.approx(3.8 * 0.02 / (4 * 0.002 + 0.03))
    assert cell["vs_plain"].median == pytest.approx(1.5, rel=0.02)
    assert cell["share_of_predicted"].median == pytest.approx(0.75, rel=0.02)
    assert cell["kernel_bytes_per_s"] == pytest.approx(500e6 / 0.018)
    assert cell["kv_share_of_plain"] == pytest.approx(0.9)
    assert "controller_vs_plain" not in cell
    assert set(to_plain(cell)["parts"]) >= {"plain_s", "verify_s", "draft_s"}


def test_headlines_are_of_the_drafter_that_was_best_when_tried() -> None:
    other = Drafter(method="self", policy="streaming", budget=64)
    cells = [
        a_cell(2400.0, 1600.0, 2300.0),
        a_cell(2500.0, 1600.0, None, drafter=other),
        a_cell(9000.0, 1600.0, None, temperature=0.0),
        a_cell(8000.0, 8000.0, 7000.0, context=512),
        a_cell(2000.0, 1000.0, None, heads="mha"),
    ]
    headlines = headlines_of(cells)
    assert headlines["speedup_b32_4k_gqa"] == cells[1]["vs_plain"].median
    assert headlines["speedup_b32_4k_mha"] == cells[4]["vs_plain"].median
    assert headlines["worst_vs_plain"] == cells[3]["controller_vs_plain"].upper < 0.97
    assert headlines["share_of_predicted"] == cells[1]["share_of_predicted"].median
    assert headlines["share_of_predicted_worst"] == cells[3]["share_of_predicted"].median
    assert "least_growth_4k_gqa" not in headlines
    assert headlines["kernel_gb_s_share_of_machine"] == pytest.approx(
        cells[1]["kernel_bytes_per_s"] / cells[1]["stream_bytes_per_s"]
    )
    (failure,) = failures_of(cells)
    assert "32 x 512" in failure
    Console(file=None, quiet=True).print(table_of(cells))


def test_growth_is_that_of_the_worst_step_to_a_larger_batch() -> None:
    cells = [
        a_cell(1000.0 * speedup, 1000.0, None, batch=batch)
        for batch, speedup in ((32, 1.6), (1, 1.5), (8, 1.2), (4, 1.4))
    ]
    growth = growth_with_batch(cells)
    assert growth == pytest.approx(1.2 / 1.4, rel=0.02)
    assert growth_with_batch(cells[:1]) is None
    assert growth_with_batch([*cells[:1], a_cell(9000.0, 1000.0, None, batch=64, context=512)]) is None


def test_the_plan_is_what_is_asked_for() -> None:
    grid = {
        (cell.batch, cell.context)
        for cell in FULL.cells
        if cell.heads == "gqa" and cell.drafter == MAIN and cell.with_controller
    }
    assert grid == {(b, c) for b in (1, 4, 8, 16, 32) for c in (512, 1024, 2048, LONG)}
    assert {cell.drafter.policy for cell in FULL.cells} == set(get_args(KvPolicyName))
    scored = set(get_args(KvPolicyName)) - {"full", "streaming"}
    for pair in {("self", one) for one in (*scored, "streaming")} | {("draft_model", "streaming")}:
        drafters = {cell.drafter for cell in FULL.cells if cell.heads == "gqa"}
        assert len({one.budget for one in drafters if (one.method, one.policy) == pair}) >= 3
    assert all(cell.with_controller for cell in FULL.cells if cell.temperature > 0.0)
    assert {cell.heads for cell in QUICK.cells} == {"gqa", "mha"}
    room = FULL.room(FULL.cells, 2)
    assert room.num_tokens >= 32 * (LONG + FULL.num_tokens)
    assert LONG + FULL.num_tokens < 4096


def test_a_part_of_the_plan() -> None:
    one = only(FULL, "^gqa, self, streaming 256, 8 x 512$")
    assert one.cells == (Cell(heads="gqa", drafter=MAIN, batch=8, context=512, with_controller=True),)
    assert headlines_of([a_cell(2400.0, 1600.0, None, batch=8, context=512)]).keys() == {
        "share_of_predicted_worst"
    }
    with pytest.raises(typer.BadParameter, match=rf"none of {len(FULL.cells)} cells \(gqa, self, "):
        only(FULL, "9 x 512")


def test_a_draft_keeps_its_budget_in_whole_blocks() -> None:
    assert MAIN.kept_tokens(LONG) == 256 + 16
    assert MAIN.kept_tokens(100) == 100
    assert ORDINARY.kept_tokens(LONG) == LONG
    assert Drafter(method="self", policy="streaming", budget=0.05).kept_tokens(4000) == 208 + 16


@pytest.mark.full
@pytest.mark.usefixtures("one_thread_each")
def test_a_cell_is_measured(tmp_path: Path) -> None:
    """Two drafters of the demo family, for a moment: rounds and tokens are those of every sequence."""
    (tmp_path / "target").symlink_to(DEMO / "target")
    room = Room(max_num_seqs=2, num_tokens=6 * 512, max_draft_tokens=3, num_threads=1)
    standalone = Drafter(method="draft_model", policy="streaming", budget=64)
    plan = Plan(cells=(), lengths=(2, 3), pairs=2, block_s=0.02, try_s=0.01, warm_s=0.02, num_tokens=64)
    cell = Cell(heads="gqa", drafter=standalone, batch=2, context=256)
    make = [LongEngine(one, tmp_path / "target", DEMO / "draft", room) for one in (standalone, ORDINARY)]
    with contextlib.ExitStack() as stack:
        engine, ordinary = (stack.enter_context(contextlib.closing(one)) for one in make)
        runner = engine.target.runner
        step = Step(batch=2, rows=3, context=250)
        assert inputs_of(runner, step).metadata.context_lens_host == (243, 243)
        assert kv_bytes(runner, step) == 2 * 240 * 4096
        texts = LongTexts.read(engine.engine.tokenizer)
        beside = Beside(ordinary=ordinary, texts=texts, stream=Stream())
        result = Bench(plan, engine, beside, 4).cell(cell, lambda: None)
        engine.read(prompts := texts.prompts(2, 256))
        before = engine.engine.metrics()
        drafts, tokens = before.num_drafts, before.num_draft_tokens
        counted = engine.decode(Batch(prompts=prompts, num_tokens=64), FixedController(2), 0.02)
        after = engine.engine.metrics()
        assert after.num_drafts - drafts >= 2 * counted.num_rounds, (
            "every sequence has a draft in every round"
        )
        assert after.num_draft_tokens - tokens >= 4 * counted.num_rounds
    assert result["k"] in (2, 3)
    assert 1.0 <= result["tokens_per_round"] <= 4.0
    assert result["predicted"].median > 0
    assert len(result["vs_plain"].values) == 2


def test_results_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [
        a_cell(2400.0, 1600.0, 2300.0),
        a_cell(1500.0, 1000.0, None, batch=8),
        a_cell(8000.0, 8000.0, 8000.0, context=512),
        a_cell(2000.0, 1000.0, None, heads="mha"),
        a_cell(9000.0, 1600.0, None, temperature=0.0),
    ]
    (tmp_path / "results.json").write_text(json.dumps(to_plain({"cells": cells})))
    long_context_plots.main(tmp_path / "results.json", tmp_path)
    text = (tmp_path / "long-context.svg").read_text()
    for label in ("predicted from the parts", "mha, self, streaming 256", "3840", "512"):
        assert label in text
