"""The compiled forward of a model that several ranks hold: made by all of them together, or by none."""

from __future__ import annotations

import hashlib

from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward, can_stay_compiled
from specdec.model.native_compile import CHECK_STAGE
from specdec.model.parallel.grid import RankGrid
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.resumed_forward import ResumedForward
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
    compiled = CompiledForward(
        runner, config, _slots(grid), like if isinstance(like, CompiledForward) else None
    )
    _compile_together(compiled, grid)
    runner.graphs = compiled


def resume_over_ranks(runner: ModelRunner, view: ModelRunner, config: CompileConfig) -> ResumedForward | None:
    """Return what goes on behind an early exit, made by all ranks together; None: nothing is compiled.

    Call it once `compile_over_ranks` is through with both runners.

    Raises:
        TransportError: a rank is gone.
    """
    grid = runner.loaded.grid
    assert grid is not None
    if runner.graphs is None or view.graphs is None:
        return None
    resumed = ResumedForward(runner, view, config, _slots(grid))
    _compile_together(resumed, grid)
    # They have unequal parts where something does not divide evenly, and must not part.
    answers = grid.ranks.exchange(b"%d" % resumed.fewest_rows)
    resumed.fewest_rows = max(map(int, answers))
    return resumed


def _slots(grid: RankGrid) -> RankSlots | None:
    return None if grid.tensor is None else RankSlots(grid.tensor)


def _compile_together(compiled: CompiledForward | ResumedForward, grid: RankGrid) -> None:
    while compiled.pending() and compiled.stage != CHECK_STAGE:
        compiled.run_next()
    _share_fate(compiled, grid)
    while compiled.pending():
        compiled.run_next()
    _share_fate(compiled, grid)


def _share_fate(compiled: CompiledForward | ResumedForward, grid: RankGrid) -> None:
    """Give up when another rank has, or ranks of one stage would meet in different places."""
    own = f"{_FAILED}{compiled.failure}" if compiled.failure else _digest(compiled)
    answers = [answer.decode(errors="replace") for answer in grid.ranks.exchange(own.encode())]
    if compiled.failure:
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


def _digest(compiled: CompiledForward | ResumedForward) -> str:
    return hashlib.blake2b(repr(list(compiled.meetings)).encode(), digest_size=8).hexdigest()
