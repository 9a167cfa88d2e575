"""The loop over a desk and toy engines: outputs of a round leave during the next one, and none is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import pytest
from ray.exceptions import OutOfMemoryError

from cluster import engine_loop
from cluster.desk import RequestDesk
from cluster.engine_loop import EngineLoop
from cluster.series import is_counter
from specdec.core.clock import MonotonicClock
from specdec.core.error_codes import COORDINATOR_CRASHED, COORDINATOR_FAILED
from specdec.core.errors import TransportError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.plan import TargetStep
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.proposers.none import NoProposer
from specdec.transport.base import ChannelCounters, Envelope, PeerId
from specdec.transport.messages import Abort, Message, OutputFrame, Refused, SubmitRequest
from specdec.transport.status import DraftLinkStatus

VOCAB = 9
MODEL = ToyModel(VOCAB, seed=3)
INGRESS = PeerId("ingress")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(engine_loop, "_LONGEST_WAIT_S", 0.002)


class CallingTarget(ToyTarget):
    """Calls back when a step has been submitted, as a remote target does."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__(MODEL, num_blocks=48)
        self._meanwhile = meanwhile

    def submit(self, step: TargetStep) -> None:
        super().submit(step)
        self._meanwhile()


class ToySource:
    """Makes engines over toy targets; the first `num_losses` of them are lost after five steps."""

    def __init__(self, *, calls: bool, num_losses: int) -> None:
        self._calls = calls
        self.num_losses_left = num_losses

    def make_engine(self, meanwhile: Callable[[], None]) -> Engine:
        target = CallingTarget(meanwhile if self._calls else lambda: None)
        if self.num_losses_left:
            self.num_losses_left -= 1
            target.num_steps_until_lost = 5
        return Engine.from_parts(
            target=target, proposer=NoProposer(), tokenizer=ToyTokenizer.of_letters(VOCAB)
        )

    def check_idle(self) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        return {}

    def draft_links(self) -> tuple[DraftLinkStatus, ...]:
        return ()

    def stop(self) -> None:
        pass


class Door:
    """What an ingress would get."""

    def __init__(self) -> None:
        self.frames: list[OutputFrame] = []
        self.refusals: list[Refused] = []
        self.arrived = threading.Condition()

    def send(self, peer_id: PeerId, message: Message) -> None:
        assert peer_id == INGRESS
        if isinstance(message, Refused):
            self.refusals.append(message)
        if isinstance(message, OutputFrame):
            with self.arrived:
                self.frames.append(message)
                self.arrived.notify_all()

    def tokens(self, request_id: RequestId) -> list[int]:
        tokens: list[int] = []
        for frame in self.frames:
            for output in frame.outputs:
                if output.request_id == request_id:
                    assert output.first_index == len(tokens)
                    tokens.extend(output.token_ids)
        return tokens

    def num_finished(self) -> int:
        return sum(output.finish_reason is not None for frame in self.frames for output in frame.outputs)

    def await_finished(self, count: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.num_finished() >= count, 20)


def request(name: str, max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=max_tokens),
        seed=len(name),
        epoch=Epoch(0),
    )


@pytest.mark.parametrize("num_losses", [0, 2])
@pytest.mark.parametrize("calls", [True, False])
def test_every_output_leaves_once_and_in_order(calls: bool, num_losses: int) -> None:
    door = Door()
    desk = RequestDesk(door.send, MonotonicClock(), lease_s=60.0)
    requests = [request("a", 17), request("bb", 4), request("ccc", 11)]
    source = ToySource(calls=calls, num_losses=num_losses)
    run_loop(door, desk, source, *requests, num_finished=3)
    assert source.num_losses_left == 0
    for one in requests:
        assert one.params.max_tokens is not None
        assert door.tokens(one.request_id) == MODEL.continuation(
            one.prompt_token_ids, one.params, one.seed, one.params.max_tokens
        )
    assert door.num_finished() == 3
    assert desk.num_streams == 0


class SlowSource(ToySource):
    """Its first target is lost after five steps; the second is there when `is_loaded` says so."""

    def __init__(self) -> None:
        super().__init__(calls=False, num_losses=1)
        self.num_attempts = 0
        self.is_loading, self.is_loaded = threading.Event(), threading.Event()

    def metrics(self) -> Mapping[str, float]:
        return {
            "draft_utilization": 0.5,
            "local_draft_utilization": 0.4,
            "draft_pool_usage_perc": 0.3,
            'drafter_num_requests_running{drafter="small"}': 2.0,
            "target_utilization": 0.9,
            "queue_wait_seconds": 7.0,
        }

    def make_engine(self, meanwhile: Callable[[], None]) -> Engine:
        self.num_attempts += 1
        if self.num_attempts > 1:
            self.is_loading.set()
            assert self.is_loaded.wait(20)
        return super().make_engine(meanwhile)


