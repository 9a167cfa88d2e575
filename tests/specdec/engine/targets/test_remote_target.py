"""One owner at a time, each step once, and a clear end."""

from __future__ import annotations

import msgspec
import pytest

from specdec.core.errors import ChannelTimeout, TransportError
from specdec.core.plan import AdmittedSequence, TargetResult, TargetStep, TargetWork
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.remote_target import RemoteTarget, RemoteTargetTimes
from specdec.engine.targets.toy_target import ToyModel, ToyTarget
from specdec.transport.base import PeerId, PeerLost
from specdec.transport.memory import Faults
from specdec.transport.messages import Ping, RunStep, StepDone, StepPart, encode
from tests.specdec.engine.targets.target_world import TIMES, WORKER, A, World, step


def test_steps_are_answered_in_order_and_two_may_be_in_flight() -> None:
    world = World()
    target = world.attach(0, 1)
    assert target.description == world.toy.description
    target.submit(step(10, admit=True))
    target.submit(step(11))
    first, second = target.collect(), target.collect()
    assert (first.step_id, second.step_id) == (10, 11)
    assert first.results == second.results


def test_steps_run_once_and_in_order_over_a_network_that_doubles_loses_and_reorders() -> None:
    world = World()
    target = world.attach(0, 1)
    world.network.faults = Faults(delay_s=(0.0, 3.0), loss=0.3, duplication=0.3, in_order=False)
    ran: list[int] = []
    submit = world.toy.submit

    def recording(one: TargetStep) -> None:
        ran.append(one.step_id)
        submit(one)

    world.toy.submit = recording  # type: ignore[method-assign]
    world.clock.advance(1.0)
    results: list[TargetResult] = []
    target._times = RemoteTargetTimes(step_timeout_s=1e6)
    for number in range(100):
        target.submit(step(number, admit=number == 0))
        if number % 2:
            results += [target.collect(), target.collect()]
    assert ran == list(range(100))
    assert [result.step_id for result in results] == list(range(100))


def test_a_newer_owner_fences_the_older_off_and_inherits_a_clean_target() -> None:
    world = World()
    old = world.attach(0, 1)
    old.submit(step(0, admit=True))
    old.collect()
    assert world.toy.known_requests == {A}
    new = world.attach(1, 2)
    new.submit(step(0, admit=True))  # the toy refuses to admit a sequence twice
    assert new.collect().results
    old.submit(step(1))
    with pytest.raises(TransportError, match="taken over: incarnation 2 > 1"):
        old.collect()
    new.submit(step(1))
    assert new.collect().step_id == 1


def test_an_owner_that_never_ran_a_step_leaves_a_clean_target_too() -> None:
    world = World()
    first = world.attach(0, 1)
    first.submit(step(0, admit=True))
    first.collect()
    world.attach(1, 2)
    last = world.attach(0, 3)
    last.submit(step(0, admit=True))  # the toy refuses to admit a sequence twice
    assert last.collect().results
    assert world.toy.known_requests == {A}


def test_an_older_owner_cannot_come_back() -> None:
    world = World()
    world.attach(0, 5)
    with pytest.raises(TransportError, match="taken over"):
        world.attach(1, 4)
    with pytest.raises(TransportError, match="taken over"):
        world.attach(1, 5)


def test_an_idle_owner_learns_that_it_was_fenced_off() -> None:
    world = World()
    old = world.attach(0, 1)
    old.check()
    world.attach(1, 2)
    with pytest.raises(TransportError, match="taken over"):
        old.check()


def test_steps_of_others_are_not_run() -> None:
    world = World()
    target = world.attach(0, 1)
    world.owners[1].connect(world.worker.address)
    world.owners[1].send(WORKER, RunStep(1, 0, step(666, admit=True)))
    world.owners[1].send(WORKER, RunStep(7, 0, step(666, admit=True)))
    world.owners[1].send(WORKER, Ping(1))
    world.network.run_for(1.0)
    assert world.toy.known_requests == frozenset()
    target.submit(step(0, admit=True))
    assert target.collect().step_id == 0


def test_what_the_worker_drops_is_told_once_however_often_and_late_its_answers_come() -> None:
    world = World()
    target = world.attach(0, 1)
    key = 'worker_messages_dropped{channel="target",dropped_by="target_worker",reason="%s"}'
    target.submit(step(0, admit=True))
    target.collect()
    assert not any("target_worker" in series for series in target.messages_dropped), "there is nothing yet"
    world.owners[1].connect(world.worker.address)
    for number in (1, 2):
        world.owners[0].send(WORKER, Ping(1))
        world.owners[1].send(WORKER, RunStep(7, 0, step(666, admit=True)))
        target.submit(step(number))
    target.collect()
    target.collect()
    told = {series: n for series, n in target.messages_dropped.items() if "target_worker" in series}
    assert told == {key % "stale": 2, key % "unexpected_kind": 2}
    target.submit(step(3))
    target._take_answer(StepDone(1, 3, TargetResult(3, ()), {key % "stale": 1}))
    assert target.collect().step_id == 3
    assert target.messages_dropped[key % "stale"] == 2, "the answer was made before others"


