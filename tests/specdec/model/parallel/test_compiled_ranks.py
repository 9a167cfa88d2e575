"""Ranks that run compiled: the logits of eager ranks and of the whole model, however rows travel."""

from __future__ import annotations

import gc
import mmap
import os
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.core.errors import ResourceError, TransportError
from specdec.kv.config import CacheConfig
from specdec.model import native_compile
from specdec.model.batch import SequenceSlice
from specdec.model.config import ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import load_model
from specdec.model.parallel import shared_slots
from specdec.model.parallel.group import RankGroup
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.rank_graphs import compile_over_ranks
from specdec.model.recording import CannotLower
from specdec.model.runner import ModelRunner
from tests.architectures import ARCHITECTURES, VOCAB_SIZE, save_model
from tests.rank_pool import BreakablePools, Failure, Pools

Folders = Callable[[str], Path]

TOKENS = random.Random(5).choices(range(2, VOCAB_SIZE), k=40)
CUTS = ((0, 25), (25, 26), (26, 31), (31, 40))
COVER = {
    "llama": 4,
    "llama_tied": 2,
    "gpt2": 4,
    "olmo2": 2,
    "gemma2": 2,
    "phi3_longrope": 2,
    "mixtral": 2,
    "falcon": 2,
}


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(f"compiled-ranks-{architecture}")
        save_model(folder, architecture)
        return folder

    return make


@dataclass(frozen=True)
class Way:
    """How ranks run."""

    compiled: bool = True
    dtype: str = "float32"
    shares_memory: bool = True
    num_threads: int = 1
    row_by_row: bool = False


class Ran(NamedTuple):
    logits: torch.Tensor
    state: str
    failure: str
    is_shared: bool | None


def runner_of(group: RankGroup | None, folder: Path, way: Way) -> ModelRunner:
    mode = "auto" if way.compiled else "off"
    size = 1 if group is None else group.size
    config = ModelConfig.model_validate(
        {"model": str(folder), "dtype": way.dtype, "tensor_parallel_size": size, "compile": {"mode": mode}}
    )
    cache = CacheConfig(block_size=4, num_blocks=70)
    runner = ModelRunner(load_model(config, None, group), cache, max_num_seqs=2)
    if group is not None:
        compile_over_ranks(runner, config.compile)
    return runner


def run(group: RankGroup | None, folder: Path, way: Way) -> Ran:
    """Logits of TOKENS, of all token ids or this rank's."""
    folder_before, threads_before = shared_slots._PROCESSES, torch.get_num_threads()
    torch.set_num_threads(way.num_threads)
    if not way.shares_memory and group is not None and group.rank == 1:
        shared_slots._PROCESSES = Path("/no/such/folder")
    try:
        runner = runner_of(group, folder, way)
        return forward(runner, way)
    finally:
        shared_slots._PROCESSES = folder_before
        torch.set_num_threads(threads_before)


def forward(runner: ModelRunner, way: Way) -> Ran:
    cuts = [(at, at + 1) for at in range(len(TOKENS))] if way.row_by_row else CUTS
    rows = [
        runner.forward(
            [
                SequenceSlice(
                    token_ids=TOKENS[start:end],
                    start=start,
                    block_table=range(1, 11),
                    num_logit_rows=end - start,
                    shift=None if runner.loaded.rotary is None else runner.loaded.rotary.shift(1, 40),
                )
            ]
        ).clone()
        for start, end in cuts
    ]
    compiled = runner.graphs
    if not isinstance(compiled, CompiledForward):
        return Ran(torch.cat(rows), "off", "", None)
    slots = compiled._slots
    return Ran(torch.cat(rows), compiled.state, compiled.failure, None if slots is None else slots.is_shared)


def whole(parts: list[Ran]) -> torch.Tensor:
    return torch.cat([part.logits for part in parts], -1)


def require_compiled(parts: list[Ran]) -> None:
    if any("compiler" in part.failure for part in parts):
        pytest.skip("no compiled forward here")
    assert [(part.state, part.failure) for part in parts] == [("ready", "")] * len(parts)


@pytest.mark.parametrize(
    "architecture",
    [*COVER, *(pytest.param(name, marks=pytest.mark.full) for name in ARCHITECTURES if name not in COVER)],
)
def test_logits_are_those_of_eager_ranks_and_of_one(
    rank_pool: Pools, folder_of: Folders, architecture: str
) -> None:
    pool, folder = rank_pool(COVER.get(architecture, 2)), folder_of(architecture)
    compiled = pool.run(run, folder, Way())
    require_compiled(compiled)
    one = run(None, folder, Way(compiled=False)).logits
    torch.testing.assert_close(whole(compiled), one, rtol=0, atol=2e-5)
    eager = pool.run(run, folder, Way(compiled=False))
    torch.testing.assert_close(whole(compiled), whole(eager), rtol=0, atol=2e-5)
    assert torch.equal(whole(compiled).argmax(-1), one.argmax(-1))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama_tied", "float32"),
        ("mixtral", "bfloat16"),
        pytest.param("llama_tied", "bfloat16", marks=pytest.mark.full),
        pytest.param("mixtral", "float32", marks=pytest.mark.full),
    ],
)
def test_the_same_bits_whatever_the_batch_the_threads_and_the_way(
    rank_pool: Pools, folder_of: Folders, architecture: str, dtype: str
) -> None:
    """Sums are made in the order of the ranks; between machines rows travel over the group."""
    pool, folder = rank_pool(2), folder_of(architecture)
    first = pool.run(run, folder, Way(dtype=dtype))
    require_compiled(first)
    assert all(part.is_shared for part in first)
    for way in (
        Way(dtype=dtype, row_by_row=True),
        Way(dtype=dtype, num_threads=2),
        Way(dtype=dtype, shares_memory=False),
        Way(dtype=dtype, shares_memory=False, num_threads=3, row_by_row=True),
    ):
        again = pool.run(run, folder, way)
        require_compiled(again)
        assert all(part.is_shared == way.shares_memory for part in again)
        assert torch.equal(whole(first), whole(again)), way


