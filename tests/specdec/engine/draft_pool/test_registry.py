"""Which draft worker has which sequence."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise

import pytest

from specdec.core.ids import RequestId
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.placement import DraftPlacementConfig
from specdec.engine.draft_pool.registry import _MOST_DEATHS, DraftRegistry, Registration
from specdec.transport.base import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
DEADLINES = DraftDeadlineConfig()


@dataclass
class Placed:
    request_id: RequestId
    committed_len: int = 10


class Bench:
    """A registry, and who was told to forget what."""

    def __init__(self, *workers: PeerId, max_context: int | None = None) -> None:
        self.left: list[tuple[RequestId, PeerId]] = []
        self.registry = DraftRegistry(
            "coordinator",
            deadlines=DEADLINES,
            placement=DraftPlacementConfig(),
            max_context=max_context,
            on_leave=self._on_leave,
        )
        for worker in workers:
            self.registry.add(worker)

    def _on_leave(self, request_id: RequestId, registration: Registration, has_ended: bool) -> None:
        self.left.append((request_id, registration.worker))


def some(number: int, committed_len: int = 10) -> list[Placed]:
    return [Placed(RequestId(f"r{index}"), committed_len) for index in range(number)]


def test_sequences_are_spread_and_stay_where_they_are() -> None:
    bench = Bench(A, B)
    sequences = some(6)
    first = bench.registry.by_worker(sequences, 0.0)
    assert {worker: len(group) for worker, group in first.items()} == {A: 3, B: 3}
    assert bench.registry.by_worker(sequences, 5.0) == first
    assert bench.left == []


def test_what_a_worker_had_is_given_away_anew_without_telling_it() -> None:
    bench = Bench(A, B)
    sequences = some(4)
    epochs = {name: its.epoch for name, its in _registered(bench, sequences).items()}
    bench.registry.remove(A)
    after = _registered(bench, sequences)
    assert {its.worker for its in after.values()} == {B}
    assert bench.left == [], "who is gone is not told"
    changed = {name for name, its in after.items() if its.epoch != epochs[name]}
    assert len(changed) == 2


def test_who_loses_a_sequence_is_told() -> None:
    bench = Bench(A)
    (one,) = some(1)
    _registered(bench, [one])
    bench.registry.forget(one.request_id)
    assert bench.left == [(one.request_id, A)]
    assert bench.registry.links[A].num_registered == 0
    bench.registry.forget(one.request_id)
    assert len(bench.left) == 1


def test_nobody_is_asked_for_what_nobody_can_go_on_with() -> None:
    bench = Bench(A, B, max_context=100)
    short, long = Placed(RequestId("short"), 40), Placed(RequestId("long"), 100)
    assert set(_registered(bench, [short, long])) == {short.request_id}
    bench.registry.told_length(A, 30)
    assert set(_registered(bench, [short])) == {short.request_id}, "the other one has not said"
    bench.registry.told_length(B, 40)
    assert not bench.registry.by_worker([short], 0.0)
    assert not bench.registry.registrations
    assert bench.left == [(short.request_id, A), (short.request_id, B)]


def test_one_that_found_no_place_may_come_again_one_that_has_outgrown_a_worker_rests_there() -> None:
    bench = Bench(A, B)
    (one,) = some(1)
    _registered(bench, [one])
    bench.registry.refused(one.request_id)
    assert bench.registry.why_nowhere(one.request_id) == "place"
    registration = _registered(bench, [one])[one.request_id]
    registration.note_answer(10, 0)
    worker = registration.worker
    bench.registry.outgrown(one.request_id, 10, 0.0)
    assert bench.registry.why_nowhere(one.request_id) == "memory"
    for _ in range(3):  # it rests there, and only there
        assert _registered(bench, [one])[one.request_id].worker != worker
        bench.registry.forget(RequestId("another"))
    assert sum(link.num_registered for link in bench.registry.links.values()) == 1


def test_who_is_too_long_for_the_memory_rests_there_and_shorter_ones_may_come_at_once() -> None:
    bench = Bench(A)
    long, short = Placed(RequestId("long"), 40), Placed(RequestId("short"), 4)
    other = Placed(RequestId("other"), 40)
    _registered(bench, [long])
    bench.registry.outgrown(long.request_id, 40, 0.0)
    assert set(_registered(bench, [long, other, short])) == {short.request_id}
    for held_back in (long, other):
        assert bench.registry.why_nowhere(held_back.request_id) == "memory"
    bench.registry.forget(other.request_id)
    bench.registry.by_worker([long], DEADLINES.max_retry_s)
    assert long.request_id in bench.registry.registrations, "its memory may be free again"


def test_of_those_that_a_worker_may_have_no_memory_for_the_shortest_is_tried() -> None:
    """If it had none for that one, it would have none for those that are longer."""
    bench = Bench(A)
    longest, shortest = Placed(RequestId("longest"), 90), Placed(RequestId("shortest"), 40)
    sequences = [longest, Placed(RequestId("middle"), 60), shortest]
    _registered(bench, sequences)
    for one in sequences:
        bench.registry.outgrown(one.request_id, one.committed_len, 0.0)
    for attempt in range(1, 4):
        now_s = attempt * (DEADLINES.max_retry_s + 0.1)
        bench.registry.by_worker(sequences, now_s)
        assert bench.registry.registrations.keys() == {shortest.request_id}
        bench.registry.outgrown(shortest.request_id, 40, now_s)


def test_a_longer_one_is_not_tried_in_vain_while_the_shortest_rests() -> None:
    """Once attempts are as seldom as they get: each is the shortest one's, though answers take a while."""
    bench = Bench(A)
    longest, shortest = Placed(RequestId("longest"), 90), Placed(RequestId("shortest"), 40)
    _registered(bench, [shortest])
    bench.registry.outgrown(shortest.request_id, 40, 0.0)
    attempts: list[tuple[float, RequestId]] = []
    for tick in range(1, 400):
        now_s = 0.05 * tick
        bench.registry.by_worker([longest, shortest], now_s)
        for one in (longest, shortest):
            if one.request_id in bench.registry.registrations:
                attempts.append((now_s, one.request_id))
                bench.registry.outgrown(one.request_id, one.committed_len, now_s + 0.04)
    late = [(at_s, name) for at_s, name in attempts if at_s > 3 * DEADLINES.max_retry_s]
    assert {name for _, name in late} == {shortest.request_id}
    gaps = [later - sooner for (sooner, _), (later, _) in pairwise(late)]
    assert len(gaps) >= 4
    assert min(gaps) > DEADLINES.max_retry_s


