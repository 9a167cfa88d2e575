"""Ingresses and coordinators over a simulated bad network: every stream ends once, with the right tokens.

Real `StreamBook`, `RequestDesk` and `Engine`; only targets are toys, and Ray is absent. Coordinators crash,
targets are lost, links lose, double, delay and reorder messages.
"""

from __future__ import annotations

import random
import time
from typing import Literal

import msgspec
import pytest

from specdec.core.error_codes import COORDINATOR_CRASHED, SHUTTING_DOWN, TARGET_LOST
from specdec.core.errors import CapacityError, ChannelTimeout, InputError, NotReadyError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.proposers.ngram import NgramProposer
from specdec.transport.base import Envelope, PeerId
from specdec.transport.memory import Faults
from specdec.transport.messages import (
    Abort,
    OutputFrame,
    Ping,
    Pong,
    ProposeReply,
    Release,
    SubmitRequest,
)
from specdec.transport.status import TargetGroupStatus
from tests.cluster.simulation import (
    LEASE_S,
    MODEL,
    ROUND_S,
    VOCAB,
    Bug,
    Simulation,
    a_request,
    assert_right,
    expected,
    simple,
)
from tests.pairwise import mostly_full


def random_faults(rng: random.Random) -> Faults:
    return Faults(
        delay_s=(0.0, rng.choice([0.0, 0.01, 0.2])),
        loss=rng.choice([0.0, 0.0, 0.02, 0.1]),
        duplication=rng.choice([0.0, 0.1]),
        in_order=rng.random() < 0.6,
    )


def disturb(sim: Simulation, rng: random.Random) -> None:
    """Perhaps let something fail, or come back."""
    fate = rng.random()
    if fate < 0.1 and sim.coordinators:
        sim.crash(rng.choice(sim.coordinators), told_after_s=rng.uniform(0, 6))
    elif fate < 0.2:
        sim.start_coordinator()
    elif fate < 0.35 and sim.coordinators:
        rng.choice(sim.coordinators).lose_target(rng.randint(0, 3))
    elif fate < 0.42:
        sim.network.faults = random_faults(rng)


def run_random_schedule(seed: int) -> int:
    """Two ingresses, a few coordinators, everything failing; return the number of failovers."""
    rng = random.Random(seed)
    sim = Simulation(random_faults(rng), seed)
    for _ in range(rng.randint(1, 3)):
        sim.start_coordinator()
    ingresses = [sim.start_ingress("ingress-1"), sim.start_ingress("ingress-2")]
    sim.network.run_for(2.0)
    opened: tuple[list[Request], list[Request]] = ([], [])
    to_open = [(rng.randrange(2), a_request(f"r{seed}.{index}", rng)) for index in range(8)]
    for _ in range(60):
        sim.network.run_for(0.1)
        if to_open and rng.random() < 0.4:
            where, request = to_open.pop()
            try:
                ingresses[where].open(request)
            except NotReadyError:
                to_open.append((where, request))
            else:
                opened[where].append(request)
        else:
            disturb(sim, rng)
    if not sim.coordinators:
        sim.start_coordinator()
    sim.run_until_done()
    for index, ingress in enumerate(ingresses):
        assert_right(ingress, opened[index], may_be_blamed=True)
    sim.network.faults = Faults()
    sim.network.run_for(3 * LEASE_S)
    for coordinator in sim.coordinators:
        assert coordinator.desk.num_streams == 0, "a stream is served that nobody waits for"
        assert not coordinator.engine.has_work
    return sum(ingress.book.counters["failovers"] for ingress in ingresses)


@pytest.mark.parametrize("block", mostly_full(range(6), [0]))
def test_random_schedules(block: int) -> None:
    num_failovers = sum(run_random_schedule(seed) for seed in range(25 * block, 25 * block + 25))
    assert num_failovers > 20, "hardly anything failed: these schedules prove nothing"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("block", range(6, 86))
