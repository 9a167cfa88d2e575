"""What a controller takes for itself is not told to it as the time of a round."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from specdec.core.clock import ManualClock
from specdec.core.plan import TargetResult
from specdec.engine.targets.toy_target import ToyTarget
from specdec.scheduling.speculation.controller import FixedController, RoundObservation
from specdec.scheduling.state import Schedulable
from specdec.transport.memory import Faults, MemoryChannel
from specdec.transport.messages import ProposeRequest, RunStep
from tests.specdec.engine.remote_cluster import MODEL as REMOTE_MODEL
from tests.specdec.engine.remote_cluster import Cluster, a_request
from tests.specdec.engine.toy_engines import MODEL, request, run, toy_engine

ROUND_S = 0.002


class SlowTarget(ToyTarget):
    """Every step takes the same time."""

    clock: ManualClock

    def collect(self):  # type: ignore[no-untyped-def]
        self.clock.advance(ROUND_S)
        return super().collect()


@dataclass
class Ponderer(FixedController):
    """Takes its time."""

    clock: ManualClock
    choose_s: float
    observe_s: float
    think_s: float = 0.0
    meanwhile: Callable[[float], None] | None = None
    """Lets time pass for others, too."""
    heard: list[RoundObservation] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(0)

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> Sequence[int]:
        self.clock.advance(self.choose_s)
        self.done.append("choose")
        return super().choose(decoding, elsewhere)

    def observe(self, observation: RoundObservation) -> None:
        self.clock.advance(self.observe_s)
        self.heard.append(observation)
        self.done.append("observe")

    def think(self) -> None:
        (self.meanwhile or self.clock.advance)(self.think_s)
        self.done.append("think")


@pytest.mark.parametrize(
    ("choose_s", "observe_s", "think_s"),
    [(0.0, 0.0, 0.0), (0.003, 0.0, 0.0), (0.0, 0.004, 0.0), (0.0, 0.0, 0.005), (0.01, 0.02, 0.03)],
)
def test_rounds_take_as_long_however_long_the_controller_thinks(
    choose_s: float, observe_s: float, think_s: float
) -> None:
    clock = ManualClock()
    target = SlowTarget(MODEL)
    target.clock = clock
    engine = toy_engine(target=target, clock=clock)
    controller = Ponderer(clock, choose_s, observe_s, think_s)
    engine._rounds._controller._controller = controller
    run(engine, request())
    times = [one.round_s for one in controller.heard if one.round_s is not None]
    assert len(times) > 3
    assert times == pytest.approx([ROUND_S] * len(times))
    assert controller.done[:6] == ["choose", "observe", "think"] * 2, (
        "the target is idle: it may think at once"
    )


class _ReportingTarget(ToyTarget):
    """Says that it took as long as the wire to it and back."""

    def collect(self) -> TargetResult:
        return msgspec.structs.replace(super().collect(), forward_s=ROUND_S)


def _remote_rounds(think_s: float) -> tuple[Cluster, Ponderer]:
    wire = Faults(delay_s=(ROUND_S / 2, ROUND_S / 2))
    cluster = Cluster(
        wire, num_drafters=0, make_target=lambda _: _ReportingTarget(REMOTE_MODEL, num_blocks=64)
    )
    controller = Ponderer(cluster.clock, 0.0, 0.0, think_s, cluster.network.run_for)
    cluster.engine._rounds._controller._controller = controller
    one = a_request("a", random.Random(2))
    params = msgspec.structs.replace(one.params, max_tokens=12)
    cluster.run([msgspec.structs.replace(one, params=params)])
    return cluster, controller


@pytest.mark.parametrize("think_s", [0.0, 0.4 * ROUND_S, 3.0 * ROUND_S])
def test_beside_a_target_elsewhere_it_thinks_while_that_is_at_work(think_s: float) -> None:
    cluster, controller = _remote_rounds(think_s)
    assert controller.done[:7] == ["choose", "think", "observe", "choose", "think", "observe", "choose"]
    assert controller.done[-2:] == ["observe", "think"], "with nothing left to do nobody waits for it"
    times = [one.round_s for one in controller.heard if one.round_s is not None]
    assert len(times) > 3
    assert times == pytest.approx([ROUND_S] * len(times))
    metrics = cluster.engine.metrics()
    late_s = max(0.0, think_s - ROUND_S)
    last_thought_s = think_s
    assert metrics.round_s == pytest.approx(metrics.num_rounds * (ROUND_S + late_s) + last_thought_s)
    hidden = think_s < ROUND_S
    assert metrics.coordinator_s == pytest.approx(
        last_thought_s + (0.0 if hidden else metrics.num_rounds * think_s)
    )


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_draft_workers_are_told_what_is_only_to_be_read_once_the_target_is_at_work(
    num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(Faults(), num_drafters=1, num_draft_tokens=num_draft_tokens)
    sent: list[RunStep | ProposeRequest] = []

    def send(channel: MemoryChannel, peer_id: object, message: object) -> None:
        if isinstance(message, RunStep | ProposeRequest):
            sent.append(message)
        plain_send(channel, peer_id, message)  # type: ignore[arg-type]

    plain_send = MemoryChannel.send
    monkeypatch.setattr(MemoryChannel, "send", send)
    one = msgspec.structs.replace(a_request("a", random.Random(1)), prompt_token_ids=(1, 2, 3))
    params = msgspec.structs.replace(one.params, max_tokens=120)
    cluster.run([msgspec.structs.replace(one, params=params)])
    asked = [number for number, message in enumerate(sent) if isinstance(message, ProposeRequest)]
    for number in asked:
        message = sent[number]
        assert isinstance(message, ProposeRequest)
        before, behind = (isinstance(sent[at], RunStep) for at in (number - 1, number + 1))
        if all(entry.num_draft_tokens == 0 for entry in message.entries):
            assert number > 0
            assert before, "the target has its step first"
        else:
            assert behind, "the step has these drafts"
    assert len(asked) == 3 if num_draft_tokens == 0 else len(asked) > 10


def test_what_was_done_beside_a_target_that_is_lost_belongs_to_no_later_round() -> None:
    cluster, _ = _remote_rounds(0.4 * ROUND_S)
    rounds = cluster.engine._rounds
    cluster.engine.add_request(a_request("b", random.Random(3)))
    assert rounds._launch("lockstep")
    assert rounds._beside_s == pytest.approx(0.4 * ROUND_S)
    rounds.abandon()
    assert rounds._beside_s == 0.0
