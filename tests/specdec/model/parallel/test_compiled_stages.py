"""Stages that run compiled: bit for bit the logits of the whole model run compiled.

Every row is computed by the same operations in the same order, wherever layers are divided; two stages of two
ranks are compared with two ranks that hold all layers, whose sums are made in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.kv.config import CacheConfig
from specdec.model import native_compile
from specdec.model.batch import SequenceSlice
from specdec.model.config import ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import load_model
from specdec.model.lowering import ADD, MUL, Elementwise
from specdec.model.parallel import stage as stages
from specdec.model.parallel.group import RankGroup
from specdec.model.pipeline import StageRunner
from specdec.model.rank_graphs import compile_over_ranks
from specdec.model.recording import CannotLower
from specdec.model.runner import ModelRunner
from tests.architectures import ARCHITECTURES, VARIED_ARCHITECTURES, VOCAB_SIZE, save_model
from tests.rank_pool import Pools

Folders = Callable[[str], Path]

NUM_LAYERS = 5
TOKENS = random.Random(5).choices(range(2, VOCAB_SIZE), k=40)
CUTS = ((0, 25), (25, 26), (26, 31), (31, 40))
GRIDS = {"2": (2, 1), "3": (3, 1), "2x2": (2, 2)}
"""Stages, and ranks of each."""
DTYPES = ("float32", "bfloat16")
SETTINGS = tuple(product(GRIDS, DTYPES))
COVER = tuple((name, *setting) for name, setting in zip(ARCHITECTURES, cycle(SETTINGS), strict=False))
"""Every architecture in one setting, and every setting."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How stages run."""

    stages: int = 1
    width: int = 1
    compiled: bool = True
    dtype: str = "float32"
    min_tokens: int = 6
    num_threads: int = 1
    row_by_row: bool = False


class Ran(NamedTuple):
    logits: torch.Tensor
    state: str
    failure: str


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(f"compiled-stages-{architecture}")
        save_model(folder, architecture, num_layers=NUM_LAYERS)
        return folder

    return make