def test_many_more_random_schedules(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        run_random_schedule(seed)


def test_a_stream_moves_to_another_coordinator_with_what_was_delivered() -> None:
    sim, ingress = simple(2)
    request = a_request("r", random.Random(1))
    ingress.open(request)
    sim.network.run_for(0.2)
    delivered = list(ingress.tokens[request.request_id])
    assert 0 < len(delivered) < 30
    (serving,) = [c for c in sim.coordinators if c.desk.num_streams]
    sim.crash(serving, told_after_s=0.0)
    (survivor,) = sim.coordinators
    survivor.desk.status = TargetGroupStatus()
    sim.network.run_for(0.1)
    status = survivor.desk._status_now()
    assert status is not None
    assert status.num_continued == 1
    sim.run_until_done()
    assert_right(ingress, [request])
    last = ingress.last[request.request_id]
    assert isinstance(last, RequestOutput)
    assert last.epoch == 1
    assert survivor.engine.metrics().generation_tokens <= 30 - len(delivered), (
        "delivered tokens were made again"
    )


@pytest.mark.parametrize("loss", ["coordinator", "target"])
def test_time_goes_on_across_losses(loss: str) -> None:
    """What a request is given is given once, not anew by everyone who takes it over."""
    sim, ingress = simple(2)
    request = msgspec.structs.replace(
        a_request("r", random.Random(1), max_tokens=150), timeout_s=4.0, num_draft_tokens=0
    )
    opened_s = sim.clock.now_s()
    ingress.open(request)
    sim.network.run_for(2.0)
    (serving,) = [coordinator for coordinator in sim.coordinators if coordinator.desk.num_streams]
    if loss == "target":
        serving.lose_target()
    else:
        sim.crash(serving, told_after_s=0.0)
    while ingress.book.num_streams:
        sim.network.run_for(0.1)
    last = ingress.last[request.request_id]
    assert isinstance(last, RequestOutput)
    assert last.error_code == "request_timeout"
    assert sim.clock.now_s() - opened_s < 5.5


def test_a_lost_target_is_replayed_by_its_coordinator_without_the_ingress_noticing() -> None:
    sim, ingress = simple()
    requests = [a_request(f"r{index}", random.Random(index)) for index in range(6)]
    for request in requests:
        ingress.open(request)
    sim.network.run_for(0.2)
    sim.coordinators[0].lose_target()
    sim.run_until_done()
    assert_right(ingress, requests)
    assert ingress.book.counters["failovers"] == 0
    assert {last.epoch for last in ingress.last.values() if isinstance(last, RequestOutput)} == {0}


def test_streams_leave_a_coordinator_whose_target_is_lost_for_one_that_has_one() -> None:
    sim, ingress = simple(2)
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=120) for index in range(6)]
    for request in requests:
        ingress.open(request)
    sim.network.run_for(0.3)
    lost, other = sim.coordinators
    num_moved = lost.desk.num_streams
    assert num_moved > 0
    lost.load_s = 60.0  # a large model
    lost.lose_target()
    sim.network.run_for(1.0)
    assert lost.desk.num_streams == 0
    later = [a_request(f"later{index}", random.Random(index)) for index in range(3)]
    for request in later:
        ingress.open(request)
        sim.network.run_for(0.1)
        assert lost.desk.num_streams == 0, "it is idle, and has nothing to serve with"
    sim.run_until_done(limit_s=60.0)
    assert_right(ingress, requests + later)
    assert ingress.book.counters["failovers"] == num_moved
    # When it is back, it is sent requests like any other.
    sim.network.run_for(60.0)
    ahead = [a_request(f"ahead{index}", random.Random(index), max_tokens=120) for index in range(4)]
    for request in ahead:
        ingress.open(request)
    sim.network.run_for(0.2)
    assert lost.desk.num_streams > 0
    assert other.desk.num_streams > 0
    sim.run_until_done()
    assert_right(ingress, ahead)


def test_without_another_streams_wait_for_the_next_target() -> None:
    sim, ingress = simple(2)
    request = a_request("r", random.Random(1), max_tokens=60)
    ingress.open(request)
    sim.network.run_for(0.2)
    for coordinator in sim.coordinators:
        coordinator.load_s = 30.0
        coordinator.lose_target()
    other = a_request("other", random.Random(2))
    ingress.open(other)  # the other target is not missed before it is needed
    sim.network.run_for(2.0)
    late = a_request("late", random.Random(3))
    ingress.open(late)
    assert ingress.book.description is not None
    sim.run_until_done(limit_s=80.0)
    assert_right(ingress, [request, other, late])


@pytest.mark.parametrize("num_coordinators", [1, 2])
def test_while_targets_are_loaded_no_more_are_taken_in_than_would_be_otherwise(num_coordinators: int) -> None:
    sim, ingress = simple(num_coordinators, max_num_waiting=2)
    first = [a_request(f"first{index}", random.Random(index), max_tokens=60) for index in range(6)]
    for request in first:
        ingress.open(request)
    sim.network.run_for(0.3)
    for coordinator in sim.coordinators:
        coordinator.load_s = 30.0
        coordinator.lose_target()
    sim.network.run_for(0.3)
    later = [a_request(f"later{index}", random.Random(index)) for index in range(20)]
    for request in later:
        ingress.open(request)
    sim.network.run_for(1.0)
    refused = [r for r in later if isinstance(ingress.last.get(r.request_id), CapacityError)]
    assert len(refused) == 26 - 6 * num_coordinators
    assert all(coordinator.desk.num_streams == 6 for coordinator in sim.coordinators)
    error = ingress.last[refused[0].request_id]
    assert isinstance(error, CapacityError)
    assert error.retry_after_s >= 5.0
    sim.run_until_done()
    assert_right(ingress, [*first, *(request for request in later if request not in refused)])


