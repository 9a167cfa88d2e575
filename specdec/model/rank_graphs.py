"""The compiled forward of a model that several ranks hold: made by all of them together, or by none."""

from __future__ import annotations

import hashlib

from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward, can_stay_compiled
from specdec.model.native_compile import CHECK_STAGE
from specdec.model.parallel.grid import RankGrid
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.runner import ForwardGraphs, ModelRunner

_FAILED = "failed "


def compile_over_ranks(runner: ModelRunner, config: CompileConfig, like: ForwardGraphs | None = None) -> None:
    """Let `runner`, which has this rank's part of a model, run compiled where that is possible.

    `like` is what another runner was given that has the same weights, in part at least.

    Ranks of a stage hand each other rows within the forward; stages hand on hidden states between forwards.
    All ranks call it at the same time, before they run anything; what one of them cannot compile all run
    eagerly, and a log line of each says why. It takes what the C++ build takes (once per machine) and a
    second or two.

    Raises:
        TransportError: a rank is gone.
    """
    if config.mode == "off" or runner.loaded.device.type != "cpu" or not can_stay_compiled(runner.loaded):
        return
    grid = runner.loaded.grid
    assert grid is not None
    slots = None if grid.tensor is None else RankSlots(grid.tensor)
    compiled = CompiledForward(runner, config, slots, like if isinstance(like, CompiledForward) else None)
    while compiled.pending() and compiled.stage != CHECK_STAGE:
        compiled.run_next()
    _share_fate(compiled, grid)
    while compiled.pending():
        compiled.run_next()
    _share_fate(compiled, grid)
    runner.graphs = compiled


def _share_fate(compiled: CompiledForward, grid: RankGrid) -> None:
    """Give up when another rank has, or ranks of one stage would meet in different places."""
    own = f"{_FAILED}{compiled.failure}" if compiled.state == "failed" else _digest(compiled)
    answers = [answer.decode(errors="replace") for answer in grid.ranks.exchange(own.encode())]
    if compiled.state == "failed":
        return
    for rank, answer in enumerate(answers):
        if answer.startswith(_FAILED):
            compiled.give_up(f"rank {rank}: {answer.removeprefix(_FAILED)}")
            return
    for rank, answer in enumerate(answers):
        first = rank - rank % grid.width
        if answer != answers[first]:
            compiled.give_up(f"rank {rank} computes something else than rank {first}")
            return


def _digest(compiled: CompiledForward) -> str:
    return hashlib.blake2b(repr(list(compiled.meetings)).encode(), digest_size=8).hexdigest()
