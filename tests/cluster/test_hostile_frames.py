"""Members that send what decodes and makes no sense: whoever serves refuses or drops it, and serves on.

Frames are those of real messages with one or more of their values replaced. What does not decode is dropped
by channels (tests/specdec/transport); the rest arrives here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from cluster.desk import RequestDesk
from specdec.core.clock import ManualClock
from specdec.core.errors import ChannelTimeout, ProtocolError
from specdec.core.ids import Epoch, RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.transport import messages as m
from specdec.transport.base import Envelope, PeerId
from tests.specdec.engine.test_draft_server import Bench, draft_model, entry, expected
from tests.specdec.engine.test_remote_target import World, step
from tests.specdec.engine.toy_engines import toy_engine
from tests.specdec.transport.test_messages import EXAMPLES

HEADER = m.encode(m.Ping(1))[:3]
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 63, 64, 65, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)),
    *(0.0, -0.0, 0.5, 1e308, -1e308, float("inf"), float("nan"), True, False, None, "", "x", "a" * 3000),
    *([], [0], [1, 2, 3], [-1], [1 << 40], [[]], list(range(200)), {}, {"": 1}, b"", b"\x00" * 40),
)
COUNTS = [400, pytest.param(40_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
INGRESS, OTHER = PeerId("ingress"), PeerId("other")


def changed(value: Any, generator: random.Random) -> Any:
    """Return a value with one leaf (or branch) of it replaced."""
    if isinstance(value, list) and value and generator.random() < 0.9:
        index = generator.randrange(len(value))
        return [*value[:index], changed(value[index], generator), *value[index + 1 :]]
    if isinstance(value, dict) and value and generator.random() < 0.9:
        name = generator.choice(sorted(value))
        return value | {name: changed(value[name], generator)}
    return generator.choice(VALUES)


def messages(examples: list[m.Message], num_frames: int, seed: int = 5) -> Iterator[m.Message]:
    """Changed messages, those of so many frames that decode."""
    generator = random.Random(seed)
    contents = [msgspec.msgpack.decode(m.encode(example)[3:]) for example in examples]
    num_decoded = 0
    for _ in range(num_frames):
        tag, *content = generator.choice(contents)
        for _ in range(generator.randrange(1, 4)):
            content = changed(content, generator)
            if not isinstance(content, list):
                break
        fields = content if isinstance(content, list) else [content]
        with suppress(ProtocolError):
            yield m.decode(HEADER + msgspec.msgpack.encode([tag, *fields]))
            num_decoded += 1
    assert num_decoded > num_frames / 20, "hardly anything decodes: nothing is tested"


@pytest.mark.parametrize("num_frames", COUNTS)
def test_a_draft_worker_serves_on(num_frames: int) -> None:
    bench = Bench(draft_model())
    asked = [entry("a"), entry("b", pending=(7,), fan_out=(2, 1)), entry("c", num_draft_tokens=0)]
    examples = [*EXAMPLES, *(m.ProposeRequest(1, (one, *asked)) for one in asked * 3)]
    for number, message in enumerate(messages(examples, num_frames)):
        bench.channels[0].send(PeerId("draft"), message)
        bench.network.run_for(0.01)
        bench.server.step(0)
        if number % 50 == 0:
            bench.network.run_for(0.01)
            with suppress(ChannelTimeout):
                while True:
                    bench.channels[0].receive(0)
    while bench.server.has_waiting:
        bench.server.step(0)
    honest = entry("h", pending=(7, 8), fan_out=(2, 1, 2))
    bench.send(1, honest)
    (answer,) = [answer for answer in bench.serve()[1] if answer.request_id == "h"]
    assert answer.branches == expected(honest)
    counted = bench.server.counters
    assert counted["invalid_entries"]
    assert counted["unexpected_messages"]


@pytest.mark.parametrize("num_frames", COUNTS)
def test_a_target_worker_serves_its_owner_on(num_frames: int) -> None:
    world = World()
    owner = world.attach(0, 1 << 62)
    owner.submit(step(0, admit=True))
    first = owner.collect()
    intruder = world.owners[1]
    intruder.connect(world.worker.address)
    for message in messages(EXAMPLES, num_frames):
        if isinstance(message, m.Hello) and message.incarnation > 1 << 62:
            continue  # a newer owner: that is how a coordinator is replaced
        intruder.send(world.worker.address.peer_id, message)
        world.network.run_for(0.001)
    world.network.run_for(0.1)
    assert world.error is None
    owner.submit(step(1))
    second = owner.collect()
    assert [len(result.token_ids) for result in (*first.results, *second.results)] == [1, 1]
    assert world.server.counters["stale_steps"]
    assert world.server.counters["unexpected_messages"]


@pytest.mark.parametrize("num_frames", COUNTS)
def test_a_coordinator_serves_on(num_frames: int) -> None:
    """Its desk and the engine behind it: every stream that was taken in ends, and the honest one is right."""
    sent: list[tuple[PeerId, m.Message]] = []
    desk = RequestDesk(lambda peer_id, message: sent.append((peer_id, message)), ManualClock(), lease_s=60.0)
    engine = toy_engine()
    params = SamplingParams(temperature=0.0, max_tokens=4)

    def request(name: str) -> Request:
        return Request(request_id=RequestId(name), prompt_token_ids=(1, 2, 3), params=params, seed=1)

    def run() -> None:
        desk.serve(engine)
        for _ in range(200):
            if not engine.has_work:
                return
            desk.deliver(engine.step())

    examples = [*EXAMPLES, *(m.SubmitRequest(request(f"r{number}")) for number in range(20))]
    for number, message in enumerate(messages(examples, num_frames)):
        if isinstance(message, m.SubmitRequest):
            # What a door would have bounded, and what would take the toy for ever.
            limit = min(message.request.params.max_tokens or 9, 9)
            bounded = msgspec.structs.replace(message.request.params, max_tokens=limit)
            message = m.SubmitRequest(
                msgspec.structs.replace(
                    message.request,
                    params=bounded,
                    request_id=RequestId(f"{number}-{message.request.request_id}"),
                )
            )
        desk.hear(Envelope(sender=INGRESS, message=message))
        run()
    sent.clear()
    desk.hear(Envelope(sender=OTHER, message=m.SubmitRequest(request("honest"))))
    run()
    frames = [message for peer_id, message in sent if peer_id == OTHER and isinstance(message, m.OutputFrame)]
    outputs = [output for frame in frames for output in frame.outputs]
    assert sum(len(output.token_ids) for output in outputs) == 4
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].epoch == Epoch(0)
    assert desk.num_unexpected
    assert desk.num_streams == 0
