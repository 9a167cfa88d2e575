"""Hidden states between a target worker and a draft worker: what is taken in, and two real processes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.engine.draft_pool.hidden_routing import HiddenRouting
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import sequence_name
from specdec.engine.engine import Engine
from specdec.engine.targets.hidden_sender import HiddenSender
from specdec.engine.targets.remote_target import RemoteTarget
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.targets.toy_target import ToyTokenizer
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.base import Envelope, PeerId
from specdec.transport.memory import MemoryChannel, MemoryNetwork
from specdec.transport.messages import HiddenStates, Ping
from specdec.transport.torch_dist import TorchDistChannel
from specdec.transport.zmq import ZmqChannel
from tests.specdec.engine.hidden_draft_process import Addresses, hidden_draft_process
from tests.specdec.engine.hidden_toy import CAPABILITIES, LAYERS, HiddenToyTarget
from tests.specdec.engine.hidden_wire import OTHERS, OURS, Wire, rows, run_of, view
from tests.specdec.engine.remote_cluster import PATIENT, VOCAB, a_request, expected


def test_rows_are_put_together_and_given_to_their_prefix_alone() -> None:
    wire = Wire()
    wire.send(run_of(0, 5))
    wire.send(run_of(5, 7))
    wire.send(run_of(6, 9))  # the coordinator sent its tokens again: rows 6 and 7 come twice
    assert torch.equal(wire.rows_of(view(10)), torch.arange(9.0))
    assert wire.rows_of(view(9)) is None, "those rows are of a longer prefix"
    assert wire.rows_of(view(10, epoch=1)) is None
    assert wire.rows_of(view(10, request_id="s")) is None
    assert wire.dropped() == {}
    wire.inbox.release([view(10).request_id])
    assert wire.inbox.num_sequences == 0


def test_rows_are_kept_on_the_device_that_they_are_read_on() -> None:
    """Though they have come by the host, as those do that are sent before a device lane is open."""
    wire = Wire(device=torch.device("meta"))
    wire.send(run_of(0, 5))
    wire.send(run_of(5, 7))
    kept = wire.rows_of(view(8))
    assert kept is not None
    assert (kept.device.type, kept.shape) == ("meta", (7,))


def test_lost_rows_leave_what_follows_them() -> None:
    wire = Wire()
    wire.send(run_of(0, 5))
    wire.send(run_of(7, 9))
    assert torch.equal(wire.rows_of(view(10)), torch.tensor([7.0, 8.0]))
    assert wire.inbox.counters["hidden_gaps"] == 1


def test_a_wrong_prefix_gets_no_rows() -> None:
    wire = Wire()
    wire.send(run_of(0, 5, prefix_hash=1234))
    assert wire.rows_of(view(6)) is None


def test_a_round_waits_for_rows_on_their_way_and_not_for_ever() -> None:
    wire = Wire()
    wire.network.schedule(0.01, lambda: wire.send(run_of(0, 5)))
    assert wire.rows_of(view(6)) is not None
    assert wire.rows_of(view(7)) is None
    assert wire.inbox.counters["hidden_waits_in_vain"] == 1
    assert wire.network.clock.now_s() < 0.1


def test_a_target_worker_that_sends_on_and_on_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    wire.send(run_of(0, 5))
    receive, num_received = MemoryChannel.receive, 0

    def endless(channel: MemoryChannel, timeout_s: float | None) -> Envelope:
        nonlocal num_received
        num_received += 1
        assert num_received < 100_000
        if num_received > 1:
            wire.network.clock.advance(1e-5)
            return Envelope(sender=PeerId("other-target"), message=Ping(1))
        wire.network.run_for(0.0)
        return receive(channel, timeout_s)

    monkeypatch.setattr(MemoryChannel, "receive", endless)
    assert torch.equal(wire.rows_of(view(6)), torch.arange(5.0))


def test_the_stale_the_foreign_and_the_malformed_are_counted_and_dropped() -> None:
    wire = Wire()
    wire.send(run_of(0, 5, epoch=1))
    wire.send(run_of(0, 5, epoch=1))  # twice
    wire.send(run_of(0, 4, epoch=1))  # overtaken
    wire.send(run_of(0, 9, epoch=0))  # of an attempt that has been given up
    wire.send(run_of(0, 9, epoch=2), sender=wire.other)  # not a target worker of this coordinator
    good = run_of(5, 7, epoch=1)
    states = HiddenStates(OURS, LAYERS, (good,))
    for message, hidden in (
        (Ping(1), rows(5, 7)),
        (states, None),
        (HiddenStates(OURS, LAYERS, ()), rows(5, 5)),
        (states, rows(5, 8)),
        (states, rows(5, 7)[:, :3]),
        (states, rows(5, 7).int()),
        (HiddenStates(OURS, (1, 2), (good,)), rows(5, 7)),
        (HiddenStates(OURS, LAYERS, (run_of(7, 7, epoch=1),)), rows(7, 7)),
        (HiddenStates(OURS, LAYERS, (run_of(-2, 0, epoch=1),)), rows(5, 7)),
    ):
        wire.send_as(message, hidden)
    assert torch.equal(wire.rows_of(view(6, epoch=1)), torch.arange(5.0))
    assert wire.dropped() == {"hidden_stale": 3, "hidden_foreign": 1, "hidden_malformed": 9}
    wire.send(run_of(0, 5), sender=wire.other, coordinator=OTHERS)
    assert torch.equal(wire.rows_of(view(6, epoch=1)), torch.arange(5.0)), "coordinators do not mix"


def test_what_is_kept_is_bounded_and_a_coordinator_that_leaves_leaves_nothing() -> None:
    wire = Wire(max_rows=20)
    for index in range(10):
        wire.send(run_of(0, 5, request_id=f"r{index}"))
    wire.send(run_of(0, 30), sender=wire.other, coordinator=OTHERS)
    assert wire.rows_of(view(6, request_id="r9")) is not None
    assert wire.rows_of(view(6, request_id="r5")) is None
    assert wire.inbox.num_sequences == 4 + 1
    wire.inbox.admit([(wire.other.address, OTHERS)])
    assert wire.inbox.num_sequences == 1
    assert wire.inbox._names.keys() == {sequence_name(OTHERS, RequestId("r"), 0)}


@contextmanager
def served(server: TargetServer, stop: threading.Event) -> Iterator[None]:
    def serve() -> None:
        while not stop.is_set():
            server.step(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def engine_beside(sender: TorchDistChannel, channel: ZmqChannel, draft: Addresses) -> Iterator[Engine]:
    """An engine whose target worker (in a thread) sends what a draft worker elsewhere lives on."""
    network = MemoryNetwork()
    worker, coordinator = network.open(PeerId("target")), network.open(PeerId("coordinator-target"))
    worker.admit([coordinator.address])
    toy = HiddenToyTarget()
    with served(TargetServer(worker, toy, hidden=HiddenSender(sender, toy)), threading.Event()):
        target = RemoteTarget(coordinator, worker.address, incarnation=1, times=PATIENT)
        routing = HiddenRouting(channel, target.send_hidden)
        routing.set_inboxes({draft.messages.peer_id: draft.tensors})
        deadlines = DraftDeadlineConfig(min_deadline_s=2.0, max_deadline_s=10.0)
        proposer = RemoteProposer(routing, capabilities=CAPABILITIES, vocab_size=VOCAB, deadlines=deadlines)
        proposer.set_workers([draft.messages])
        yield Engine.from_parts(
            target=target,
            proposer=proposer,
            tokenizer=ToyTokenizer.of_letters(VOCAB),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        )


def run(engine: Engine, requests: list[Request]) -> None:
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    for request in requests:
        assert tokens[request.request_id] == expected(request)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_two_processes_draft_by_hidden_states_over_gloo(seed: int) -> None:
    """Every draft is right while the draft worker lives; when it is killed, requests go on with k = 0."""
    rng = random.Random(seed)
    channel, sender = ZmqChannel(PeerId("coordinator")), TorchDistChannel(PeerId("target-tensors"))
    try:
        with (
            hidden_draft_process(Addresses(channel.address, sender.address)) as (process, draft),
            engine_beside(sender, channel, draft) as engine,
        ):
            run(engine, [a_request(f"before-{index}", rng) for index in range(6)])
            metrics = engine.metrics()
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 20
            half_way = a_request("half way", random.Random(7))
            engine.add_request(half_way)
            begun = [token for output in engine.step() for token in output.token_ids]
            process.kill()
            while engine.has_work:
                begun += [token for output in engine.step() for token in output.token_ids]
            assert begun == expected(half_way)
            num_before = engine.metrics().num_draft_tokens
            run(engine, [a_request(f"after-{index}", rng) for index in range(4)])
            assert engine.metrics().num_draft_tokens == num_before
    finally:
        sender.close()
        channel.close()