def test_what_leaves_makes_room_for_one_that_waits() -> None:
    """The shortest, though it was refused just before; who was never read there leaves no room."""
    bench = Bench(A)
    held, unread = Placed(RequestId("held"), 30), Placed(RequestId("unread"), 30)
    long, longer = Placed(RequestId("long"), 40), Placed(RequestId("longer"), 50)
    _registered(bench, [held, unread, long])
    bench.registry.answered(held.request_id, 30, 0, 0.0)
    bench.registry.outgrown(long.request_id, 40, 0.0)
    bench.registry.forget(unread.request_id)
    assert bench.registry.by_worker([held, longer, long], 0.01)[A] == [held]
    bench.registry.forget(held.request_id)
    assert bench.registry.by_worker([longer, long], 0.02)[A] == [long]


def test_what_is_moved_does_not_send_those_that_wait_to_where_it_was() -> None:
    """The worker that it is moved to has more to spare."""
    bench = Bench(A)
    held, long = Placed(RequestId("held"), 30), Placed(RequestId("long"), 40)
    _registered(bench, [held, long])
    bench.registry.answered(held.request_id, 30, 0, 0.0)
    bench.registry.outgrown(long.request_id, 40, 0.0)
    bench.registry.add(B)
    bench.registry.give(held, B, 0.01)
    assert bench.registry.by_worker([held, long], 0.01)[B] == [held, long]


