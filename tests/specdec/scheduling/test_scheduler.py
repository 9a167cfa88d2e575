"""The plan of one round, and what many rounds add up to: nobody starves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.controller import FixedController
from tests.specdec.scheduling.simulation import FakeRequest, Simulation, check_plan, fake_request


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


def test_rows_beside_come_with_drafts_or_not_at_all() -> None:
    """All of a request's and a draft at least, in its share of rows and blocks and of the context."""

    def planned(**options: Any) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        simulation = simulation_of(
            *(decoding(name, 3, arrival=index, blocks=1) for index, name in enumerate("ab")),
            controller=FixedController(options.pop("wanted", 4)),
            num_rows_beside=5,
            **{"num_blocks": 64, "max_num_batched_tokens": 64, **options},
        )
        plan = simulation.plan()
        check_plan(plan, simulation)
        return dict(plan.num_tokens), dict(plan.num_draft_tokens), dict(plan.num_rows_beside)

    def both(number: int) -> dict[str, int]:
        return dict.fromkeys("ab", number)

    assert planned() == (both(10), both(4), both(5))
    assert planned(wanted=0) == (both(1), {}, {})
    assert planned(max_num_batched_tokens=16) == (both(8), both(2), both(5))
    assert planned(max_num_batched_tokens=14) == (both(7), both(1), both(5))
    assert planned(max_num_batched_tokens=12) == (both(5), both(4), {})  # 5 rows each: too few for both
    assert planned(max_sequence_len=10) == (both(8), both(2), both(5))
    assert planned(max_sequence_len=8) == (both(5), both(4), {})
    # 5 blocks: the first gets three places more than it has rows for, the second what is left.
    assert planned(num_blocks=5) == ({"a": 10, "b": 5}, both(4), {"a": 5})


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


@pytest.mark.parametrize(("ttft_s", "num_prompt_rows"), [(None, 4), (0.2, 13)])
def test_prompts_whose_first_token_is_wanted_soon_go_before_drafts(
    ttft_s: float | None, num_prompt_rows: int
) -> None:
    """Sixteen rows, three of which decode; the controller would fill all the others with drafts."""
    simulation = simulation_of(
        *[decoding(name, 4, arrival=index, blocks=2) for index, name in enumerate("abc")],
        controller=FixedController(8),
        num_blocks=40,
    )
    prompt = fake_request("long", 40, arrival=9)
    prompt.ttft_s = ttft_s
    simulation.waiting.push(prompt)
    plan = simulation.plan()
    assert plan.num_tokens[RequestId("long")] == num_prompt_rows


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(40, 3), (14, 4)], ids=["no place", "no blocks"])
def test_rows_are_kept_for_no_prompt_that_cannot_come(num_blocks: int, max_num_seqs: int) -> None:
    """Or a full server drafts nothing as long as anybody waits."""
    simulation = simulation_of(
        *[decoding(name, 4, arrival=index, blocks=2) for index, name in enumerate("abc")],
        controller=FixedController(4),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
    )
    prompt = fake_request("long", 40, arrival=9)
    prompt.ttft_s = 0.2
    simulation.waiting.push(prompt)
    plan = simulation.plan()
    assert plan.num_draft_tokens == dict.fromkeys("abc", 4)
    assert plan.admitted == ()


class Minding(FixedController):
    """Drafts are bounded by latency targets."""

    minds_targets = True


@pytest.mark.parametrize(
    ("controller", "pressed", "has_drafts"),
    [
        (Minding(2), {"prompt"}, False),
        (Minding(2), {"a"}, True),  # it decodes: its first token is there
        (Minding(2), set(), True),
        (FixedController(2), {"prompt"}, True),
    ],
)
def test_nobody_drafts_while_a_prompt_is_read_whose_time_runs_out(
    controller: FixedController, pressed: set[str], has_drafts: bool
) -> None:
    prompt = fake_request("prompt", 5, arrival=9, computed=2)
    prompt.num_blocks = 2
    simulation = simulation_of(
        *[decoding(name, 4, arrival=index, blocks=2) for index, name in enumerate("abc")],
        prompt,
        controller=controller,
        num_blocks=40,
    )
    simulation.pressed = frozenset(map(RequestId, pressed))
    plan = simulation.plan()
    assert plan.num_draft_tokens == (dict.fromkeys("abc", 2) if has_drafts else {})
    assert plan.num_tokens[RequestId("prompt")] == 3


@pytest.mark.parametrize(
    ("requested", "k", "expected"),
    [(None, 4, 4), (0, 4, 0), (2, 4, 2), (9, 4, 4), (64, 4, 4), (9, 8, 5), (None, 8, 5), (64, 0, 0)],
)
def test_request_overrides_the_controller_within_what_is_configured_and_of_use(
    requested: int | None, k: int, expected: int
) -> None:
    request = decoding("a", 3, blocks=1, generate=6)
    request.requested_draft_tokens = requested
    simulation = simulation_of(request, controller=FixedController(k))
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