def test_a_stream_that_has_begun_is_not_refused_while_a_target_is_loaded() -> None:
    sim, ingress = simple(2, max_num_waiting=0)
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=80) for index in range(8)]
    for request in requests:
        ingress.open(request)
        sim.network.run_for(2 * ROUND_S)
    sim.network.run_for(3 * ROUND_S)
    served = [r for r in requests if r.request_id not in ingress.last]
    assert all(ingress.tokens[request.request_id] for request in served)
    crashed, other = sim.coordinators
    other.load_s = 20.0
    other.lose_target()
    sim.crash(crashed, told_after_s=0.5)
    sim.network.run_for(3.0)
    assert other.desk.num_streams == len(served) > 4
    sim.run_until_done()
    assert_right(ingress, served)


def test_where_another_has_no_room_streams_go_on_as_soon_as_one_of_both_has() -> None:
    sim, ingress = simple(2, max_num_waiting=0)
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=80) for index in range(8)]
    for request in requests:
        ingress.open(request)
        sim.network.run_for(2 * ROUND_S)
    refused = [r for r in requests if isinstance(ingress.last.get(r.request_id), CapacityError)]
    lost = sim.coordinators[0]
    num_moved = lost.desk.num_streams
    assert num_moved > 0
    lost.load_s = 20.0
    lost.lose_target()
    sim.run_until_done(limit_s=60.0)
    assert_right(ingress, [r for r in requests if r not in refused])
    # Who is refused and tries again has not failed over once more.
    assert ingress.book.counters["failovers"] == num_moved


def test_a_request_that_kills_targets_does_so_three_times_wherever_it_goes() -> None:
    sim, ingress = simple(3)
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=60) for index in range(8)]
    for coordinator in sim.coordinators:
        coordinator.poison = requests[2].request_id
        coordinator.load_s = 5.0
    for request in requests:
        ingress.open(request)
    sim.run_until_done()
    assert_right(ingress, requests[:2] + requests[3:])
    last = ingress.last[requests[2].request_id]
    assert isinstance(last, RequestOutput)
    assert (last.finish_reason, last.error_code) == ("error", "request_failed_repeatedly")
    assert sum(coordinator.num_losses for coordinator in sim.coordinators) == 3


def test_a_request_that_kills_targets_is_ended_alone_and_the_others_live() -> None:
    sim, ingress = simple()
    requests = [a_request(f"r{index}", random.Random(index)) for index in range(4)]
    coordinator = sim.coordinators[0]
    coordinator.poison = requests[2].request_id
    for request in requests:
        ingress.open(request)
    sim.run_until_done()
    assert_right(ingress, [requests[0], requests[1], requests[3]])
    last = ingress.last[requests[2].request_id]
    assert isinstance(last, RequestOutput)
    assert (last.finish_reason, last.error_code) == ("error", "request_failed_repeatedly")
    assert coordinator.num_losses == 3


@pytest.mark.parametrize("num_coordinators", [1, 3])
def test_a_request_that_kills_coordinators_is_ended_alone_and_the_others_live(num_coordinators: int) -> None:
    sim, ingress = simple()
    for _ in range(num_coordinators - 1):
        sim.start_coordinator()
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=60) for index in range(8)]
    for coordinator in sim.coordinators:
        coordinator.fatal = "r2"
    for request in requests:
        ingress.open(request)
    sim.run_until_done()
    assert_right(ingress, requests[:2] + requests[3:])
    last = ingress.last[requests[2].request_id]
    assert isinstance(last, RequestOutput)
    assert (last.finish_reason, last.error_code) == ("error", "request_failed_repeatedly")
    assert sim.num_started == num_coordinators + 3, "it had two chances, and one alone"
    # What came after it is served as ever.
    later = a_request("later", random.Random(9))
    ingress.open(later)
    sim.run_until_done()
    assert_right(ingress, [later])


