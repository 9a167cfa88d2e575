"""What neighbours of a virtual machine disturb is measured again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks import stolen
from benchmarks.steady import Counted
from benchmarks.stolen import least_stolen, stolen_seconds
from benchmarks.turns import Turns


class Neighbour:
    """Takes a share of our cores in every block of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> None:
        times = itertools.accumulate((share for one in shares for share in (0.0, one)), initial=0.0)
        next(times)
        clock = itertools.accumulate(itertools.cycle((0.0, 1.0)))
        monkeypatch.setattr(stolen, "stolen_seconds", lambda: next(times))
        monkeypatch.setattr(stolen.time, "perf_counter", lambda: next(clock))
        monkeypatch.setattr(stolen, "_cores", lambda: {0})


def test_a_disturbed_block_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Neighbour(monkeypatch, [0.5, 0.3, 0.05, 0.0])
    blocks = iter("abcd")
    measured = least_stolen(lambda: next(blocks))
    assert measured.result == "c"
    assert measured.stolen == pytest.approx(0.05)
    assert next(blocks) == "d"


def test_where_the_neighbour_stays_the_least_disturbed_block_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Neighbour(monkeypatch, [0.5, 0.4, 0.3, 0.2, 0.3, 0.4, 0.1])
    blocks = iter("abcdefg")
    measured = least_stolen(lambda: next(blocks))
    assert measured.result == "d"
    assert measured.stolen == pytest.approx(0.2)
    assert next(blocks) == "g"


def test_turns_say_how_disturbed_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    Neighbour(monkeypatch, [0.02, 0.5, 0.04])
    turns, taken = Turns(), list[str]()

    def decode(name: str) -> Counted:
        taken.append(name)
        return Counted(num_tokens=len(taken), seconds=1.0)

    turns.take({"a": lambda: decode("a"), "b": lambda: decode("b")})
    assert taken == ["a", "b", "b"]
    assert turns.rates("a", "b") == {"a": (1.0,), "b": (3.0,)}
    assert turns.most_stolen == pytest.approx(0.04)


def test_only_cores_that_we_may_use_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  1 1 1 1 1 1 1 900 0 0\ncpu0 1 1 1 1 1 1 1 100 0 0\ncpu1 1 1 1 1 1 1 1 300 0 0\n"
        "cpu2 1 1 1 1 1 1 1 500 0 0\nintr 5 5 5 5 5 5 5 5 5\n"
    )
    monkeypatch.setattr(stolen, "_STAT", stat)
    monkeypatch.setattr(stolen, "_cores", lambda: {0, 2})
    monkeypatch.setattr(stolen.os, "sysconf", lambda name: 100)
    assert stolen_seconds() == pytest.approx(6.0)
    monkeypatch.setattr(stolen, "_STAT", tmp_path / "none")
    assert stolen_seconds() == 0.0
