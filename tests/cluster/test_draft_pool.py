"""How a place of the draft pool looks after its worker, without Ray."""

from __future__ import annotations

import inspect
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from pydantic import ValidationError
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from cluster import draft_pool
from cluster.autoscaling.config import DraftScalingConfig
from cluster.autoscaling.draft_demand import DraftDemand, demand_of
from cluster.autoscaling.draft_pool import wanted_workers
from cluster.autoscaling.serve_policy import pool_load
from cluster.config import ClusterConfig, MembershipConfig
from cluster.directory import Member, Role
from cluster.directory_actor import DirectoryLink
from cluster.draft_pool import DraftPoolReplica
from cluster.worker_handle import WorkerHandle
from specdec.core.clock import ManualClock
from specdec.core.errors import TransportError
from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerAddress, PeerId
from workers.draft_worker import DraftWorkerProcess


class Worker:
    """A worker that is healthy, or fails its check with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.is_stopped = False
        self.num_calls = 0
        self.admitted: list[tuple[Any, ...]] = []
        self.refuses: Exception | None = None

    def call(self, method: str, *arguments: Any, timeout_s: float = 10.0) -> dict[str, float]:
        if method == "admit":
            self.admitted.append(arguments)
            if self.refuses is not None:
                raise self.refuses
            return {}
        assert method == "check_health"
        self.num_calls += 1
        assert self.num_calls < 100, "it is looked after for ever"
        if self._error is not None:
            raise self._error
        if self.is_stopped:
            raise TransportError("the draft worker does not answer")
        return {"num_sequences": 1.0}

    def stop(self) -> None:
        self.is_stopped = True


class Place(DraftPoolReplica):
    """The watch of a place alone: how often starting a worker fails is told."""

    def __init__(self, first: Worker, failures: list[Exception]) -> None:  # not that of a real one
        self._cluster = ClusterConfig(membership=MembershipConfig(lease_s=1.0, renew_s=0.001))
        self._stop = threading.Event()
        self._news = threading.Event()
        self._coordinators = []
        self._told = ([], [])
        self._learning = None
        self._member = None
        self._worker = cast("WorkerHandle", first)
        self._worker_id = None
        self._counters = {}
        self._full_until_s = 0.0
        self._failures = failures
        self.num_started = 0

    def __del__(self) -> None:
        """Nothing has been started that would have to end."""

    def _start_worker(self) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self.num_started += 1
        self._worker = cast("WorkerHandle", Worker())
        self._stop.set()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_pool, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(draft_pool, "_LONGEST_WAIT_S", 0.002)


def says_no(text: str) -> Any:
    return RayTaskError("check_health", "traceback", RuntimeError(text))


@pytest.mark.parametrize("error", [TransportError("it is dead"), says_no("its thread has ended")])
def test_a_worker_that_is_dead_or_serves_no_more_is_replaced(error: Exception) -> None:
    first = Worker(error)
    place = Place(first, [])
    place._keep_alive()
    assert first.is_stopped
    assert place.num_started == 1


def test_a_worker_that_does_not_start_is_tried_again_whatever_ray_says() -> None:
    place = Place(Worker(TransportError("it is dead")), [TransportError("died"), RayError("no such group")])
    place._keep_alive()
    assert place.num_started == 1


def test_a_worker_that_the_memory_monitor_has_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a real handle: Ray says so by another error than that of other deaths."""

    def get(call: object, timeout: float) -> object:
        raise OutOfMemoryError("killed by the memory monitor")

    method = SimpleNamespace(remote=lambda *_: None)
    stopped: list[object] = []
    monkeypatch.setattr("cluster.worker_handle.ray.get", get)
    monkeypatch.setattr("cluster.worker_handle.ray.kill", lambda actor, no_restart: stopped.append(actor))
    actor = SimpleNamespace(check_health=method)
    place = Place(Worker(), [])
    place._worker = WorkerHandle(actor, "draft worker")
    place._keep_alive()
    assert stopped == [actor]
    assert place.num_started == 1


def test_a_worker_that_was_started_and_not_announced_is_not_kept() -> None:
    place = Place(Worker(TransportError("it is dead")), [])
    nameless, announce = Worker(), place._start_worker

    def fail_behind_the_start() -> None:
        place._worker = cast("WorkerHandle", nameless)
        place._start_worker = announce  # type: ignore[method-assign]
        raise TransportError("the draft worker does not answer")

    place._start_worker = fail_behind_the_start  # type: ignore[method-assign]
    place._keep_alive()
    assert nameless.is_stopped
    assert place.num_started == 1