@pytest.mark.parametrize("place", ["add_request", "step"])
@pytest.mark.parametrize("num_coordinators", [1, 3])
def test_a_request_that_makes_loops_raise_is_ended_alone_and_the_others_live(
    num_coordinators: int, place: Literal["add_request", "step"]
) -> None:
    sim, ingress = simple(num_coordinators)
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=60) for index in range(8)]
    for coordinator in sim.coordinators:
        coordinator.bug = Bug(RequestId("r2"), place)
    for request in requests:
        ingress.open(request)
    sim.run_until_done()
    assert_right(ingress, requests[:2] + requests[3:])
    last = ingress.last[requests[2].request_id]
    assert isinstance(last, RequestOutput)
    assert (last.finish_reason, last.error_code) == ("error", "request_failed_repeatedly")
    sim.network.run_for(5.0)  # until the last one has been replaced
    assert sim.num_started == num_coordinators + 3, "it had two chances, and one alone"


def test_a_coordinator_whose_loop_has_failed_takes_nothing_more() -> None:
    """It has nothing to do, so that it looks like the best place to go until it is replaced."""
    sim, ingress = simple(2)
    failed, other = sim.coordinators
    failed.desk.end_all("the coordinator failed", COORDINATOR_CRASHED)
    failed.is_alive = False  # its rounds; its channel lives on
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=60) for index in range(4)]
    for request in requests:
        ingress.open(request)
        sim.network.run_for(0.1)
        assert failed.desk.num_streams == 0
    sim.run_until_done(limit_s=60.0)
    assert_right(ingress, requests)
    assert other.engine.metrics().finished["length"] == 4


def test_an_abort_of_one_attempt_does_not_end_the_next() -> None:
    """Both were ordered while the engine was being given something else, so that the abort is found later."""
    sim, ingress = simple()
    (coordinator,) = sim.coordinators
    coordinator.is_alive = False  # its rounds are driven from here
    request, other = a_request("r", random.Random(5)), a_request("other", random.Random(6))
    sender, desk, engine = ingress.channel.address.peer_id, coordinator.desk, coordinator.engine

    def hear(message: Abort | SubmitRequest) -> None:
        desk.hear(Envelope(sender=sender, message=message))

    hear(SubmitRequest(request))
    desk.serve(engine)
    hear(SubmitRequest(other))
    add_request = engine.add_request

    def adding(one: Request) -> None:
        add_request(one)
        if one.request_id == other.request_id:
            hear(Abort(request.request_id, Epoch(0)))
            hear(SubmitRequest(msgspec.structs.replace(request, epoch=Epoch(1))))

    engine.add_request = adding  # type: ignore[method-assign]
    desk.serve(engine)
    desk.serve(engine)
    steps = [engine.step() for _ in range(50)]
    outputs = [output for step in steps for output in step if (output.request_id, output.epoch) == ("r", 1)]
    assert outputs[-1].finish_reason == "length"
    assert [token for output in outputs for token in output.token_ids] == expected(request)


def test_who_was_there_at_two_crashes_by_chance_is_cleared() -> None:
    sim, ingress = simple()
    request = Request(
        request_id=RequestId("r"),
        prompt_token_ids=(1,),
        params=SamplingParams(temperature=1.0, max_tokens=150, ignore_eos=True),
        seed=1,
        num_draft_tokens=0,
    )
    ingress.open(request)
    for _ in range(4):
        sim.network.run_for(0.6)
        assert ingress.book.num_streams == 1
        sim.crash(sim.coordinators[0], told_after_s=0.5)
        sim.start_coordinator()
    sim.run_until_done()
    assert_right(ingress, [request])


def test_when_all_coordinators_are_gone_streams_wait_and_then_end_in_one_error() -> None:
    sim, ingress = simple()
    request = a_request("r", random.Random(1))
    ingress.open(request)
    sim.network.run_for(0.2)
    sim.crash(sim.coordinators[0])
    sim.network.run_for(50.0)
    assert request.request_id not in ingress.last
    assert ingress.book.description is None
    sim.network.run_for(20.0)
    last = ingress.last[request.request_id]
    assert isinstance(last, RequestOutput)
    assert (last.finish_reason, last.error_code) == ("error", "coordinator_lost")
    with pytest.raises(NotReadyError, match="no model is ready"):
        ingress.open(a_request("other", random.Random(2)))


def test_another_model_does_not_continue_a_stream() -> None:
    sim, ingress = simple()
    request = a_request("r", random.Random(1))
    ingress.open(request)
    sim.network.run_for(0.2)
    sim.crash(sim.coordinators[0])
    sim.start_coordinator(revision="another")
    sim.run_until_done()
    last = ingress.last[request.request_id]
    assert isinstance(last, RequestOutput)
    assert last.error_code == "coordinator_lost"


