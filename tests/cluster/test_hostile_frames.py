"""Members that send what decodes and makes no sense: whoever serves refuses or drops it, and serves on.

Frames are those of real messages with one or more of their values replaced. What does not decode is dropped
by channels (tests/specdec/transport); the rest arrives here.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

import msgspec
import pytest

from cluster import client, door_account
from cluster.client import ClusterService
from cluster.config import ClusterConfig
from cluster.desk import RequestDesk
from cluster.directory import Member
from deploy.openai.metrics import DoorMetrics, render
from specdec.core.clock import ManualClock
from specdec.core.errors import ChannelTimeout, NotReadyError, ProtocolError
from specdec.core.ids import Epoch, RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.transport import messages as m
from specdec.transport.base import Envelope, PeerId
from specdec.transport.config import ChannelConfig
from specdec.transport.zmq import KeyPair, ZmqChannel
from tests.cluster.absent_directory import Directory
from tests.cluster.door_series import OPEN, REQUESTS
from tests.specdec.engine.draft_pool.server_bench import Bench, draft_model, entry, expected
from tests.specdec.engine.targets.target_world import World, step
from tests.specdec.engine.toy_engines import toy_engine
from tests.specdec.transport.message_examples import EXAMPLES
from tests.specdec.transport.raw_dealer import raw_dealer

HEADER = m.encode(m.Ping(1))[:3]
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 63, 64, 65, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)),
    *(0.0, -0.0, 0.5, 1e308, -1e308, float("inf"), float("nan"), True, False, None, "", "x", "a" * 3000),
    *([], [0], [1, 2, 3], [-1], [1 << 40], [[]], list(range(200)), {}, {"": 1}, b"", b"\x00" * 40),
)
COUNTS = [400, pytest.param(40_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
INGRESS, OTHER = PeerId("ingress"), PeerId("other")
FIRST_NONCE = 1 << 61


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
    num_decoded = 0
    for frame in frames(examples, num_frames, seed):
        with suppress(ProtocolError):
            yield m.decode(frame)
            num_decoded += 1
    assert num_decoded > num_frames / 20, "hardly anything decodes: nothing is tested"


def frames(examples: list[m.Message], num_frames: int, seed: int = 5) -> Iterator[bytes]:
    """Frames of changed messages."""
    generator = random.Random(seed)
    contents = [msgspec.msgpack.decode(m.encode(example)[3:]) for example in examples]
    for _ in range(num_frames):
        tag, *content = generator.choice(contents)
        for _ in range(generator.randrange(1, 4)):
            content = changed(content, generator)
            if not isinstance(content, list):
                break
        fields = content if isinstance(content, list) else [content]
        yield HEADER + msgspec.msgpack.encode([tag, *fields])


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


@pytest.mark.parametrize("num_frames", COUNTS)
@pytest.mark.parametrize("keeps", [True, False], ids=["it keeps the account", "the other does"])
def test_a_door_answers_on(num_frames: int, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another door sends them to its port. What the two have counted is told all the while, and is right
    again with the other's first sound message."""
    monkeypatch.setattr(client, "DirectoryLink", Directory)
    monkeypatch.setattr(door_account, "_REPORT_S", 0.01)
    monkeypatch.setattr(door_account, "_FIRST_ANSWER_S", 0.01)
    # None of a channel's own, which do not arrive; many of those that doors send each other.
    reports = [m.DoorReport({REQUESTS: 3.0}, {OPEN: 1.0}, {REQUESTS: 2.0}), m.DoorTotals({"rounds": 1.0}, {})]
    own = [example for example in EXAMPLES if not isinstance(example, m.LaneOffer | m.LaneMoved)]
    keys, faults = KeyPair.generate(), []
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        service = ClusterService(ClusterConfig(channels=ChannelConfig(bind="loopback")))
        service.share(lambda: m.DoorReport({REQUESTS: 4.0}, {OPEN: 2.0}))
        await service.start()
        hear = service._hear

        def noting(envelope: Envelope) -> None:
            if isinstance(envelope.message, m.Ping) and envelope.message.nonce > FIRST_NONCE:
                heard.put_nowait(envelope.message.nonce)
            hear(envelope)

        monkeypatch.setattr(service, "_hear", noting)
        with closing(ZmqChannel(OTHER, keys=keys)) as channel:
            since = service._since + (1.0 if keeps else -1.0)
            service._follow((Member(address=channel.address, role="ingress", since=since),))
            assert service.adds_up == keeps
            with raw_dealer(service._channel, keys) as dealer:
                for number, frame in enumerate(frames([*own, *reports * len(own)], num_frames)):
                    dealer.send(frame)
                    if number % 20 == 0:
                        await read(dealer, FIRST_NONCE + 1 + number)
                        await told(service)
                sound = (
                    m.DoorReport({REQUESTS: 5.0}, {OPEN: 1.0}) if keeps else m.DoorTotals({REQUESTS: 9.0}, {})
                )
                dealer.send(m.encode(sound))
                await read(dealer, 1 << 62)
                async with asyncio.timeout(20):
                    while (await told(service))[REQUESTS] != 9.0:
                        await asyncio.sleep(0.01)
                assert service._report().counters["unexpected_messages_dropped"] > num_frames / 100
        service.check_health()
        await service.close()

    async def read(dealer: Any, nonce: int) -> None:
        """Wait until all that was sent has been read."""
        dealer.send(m.encode(m.Ping(nonce)))
        async with asyncio.timeout(20):
            while await heard.get() != nonce:
                pass

    async def told(service: ClusterService) -> Mapping[str, float]:
        await asyncio.sleep(2 * door_account._REPORT_S)  # until what was read is in the sums
        try:
            values = await service.metrics()
        except NotReadyError:
            return {}  # it has not heard of the account yet
        lines = render(DoorMetrics(), values).decode().splitlines()
        numbers = [float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")]
        assert all(map(math.isfinite, numbers))
        return values

    asyncio.run(run())
    assert not faults