class TestUrgentRequests:
    """A waiting request takes the place of those whose priority is less urgent, and of nobody else."""

    @staticmethod
    def full(**options: object) -> Simulation:
        """Four places, all taken; blocks are there."""
        return simulation_of(
            decoding("equal", 8, arrival=0, blocks=2),
            decoding("batch", 12, arrival=1, blocks=3, priority=1),
            decoding("small", 7, arrival=2, blocks=2, priority=1),
            decoding("bulk", 20, arrival=3, blocks=5, priority=2),
            **{"num_blocks": 64, **options},
        )

    def test_one_takes_the_place_of_the_least_urgent(self) -> None:
        simulation = self.full()
        simulation.waiting.push(fake_request("urgent", 4, arrival=9))
        plan = simulation.run_round()
        assert (plan.preempted, plan.admitted) == (("bulk",), ("urgent",))
        assert plan.num_tokens == {"equal": 1, "batch": 1, "small": 1, "urgent": 4}

    def test_then_of_the_one_that_loses_least(self) -> None:
        simulation = self.full()
        for number in range(2):
            simulation.waiting.push(fake_request(f"urgent{number}", 4, arrival=9 + number))
        assert simulation.run_round().preempted == ("bulk", "small")

    def test_nobody_takes_the_place_of_an_equal(self) -> None:
        simulation = self.full()
        for number in range(5):
            simulation.waiting.push(fake_request(f"urgent{number}", 1, arrival=9 + number))
        plan = simulation.run_round()
        assert set(plan.preempted) == {"bulk", "small", "batch"}
        assert plan.admitted == ("urgent0", "urgent1", "urgent2")
        simulation = self.full()
        simulation.waiting.push(fake_request("late bulk", 1, arrival=9, priority=2))
        assert simulation.run_round().preempted == ()

    def test_as_many_blocks_are_freed_as_it_takes(self) -> None:
        """12 of 13 blocks are held, and one is needed by `equal` in this very round; one is spared."""
        simulation = self.full(num_blocks=13, max_num_seqs=5)
        simulation.running[RequestId("equal")].committed_len = 9
        simulation.running[RequestId("equal")].num_computed = 8
        simulation.waiting.push(fake_request("urgent", 16, arrival=9))
        plan = simulation.run_round()
        assert (plan.preempted, plan.admitted) == (("bulk",), ("urgent",))
        simulation = self.full(num_blocks=13, max_num_seqs=5)
        simulation.waiting.push(fake_request("urgent", 25, arrival=9))
        plan = simulation.run_round()
        assert (plan.preempted, plan.admitted) == (("bulk", "small"), ("urgent",))

    def test_nobody_goes_if_that_makes_no_room(self) -> None:
        simulation = self.full(num_blocks=13)
        simulation.waiting.push(fake_request("urgent", 44, arrival=9))  # 11 blocks and a spare one; 2 stay
        plan = simulation.run_round()
        assert (plan.preempted, plan.admitted) == ((), ())

    def test_nobody_goes_where_there_is_room(self) -> None:
        simulation = self.full(max_num_seqs=5)
        simulation.waiting.push(fake_request("urgent", 4, arrival=9))
        plan = simulation.run_round()
        assert (plan.preempted, plan.admitted) == ((), ("urgent",))

    def test_its_prompt_is_read_first(self) -> None:
        simulation = Simulation(num_blocks=64, max_num_batched_tokens=8)
        simulation.waiting.push(fake_request("bulk", 100, arrival=1, priority=1))
        simulation.run_round()
        simulation.waiting.push(fake_request("urgent", 12, arrival=2))
        assert simulation.run_round().num_tokens == {"urgent": 8}
        assert simulation.run_round().num_tokens == {"urgent": 4, "bulk": 4}

    def test_it_does_not_pass_an_equal_that_was_preempted(self) -> None:
        """What is free now is for whoever gave it up, when that one is no less urgent."""
        simulation = simulation_of(
            decoding("a", 5, arrival=0, blocks=1),
            decoding("b", 12, arrival=1, blocks=3),
            decoding("bulk", 4, arrival=2, blocks=1, priority=1),
            num_blocks=5,
        )
        simulation.running[RequestId("bulk")].num_blocks = 0  # gives nothing back: b must go too
        simulation.running[RequestId("b")].num_blocks = 4
        simulation.waiting.push(fake_request("urgent", 2, arrival=9))
        plan = simulation.plan()
        assert set(plan.preempted) == {"bulk", "b"}
        assert plan.admitted == ()

    def test_rows_and_blocks_of_the_preempted_are_used_by_others(self) -> None:
        """`bulk` had been given a row and a block in this round already."""
        simulation = simulation_of(
            decoding("a", 4, arrival=0, blocks=1),
            decoding("bulk", 5, arrival=1, blocks=1, priority=1),
            num_blocks=5,
            max_num_seqs=2,
            max_num_batched_tokens=2,
        )
        simulation.waiting.push(fake_request("urgent", 12, arrival=9))
        plan = simulation.run_round()
        assert (plan.preempted, plan.admitted) == (("bulk",), ("urgent",))
        assert plan.num_tokens == {"a": 1, "urgent": 1}

    def test_a_stream_of_urgent_ones_ends_and_the_others_finish(self) -> None:
        simulation = self.full(num_blocks=16)
        for number in range(30):
            simulation.waiting.push(
                fake_request(f"u{number}", 9, arrival=9 + number, priority=-1, generate=5)
            )
        for request in simulation.running.values():
            request.num_to_generate = 8
        simulation.run_until_finished(max_rounds=400)
        finished = [request.service_key.priority for request in simulation.finished]
        assert finished == sorted(finished)


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
        num_rows_beside=(0, 0, 3)[seed % 3],
        max_sequence_len=num_blocks * block_size,
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
                    priority=generator.choice([-1, 0, 0, 1]),
                    generate=generator.randint(1, capacity - length),
                )
            )
            arrival += 1
        if simulation.running or len(simulation.waiting):
            simulation.run_round()
    simulation.run_until_finished()
    assert len(simulation.finished) == arrival