def count_files(group: RankGroup, folder: Path) -> list[int]:
    counts = []
    for _ in range(3):
        run(group, folder, Way())
        gc.collect()
        links = []
        for one in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of the folder itself is gone
                links.append(os.readlink(one))
        counts.append(sum("drafthouse-ranks" in link for link in links))
    return counts


def test_no_file_is_left_open(rank_pool: Pools, folder_of: Folders) -> None:
    for counts in rank_pool(2).run(count_files, folder_of("llama")):
        assert counts == [counts[0]] * 3
        assert counts[0] <= 1


def open_another(group: RankGroup) -> bool:
    """Rank 1 finds a file, but not rank 0's: as on another machine."""
    real = os.pread
    if group.rank == 1:
        shared_slots.os.pread = lambda *_: bytes(16)
    try:
        return RankSlots(group).is_shared
    finally:
        shared_slots.os.pread = real


def test_another_file_at_the_same_place_is_not_taken(rank_pool: Pools) -> None:
    assert rank_pool(2).run(open_another) == [False, False]


# ----------------------------------------------------------------------------------- what goes wrong


def run_with_broken_rank(group: RankGroup, folder: Path, place: str) -> Ran:
    """Rank 1 cannot lower the forward, or lowers it wrongly."""
    before = getattr(native_compile, place)

    def broken(*args: Any) -> Any:
        if place == "lower":
            raise CannotLower("as it happens")
        operations, results = args
        return before([*operations[:3], *operations[4:]], results)

    if group.rank == 1:
        setattr(native_compile, place, broken)
    try:
        return run(group, folder, Way())
    finally:
        setattr(native_compile, place, before)


@pytest.mark.parametrize("place", ["lower", "fuse"])
def test_what_one_rank_cannot_compile_all_run_eagerly(
    rank_pool: Pools, folder_of: Folders, place: str
) -> None:
    folder = folder_of("llama")
    parts = rank_pool(2).run(run_with_broken_rank, folder, place)
    assert [part.state for part in parts] == ["failed", "failed"]
    assert parts[0].failure.startswith("rank 1: ")
    if place == "lower":
        assert [part.failure for part in parts] == ["rank 1: as it happens", "as it happens"]
    one = run(None, folder, Way(compiled=False)).logits
    torch.testing.assert_close(whole(parts), one, rtol=0, atol=2e-5)


def run_for_ever(group: RankGroup, folder: Path, way: Way) -> None:
    runner = runner_of(group, folder, way)
    while True:
        forward(runner, way)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_is_noticed_within_a_forward(
    breakable_pool: BreakablePools, folder_of: Folders, victim: int
) -> None:
    with breakable_pool(2) as pool:
        way = Way()
        pool.send(run, folder_of("llama"), way)
        for rank in range(2):
            pool.receive(rank)
        pool.send(run_for_ever, folder_of("llama"), way)
        pool.kill(victim)
        failure = pool.receive(1 - victim)
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, TransportError)
    assert "lost a peer" in failure.text


def run_alone(group: RankGroup, folder: Path, who: int, timeout_s: float) -> str:
    """Rank `who` runs a forward that the other one, alive, takes no part in."""
    runner = runner_of(group, folder, Way())
    assert isinstance(runner.graphs, CompiledForward)
    forward(runner, Way())
    slots = runner.graphs._slots
    assert slots is not None
    slots.native.timeout_ms = int(1000 * timeout_s)
    message = ""
    if group.rank == who:
        try:
            forward(runner, Way())
        except TransportError as error:
            message = str(error)
    group.exchange(b"over")  # the other one lives that long
    return message


def test_a_rank_that_does_not_come_is_noticed(rank_pool: Pools, folder_of: Folders) -> None:
    assert "lost a peer" in rank_pool(2).run(run_alone, folder_of("llama"), 0, 0.3)[0]


def count_on(group: RankGroup) -> list[int]:
    slots = RankSlots(group, 64)
    assert isinstance(slots._memory, mmap.mmap)
    numbers = [slots._last_meeting()]
    struct.pack_into("=I", slots._memory, 64 * group.rank, 0xC000_0000)
    slots.reserve(1000)
    for rank in range(group.size):  # that of every rank is there before anybody goes on
        numbers += struct.unpack_from("=I", slots._memory, 64 * rank)
    group.exchange(b"seen")
    return numbers


def test_meetings_are_counted_on_in_larger_slots(rank_pool: Pools) -> None:
    """Numbers of weeks of decoding would be taken for reached otherwise, and nobody waited for."""
    assert rank_pool(2).run(count_on) == [[0, 0xC000_0000, 0xC000_0000]] * 2


def grow(group: RankGroup, can_share: bool) -> str:
    slots = RankSlots(group, 64)
    before = bytes(str(slots.is_shared), "ascii")
    slots.reserve(64)
    slots.reserve(1000)
    assert slots.native.slot_bytes == 1024
    if not can_share:
        slots._share = lambda *_, **__: False  # type: ignore[method-assign]
    try:
        slots.reserve(5000)
    except ResourceError as error:
        return str(error)
    return (before + b" " + bytes(str(slots.is_shared), "ascii")).decode()


def test_slots_grow(rank_pool: Pools) -> None:
    assert rank_pool(2).run(grow, True) == ["True True"] * 2
    for message in rank_pool(2).run(grow, False):
        assert "there is no memory for the" in message