def test_a_full_queue_is_refused_and_a_bad_request_by_name() -> None:
    sim, ingress = simple(max_num_waiting=1)
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=60) for index in range(12)]
    for request in requests:
        ingress.open(request)
    too_long = msgspec.structs.replace(requests[0], request_id=RequestId("long"), prompt_token_ids=(1,) * 999)
    ingress.open(too_long)
    sim.run_until_done()
    refused = [r for r in requests if isinstance(ingress.last[r.request_id], CapacityError)]
    assert 5 <= len(refused) <= 8
    assert_right(ingress, [request for request in requests if request not in refused])
    assert isinstance(ingress.last[too_long.request_id], InputError)


def test_refused_at_one_coordinator_a_request_goes_to_the_next() -> None:
    sim, ingress = simple(2, max_num_waiting=0)
    requests = [a_request(f"r{index}", random.Random(index)) for index in range(2)]
    for request in requests:
        ingress.open(request)
        sim.network.run_for(0.2)
    sim.run_until_done()
    refused = [r for r in requests if isinstance(ingress.last[r.request_id], CapacityError)]
    assert_right(ingress, [request for request in requests if request not in refused])


def test_a_drained_coordinator_finishes_what_it_has_and_gets_nothing_new() -> None:
    sim, ingress = simple(2)
    first, second = (a_request(name, random.Random(5)) for name in ("first", "second"))
    ingress.open(first)
    sim.network.run_for(0.2)
    (serving,) = [c for c in sim.coordinators if c.desk.num_streams]
    serving.desk.drain()
    ingress.open(second)
    sim.run_until_done()
    assert_right(ingress, [first, second])
    assert {last.epoch for last in ingress.last.values() if isinstance(last, RequestOutput)} <= {0, 1}
    assert serving.engine.metrics().finished["length"] == 1


def test_what_outlasts_the_end_of_the_deployment_ends_in_one_error() -> None:
    sim, ingress = simple(2)
    short = a_request("short", random.Random(5), max_tokens=20)
    long = [a_request(f"long-{index}", random.Random(index), max_tokens=160) for index in range(3)]
    for request in (short, *long):
        ingress.open(request)
    sim.network.run_for(0.2)
    for coordinator in sim.coordinators:
        coordinator.desk.close_down(0.8)
        coordinator.desk.close_down(60.0)  # the first call counts
    sim.network.run_for(ROUND_S)  # much less than to the next ping
    assert ingress.book.description is None
    with pytest.raises(NotReadyError, match="shutting down"):
        ingress.open(a_request("late", random.Random(2)))
    sim.network.run_for(3.0)
    assert ingress.book.num_streams == 0
    assert_right(ingress, [short])
    for request in long:
        last = ingress.last[request.request_id]
        assert isinstance(last, RequestOutput)
        assert (last.finish_reason, last.error_code, last.epoch) == ("error", SHUTTING_DOWN, 0)
        tokens = ingress.tokens[request.request_id]
        assert 0 < len(tokens) < 160
        assert tokens == expected(request)[: len(tokens)]
    for coordinator in sim.coordinators:
        assert not coordinator.engine.has_work, "it goes on with what nobody waits for"


def test_when_the_last_coordinator_of_a_closing_deployment_dies_its_streams_end_at_once() -> None:
    sim, ingress = simple()
    request = a_request("r", random.Random(5), max_tokens=160)
    ingress.open(request)
    sim.network.run_for(0.2)
    sim.coordinators[0].desk.close_down(1000.0)
    sim.network.run_for(0.2)
    sim.crash(sim.coordinators[0])
    sim.network.run_for(LEASE_S + 1.0)  # far less than the time that another would have to appear
    last = ingress.last[request.request_id]
    assert isinstance(last, RequestOutput)
    assert last.error_code == SHUTTING_DOWN


def test_one_that_was_wrong_about_the_end_of_the_deployment_is_forgotten() -> None:
    """Serve did not answer when it was asked why a replica ends, and there was no other."""
    sim, ingress = simple()
    wrong = sim.coordinators[0]
    wrong.desk.close_down(1000.0)
    sim.network.run_for(0.2)
    with pytest.raises(NotReadyError, match="shutting down"):
        ingress.open(a_request("early", random.Random(2)))
    second = sim.start_coordinator()
    sim.network.run_for(1.0)
    sim.crash(wrong, told_after_s=0.0)
    request = a_request("r", random.Random(5), max_tokens=160)
    ingress.open(request)
    sim.network.run_for(0.3)
    sim.crash(second, told_after_s=0.0)  # what this one leaves is not at its end
    sim.network.run_for(10.0)
    assert request.request_id not in ingress.last
    sim.start_coordinator()
    sim.run_until_done()
    assert_right(ingress, [request])


