"""What the benchmark of a server with a drafter beside one without counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.beside_plain import (
    FULL,
    QUICK,
    VARIANTS,
    Turn,
    bodies_of,
    config_of,
    headlines,
    ratio,
    turn_of,
)
from benchmarks.closed_loop import ClosedLoop
from deploy.config_file import parse_config
from deploy.load.client import load_client
from deploy.load.generator import Timeline
from deploy.openai.settings import DoorSettings
from tests.deploy.openai.fakes import Door, ScriptedService
from tests.deploy.openai.live import live_server

FAMILY = Path("models/demo")
PROMPTS = ["a" * 300, "b" * 160, "c" * 20]


def a_turn(tokens_per_s: float) -> Turn:
    return Turn(
        num_requests=1,
        tokens_per_s=tokens_per_s,
        ms_per_round={},
        per_round={},
        trial_rounds={},
        rounds_by_mode={},
        cpu_cores={},
        stolen=0.0,
    )


@pytest.mark.parametrize("drafts", [False, True])
def test_both_servers_have_a_configuration_that_can_be_served(drafts: bool) -> None:
    config = parse_config(config_of(FULL, FAMILY, drafts=drafts))
    assert (config.speculative_config.method == "draft_model") == drafts
    assert config.http.proxy == "python", "HAProxy has ports of its own: there cannot be two"
    assert config.scheduler.max_num_seqs == max(FULL.batches) == max(QUICK.batches)


def test_all_get_the_same_requests_but_for_their_own_k() -> None:
    ours, theirs = bodies_of(FULL, PROMPTS, 0), bodies_of(FULL, PROMPTS, None)
    seen = set()
    for _ in range(50):
        one, other = ours(), theirs()
        assert one.pop("speculation") == {"num_speculative_tokens": 0}
        assert one == other
        assert len(one["prompt"]) <= FULL.prompt_characters
        seen.add((one["prompt"], one["seed"]))
    assert len(seen) == 50


def test_a_turn_is_what_counters_have_grown_by() -> None:
    timelines = [Timeline(due_s=0.0, num_output_tokens=30), Timeline(due_s=0.0, num_output_tokens=20)]
    rounds = {
        "rounds_total": 10.0,
        "coordinator_time_seconds_total": 0.02,
        "verify_time_seconds_total": 0.03,
        "round_time_seconds_total": 0.05,
        "generation_tokens_total": 50.0,
        "spec_decode_num_draft_tokens_total": 5.0,
        "speculation_probe_rounds_total": 1.0,
        "overlap_rounds_total lockstep": 8.0,
        "overlap_rounds_total ping_pong": 2.0,
        "overlap_rounds_total draft_ahead": 0.0,
    }
    turn = turn_of(timelines, 2.0, rounds, {"target": 1.0}, 0.01)
    assert turn.tokens_per_s == 25.0
    assert turn.ms_per_round == pytest.approx(
        {"coordinator": 2.0, "waiting for drafts": 0.0, "verifying": 3.0, "all": 5.0}
    )
    assert turn.per_round == {"generated": 5.0, "drafted": 0.5, "accepted": 0.0}
    assert turn.trial_rounds["probe"] == 0.1
    assert turn.rounds_by_mode == {"lockstep": 0.8, "ping_pong": 0.2}
    assert turn.cpu_cores == {"target": 0.5}


def test_ratios_are_of_turns_and_the_least_of_all_batches_is_the_headline() -> None:
    plain = [a_turn(100.0), a_turn(200.0), a_turn(100.0)]
    slower = [a_turn(90.0), a_turn(180.0), a_turn(90.0)]
    assert ratio(slower, plain).values == pytest.approx((0.9, 0.9, 0.9))
    cells: list[Mapping[str, Any]] = [
        {"ratios": {name: ratio(plain, plain) for name in VARIANTS[1:]}},
        {"ratios": {"controller": ratio(slower, plain), "own_k0": ratio(plain, plain)}},
    ]
    numbers = headlines(cells)
    assert numbers["controller_vs_none_median"] == pytest.approx(0.9)
    assert numbers["controller_vs_none_upper"] == pytest.approx(0.9)
    assert numbers["own_k0_vs_none_median"] == 1.0


def test_clients_ask_again_until_it_is_time_and_wait_for_what_they_have_asked() -> None:
    asked: list[int] = []
    answered: list[int] = []

    def body() -> Mapping[str, Any]:
        asked.append(1)
        return {"model": "demo", "prompt": "x", "max_tokens": 3, "stream": True}

    async def run(url: str) -> int:
        async with load_client(url, connect_s=10.0, read_s=10.0) as client:
            loop = ClosedLoop(client, "/v1/completions", body, lambda: answered.append(1))
            return len(await loop.run(2, asyncio.get_running_loop().time() + 0.3))

    door = Door(ScriptedService(), DoorSettings(served_model_name="demo"))
    with live_server(door.app) as url:
        num_ended = asyncio.run(run(url))
    assert len(asked) == len(answered) == num_ended > 4
