"""Ranks that are stopped are noticed; ranks that are idle, slow, done or stopped with rank 0 are not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from specdec.engine.engine import Engine
from specdec.engine.ranks import launch
from specdec.engine.ranks.launch import FollowerProcesses
from specdec.model.parallel import heartbeat
from specdec.model.parallel.group import RankGroup
from specdec.model.parallel.heartbeat import MAX_SILENT_LOOKS, HeartbeatWatch, beating, looks_in
from tests.architectures import save_model
from tests.rank_pool import BreakablePools, Pools
from tests.specdec.engine.ranked_engines import GREEDY, PROMPTS, config_of, generate

INTERVAL_S = 0.1
LOOKS = 15


def follow_or_watch(group: RankGroup, follow: Callable[[RankGroup], None], seconds: float) -> Any:
    """Rank 0: the ranks that it called silent within `seconds`, of others that `follow` while they beat."""
    if group.rank > 0:
        group.smallest(0)
        with beating(group, INTERVAL_S):
            follow(group)
        return None
    found: Queue[int] = Queue()
    watch = HeartbeatWatch(group, found.put, interval_s=INTERVAL_S, max_silent_looks=LOOKS)
    group.smallest(0)
    ranks: list[int] = []
    end_s = time.monotonic() + seconds
    try:
        while (left_s := end_s - time.monotonic()) > 0 and not ranks:
            ranks.append(found.get(timeout=left_s))
    except Empty:
        pass
    finally:
        watch.close()
    return ranks


def stop_itself(group: RankGroup) -> None:
    time.sleep(5 * INTERVAL_S)
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    be_slow(group)


def be_slow(group: RankGroup) -> None:
    """Longer than silence may last."""
    time.sleep(2 * LOOKS * INTERVAL_S)


def be_done(group: RankGroup) -> None:
    """End at once, and stay alive for the rest of the test."""


def test_a_stopped_rank_is_noticed(breakable_pool: BreakablePools) -> None:
    with breakable_pool(3) as pool:
        pool.send(follow_or_watch, stop_itself, 30)
        assert pool.receive(0) == [2]
        pool.kill(2)  # which is all that a stopped process is good for


@pytest.mark.parametrize("follow", [be_slow, be_done])
def test_a_rank_that_runs_is_not_silent(rank_pool: Pools, follow: Callable[[RankGroup], None]) -> None:
    seconds = 1.5 * LOOKS * INTERVAL_S
    assert rank_pool(2).run(follow_or_watch, follow, seconds)[0] == []


def test_silence_is_counted_in_looks_and_ends_with_a_new_number() -> None:
    silence = heartbeat._Silence()
    assert [silence.look(number) for number in (b"-", b"-", b"0", b"0", b"0", b"1", b"1", b"-", b"-")] == [
        0, 0, 0, 1, 2, 0, 1, 0, 0
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.slow
def test_a_stopped_process_ends_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine that has started its ranks: the round in which it is stopped does not end otherwise."""
    monkeypatch.setattr(launch, "HeartbeatWatch", partial(HeartbeatWatch, max_silent_looks=2))
    processes: list[Any] = []
    start = FollowerProcesses.start

    def note(self: FollowerProcesses, *args: Any) -> None:
        start(self, *args)
        processes.append(self._processes[-1])

    monkeypatch.setattr(FollowerProcesses, "start", note)
    save_model(tmp_path, "llama")
    with Engine(config_of(tmp_path, 2, stages=2)) as engine:
        generate(engine, [GREEDY])
        os.kill(processes[0].pid, signal.SIGSTOP)
        (result,) = engine.generate([PROMPTS[0]], GREEDY)
        assert "lost a peer" in (result.choices[0].error or "")
    assert processes[0].poll() == -signal.SIGKILL


def test_a_silence_is_as_long_as_it_is_configured() -> None:
    assert [looks_in(seconds) for seconds in (0.2, 3.0, 20.0, 20.5)] == [1, 3, MAX_SILENT_LOOKS, 21]
