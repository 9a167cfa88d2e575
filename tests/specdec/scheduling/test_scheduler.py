"""The plan of one round, and what many rounds add up to: nobody starves."""

from __future__ import annotations

import random

import pytest

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.controller import FixedController
from tests.specdec.scheduling.simulation import FakeRequest, Simulation, fake_request


def decoding(name: str, length: int, *, arrival: int = 0, blocks: int, **options: int) -> FakeRequest:
    request = fake_request(name, length, arrival=arrival, computed=length - 1, **options)
    request.num_blocks = blocks
    return request


def simulation_of(*running: FakeRequest, **options: object) -> Simulation:
    simulation = Simulation(**options)  # type: ignore[arg-type]
    simulation.running = {request.request_id: request for request in running}
    return simulation


def test_prompt_is_read_in_chunks_and_sampled_once() -> None:
    simulation = Simulation(max_num_batched_tokens=8)
    simulation.waiting.push(fake_request("a", 20))
    chunks = [simulation.run_round().num_tokens["a"] for _ in range(4)]  # type: ignore[index]
    assert chunks == [8, 8, 4, 1]


def test_decodes_come_before_prompts() -> None:
    simulation = simulation_of(
        decoding("late", 4, arrival=5, blocks=1), num_blocks=64, max_num_batched_tokens=8
    )
    early = fake_request("early", 40, arrival=1)
    early.num_blocks = 10
    simulation.running[early.request_id] = early
    assert simulation.plan().num_tokens == {"late": 1, "early": 7}


def test_draft_rows_go_round_evenly() -> None:
    simulation = simulation_of(
        *(decoding(name, 3, arrival=index, blocks=1) for index, name in enumerate("abcd")),
        controller=FixedController(8),
        max_num_batched_tokens=16,
        num_blocks=64,
    )
    assert simulation.plan().num_draft_tokens == dict.fromkeys("abcd", 3)


def test_prompts_keep_a_share_of_the_rows_from_drafts() -> None:
    simulation = simulation_of(
        *(decoding(name, 3, arrival=index, blocks=1) for index, name in enumerate("abc")),
        controller=FixedController(8),
        max_num_batched_tokens=16,
        num_blocks=64,
    )
    simulation.waiting.push(fake_request("long", 40, arrival=9))
    plan = simulation.plan()
    assert plan.num_draft_tokens == dict.fromkeys("abc", 3)
    assert plan.num_tokens["long"] == 4  # type: ignore[index]
    assert plan.admitted == ("long",)


@pytest.mark.parametrize(("requested", "expected"), [(None, 4), (0, 0), (2, 2), (9, 5)])
def test_request_overrides_the_controller_within_what_is_of_use(requested: int | None, expected: int) -> None:
    request = decoding("a", 3, blocks=1, generate=6)
    request.requested_draft_tokens = requested
    simulation = simulation_of(request, controller=FixedController(4))
    assert simulation.plan().num_draft_tokens.get(RequestId("a"), 0) == expected


def test_drafts_shrink_before_anyone_is_preempted() -> None:
    """Eight tokens of room are left; two sequences would like 1 + 8 rows each."""
    simulation = simulation_of(
        decoding("a", 4, arrival=0, blocks=1),
        decoding("b", 4, arrival=1, blocks=1),
        controller=FixedController(8),
        num_blocks=3,
        max_num_batched_tokens=64,
    )
    plan = simulation.plan()
    assert plan.preempted == ()
    assert plan.num_draft_tokens == {"a": 4}
    assert plan.num_tokens == {"a": 5, "b": 1}


def test_preempts_who_loses_least_behind_the_needy() -> None:
    simulation = simulation_of(
        decoding("first", 9, arrival=0, blocks=2),
        decoding("big", 12, arrival=1, blocks=3),
        decoding("small", 4, arrival=2, blocks=1),
        num_blocks=6,
    )
    plan = simulation.plan()
    assert plan.preempted == ("small",)
    assert plan.num_tokens == {"first": 1, "big": 1}