def test_a_request_that_meets_the_end_of_the_deployment_is_not_kept_waiting() -> None:
    sim, ingress = simple()
    desk = sim.coordinators[0].desk
    desk._is_draining, desk._end_s = True, 1e9  # the news is still on its way
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.network.run_for(ROUND_S)
    assert isinstance(ingress.last[request.request_id], NotReadyError)


@pytest.mark.parametrize("has_heard", [True, False])
def test_who_leaves_makes_room_for_a_successor_that_the_door_has_yet_to_hear_of(has_heard: bool) -> None:
    """In an update in place: the one that goes knows that another serves before this door does."""
    sim, ingress = simple()
    leaving = sim.coordinators[0].desk
    if has_heard:
        leaving.drain()
        sim.network.run_for(ROUND_S)
    else:
        leaving._is_draining = True  # the news is still on its way
    assert ingress.book.description is not None
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.network.run_for(0.6 * LEASE_S)
    assert request.request_id not in ingress.last
    sim.start_coordinator()
    assert ingress.book.description is not None, "it has not introduced itself yet, but takes requests"
    sim.run_until_done()
    assert_right(ingress, [request])


def test_where_nobody_follows_one_that_leaves_it_is_said_after_a_lease() -> None:
    sim, ingress = simple()
    sim.coordinators[0].desk.drain()
    sim.network.run_for(ROUND_S)
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.network.run_for(LEASE_S + 0.5)
    assert isinstance(ingress.last[request.request_id], NotReadyError)
    assert ingress.book.description is None
    with pytest.raises(NotReadyError):
        ingress.open(a_request("s", random.Random(6)))


def test_who_is_silent_but_in_the_directory_is_waited_for() -> None:
    """A machine that starts other processes may be silent for longer than a lease."""
    sim, ingress = simple()
    sim.network.faults = Faults(loss=1.0)
    sim.network.run_for(3 * LEASE_S)
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.network.run_for(3 * LEASE_S)
    assert request.request_id not in ingress.last
    sim.network.faults = Faults()
    sim.run_until_done()
    assert_right(ingress, [request])


def test_many_streams_that_wait_are_soon_placed_when_somebody_is_back() -> None:
    """A door does nothing else meanwhile: it must not look at all streams for each of them."""
    sim, ingress = simple(max_num_waiting=8000)
    sim.network.faults = Faults(loss=1.0)
    sim.network.run_for(3 * LEASE_S)
    rng = random.Random(5)
    for number in range(8000):
        ingress.open(a_request(f"r{number}", rng))
    started_s = time.thread_time()
    ingress.book.hear(Envelope(sender=sim.coordinators[0].member.peer_id, message=Pong(0, ())))
    took_s = time.thread_time() - started_s
    assert not ingress.book.has_homeless
    assert took_s < 2.0, f"{took_s:.1f} s"


def test_who_is_silent_and_then_lost_is_not_waited_for() -> None:
    sim, ingress = simple()
    sim.network.faults = Faults(loss=1.0)
    sim.network.run_for(3 * LEASE_S)
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.crash(sim.coordinators[0], told_after_s=1.0)
    sim.network.run_for(LEASE_S + 3.0)
    assert isinstance(ingress.last[request.request_id], NotReadyError)


@pytest.mark.parametrize("may_be_none", [False, True])
def test_a_door_that_is_cut_off_says_so(may_be_none: bool) -> None:
    """Others may hear the coordinators: whoever chooses a door by its health is to choose one of them."""
    sim, ingress = simple()
    ingress.book._coordinators._may_be_none = may_be_none
    old = a_request("old", random.Random(5))
    ingress.open(old)
    sim.network.run_for(0.2)
    sim.network.faults = Faults(loss=1.0)
    sim.network.run_for(9 * LEASE_S)
    assert ingress.book.description is not None, "who is silent may be late"
    sim.network.run_for(2 * LEASE_S)
    assert ingress.book.description is None
    with pytest.raises(NotReadyError):
        ingress.open(a_request("early", random.Random(6)))
    assert old.request_id not in ingress.last, "what had begun waits for a failover"
    sim.network.faults = Faults()
    sim.network.run_for(LEASE_S)
    assert ingress.book.description is not None
    new = a_request("new", random.Random(7))
    ingress.open(new)
    sim.run_until_done()
    assert_right(ingress, [old, new])


