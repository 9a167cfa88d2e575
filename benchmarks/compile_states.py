"""Asks a server whether its workers' forwards are compiled."""

from __future__ import annotations

import re
import time
from collections.abc import Set

import httpx

_SERIES = re.compile(r'^ray_drafthouse_num_workers\{compile="(\w+)",part="(\w+)"\} ([0-9.]+)', re.MULTILINE)


def compile_states(url: str) -> dict[str, str]:
    """Return the state of compiling by part, "target" and "draft", of a server with one worker of each."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    return {part: state for state, part, count in _SERIES.findall(text) if float(count)}


def wait_compiled(url: str, timeout_s: float, parts: Set[str] = frozenset({"target", "draft"})) -> None:
    """Wait until nothing is left to be compiled. `parts`: those that have workers.

    Raises:
        RuntimeError: something runs eagerly for good: what would be measured is not what is meant.
        TimeoutError: it takes too long.
    """
    give_up_s = time.monotonic() + timeout_s
    states: dict[str, str] = {}
    while time.monotonic() < give_up_s:
        states = compile_states(url)
        if set(states) == parts and "pending" not in states.values():
            break
        time.sleep(0.5)
    else:
        raise TimeoutError(f"compiling was not over after {timeout_s:g} s: {states}")
    if set(states.values()) != {"ready"}:
        raise RuntimeError(f"not compiled: {states}")