def test_nobody_is_preempted_for_someone_behind() -> None:
    """The needy one is last, and has the most to lose: it goes itself."""
    simulation = simulation_of(
        decoding("old", 4, arrival=0, blocks=1), decoding("young", 21, arrival=1, blocks=5), num_blocks=6
    )
    assert simulation.plan().preempted == ("young",)


def test_more_urgent_requests_are_served_first() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.waiting.push(fake_request("early", 4, arrival=1))
    simulation.waiting.push(fake_request("urgent", 4, arrival=2, priority=-1))
    assert simulation.plan().admitted == ("urgent",)


def test_nobody_passes_the_head_of_the_queue() -> None:
    simulation = simulation_of(decoding("running", 28, blocks=7), num_blocks=16, max_num_batched_tokens=64)
    simulation.waiting.push(fake_request("long", 40, arrival=1))
    simulation.waiting.push(fake_request("short", 4, arrival=2))
    assert simulation.plan().admitted == ()


def test_nobody_is_admitted_into_a_round_with_preemption() -> None:
    simulation = simulation_of(
        decoding("a", 5, arrival=0, blocks=1), decoding("b", 12, arrival=1, blocks=3), num_blocks=4
    )
    simulation.waiting.push(fake_request("c", 2, arrival=2))
    plan = simulation.plan()
    assert plan.preempted == ("b",)
    assert plan.admitted == ()


def test_stream_of_short_requests_cannot_starve_a_long_prompt() -> None:
    simulation = Simulation(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=8)
    long = fake_request("long", 56, arrival=2, generate=8)
    simulation.waiting.push(fake_request("short0", 4, arrival=0, generate=4))
    simulation.waiting.push(fake_request("short1", 4, arrival=1, generate=4))
    simulation.waiting.push(long)
    arrival = 3
    while long not in simulation.finished:
        while len(simulation.waiting) < 6:  # there are always short ones waiting
            simulation.waiting.push(fake_request(f"short{arrival}", 4, arrival=arrival, generate=4))
            arrival += 1
        simulation.run_round()
        assert simulation.round_number < 60, "the long prompt starves"
    assert long.num_preemptions == 0


def test_two_big_requests_do_not_preempt_each_other_forever() -> None:
    """Each alone fills the pool; together they cannot run to their ends."""
    simulation = Simulation(num_blocks=16, max_num_batched_tokens=16)
    requests = [fake_request("a", 8, arrival=0, generate=56), fake_request("b", 8, arrival=1, generate=56)]
    for request in requests:
        simulation.waiting.push(request)
    simulation.run_until_finished(max_rounds=400)
    assert [request.request_id for request in simulation.finished] == ["a", "b"]
    assert requests[0].num_preemptions == 0
    assert 1 <= requests[1].num_preemptions <= 10


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_finish(seed: int) -> None:
    """Any load that is admissible finishes, every plan keeps its promises (`check_plan`)."""
    generator = random.Random(seed)
    block_size = generator.choice([1, 2, 4])
    num_blocks = generator.randint(4, 24)
    max_num_seqs = generator.randint(1, 6)
    simulation = Simulation(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=generator.randint(max_num_seqs, 24),
        controller=FixedController(generator.randint(0, 5)),
        num_accepted=generator.randint(0, 5),
    )
    capacity = num_blocks * block_size
    arrival = 0
    for _ in range(30):
        for _ in range(generator.randint(0, 2)):
            length = generator.randint(1, capacity - 1)
            simulation.waiting.push(
                fake_request(
                    f"r{arrival}",
                    length,
                    arrival=arrival,
                    priority=generator.choice([0, 0, 1]),
                    generate=generator.randint(1, capacity - length),
                )
            )
            arrival += 1
        if simulation.running or len(simulation.waiting):
            simulation.run_round()
    simulation.run_until_finished()
    assert len(simulation.finished) == arrival