def test_who_has_a_worker_keeps_its_place_in_the_order_of_service() -> None:
    """The last of a round lose their memory first: never the most urgent for being the longest."""
    bench = Bench(A)
    old, young = Placed(RequestId("old"), 200), Placed(RequestId("young"), 150)
    outgrown, short = Placed(RequestId("outgrown"), 100), Placed(RequestId("short"), 50)
    _registered(bench, [old, young, outgrown])
    bench.registry.outgrown(outgrown.request_id, 100, 0.0)
    assert bench.registry.by_worker([old, young], 0.0)[A] == [old, young]
    later_s = DEADLINES.max_retry_s
    waiting = [old, outgrown, young, short]
    assert bench.registry.by_worker(waiting, later_s)[A] == [old, young, short, outgrown]


@pytest.mark.parametrize("others", [(), (C,)], ids=["alone", "with another silent one"])
def test_a_silent_worker_keeps_what_nobody_else_has_memory_for(others: tuple[PeerId, ...]) -> None:
    """Given away to a silent one, itself or another, the sequence would only be read anew, at each call."""
    bench = Bench(A)
    settled = Placed(RequestId("settled"))
    its = _registered(bench, [settled])[settled.request_id]
    its.sent_len = 10
    bench.registry.answered(settled.request_id, 10, 0, 0.0)
    for worker in (B, *others):
        bench.registry.add(worker)
    for worker in (A, *others):
        bench.registry.links[worker].patience.missed(0.0)
    for now_s in (0.6, 0.65, 0.69):
        bench.registry.links[B].memory.refused(1, 0.6)
        bench.registry.by_worker([settled], now_s)
        assert bench.registry.registrations[settled.request_id] is its
    assert (bench.left, its.sent_len) == ([], 10)
    bench.registry.by_worker([settled], 0.6 + DEADLINES.max_retry_s)
    assert bench.registry.registrations[settled.request_id].worker == B, "it may have memory again"


def test_of_those_that_a_silent_worker_has_the_shortest_is_tried_elsewhere() -> None:
    """If the longest came first, it would be tried for ever, and no other."""
    bench = Bench(A)
    long, short = Placed(RequestId("long"), 50), Placed(RequestId("short"), 20)
    _registered(bench, [long, short])
    bench.registry.add(B)
    bench.registry.links[A].patience.missed(0.0)
    bench.registry.links[B].memory.refused(15, 0.6)
    bench.registry.by_worker([long, short], 0.6 + DEADLINES.max_retry_s)
    assert {one: its.worker for one, its in bench.registry.registrations.items()} == {"long": A, "short": B}


def test_a_silent_worker_without_sequences_is_given_one_while_another_one_answers() -> None:
    """What it is given would be read by nobody; but who is not asked can never be heard again."""
    bench = Bench(A, B)
    bench.registry.links[A].patience.missed(0.0)
    bench.registry.links[B].memory.refused(5, 0.6)
    waiting = some(3)
    for now_s in (0.65, 0.66):
        assert bench.registry.by_worker(waiting, now_s) == {A: waiting[:1]}
    assert [bench.registry.why_nowhere(one.request_id) for one in waiting] == [None, "memory", "memory"]
    bench.registry.forget(waiting[0].request_id)
    bench.registry.links[A].patience.asked(0.66)
    assert bench.registry.by_worker(waiting[1:], 0.67) == {}, "its next attempt is some time away"
    bench.registry.links[B].patience.missed(0.0)
    bench.registry.by_worker(waiting, 1.3)
    assert len(bench.registry.registrations) == 3, "nobody answers: whoever is back first"


def test_who_is_as_long_as_what_a_worker_refused_goes_to_another() -> None:
    """A worker whose memory is full of long texts has few of them: it looks as if it had little to do."""
    bench = Bench(A, B)
    for one in some(4):
        bench.registry.give(one, A, 0.0)
    refused = Placed(RequestId("refused"), 100)
    bench.registry.give(refused, B, 0.0)
    bench.registry.outgrown(refused.request_id, 100, 0.0)
    newcomers = [Placed(RequestId(f"newcomer{index}"), 100 + index) for index in range(3)]
    short = Placed(RequestId("short"), 99)
    registered = _registered(bench, [*newcomers[:1], short])
    assert registered[newcomers[0].request_id].worker == A
    assert registered[short.request_id].worker == B
    bench.registry.by_worker(newcomers, DEADLINES.first_retry_s)
    workers = [bench.registry.registrations[one.request_id].worker for one in newcomers]
    assert workers == [A, B, A], "one of them finds out whether it has memory again"


