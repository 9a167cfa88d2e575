"""Which draft worker has which sequence."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.core.ids import RequestId
from specdec.engine.draft_patience import DraftDeadlineConfig
from specdec.engine.draft_placement import DraftPlacementConfig
from specdec.engine.draft_registry import DraftRegistry, Registration
from specdec.transport.base import PeerId

A, B = PeerId("a"), PeerId("b")
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

    def _on_leave(self, request_id: RequestId, registration: Registration) -> None:
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
    assert len(bench.left) == 1


def test_one_that_never_had_a_place_was_refused_one_that_had_has_outgrown_it() -> None:
    bench = Bench(A, B)
    (one,) = some(1)
    registration = _registered(bench, [one])[one.request_id]
    assert not bench.registry.refused(one.request_id, 0.0)
    registration = _registered(bench, [one])[one.request_id]
    registration.note_answer(10, 0)
    worker = registration.worker
    assert bench.registry.refused(one.request_id, 0.0)
    for _ in range(3):  # it rests there, and only there
        assert _registered(bench, [one])[one.request_id].worker != worker
        bench.registry.forget(RequestId("another"))
    assert sum(link.num_registered for link in bench.registry.links.values()) == 1


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


def _registered(bench: Bench, sequences: list[Placed]) -> dict[RequestId, Registration]:
    bench.registry.by_worker(sequences, 0.0)
    return dict(bench.registry.registrations)