def test_a_directory_that_cannot_be_reached_vouches_for_nobody() -> None:
    """Who dies then stays in the last view of it for ever."""
    sim, ingress = simple()
    old = a_request("old", random.Random(5))
    ingress.open(old)
    sim.network.run_for(0.2)
    sim.lose_directory()
    sim.crash(sim.coordinators[0], told_after_s=1.0)
    sim.network.run_for(LEASE_S + 1.0)
    waits = a_request("waits", random.Random(6))
    ingress.open(waits)
    sim.network.run_for(LEASE_S)
    assert isinstance(ingress.last[waits.request_id], NotReadyError), "two leases after its last answer"
    assert ingress.book.description is None, "which is what /health says"
    with pytest.raises(NotReadyError, match="no model is ready"):
        ingress.open(a_request("late", random.Random(7)))
    assert old.request_id not in ingress.last, "what had begun waits for a failover"
    sim.directory_lost_s = None
    sim.start_coordinator()
    sim.run_until_done()
    assert_right(ingress, [old])


def test_who_is_silent_is_waited_for_again_once_the_directory_answers() -> None:
    sim, ingress = simple()
    sim.lose_directory()
    sim.network.faults = Faults(loss=1.0)
    sim.network.run_for(4 * LEASE_S)
    with pytest.raises(NotReadyError):
        ingress.open(a_request("early", random.Random(5)))
    sim.directory_lost_s = None
    sim.network.run_for(1.0)
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.network.faults = Faults()
    sim.run_until_done()
    assert_right(ingress, [request])


def test_without_the_directory_those_who_are_heard_serve() -> None:
    sim, ingress = simple()
    sim.lose_directory()
    sim.network.run_for(5 * LEASE_S)
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.run_until_done()
    assert_right(ingress, [request])


def test_a_successor_that_has_not_introduced_itself_takes_requests() -> None:
    sim, ingress = simple()
    described = ingress.book.description
    sim.coordinators[0].desk.drain()
    sim.network.run_for(LEASE_S + 1.0)
    assert ingress.book.description is None, "the time of doubt is over"
    successor = sim.start_coordinator()
    assert ingress.book.description == described
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.run_until_done()
    assert_right(ingress, [request])
    assert successor.engine.metrics().finished["length"] == 1


def test_an_ingress_that_is_closed_ends_its_streams() -> None:
    sim, ingress = simple()
    request = a_request("r", random.Random(5), max_tokens=160)
    ingress.open(request)
    sim.network.run_for(0.2)
    ingress.book.end_all()
    last = ingress.last[request.request_id]
    assert isinstance(last, RequestOutput)
    assert last.error_code == SHUTTING_DOWN
    sim.network.run_for(3 * ROUND_S)
    assert not sim.coordinators[0].engine.has_work


def close_down_amid_faults(seed: int) -> tuple[int, int]:
    """End a deployment over a bad network; return how many streams were complete and how many cut."""
    rng = random.Random(seed)
    sim = Simulation(random_faults(rng), seed)
    for _ in range(rng.randint(1, 3)):
        sim.start_coordinator()
    ingress = sim.start_ingress()
    sim.network.run_for(5.0)
    requests = [a_request(f"r{index}", rng, max_tokens=rng.choice([5, 40, 160])) for index in range(6)]
    for request in requests:
        ingress.open(request)
    sim.network.run_for(rng.uniform(0.0, 2.0))
    for coordinator in sim.coordinators:
        coordinator.desk.close_down(rng.uniform(0.0, 3.0))
    if len(sim.coordinators) > 1 and rng.random() < 0.5:
        sim.crash(rng.choice(sim.coordinators))
    sim.network.run_for(10.0 + 5 * LEASE_S)
    assert ingress.book.num_streams == 0
    num_complete = 0
    for request in requests:
        last, tokens = ingress.last[request.request_id], ingress.tokens[request.request_id]
        assert tokens == expected(request)[: len(tokens)]
        if isinstance(last, RequestOutput) and last.finish_reason == "length":
            assert len(tokens) == request.params.max_tokens
            num_complete += 1
        elif isinstance(last, RequestOutput):
            assert last.error_code == SHUTTING_DOWN
        else:
            assert isinstance(last, NotReadyError)
    return num_complete, len(requests) - num_complete


def test_the_end_of_a_deployment_over_a_bad_network() -> None:
    outcomes = [close_down_amid_faults(seed) for seed in range(40)]
    assert sum(complete for complete, _ in outcomes) > 40
    assert sum(cut for _, cut in outcomes) > 40


