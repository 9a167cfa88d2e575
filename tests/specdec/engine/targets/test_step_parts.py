"""Steps longer than a message: whole again, whatever order their parts come in."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from specdec.core.errors import ChannelTimeout, MessageTooLong, ProtocolError
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep, TargetWork, WorkResult
from specdec.engine.targets import step_parts
from specdec.engine.targets.step_parts import StepAssembly, parts_of, send_step
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults, MemoryNetwork
from specdec.transport.messages import Message, RunStep, StepDone, StepPart, encode
from specdec.transport.wrapped import WrappedChannel
from tests.specdec.engine.remote_cluster import Cluster, a_request, expected

MOST = 1000


def long_step(sequence: int, num_tokens: int = 3000) -> RunStep:
    work = TargetWork(RequestId("a"), tuple(range(num_tokens)), 0, 1, 0, (1, 2))
    return RunStep(3, sequence, TargetStep(sequence, (work,)))


def test_parts_fit_and_make_the_step_in_any_order() -> None:
    rng = random.Random(1)
    assembly = StepAssembly(RunStep)
    steps = [long_step(0), long_step(1, num_tokens=5000)]
    parts = [part for step in steps for part in parts_of(step, MOST)]
    assert all(len(encode(part)) <= MOST for part in parts)
    assert len(parts) > 10
    sent = [*parts, *rng.sample(parts, 5)]
    rng.shuffle(sent)
    made = [step for part in sent if (step := assembly.add(part)) is not None]
    assert [step for step in steps if step in made] == steps
    assert len(parts_of(long_step(2, num_tokens=3), MOST)) == 1, "what is short is one part"


def test_a_step_that_was_cut_in_another_way_before_begins_anew() -> None:
    assembly, step = StepAssembly(RunStep), long_step(0)
    assert assembly.add(parts_of(step, MOST)[0]) is None
    made = [assembly.add(part) for part in parts_of(step, 2 * MOST)]
    assert made[-1] == step
    assert not any(made[:-1])


def test_few_steps_are_waited_for() -> None:
    assembly = StepAssembly(RunStep)
    first, *others = [parts_of(long_step(sequence), MOST) for sequence in range(6)]
    for parts in (first, *others):
        assert assembly.add(parts[0]) is None
    assert not any(assembly.add(part) for part in first[1:]), "its first part is forgotten"
    assert assembly.add(first[0]) == long_step(0)
    assembly.clear()
    assert not any(assembly.add(part) for part in others[-1][1:])


def test_what_is_no_part_of_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly, parts = StepAssembly(RunStep), parts_of(long_step(0), MOST)
    for wrong in (
        {"index": -1},
        {"index": parts[0].count},
        {"count": 0},
        {"count": step_parts.MOST_PARTS + 1},
    ):
        with pytest.raises(ProtocolError, match="of step 0"):
            assembly.add(msgspec.structs.replace(parts[0], **wrong))
    for content in (b"nonsense", encode(long_step(1)), encode(StepPart(3, 0, 0, 1, b""))):
        with pytest.raises(ProtocolError):
            assembly.add(StepPart(3, 0, 0, 1, content))
    monkeypatch.setattr(step_parts, "MOST_PARTS", 2)
    with pytest.raises(MessageTooLong, match="exceeds"):
        parts_of(long_step(0), MOST)


def test_answers_are_put_together_as_steps_are_and_not_taken_for_them() -> None:
    done = StepDone(3, 0, TargetResult(0, (WorkResult(token_ids=tuple(range(3000))),)))
    answers, steps = StepAssembly(StepDone), StepAssembly(RunStep)
    parts = parts_of(done, MOST)
    assert [answers.add(part) for part in parts] == [*[None] * (len(parts) - 1), done]
    for assembly, others in ((steps, parts), (answers, parts_of(long_step(0), MOST))):
        *first, last = others
        assert not any(assembly.add(part) for part in first)
        with pytest.raises(ProtocolError, match="the parts of step 0 are no such"):
            assembly.add(last)


class Narrow(WrappedChannel):
    """Has room for a few messages at a time, and drops the others."""

    room = 0

    def send(self, peer_id: PeerId, message: Message) -> None:
        if isinstance(message, RunStep) or self.room > 0:
            super().send(peer_id, message)
            self.room -= 1


def test_what_a_queue_has_no_room_for_at_once_is_there_after_a_few_attempts() -> None:
    network = MemoryNetwork()
    sender, receiver = (
        network.open(PeerId("sender"), max_message_bytes=MOST),
        network.open(PeerId("receiver")),
    )
    receiver.admit([sender.address])
    sender.connect(receiver.address)
    channel, step = Narrow(sender), long_step(0)
    assembly, found, num_before = StepAssembly(RunStep), None, 0
    while found is None:
        assert num_before < 10
        channel.room = len(parts_of(step, MOST)) // 2
        assert send_step(channel, PeerId("receiver"), step, num_before)
        num_before += 1
        with contextlib.suppress(ChannelTimeout):
            while True:
                part = receiver.receive(0).message
                assert isinstance(part, StepPart)
                found = assembly.add(part) or found
    assert found == step
    assert num_before > 1


@pytest.mark.parametrize("mode", ["lockstep", "ping_pong"])
def test_an_engine_whose_every_long_step_is_cut_says_what_the_target_says(mode: OverlapMode) -> None:
    rng = random.Random(6)
    requests = [a_request(f"{'a-long-name-' * 9}{number}", rng) for number in range(8)]
    faults = Faults(delay_s=(0.0, 0.05), loss=0.05, duplication=0.1, in_order=False)
    cluster = Cluster(faults, seed=3, mode=mode, max_message_bytes=400)
    found = cluster.run(requests)
    assert found == {request.request_id: expected(request) for request in requests}
    assert cluster.target.counters["steps_in_parts"] > 3
