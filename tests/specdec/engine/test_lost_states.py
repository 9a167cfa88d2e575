"""Hidden states that are long, late, lost or read: in parts, waited for once, asked for again, forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.engine.draft_pool.hidden_routing import HiddenRouting
from specdec.engine.targets import hidden_sender
from specdec.engine.targets.hidden_sender import HiddenSender
from specdec.proposers.hidden import ReceivedRows
from specdec.transport.base import PeerAddress, PeerId, PeerLost
from specdec.transport.memory import MemoryNetwork
from specdec.transport.messages import (
    HiddenStates,
    HiddenWish,
    ProposeAnswer,
    ProposeEntry,
    ProposeReply,
    ProposeRequest,
    SendHidden,
)
from tests.specdec.engine.hidden_toy import LAYERS, WIDTH
from tests.specdec.engine.hidden_wire import OTHERS, OURS, TOKENS, Wire, rows, run_of, view

NAME = RequestId("r")


def test_rows_are_those_of_a_prefix_once_all_of_them_are_there() -> None:
    wire = Wire()
    whole = run_of(0, 9)
    wire.send(msgspec.structs.replace(whole, num_rows=5))
    assert wire.rows_of(view(10)) is None
    assert wire.rows_of(view(6)) is None
    wire.send(msgspec.structs.replace(whole, first_row=5, num_rows=4))
    assert torch.equal(wire.rows_of(view(10)), torch.arange(9.0))


def test_what_was_read_is_forgotten() -> None:
    received = ReceivedRows(2)
    for first, end in ((2, 5), (5, 6), (6, 10)):
        received.append(rows(first, end))
    received.read_from(7)
    assert (received.first_row, received.end_row, received.num_rows) == (7, 10, 3)
    assert torch.equal(received.since(8)[:, 0], torch.tensor([8.0, 9.0]))
    assert not received.are_missed
    received.read_from(10)
    assert (received.first_row, received.num_rows) == (10, 0)


def test_rows_come_again_only_where_they_are_missed() -> None:
    wire = Wire()
    wire.send(run_of(0, 5))
    (kept,) = wire.inbox.await_rows([view(6)]).values()
    kept.read_from(4)
    assert wire.inbox.num_rows == 1
    wire.send(run_of(0, 5))  # a copy that the network made
    assert torch.equal(wire.rows_of(view(6)), torch.tensor([4.0]))
    kept.read_from(0)  # the drafter has lost what it made of them
    wire.send(run_of(0, 7))
    assert torch.equal(wire.rows_of(view(8)), torch.arange(7.0))
    assert wire.dropped() == {"hidden_stale": 1}


def test_nobody_is_waited_for_twice_before_something_has_come() -> None:
    wire = Wire()
    clock = wire.network.clock
    assert wire.rows_of(view(6)) is None
    waited_s = clock.now_s()
    assert waited_s > 0.0
    assert wire.rows_of(view(6)) is None
    assert clock.now_s() == waited_s
    assert wire.inbox.await_rows([view(6, request_id="s")], awaited=()) == {}
    assert clock.now_s() == waited_s, "it is only read"
    wire.send(run_of(0, 4))
    assert wire.rows_of(view(6)) is None
    assert clock.now_s() > waited_s, "it is there, though late"


def test_another_target_worker_counts_attempts_anew() -> None:
    wire = Wire()
    wire.send(run_of(0, 5, epoch=7))
    wire.send(run_of(0, 5), sender=wire.other, coordinator=OTHERS)
    assert wire.rows_of(view(6, epoch=7)) is not None
    successor = wire.network.open(PeerId("target-2"))
    successor.connect(wire.inbox.address)
    wire.inbox.admit([(successor.address, OURS), (wire.other.address, OTHERS)])
    assert wire.inbox.num_sequences == 1
    wire.send(run_of(0, 5), sender=successor)
    assert wire.rows_of(view(6)) is not None


class Taps:
    layers = LAYERS

    def __init__(self, end_row: int) -> None:
        self.end_row = end_row

    def hidden_rows(self, request_id: RequestId, first_row: int, end_row: int) -> torch.Tensor | None:
        return rows(first_row, end_row) if end_row <= self.end_row else None


def wish(first_row: int, committed_len: int, *, epoch: int = 0) -> HiddenWish:
    prefix_hash = extend_prefix_hash(EMPTY_PREFIX, TOKENS[:committed_len])
    return HiddenWish(NAME, epoch, committed_len, prefix_hash, first_row)


def test_a_target_sends_long_prompts_in_parts_and_to_new_attempts_after_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hidden_sender, "_PARCEL_BYTES", 4 * WIDTH * 4)  # rows of four
    network = MemoryNetwork()
    sending, receiving = network.open(PeerId("target")), network.open(PeerId("inbox"))
    receiving.admit([sending.address])
    sender = HiddenSender(sending, Taps(30))

    def ask(*wishes: HiddenWish) -> None:
        address = receiving.address
        sender.take(SendHidden(1, OURS, address.peer_id, address.endpoint, address.public_key, tuple(wishes)))

    def arrived() -> list[tuple[int, int]]:
        found = []
        while sender.counters["hidden_rows_sent"] > sum(num for _, num in found):
            message = receiving.receive(1.0).message
            assert isinstance(message, HiddenStates)
            found += [(run.first_row, run.num_rows) for run in message.runs]
        sender.counters.clear()
        return found

    ask(wish(0, 11))
    assert sender.num_waiting == 1, "rows there may be of another that ended under this name"
    sender.step_done({NAME})
    assert arrived() == [(0, 4), (4, 4), (8, 2)]
    ask(wish(10, 13))
    assert arrived() == [(10, 2)], "the attempt is known"
    ask(wish(0, 13, epoch=1))
    assert sender.num_waiting == 1
    sender.step_done(())
    assert sender.num_waiting == 0


def test_what_a_draft_worker_has_lost_is_wished_for_again_once() -> None:
    network = MemoryNetwork()
    ours, worker = network.open(OURS), network.open(PeerId("draft"))
    worker.admit([ours.address])
    ours.connect(worker.address)
    sent: list[tuple[int, int]] = []

    def send_wishes(coordinator: PeerId, inbox: PeerAddress, wishes: Sequence[HiddenWish]) -> None:
        sent.extend((one.first_row, one.committed_len) for one in wishes)

    routing = HiddenRouting(ours, send_wishes)
    routing.set_inboxes({worker.address.peer_id: worker.address})

    def ask(base_len: int, committed_len: int) -> None:
        entry = ProposeEntry(NAME, 3, committed_len, 0, 4, base_len, TOKENS[base_len:committed_len])
        routing.send(worker.address.peer_id, ProposeRequest(0, (entry,)))
        worker.receive(1.0)

    ask(0, 20)
    ask(20, 22)
    assert sent == [(0, 20), (19, 22)]
    answer = ProposeAnswer(NAME, 3, 22, 0, (), rows_from=5)
    worker.send(OURS, ProposeReply(0, (answer, msgspec.structs.replace(answer, epoch=2))))
    routing.receive(1.0)
    del sent[:]
    ask(22, 22)
    ask(22, 23)
    assert sent == [(5, 22), (21, 23)]


def test_a_draft_worker_that_is_not_reached_is_forgotten_with_its_wishes_after_a_step() -> None:
    """It died before this wish, which nobody takes back: no link breaks any more."""
    network = MemoryNetwork(clock=ManualClock())
    sending, dead, alive = (network.open(PeerId(name)) for name in ("target", "dead", "alive"))
    sender = HiddenSender(sending, Taps(10))
    network.kill(dead.address.peer_id)
    for address in (dead.address, alive.address):
        sender.take(
            SendHidden(1, OURS, address.peer_id, address.endpoint, address.public_key, (wish(0, 20),))
        )
    sender.step_done({NAME})
    assert (sender.num_waiting, set(sending._links)) == (2, {dead.address.peer_id, alive.address.peer_id})
    sending._inbox.put(dead.address.peer_id, PeerLost(), 0)
    sender.step_done({NAME})
    assert (sender.num_waiting, set(sending._links)) == (1, {alive.address.peer_id})