def test_nothing_is_moved_for_nothing_to_a_worker_without_memory() -> None:
    """What is moved there is refused, and comes back as a whole."""
    bench = Bench(A)
    short, long = some(12), [Placed(RequestId(f"long{index}"), 100) for index in range(3)]
    _registered(bench, short)
    bench.registry.add(B)
    for one in long:
        bench.registry.give(one, B, 0.0)
    rests_until_s: dict[RequestId, float] = {}
    for tick in range(200):
        now_s = 0.1 * tick
        for one in bench.registry.by_worker([*short, *long], now_s)[B]:
            if one not in long:
                assert now_s >= rests_until_s.get(one.request_id, 0.0)
                rests_until_s[one.request_id] = now_s + DEADLINES.max_retry_s
                bench.registry.outgrown(one.request_id, one.committed_len, now_s)
    assert 5 <= bench.registry.num_moved <= 9, "four at first, then one at a time, seldom"


def test_a_sequence_that_its_worker_cannot_read_goes_to_one_that_can() -> None:
    bench = Bench(A)
    one = Placed(RequestId("one"), 39)
    bench.registry.told_length(A, 40)
    assert _registered(bench, [one])[one.request_id].worker == A
    bench.registry.add(B)
    bench.registry.told_length(B, 256)
    one.committed_len = 40
    for _ in range(3):
        assert _registered(bench, [one])[one.request_id].worker == B
    assert bench.left == [(one.request_id, A)]
    assert {w: link.num_registered for w, link in bench.registry.links.items()} == {A: 0, B: 1}
    newcomer = Placed(RequestId("newcomer"), 100)
    assert _registered(bench, [one, newcomer])[newcomer.request_id].worker == B, "though A has nothing to do"
    assert bench.registry.num_too_long == 0
    one.committed_len = 256
    assert set(_registered(bench, [one, newcomer])) == {newcomer.request_id}
    assert bench.registry.num_too_long == 1


def test_no_sequence_is_moved_to_a_worker_that_cannot_read_it() -> None:
    bench = Bench(A)
    sequences = [Placed(RequestId(f"r{index}"), 10 if index < 2 else 100) for index in range(8)]
    _registered(bench, sequences)
    bench.registry.told_length(A, 256)
    bench.registry.add(B)
    bench.registry.told_length(B, 40)
    for number in range(20):
        bench.registry.by_worker(sequences, 10.0 * number)
    at_b = {name for name, its in bench.registry.registrations.items() if its.worker == B}
    assert at_b == {one.request_id for one in sequences if one.committed_len == 10}


@pytest.mark.parametrize("is_silent", [False, True])
def test_what_is_to_move_waits_for_whom_it_may_concern(is_silent: bool) -> None:
    """Until the next look at the balance; meanwhile the worker that is to have it may have gone silent."""
    bench = Bench(A)
    sequences = some(12)
    _registered(bench, sequences)
    bench.registry.add(B)
    bench.registry.by_worker([], 0.0)
    for one in sequences[:3]:
        bench.registry.by_worker([one], 0.0)
    assert bench.registry.num_moved == 3
    if is_silent:
        bench.registry.links[B].patience.missed(0.0)
    for now_s in (0.1, 0.2, 0.3):
        bench.registry.by_worker(sequences, now_s)
    assert bench.registry.num_moved == (3 if is_silent else 4), "four at a time"
    assert len(bench.left) == bench.registry.num_moved


def test_what_was_read_is_what_the_last_answer_says() -> None:
    registration = Registration(A, 0)
    registration.note_answer(300, 120)
    assert (registration.confirmed_len, registration.read_len) == (300, 180)
    registration.note_answer(200, 0)
    assert (registration.confirmed_len, registration.read_len) == (300, 180), "an older one says nothing"
    registration.note_answer(301, -5)
    assert registration.read_len == 301
    registration.start_again()
    assert (registration.sent_len, registration.confirmed_len, registration.read_len) == (0, 0, 0)


