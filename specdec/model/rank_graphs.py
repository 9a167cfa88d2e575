"""The compiled forward of a model that several ranks hold: made by all of them together, or by none."""

from __future__ import annotations

import hashlib

from specdec.model.config import CompileConfig
from specdec.model.graphs import CHECK_STAGE, CompiledForward
from specdec.model.parallel.group import RankGroup
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.runner import ModelRunner

_FAILED = "failed "


def compile_over_ranks(runner: ModelRunner, ranks: RankGroup, config: CompileConfig) -> None:
    """Let `runner`, which has this rank's part of a model, run compiled where that is possible.

    All ranks call it at the same time, before they run anything; what one of them cannot compile all run
    eagerly, and a log line of each says why. It takes what the C++ build takes (once per machine) and a
    second or two.

    Raises:
        TransportError: a rank is gone.
    """
    if config.mode == "off" or runner.loaded.device.type != "cpu":
        return
    compiled = CompiledForward(runner, config, RankSlots(ranks))
    while compiled.pending() and compiled.stage != CHECK_STAGE:
        compiled.run_next()
    _share_fate(compiled, ranks)
    while compiled.pending():
        compiled.run_next()
    _share_fate(compiled, ranks)
    runner.graphs = compiled


def _share_fate(compiled: CompiledForward, ranks: RankGroup) -> None:
    """Give up when another rank has, or would meet the others somewhere else."""
    own = f"{_FAILED}{compiled.failure}" if compiled.state == "failed" else _digest(compiled)
    answers = [answer.decode(errors="replace") for answer in ranks.exchange(own.encode())]
    if compiled.state == "failed":
        return
    for rank, answer in enumerate(answers):
        if answer.startswith(_FAILED):
            compiled.give_up(f"rank {rank}: {answer.removeprefix(_FAILED)}")
            return
        if answer != answers[0]:
            compiled.give_up(f"rank {rank} computes something else than rank 0")
            return


def _digest(compiled: CompiledForward) -> str:
    return hashlib.blake2b(repr(list(compiled.meetings)).encode(), digest_size=8).hexdigest()
