"""How long a benchmark waits before it measures."""

from __future__ import annotations

import httpx
import pytest

from benchmarks import compile_states
from benchmarks.compile_states import wait_compiled

_URL = "http://server"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """States of the target that the server tells one after the other; it has no draft workers."""
    told: list[str] = []

    def get(url: str, timeout: float) -> httpx.Response:
        assert url == f"{_URL}/metrics"
        state = told.pop(0) if len(told) > 1 else told[0]
        lines = [
            f'ray_drafthouse_num_workers{{compile="{state}",part="target"}} 1.0',
            'ray_drafthouse_num_workers{compile="ready",part="draft"} 0.0',
        ]
        return httpx.Response(200, text="\n".join(lines))

    monkeypatch.setattr(compile_states.httpx, "get", get)
    monkeypatch.setattr(compile_states.time, "sleep", lambda _: None)
    return told


def test_what_is_still_compiled_is_waited_for(answers: list[str]) -> None:
    answers += ["pending", "pending", "ready"]
    wait_compiled(_URL, 30.0, {"target"})
    assert answers == ["ready"]


def test_what_runs_eagerly_for_good_is_not_measured(answers: list[str]) -> None:
    answers += ["failed"]
    with pytest.raises(RuntimeError, match=r"not compiled: .*failed"):
        wait_compiled(_URL, 30.0, {"target"})


def test_whoever_is_not_there_is_waited_for(answers: list[str]) -> None:
    answers += ["ready"]
    with pytest.raises(TimeoutError, match="ready"):
        wait_compiled(_URL, 0.05)