def test_a_loss_shows_while_the_next_target_is_loaded() -> None:
    """Alerts and autoscaling go by these numbers, and a large model takes minutes."""
    door, source = Door(), SlowSource()
    desk = RequestDesk(door.send, MonotonicClock(), lease_s=60.0)
    loop = EngineLoop(desk, source, ChannelCounters())
    loop.start()
    loop.wait_ready()
    try:
        assert desk.metrics()["target_losses"] == 0
        assert desk.metrics()["draft_utilization"] == 0.5
        for name in ("a", "bb"):
            desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(request(name, 40))))
        assert source.is_loading.wait(20)
        desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(request("ccc", 3))))
        lost = desk.metrics()
        assert lost["target_losses"] == 1
        assert (lost["num_requests_running"], lost["num_requests_waiting"]) == (0, 3)
        gauges = ("kv_cache_usage_perc", *source.metrics())
        assert {name: lost.get(name) for name in gauges} == dict.fromkeys(gauges, 0)
        source.is_loaded.set()
        door.await_finished(3)
        assert desk.metrics()["target_recovery_seconds"] >= lost["target_recovery_seconds"] > 0.0
        assert desk.metrics()["target_losses"] == 1
        deadline_s = time.monotonic() + 20
        while desk.metrics()["generation_tokens"] < 83:  # those of the engine before, too
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert lost["generation_tokens"] > 0
        counters = [name for name in lost if is_counter(name)]
        assert len(counters) > 20
        assert all(desk.metrics()[name] >= lost[name] for name in counters)
    finally:
        source.is_loaded.set()
        loop.stop()