def test_a_client_that_leaves_and_one_that_aborts_free_their_blocks() -> None:
    sim, ingress = simple()
    coordinator = sim.coordinators[0]
    leaves, aborts = (a_request(name, random.Random(5), max_tokens=60) for name in ("leaves", "aborts"))
    ingress.open(leaves)
    ingress.open(aborts)
    sim.network.run_for(0.3)
    assert coordinator.engine.metrics().kv_cache_usage > 0
    ingress.book.close(leaves.request_id)
    ingress.book.abort(aborts.request_id)
    sim.network.run_for(3 * ROUND_S)
    assert coordinator.engine.metrics().kv_cache_usage == 0
    assert not coordinator.engine.has_work
    last = ingress.last[aborts.request_id]
    assert isinstance(last, RequestOutput)
    assert last.finish_reason == "abort"
    assert leaves.request_id not in ingress.last


def test_an_ingress_that_vanishes_frees_its_blocks_after_its_lease() -> None:
    sim, ingress = simple()
    coordinator = sim.coordinators[0]
    ingress.open(a_request("r", random.Random(5), max_tokens=200))
    sim.network.run_for(0.3)
    ingress.is_alive = False
    sim.network.kill(ingress.channel.address.peer_id)
    sim.network.run_for(LEASE_S / 2)
    assert coordinator.desk.num_streams == 1
    sim.network.run_for(LEASE_S)
    assert coordinator.desk.num_streams == 0
    assert coordinator.engine.metrics().kv_cache_usage == 0


def test_another_ingress_can_neither_abort_nor_take_a_stream() -> None:
    sim, ingress = simple()
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.network.run_for(0.3)
    thief = sim.network.open(PeerId("thief"))
    coordinator = sim.coordinators[0]
    coordinator.channel.admit([ingress.channel.address, thief.address])
    thief.connect(coordinator.member.address)
    thief.send(coordinator.member.peer_id, Abort(request.request_id, Epoch(99)))
    thief.send(coordinator.member.peer_id, SubmitRequest(msgspec.structs.replace(request, epoch=Epoch(99))))
    sim.run_until_done()
    assert_right(ingress, [request])


def test_messages_that_are_not_for_who_gets_them_are_counted_and_dropped() -> None:
    sim, ingress = simple()
    request = a_request("r", random.Random(5))
    ingress.open(request)
    sim.network.run_for(0.2)
    (coordinator,) = sim.coordinators
    for message in (Release(()), ProposeReply(1, ())):
        ingress.channel.send(coordinator.member.peer_id, message)
        coordinator.channel.send(ingress.channel.address.peer_id, message)
    sim.run_until_done()
    assert_right(ingress, [request])
    assert coordinator.desk.num_unexpected == 2
    assert ingress.book.counters["unexpected_messages_dropped"] == 2


def test_frames_of_old_epochs_are_dropped() -> None:
    """A coordinator that was taken for dead goes on sending: nobody hears it."""
    sim, ingress = simple(2)
    request = a_request("r", random.Random(1))
    ingress.open(request)
    sim.network.run_for(0.2)
    (zombie,) = [c for c in sim.coordinators if c.desk.num_streams]
    (stream,) = ingress.book._streams.values()
    ingress.book._evict(stream)
    assert stream.coordinator is not None
    frame = OutputFrame(
        (
            RequestOutput(
                request_id=request.request_id,
                epoch=Epoch(0),
                first_index=len(stream.delivered),
                token_ids=(0, 0, 0),
                text="aaa",
                finish_reason="length",
            ),
        )
    )
    zombie.channel.send(ingress.channel.address.peer_id, frame)
    sim.run_until_done()
    assert_right(ingress, [request])
    assert ingress.book.counters["stale_frames_dropped"] >= 1


def test_a_pong_never_overtakes_the_last_output_of_a_stream() -> None:
    """Over a link that keeps its order, nothing is ever submitted twice."""
    sim, ingress = simple()
    requests = [a_request(f"r{index}", random.Random(index), max_tokens=3) for index in range(30)]
    for request in requests:
        ingress.open(request)
        sim.network.run_for(0.07)
        ingress.channel.send(sim.coordinators[0].member.peer_id, Ping(1 << 40))
    sim.run_until_done()
    assert_right(ingress, requests)
    assert ingress.book.counters["failovers"] == 0
    with pytest.raises(ChannelTimeout):
        ingress.channel.receive(0)


def test_the_error_that_means_replay_is_the_engine_s() -> None:
    """The desk recognises by its code that an engine gave its requests up."""
    toy = ToyTarget(MODEL)
    engine = Engine.from_parts(
        target=toy,
        proposer=NgramProposer(prompt_lookup_min=1, prompt_lookup_max=2),
        tokenizer=ToyTokenizer.of_letters(VOCAB),
    )
    engine.add_request(a_request("r", random.Random(0)))
    toy.num_steps_until_lost = 0
    (output,) = engine.step()
    assert output.error_code == TARGET_LOST