def test_a_dead_worker_is_noticed_after_the_grace() -> None:
    world = World()
    target = world.attach(0, 1)
    target.submit(step(0, admit=True))
    target.collect()
    world.network.kill(WORKER)
    started_s = world.clock.now_s()
    target.submit(step(1))
    with pytest.raises(TransportError, match="is gone"):
        target.collect()
    assert world.clock.now_s() - started_s <= TIMES.lost_link_grace_s


def compute(world: World, for_s: float) -> None:
    """The worker is at a step for so long: what arrives meanwhile waits, as what has arrived."""
    world.network.serve(WORKER, lambda: None)

    def go_on() -> None:
        world.network.serve(WORKER, world.serve)
        while world.server.step(0):
            pass

    world.network.schedule(for_s, go_on)


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_a_link_that_breaks_and_returns_while_the_target_computes_for_long_ends_nothing(
    num_in_flight: int,
) -> None:
    world = World()
    target = world.attach(0, 1)
    compute(world, 4 * TIMES.lost_link_grace_s)
    for at_s in (0.5, 3.0):
        world.network.schedule(at_s, lambda: world.network.break_link(WORKER, PeerId("first"), 0.3))
    for number in range(num_in_flight):
        target.submit(step(number, admit=number == 0))
    assert [target.collect().step_id for _ in range(num_in_flight)] == [*range(num_in_flight)]
    assert world.clock.now_s() == 4 * TIMES.lost_link_grace_s


def test_a_step_that_was_lost_with_its_link_is_sent_again_once_it_is_back() -> None:
    world = World()
    target = world.attach(0, 1)
    world.network.break_link(WORKER, PeerId("first"), 0.3)
    target.submit(step(0, admit=True))
    target._times = RemoteTargetTimes(resend_after_s=1e6, lost_link_grace_s=10.0)
    assert target.collect().step_id == 0
    assert world.clock.now_s() == 0.3


@pytest.mark.parametrize("is_back_first", [False, True])
def test_a_worker_that_is_lost_while_it_computes_is_noticed_after_the_grace(is_back_first: bool) -> None:
    """Its link does not come back, or did so before it died."""
    world = World()
    target = world.attach(0, 1)
    compute(world, 1e6)
    world.network.schedule(
        0.5, lambda: world.network.break_link(WORKER, PeerId("first"), 0.3 if is_back_first else 1e6)
    )
    lost_s = 0.5
    if is_back_first:
        lost_s = 3.0
        world.network.schedule(lost_s, lambda: world.network.kill(WORKER))
    target.submit(step(0, admit=True))
    with pytest.raises(TransportError, match="is gone"):
        target.collect()
    assert world.clock.now_s() == pytest.approx(lost_s + TIMES.lost_link_grace_s)


def test_an_idle_owner_whose_link_broke_and_is_back_goes_on() -> None:
    world = World()
    target = world.attach(0, 1)
    compute(world, 1e6)
    world.network.break_link(WORKER, PeerId("first"), 0.3)
    for _ in range(8):
        target.check()
        world.network.run_for(TIMES.lost_link_grace_s / 4)


def test_a_dead_worker_is_noticed_without_a_step_too() -> None:
    world = World()
    target = world.attach(0, 1)
    world.network.kill(WORKER)
    target.check()
    world.network.run_for(1.0)
    target.check()
    world.network.run_for(1.1)
    with pytest.raises(TransportError, match="is gone"):
        target.check()


def test_a_worker_that_hangs_is_given_up() -> None:
    world = World()
    target = world.attach(0, 1)
    world.network.serve(WORKER, lambda: None)
    target.submit(step(0, admit=True))
    with pytest.raises(ChannelTimeout):
        target.collect()
    assert world.clock.now_s() == pytest.approx(TIMES.step_timeout_s)


def test_a_worker_that_fails_says_why() -> None:
    world = World()
    target = world.attach(0, 1)
    world.toy.num_steps_until_lost = 0
    target.submit(step(0, admit=True))
    with pytest.raises(TransportError, match="the toy target is lost, as asked"):
        target.collect()
    assert world.error is not None, "its process ends"


def test_a_worker_that_is_not_there_is_a_timeout() -> None:
    world = World()
    world.network.kill(WORKER)
    with pytest.raises((ChannelTimeout, TransportError)):
        world.attach(0, 1)


def test_a_step_that_was_lost_with_its_link_is_sent_again_within_the_grace() -> None:
    world = World()
    target = RemoteTarget(
        world.owners[0], world.worker.address, incarnation=1, times=RemoteTargetTimes(), clock=world.clock
    )
    break_link(world, for_s=0.6)
    target.submit(step(0, admit=True))
    assert target.collect().step_id == 0
    assert world.clock.now_s() < 1.0