def run(group: RankGroup | None, folder: Path, way: Way) -> Ran:
    """Logits of TOKENS, where they come out."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(way.num_threads)
    try:
        return forward(runner_of(group, folder, way), way)
    finally:
        torch.set_num_threads(threads_before)


def runner_of(group: RankGroup | None, folder: Path, way: Way) -> ModelRunner:
    config = ModelConfig.model_validate(
        {
            "model": str(folder),
            "dtype": way.dtype,
            "tensor_parallel_size": way.width,
            "pipeline_parallel_size": way.stages,
            "compile": {"mode": "auto" if way.compiled else "off"},
        }
    )
    cache = CacheConfig(block_size=4, num_blocks=70)
    loaded = load_model(config, None, group)
    runner = (
        ModelRunner(loaded, cache, max_num_seqs=2)
        if loaded.stage is None
        else StageRunner(loaded, cache, max_num_seqs=2, micro_batch_tokens=way.min_tokens)
    )
    if group is not None:
        compile_over_ranks(runner, config.compile)
    elif way.compiled:
        compiled = CompiledForward(runner, config.compile)
        compiled.warm_up()
        runner.graphs = compiled
    return runner


def forward(runner: ModelRunner, way: Way) -> Ran:
    cuts = [(at, at + 1) for at in range(len(TOKENS))] if way.row_by_row else CUTS
    rotary = runner.loaded.rotary
    rows = [
        runner.forward(
            [
                SequenceSlice(
                    token_ids=TOKENS[start:end],
                    start=start,
                    block_table=range(1, 11),
                    num_logit_rows=end - start,
                    shift=None if rotary is None else rotary.shift(1, 40),
                )
            ]
        ).clone()
        for start, end in cuts
    ]
    compiled = runner.graphs
    if not isinstance(compiled, CompiledForward):
        return Ran(torch.cat(rows), "off", "")
    return Ran(torch.cat(rows), compiled.state, compiled.failure)


def whole(parts: list[Ran]) -> torch.Tensor:
    return torch.cat([part.logits for part in parts if len(part.logits)], -1)


def require_compiled(parts: list[Ran]) -> None:
    if any("compiler" in part.failure for part in parts):
        pytest.skip("no compiled forward here")
    assert [(part.state, part.failure) for part in parts] == [("ready", "")] * len(parts)


def undivided(rank_pool: Pools, folder: Path, width: int, dtype: str) -> torch.Tensor:
    """Logits of the same ranks without stages."""
    way = Way(width=width, dtype=dtype)
    parts = [run(None, folder, way)] if width == 1 else rank_pool(width).run(run, folder, way)
    require_compiled(parts)
    return whole(parts)


def check(rank_pool: Pools, folder: Path, grid: str, dtype: str) -> None:
    num_stages, width = GRIDS[grid]
    parts = rank_pool(num_stages * width).run(run, folder, Way(stages=num_stages, width=width, dtype=dtype))
    require_compiled(parts)
    assert all(len(part.logits) == 0 for part in parts[width:])
    assert torch.equal(whole(parts), undivided(rank_pool, folder, width, dtype))


@pytest.mark.parametrize(
    ("architecture", "grid", "dtype"),
    [pytest.param(*one, marks=[] if one[0] in VARIED_ARCHITECTURES else [pytest.mark.full]) for one in COVER],
)
def test_the_bits_of_the_whole_model(
    rank_pool: Pools, folder_of: Folders, architecture: str, grid: str, dtype: str
) -> None:
    check(rank_pool, folder_of(architecture), grid, dtype)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("grid", "dtype"), SETTINGS)
def test_the_bits_of_the_whole_model_in_every_setting(
    rank_pool: Pools, folder_of: Folders, architecture: str, grid: str, dtype: str
) -> None:
    check(rank_pool, folder_of(architecture), grid, dtype)


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        ("3", "float32"),
        ("2x2", "bfloat16"),
        pytest.param("3", "bfloat16", marks=pytest.mark.full),
        pytest.param("2x2", "float32", marks=pytest.mark.full),
    ],
)
def test_the_same_bits_whatever_the_parts_and_the_threads(
    rank_pool: Pools, folder_of: Folders, grid: str, dtype: str
) -> None:
    num_stages, width = GRIDS[grid]
    folder = folder_of("qwen3_moe")
    expected = undivided(rank_pool, folder, width, dtype)
    for more in ({"min_tokens": 1}, {"min_tokens": 64}, {"num_threads": 3}, {"row_by_row": True}):
        way = Way(stages=num_stages, width=width, dtype=dtype, **more)
        assert torch.equal(whole(rank_pool(num_stages * width).run(run, folder, way)), expected), way


def test_other_bits_would_be_seen(rank_pool: Pools, folder_of: Folders) -> None:
    """Eager stages have other bits, and so have stages that lose the last bit of a hidden state."""
    folder = folder_of("llama")
    for dtype in DTYPES:
        expected = undivided(rank_pool, folder, 1, dtype)
        eager = whole(rank_pool(2).run(run, folder, Way(stages=2, dtype=dtype, compiled=False)))
        nudged = whole(rank_pool(2).run(run_with_nudge, folder, Way(stages=2, dtype=dtype)))
        for other in (eager, nudged):
            assert not torch.equal(other, expected)
            torch.testing.assert_close(other, expected, rtol=0, atol=0.5 if dtype == "bfloat16" else 1e-4)


def run_with_nudge(group: RankGroup, folder: Path, way: Way) -> Ran:
    """The first stage hands on another number next to each one."""
    own = stages.Stage.hand_on

    def hand_on(self: stages.Stage, hidden: torch.Tensor, tag: int) -> Any:
        return own(self, hidden.nextafter(torch.full_like(hidden, torch.inf)), tag)

    stages.Stage.hand_on = hand_on  # type: ignore[method-assign]
    try:
        return run(group, folder, way)
    finally:
        stages.Stage.hand_on = own  # type: ignore[method-assign]


# ----------------------------------------------------------------------------------- what goes wrong


def run_with_broken_rank(group: RankGroup, folder: Path, way: Way, place: str, who: int) -> Ran:
    """Rank `who` cannot lower the forward, or lowers it wrongly."""
    before = getattr(native_compile, place)

    def broken(*args: Any) -> Any:
        if place == "lower":
            raise CannotLower("as it happens")
        operations, results = args
        last = max(
            index for index, one in enumerate(operations) if isinstance(one, Elementwise) and one.op == ADD
        )
        operations[last] = replace(operations[last], op=MUL)
        return before(operations, results)

    if group.rank == who:
        setattr(native_compile, place, broken)
    try:
        return run(group, folder, way)
    finally:
        setattr(native_compile, place, before)


@pytest.mark.parametrize("grid", ["3", "2x2"])
def test_what_one_stage_cannot_compile_all_run_eagerly(
    rank_pool: Pools, folder_of: Folders, grid: str
) -> None:
    num_stages, width = GRIDS[grid]
    folder, way = folder_of("llama"), Way(stages=num_stages, width=width)
    size = num_stages * width
    parts = rank_pool(size).run(run_with_broken_rank, folder, way, "lower", size - 1)
    assert [part.state for part in parts] == ["failed"] * size
    others = [f"rank {size - 1}: as it happens"] * (size - 1)
    assert [part.failure for part in parts] == [*others, "as it happens"]
    one = run(None, folder, Way(compiled=False)).logits
    torch.testing.assert_close(whole(parts), one, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "who",
    [
        pytest.param(0, id="last stage", marks=pytest.mark.full),
        pytest.param(1, id="stage between", marks=pytest.mark.full),
        pytest.param(2, id="first stage"),
    ],
)
def test_a_stage_that_computes_something_else_is_found_out(
    rank_pool: Pools, folder_of: Folders, who: int
) -> None:
    """Logits are compared, where they come out."""
    folder, way = folder_of("llama"), Way(stages=3)
    parts = rank_pool(3).run(run_with_broken_rank, folder, way, "fuse", who)
    assert [part.state for part in parts] == ["failed"] * 3
    assert "its logits differ" in parts[0].failure
    assert [part.failure for part in parts[1:]] == [f"rank 0: {parts[0].failure}"] * 2
    one = run(None, folder, Way(compiled=False)).logits
    torch.testing.assert_close(whole(parts), one, rtol=0, atol=2e-5)