def test_who_has_much_to_read_is_behind() -> None:
    bench = Bench(A)
    sequences = [Placed(RequestId("few"), 16), Placed(RequestId("some"), 256), Placed(RequestId("many"), 257)]
    _registered(bench, sequences)
    assert bench.registry.behind(A, sequences) == {RequestId("many")}
    bench.registry.registrations[RequestId("many")].note_answer(257, 3)
    assert not bench.registry.behind(A, sequences)


def test_nobody_is_asked_about_what_several_workers_died_of(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    deadly, harmless = Placed(RequestId("deadly")), Placed(RequestId("harmless"))
    with caplog.at_level(logging.WARNING):
        for number in range(_MOST_DEATHS):
            assert not caplog.records
            bench.registry.add(PeerId(f"w{number}"))
            for its in _registered(bench, [deadly, harmless]).values():
                its.sent_len = 10
            bench.registry.registrations[harmless.request_id].note_answer(10, 0)
            bench.registry.remove(PeerId(f"w{number}"))
    assert "request deadly goes on without drafts" in caplog.text
    assert "harmless" not in caplog.text
    bench.registry.add(A)
    assert set(_registered(bench, [deadly, harmless])) == {harmless.request_id}
    assert bench.registry.why_nowhere(deadly.request_id) == "deadly"
    assert bench.registry.num_too_long == 0
    bench.registry.forget(deadly.request_id)
    assert deadly.request_id in _registered(bench, [deadly]), "another one by that name"


def test_who_was_answered_for_in_between_is_innocent() -> None:
    """A request may outlive many updates of the pool, each of which leaves its last round unanswered."""
    bench = Bench()
    (one,) = some(1)
    for number in range(3 * _MOST_DEATHS):
        worker = PeerId(f"w{number}")
        bench.registry.add(worker)
        its = _registered(bench, [one])[one.request_id]
        its.sent_len = 10
        bench.registry.answered(one.request_id, 10, 0, 0.0)
        its.sent_len = 12
        bench.registry.remove(worker)
    bench.registry.add(A)
    assert one.request_id in _registered(bench, [one])
    for number in range(_MOST_DEATHS):  # control: who has only begun to read it may have died of the rest
        bench.registry.remove(A)
        bench.registry.add(A)
        its = _registered(bench, [one]).get(one.request_id) or Registration(A, 0)
        its.sent_len = 12
        if number < _MOST_DEATHS - 1:
            bench.registry.answered(one.request_id, 11, 5, 0.0)
    bench.registry.remove(A)
    bench.registry.add(A)
    assert one.request_id not in _registered(bench, [one])


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_worker_that_was_silent_before_it_was_gone_has_died_too(is_heard: bool) -> None:
    """Its sequences had moved on by then; they are innocent where it was heard once more."""
    bench = Bench()
    (one,) = some(1)
    now_s = 0.0
    for number in range(_MOST_DEATHS):
        first, second = PeerId(f"first{number}"), PeerId(f"second{number}")
        bench.registry.add(first)
        bench.registry.by_worker([one], now_s)
        bench.registry.registrations[one.request_id].sent_len = 10
        bench.registry.links[first].patience.missed(now_s)
        now_s += 2 * DEADLINES.reassign_after_s
        bench.registry.add(second)
        bench.registry.by_worker([one], now_s)
        its = bench.registry.registrations[one.request_id]
        assert its.worker == second
        its.sent_len = 10
        its.note_answer(10, 0)
        if is_heard:
            bench.registry.links[first].patience.heard()
            bench.registry.by_worker([one], now_s)
        bench.registry.remove(first)
        bench.registry.remove(second)
    bench.registry.add(A)
    assert (one.request_id in _registered(bench, [one])) == is_heard


def _registered(bench: Bench, sequences: list[Placed]) -> dict[RequestId, Registration]:
    bench.registry.by_worker(sequences, 0.0)
    return dict(bench.registry.registrations)