def test_a_worker_that_says_it_is_there_again_is_not_given_up() -> None:
    world = World()
    target = world.attach(0, 1)
    break_link(world, for_s=0.0)
    world.network.run_for(0.0)
    target.check()  # asks whether it is there
    world.network.run_for(0.0)
    world.network.faults = Faults(loss=1.0)
    world.network.schedule(TIMES.lost_link_grace_s + 0.5, lambda: mend(world))
    target.submit(step(0, admit=True))
    assert target.collect().step_id == 0
    assert world.clock.now_s() > TIMES.lost_link_grace_s


def break_link(world: World, *, for_s: float) -> None:
    """What is sent for a while is lost, in both directions; the owner hears that the link broke."""
    world.network.faults = Faults(loss=1.0)
    world.owners[0]._inbox.put(WORKER, PeerLost(), 0)
    world.network.schedule(for_s, lambda: mend(world))


def mend(world: World) -> None:
    world.network.faults = Faults()


def long_step(step_id: int, num_blocks: int, *, admit: bool = False) -> TargetStep:
    """A step of many bytes and few rows: a long block table."""
    one = step(step_id, admit=admit)
    (work,) = one.works
    return msgspec.structs.replace(
        one, works=(msgspec.structs.replace(work, block_ids=tuple(range(1, 1 + num_blocks))),)
    )


def test_steps_longer_than_a_message_run_once_over_a_network_that_loses() -> None:
    """Masks of grammars and what drafts were drawn from grow with rows times the vocabulary."""
    world = World(max_message_bytes=2000)
    target = world.attach(0, 1)
    lengths = (4000, 2, 5000, 2)
    steps = [long_step(number, length, admit=not number) for number, length in enumerate(lengths)]
    alone = ToyTarget(ToyModel(7))
    expected = []
    for one in steps:
        alone.submit(one)
        expected.append(alone.collect())
    world.network.faults = Faults(delay_s=(0.0, 0.5), loss=0.02, duplication=0.3, in_order=False)
    found = []
    for one in steps:
        target.submit(one)
        found.append(target.collect())
    assert found == expected
    assert target.counters["steps_in_parts"] >= 2
    assert world.server.counters["malformed_steps"] == 0


def scored_target() -> ToyTarget:
    return ToyTarget(ToyModel(64), num_blocks=512, max_model_len=2048)


def scored_step(step_id: int, *, is_first: bool) -> TargetStep:
    """A prompt of which every token's 20 best are wanted: hundreds of bytes each."""
    tokens = tuple((7 * number + step_id) % 64 for number in range(600))
    work = TargetWork(A, tokens, 0, 1, 0, tuple(range(1, 152)), scored_token_ids=tokens[1:])
    params = SamplingParams(temperature=0.0, prompt_logprobs=20)
    return TargetStep(step_id, (work,), (AdmittedSequence(A, 5, params),) if is_first else ())


def test_answers_longer_than_a_message_come_in_parts() -> None:
    world = World(max_message_bytes=1 << 16, make_toy=scored_target)
    target = world.attach(0, 1)
    alone = scored_target()
    for number in range(3):
        one = scored_step(number, is_first=number == 0)
        alone.submit(one)
        target.submit(one)
        expected, found = alone.collect(), target.collect()
        assert len(encode(StepDone(1, number, expected))) > 1 << 16
        assert found == expected
    assert world.server.counters["answers_in_parts"] == 3
    assert target.counters["steps_in_parts"] == target.counters["stale_answers"] == 0
    assert world.error is None


def test_parts_of_answers_may_be_lost_doubled_and_late() -> None:
    world = World(max_message_bytes=1 << 13, make_toy=scored_target)
    target = world.attach(0, 1)
    alone = scored_target()
    steps = [scored_step(number, is_first=number == 0) for number in range(6)]
    world.network.faults = Faults(delay_s=(0.0, 0.5), loss=0.02, duplication=0.3, in_order=False)
    for pair in (steps[:2], steps[2:4], steps[4:]):
        for one in pair:
            alone.submit(one)
            target.submit(one)
        for _ in pair:
            assert target.collect() == alone.collect()
    assert target.counters["stale_answers"] > 0
    assert target.counters["malformed_answers"] == world.server.counters["malformed_steps"] == 0


def test_parts_of_no_answer_are_dropped() -> None:
    world = World()
    target = world.attach(0, 1)
    target.submit(step(0, admit=True))
    for part in (
        StepPart(1, 0, 0, 0, b""),
        StepPart(1, 0, 0, 1, b"nonsense"),
        StepPart(0, 0, 0, 2, b"of another incarnation"),
        StepPart(1, 7, 0, 2, b"of another step"),
    ):
        world.worker.send(PeerId("first"), part)
    assert target.collect().step_id == 0
    assert (target.counters["malformed_answers"], target.counters["stale_answers"]) == (2, 2)


def test_parts_of_somebody_who_is_not_the_owner_any_more_are_fenced() -> None:
    world = World(max_message_bytes=2000)
    target = world.attach(0, 1)
    world.attach(1, 2)
    target.submit(long_step(0, 4000, admit=True))
    with pytest.raises(TransportError, match="taken over"):
        target.collect()
