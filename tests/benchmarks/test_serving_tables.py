"""That the pages say of faults, overload and proxies what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import begin_of, end_of, put_into
from benchmarks.serving_tables import PARTS, SCRIPT, beside_plain, doors, faults, main, overload

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = {
    "date": "2026-02-03T04:05:06", "commit": "0123456789", "uncommitted_changes": False, "processor": "some"
}  # fmt: skip


def a_stream(pause_s: float) -> dict[str, Any]:
    return {"longest_pause_s": pause_s}


CHAOS = {
    "plan": {"num_faults": 3, "recovery_limit_s": 9.96},
    "faults": [
        {"kind": "kill_proxy", "recovery_s": 4.04, "num_nodes_given_up": 1},
        {"kind": "kill_proxy", "recovery_s": 2.0},
        {"kind": "kill_proxy", "recovery_s": None},
    ],
    "parts": [{"measured": MEASURED, "num_faults": 2}, {"measured": MEASURED, "num_faults": 1}],
    "recovery_by_kind": {"kill_proxy": {"number": 3, "median_s": 4.04, "max_s": 9.96}},
    "streams": [a_stream(1.0), a_stream(2.0), a_stream(30.0)],
    "num_streams": 3,
    "num_broken_connections": 4,
    "refusals": {"429": 1},
    "headlines": {"faults": 3, "lost": 1, "wrong": 0, "recovery_p95_s": 9.96},
}


def a_turn(proxy: str, factor: float) -> dict[str, Any]:
    return {
        "proxy": proxy,
        "milliseconds": {
            name: {"p50": factor, "p99": 2.0 * factor} for name in ("requests", "connections", "completions")
        },
        "streams": {"num_streams": 10, "num_complete": 10, "num_lost_bytes": 1, "seconds": factor},
        "cpu_s": {"proxy": 0.1 * factor, "door": 0.2},
    }


@pytest.mark.parametrize("name", PARTS)
def test_the_pages_say_what_was_measured(name: str) -> None:
    part = PARTS[name]
    page = (ROOT / "docs" / part.page).read_text()
    text = part.text(json.loads((RESULTS / name).read_text()))
    assert put_into(page, part.name, SCRIPT, text) == page


def test_faults_by_kind_and_what_streams_went_through() -> None:
    text = faults(CHAOS)
    assert "Measured: 2 faults in a run begun on 2026-02-03 at commit 0123456, some; 1 faults in" in text
    assert "| kill proxy | 3 | 4.0 | 10.0 |" in text
    assert (
        "included; not within 9.96 s, which count as so long: kill proxy (1); 1 nodes were given up" in text
    )
    assert "3 faults, during which 3 streams were read: 1 lost, 0 with a wrong token" in text
    assert "3 faults (9 were planned; the run was cut), during" in faults(
        {**CHAOS, "plan": {**CHAOS["plan"], "num_faults": 9}}
    )
    assert "4 connections broke; refused for good: 429 (1). 95 %" in text
    assert "stood still for at most 30.0 s, half of them for less than 2.0 s" in text
    assert "nobody was refused for good" in faults({**CHAOS, "refusals": {}})


def test_overload_is_that_of_the_largest_load() -> None:
    load = {
        "share": 0.8,
        "requests_per_s": 2.0,
        "num_requests": 20,
        "outcomes": {"good": 18, "late": 1, "status 429": 1},
        "goodput_per_s": 400.0,
        "ttft_p50_s": 0.5,
        "max_lateness_s": 0.01,
        "stolen": 0.03,
        "num_tries": 2,
    }
    better = {**load, "goodput_per_s": 500.0, "stolen": 0.04}
    streams = {
        "num_streams": 9,
        "most_at_once": 8,
        "num_complete": 7,
        "num_lost_bytes": 6,
        "num_bytes": 50,
        "seconds": 5.0,
    }
    results = {
        "environment": MEASURED,
        "overload": {
            "capacity_requests_per_s": 2.5,
            "loads": [load, {**load, "share": 5.0}, {**load, "share": 5.0}, better],
        },
        "streams": streams,
        "headlines": {"goodput_at_5x_vs_peak": 0.91},
    }
    text = overload(results)
    assert "| 0.8 | 2.0 | 40 | 36 | 2 | 2 | 450 (400-500) | 0.50 | 0.01 |" in text
    assert "Each load was sent 2 times" in text
    assert "had at most 4% of the server's cores; 4 times a load was sent again" in text
    assert "At 5 times the capacity goodput is 0.91 of its peak" in text
    assert "9 streams at once (8 of them were open together): 7 complete, 6 of 50 bytes lost, in 5 s" in text


def test_a_server_with_a_drafter_beside_one_without() -> None:
    def turn(tokens_per_s: float) -> dict[str, Any]:
        return {
            "tokens_per_s": tokens_per_s,
            "ms_per_round": {"coordinator": 0.5, "verifying": 3.0},
            "per_round": {"drafted": 0.25},
            "cpu_cores": {"target": 0.6, "draft": 0.07, "coordinator": 0.2},
            "stolen": 0.02,
        }

    turns = {"none": [turn(100.0), turn(110.0), turn(120.0)], "own_k0": [turn(99.0)] * 3}
    cell = {
        "batch": 16,
        "turns": turns,
        "ratios": {"own_k0": {"median": 0.98, "lower": 0.951, "upper": 1.014}},
    }
    results = {
        "environment": MEASURED,
        "plan": {"num_turns": 3, "duration_s": 7.0, "num_tokens": 128},
        "num_cores": {"server": 2, "is_shared_with_sender": True},
        "cells": [cell],
    }
    text = beside_plain(results)
    assert "| no drafter | 110 |  | 0.50 | 3.00 | 0.25 | 0.60 | 0.07 | 0.20 |" in text
    assert "| drafter, requests with k = 0 | 99 | 0.98 (0.95-1.01) | 0.50" in text
    assert "16 at a time: tokens/s" in text
    assert "on cores that the sender of the load used, too: 3 turns of 7 s of each, requests of 128" in text
    assert "had at most 2% of its cores" in text


def test_proxies_have_medians_side_by_side() -> None:
    turns = [a_turn("python", 4.0), a_turn("haproxy", 1.0), a_turn("python", 6.0), a_turn("haproxy", 3.0)]
    plan = {"num_turns": 2, "num_streams": 10, "num_stream_tokens": 4}
    text = doors({"environment": MEASURED, "plan": plan, "turns": turns})
    assert "|  | python | haproxy |" in text
    assert "| `/v1/models` on one connection, p50 (ms) | 5.0 | 2.0 |" in text
    assert "| CPU time of the proxy per stream (ms) | 50.0 | 20.0 |" in text
    assert "medians of 2 turns, with 10 streams of 4 tokens at once" in text
    assert "4 bytes were lost" in text


def test_only_what_was_measured_is_written(tmp_path: Path) -> None:
    (tmp_path / "chaos.json").write_text(json.dumps(CHAOS))
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{begin_of('faults', SCRIPT)}\nold\n{end_of('faults')}\nafter\n")
    main(results=tmp_path, docs=tmp_path)
    assert faults(CHAOS) in page.read_text()
    assert "old" not in page.read_text()