def test_a_place_that_cannot_have_a_worker_is_given_up() -> None:
    failures: list[Exception] = [TransportError("no memory") for _ in range(100)]
    place = Place(Worker(TransportError("it is dead")), failures)
    place._watch = threading.Thread(target=place._keep_alive)
    place._watch.start()
    place._watch.join(30)
    # The first one had not lived either.
    assert len(failures) == 100 - (draft_pool._MAX_ATTEMPTS - 1)
    with pytest.raises(RuntimeError, match="has ended"):
        place.check_health()


class ShortLived(Place):
    """Its workers die so long after each start, by a clock that stands still otherwise."""

    def __init__(self, clock: ManualClock, life_s: float, most: int) -> None:
        super().__init__(Worker(TransportError("it is dead")), [])
        self._clock, self._life_s, self._most = clock, life_s, most

    def _start_worker(self) -> None:
        self.num_started += 1
        self._worker = cast("WorkerHandle", Worker(TransportError("it is dead")))
        if self.num_started == self._most:
            self._stop.set()

    def _wait(self) -> bool:
        self._clock.advance(self._life_s)
        return not self._stop.is_set()


@pytest.mark.parametrize(("life_s", "num_started"), [(1.0, draft_pool._MAX_ATTEMPTS - 1), (8.0, 50)])
def test_a_place_whose_workers_die_soon_after_each_start_is_given_up(
    life_s: float, num_started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one whose workers serve for a while before something kills them."""
    clock = ManualClock()
    monkeypatch.setattr(draft_pool, "time", SimpleNamespace(monotonic=clock.now_s, time=clock.now_s))
    place = ShortLived(clock, life_s, most=50)
    place._keep_alive()
    assert place.num_started == num_started


def test_a_place_that_announces_nobody_any_more_is_replaced() -> None:
    place = Place(Worker(), [])
    place._directory = cast("DirectoryLink", SimpleNamespace(is_alive=False))
    place._watch = threading.current_thread()
    with pytest.raises(RuntimeError, match="directory's thread has ended"):
        place.check_health()


def test_what_coordinators_wanted_stands_while_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that does not answer is no idle pool: by that it would shrink under load."""
    wanted = (demand_of({"num_requests_running": 3.0}, None),)
    answers: list[tuple[DraftDemand, ...] | None] = [None, (), wanted, None, None]
    place = Place(Worker(), [])
    scaling = {"draft_pool": {"autoscaling": {"max_workers": 2}}}
    place._cluster = ClusterConfig.model_validate(
        {"membership": {"lease_s": 1.0, "renew_s": 0.001}, **scaling}
    )
    place._demands = ()

    def read(namespace: str) -> tuple[DraftDemand, ...] | None:
        if len(answers) == 1:
            place._stop.set()
        return answers.pop(0)

    monkeypatch.setattr(draft_pool, "read_demands", read)
    place._keep_alive()
    assert list(place._demands) == list(wanted)


def a_coordinator(name: str) -> Member:
    address = PeerAddress(peer_id=PeerId(name), endpoint="tcp://10.0.0.1:1", public_key=name)
    return Member(address=address, role="coordinator")


def test_the_directory_s_thread_does_not_wait_for_a_worker() -> None:
    """It renews the lease, which must not be lost because the worker is busy with other weights."""
    told, may_answer = threading.Event(), threading.Event()

    class Busy(Worker):
        def call(self, method: str, *arguments: Any, timeout_s: float = 10.0) -> dict[str, float]:
            if method == "admit":
                told.set()
                assert may_answer.wait(30)
            return super().call(method, *arguments, timeout_s=timeout_s)

    busy = Busy()
    place = Place(busy, [])
    first, second = a_coordinator("first"), a_coordinator("second")
    place._watch = threading.Thread(target=place._keep_alive, daemon=True)
    place._watch.start()
    place._follow((first,))
    assert told.wait(30)
    place._follow((first, second))  # would wait for ever
    may_answer.set()
    until_s = time.monotonic() + 30
    while len(busy.admitted) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    place._stop.set()
    place._watch.join(30)
    assert busy.admitted == [([first.address], []), ([first.address, second.address], [])]


@pytest.mark.parametrize("role", ["starting", "coordinator"])
def test_a_worker_hears_of_changes_among_coordinators_only(role: Role) -> None:
    """Of those, too, that are not ready yet: they want to know what drafts cost."""
    worker = Worker()
    place = Place(worker, [])
    handle = cast("WorkerHandle", worker)
    one = msgspec.structs.replace(a_coordinator("one"), role=role)
    door = msgspec.structs.replace(a_coordinator("door"), role="ingress")
    for members in ((one,), (one, door), (one,), ()):
        place._follow(members)
        place._tell_who_may_speak(handle)
    assert worker.admitted == [([one.address], []), ([], [])]


@pytest.mark.parametrize("error", [TransportError("it is dead"), says_no("its channel is closed")])
def test_a_worker_that_cannot_be_told_who_may_speak_is_replaced(error: Exception) -> None:
    first = Worker()
    first.refuses = error
    place = Place(first, [])
    place._follow((a_coordinator("one"),))
    place._keep_alive()
    assert first.is_stopped
    assert place.num_started == 1


def test_the_worker_is_told_how_long_a_rank_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def remote(*args: object) -> None:
        given.update(inspect.signature(DraftWorkerProcess.__init__).bind(None, *args).arguments)

    def fail(*_: object) -> None:
        raise TransportError("that is enough")

    started = SimpleNamespace(options=lambda: SimpleNamespace(remote=remote))
    monkeypatch.setattr(draft_pool, "worker_options", lambda *_: {})
    monkeypatch.setattr(draft_pool, "rank_options", lambda *_: [{}])
    monkeypatch.setattr(draft_pool, "DraftWorker", started)
    monkeypatch.setattr(draft_pool, "WorkerHandle", fail)
    place = Place(Worker(), [])
    place._engine = EngineConfig.model_validate(
        {"target": {"model": "/t"}, "speculative_config": {"method": "draft_model", "model": "/d"}}
    )
    place._cluster = ClusterConfig.model_validate(
        {"channels": {"bind": "loopback"}, "draft_pool": {"rank_silence_s": 7}}
    )
    with pytest.raises(TransportError, match="that is enough"):
        DraftPoolReplica._start_worker(place)
    assert given["rank_silence_s"] == 7.0


@pytest.mark.parametrize("silence_s", [0.0, 2.9, 3601.0])
def test_a_silence_that_would_end_healthy_ranks_or_none_is_refused(silence_s: float) -> None:
    with pytest.raises(ValidationError, match="rank_silence_s"):
        ClusterConfig.model_validate({"draft_pool": {"rank_silence_s": silence_s}})


class TestUsage:
    """Of a pool with memory for three requests and places for ten."""

    POLICY = DraftScalingConfig(max_workers=4)

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> ManualClock:
        clock = ManualClock()
        monkeypatch.setattr(draft_pool, "time", SimpleNamespace(monotonic=clock.now_s, time=clock.now_s))
        return clock

    @pytest.fixture
    def place(self) -> Place:
        place = Place(Worker(), [])
        place._engine = EngineConfig.model_validate({"target": {"model": "/t"}})
        place._cluster = ClusterConfig.model_validate(
            {"draft_pool": {"shares": {"max_sequences": 10}, "autoscaling": {"max_workers": 4}}}
        )
        place._demands = (
            DraftDemand(num_requests=9.0, utilization=0.0, wait_share=0.0, hidden_share=None, worth=1.8),
        )
        return place

    def wanted(self, *reports: dict[str, float]) -> int:
        return wanted_workers(pool_load(reports), self.POLICY).number

    @pytest.mark.parametrize("refusal", ["refused_entries", "outgrown_sequences"])
    def test_a_worker_that_refuses_requests_is_full_whatever_places_it_has(
        self, place: Place, clock: ManualClock, refusal: str
    ) -> None:
        """Coordinators try again every two seconds at least, and Serve takes a mean over twenty."""
        for second in range(60):
            refused = {refusal: float(second // 2)}
            place._note_counters({"num_sequences": 3.0, **refused})
            report = place.record_autoscaling_stats()
            if second >= 2:
                assert report["usage"] == 1.0
                assert self.wanted(report) == 2
                assert self.wanted(report, report) == 3
            clock.advance(1.0)
        clock.advance(20.0)
        after = place.record_autoscaling_stats()
        assert after["usage"] == 0.3
        assert self.wanted(after, after) == 1, "it would have been so all the time"

    def test_a_worker_is_as_full_as_its_memory(self, place: Place, clock: ManualClock) -> None:
        """Or a pool whose memory is the limit gives a worker up as soon as that has what was refused."""
        place._note_counters({"num_sequences": 3.0, "memory_held": 0.75})
        report = place.record_autoscaling_stats()
        assert report["usage"] == 0.75
        assert self.wanted(report, report) == 2
        place._note_counters({"num_sequences": 3.0, "memory_held": 1.0})
        assert place.record_autoscaling_stats()["usage"] == 0.99

    def test_what_is_too_long_for_an_empty_worker_does_not_fill_it(
        self, place: Place, clock: ManualClock
    ) -> None:
        place._note_counters({"num_sequences": 0.0, "refused_entries": 5.0})
        assert place.record_autoscaling_stats()["usage"] == 0.0

    def test_a_new_worker_has_refused_nobody_yet(self, place: Place, clock: ManualClock) -> None:
        place._note_counters({"num_sequences": 3.0})
        place._note_counters({"num_sequences": 3.0, "refused_entries": 9.0})
        clock.advance(60.0)
        place._counters = {}
        place._note_counters({"num_sequences": 3.0, "refused_entries": 1.0})
        assert place.record_autoscaling_stats()["usage"] == 1.0