def test_how_a_target_was_lost_is_said(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    desk = RequestDesk(door.send, MonotonicClock(), lease_s=60.0)
    with caplog.at_level("WARNING", logger=engine_loop.__name__):
        run_loop(door, desk, ToySource(calls=True, num_losses=1), request("a", 17), num_finished=1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the target is lost: ")
    assert len(said) > len("the target is lost: ")


class PingPongSource(ToySource):
    """Two cohorts; the first target is lost in a round of which nobody is left to hear."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__(calls=True, num_losses=0)
        self._leave = leave
        self.num_made = 0
        self.is_back = threading.Event()

    def make_engine(self, meanwhile: Callable[[], None]) -> Engine:
        engine = super().make_engine(meanwhile)
        self.num_made += 1
        if self.num_made > 1:
            self.is_back.set()
            return engine
        step = engine.step
        num_steps = 0

        def stepping(*, reads_text: bool = True) -> list[RequestOutput]:
            nonlocal num_steps
            num_steps += 1
            outputs = step(reads_text=reads_text)
            if num_steps == 3:
                self._leave()
                engine.abort(RequestId("a"))
                engine._lose_target(TransportError("it died just then"))
                engine._ended.clear()
            return outputs

        engine.step = stepping  # type: ignore[method-assign]
        return engine


def test_a_target_that_is_lost_when_nobody_is_left_is_replaced() -> None:
    door = Door()
    desk = RequestDesk(door.send, MonotonicClock(), lease_s=60.0)
    source = PingPongSource(
        lambda: desk.hear(Envelope(sender=INGRESS, message=Abort(RequestId("a"), Epoch(0))))
    )
    loop = EngineLoop(desk, source, ChannelCounters())
    loop.start()
    loop.wait_ready()
    try:
        desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(request("a", 40))))
        assert source.is_back.wait(20)
        desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(request("bb", 4))))
        door.await_finished(1)
        assert len(door.tokens(RequestId("bb"))) == 4
        assert loop.is_alive
    finally:
        loop.stop()


class HopelessSource(ToySource):
    """Its first target is lost after five steps, and there is no other."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(calls=False, num_losses=1)
        self.num_attempts = 0
        self._error = error or TransportError("the target worker died")

    def make_engine(self, meanwhile: Callable[[], None]) -> Engine:
        if self.num_losses_left:
            return super().make_engine(meanwhile)
        self.num_attempts += 1
        raise self._error


@pytest.mark.parametrize("error", [TransportError("it died"), OutOfMemoryError("by the memory monitor")])
def test_a_target_that_cannot_be_brought_back_is_given_up(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams go elsewhere, and Serve, which finds the loop ended, looks for another place."""
    monkeypatch.setattr(engine_loop, "_SOON_S", 0.0)
    door, source = Door(), HopelessSource(error)
    desk = RequestDesk(door.send, MonotonicClock(), lease_s=60.0)
    loop = EngineLoop(desk, source, ChannelCounters())
    loop.start()
    loop.wait_ready()
    for one in (request("a", 100), request("bb", 100)):
        desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(one)))
    door.await_finished(2)
    loop._thread.join(20)
    assert not loop.is_alive
    last = [output for frame in door.frames for output in frame.outputs if output.finish_reason is not None]
    assert [output.error_code for output in last] == [COORDINATOR_FAILED] * 2
    assert desk.description is None
    assert desk.num_streams == 0
    assert source.num_attempts == engine_loop._MAX_ATTEMPTS


class MortalSource(ToySource):
    """So many of its targets die before they have anything to do."""

    def __init__(self, num_deaths: int) -> None:
        super().__init__(calls=False, num_losses=0)
        self.num_deaths_left = num_deaths
        self.one_lives = threading.Event()

    def check_idle(self) -> None:
        if not self.num_deaths_left:
            self.one_lives.set()
            return
        self.num_deaths_left -= 1
        raise TransportError("the target worker died")


def test_targets_that_die_soon_after_each_start_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be loaded without end."""
    monkeypatch.setattr(engine_loop, "_IDLE_CHECK_S", 0.001)
    source = MortalSource(num_deaths=1000)
    loop = EngineLoop(RequestDesk(Door().send, MonotonicClock(), lease_s=60.0), source, ChannelCounters())
    loop.start()
    loop._thread.join(20)
    assert not loop.is_alive
    assert 1000 - source.num_deaths_left == engine_loop._MAX_ATTEMPTS


def test_targets_that_have_served_before_they_die_are_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often: they are killed by chance."""
    monkeypatch.setattr(engine_loop, "_IDLE_CHECK_S", 0.001)
    monkeypatch.setattr(engine_loop, "_SOON_S", 0.0)
    source = MortalSource(num_deaths=3 * engine_loop._MAX_ATTEMPTS)
    loop = EngineLoop(RequestDesk(Door().send, MonotonicClock(), lease_s=60.0), source, ChannelCounters())
    loop.start()
    try:
        assert source.one_lives.wait(20)
        assert loop.is_alive
    finally:
        loop.stop()


class WatchedSource(ToySource):
    """Calls `watch` with the loop's own callback whenever a step has been submitted."""

    def __init__(self, watch: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(calls=True, num_losses=0)
        self._watch = watch

    def make_engine(self, meanwhile: Callable[[], None]) -> Engine:
        return super().make_engine(lambda: self._watch(meanwhile))


def run_loop(door: Door, desk: RequestDesk, source: ToySource, *requests: Request, num_finished: int) -> None:
    loop = EngineLoop(desk, source, ChannelCounters())
    loop.start()
    loop.wait_ready()
    for one in requests:
        desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(one)))
    door.await_finished(num_finished)
    loop.stop()


@pytest.mark.parametrize("failure", ["a loop that fails", "a target that cannot be brought back"])
def test_who_has_ended_its_streams_refuses_others(failure: str) -> None:
    """Its channel lives until Serve has replaced it, and who has nothing to do is sent requests."""

    def fail(meanwhile: Callable[[], None]) -> None:
        raise AssertionError("a bug")

    source, code = (
        (WatchedSource(fail), COORDINATOR_CRASHED)
        if failure == "a loop that fails"
        else (HopelessSource(), COORDINATOR_FAILED)
    )
    door = Door()
    desk = RequestDesk(door.send, MonotonicClock(), lease_s=60.0)
    loop = EngineLoop(desk, source, ChannelCounters())
    loop.start()
    loop.wait_ready()
    desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(request("a", 100))))
    door.await_finished(1)
    loop._thread.join(20)
    assert not loop.is_alive
    (last,) = [output for output in door.frames[-1].outputs if output.finish_reason is not None]
    assert last.error_code == code
    desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(request("bb", 100))))
    assert [refusal.kind for refusal in door.refusals] == ["draining"]
    assert desk.num_streams == 0


def test_outputs_wait_for_the_target_to_be_busy_again() -> None:
    door = Door()
    num_sent: list[int] = []

    def watch(meanwhile: Callable[[], None]) -> None:
        before = len(door.frames)
        meanwhile()
        num_sent.append(len(door.frames) - before)

    desk = RequestDesk(door.send, MonotonicClock(), lease_s=60.0)
    run_loop(door, desk, WatchedSource(watch), request("a", 6), num_finished=1)
    assert num_sent == [0, 1, 1, 1, 1, 1]
    assert len(door.frames) == 6  # the last one did not wait


def test_what_waits_for_an_aborted_stream_is_dropped() -> None:
    door = Door()
    desk = RequestDesk(door.send, MonotonicClock(), lease_s=60.0)
    num_steps = 0

    def watch(meanwhile: Callable[[], None]) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            desk.hear(Envelope(sender=INGRESS, message=Abort(RequestId("a"), Epoch(0))))
        meanwhile()

    run_loop(door, desk, WatchedSource(watch), request("a", 40), request("bb", 40), num_finished=1)
    assert len(door.tokens(RequestId("bb"))) == 40
    assert len(door.tokens(RequestId("a"))) < 5
