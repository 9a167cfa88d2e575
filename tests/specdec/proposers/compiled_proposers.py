"""Proposers whose drafters run as native calls."""

from __future__ import annotations

from functools import cache

from specdec.core.idle_work import idle_work_of
from specdec.model.config import CompileConfig
from specdec.proposers.base import Proposer
from specdec.proposers.compiled_drafters import DrafterCompilation
from specdec.sampling.sampler import Sampler

HOW = DrafterCompilation(name="heads", config=CompileConfig())


@cache
def warm_sampler() -> Sampler:
    sampler = Sampler()
    sampler.warm_up()
    assert sampler.is_compiled
    return sampler


def compiled(proposer: Proposer) -> Proposer:
    (work,) = idle_work_of(proposer)
    while work.pending():
        work.run_next()
    assert work.state == "ready"
    return proposer
