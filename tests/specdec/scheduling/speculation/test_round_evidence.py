"""What rounds say of what was expected of them is believed with the next decision, or after an audit."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.controller import DraftOutcome
from specdec.scheduling.speculation.decision import Region
from specdec.scheduling.speculation.goodput import Kind
from specdec.scheduling.speculation.round_evidence import RoundEvidence

REGION = Region(2, 0)
USUAL: Any = SimpleNamespace(rate=100.0)
DECISION: Any = SimpleNamespace(
    region=REGION, option=SimpleNamespace(kind="lockstep"), options={"lockstep": USUAL}
)


def test_times_count_once_they_are_taken_in() -> None:
    evidence = RoundEvidence()
    for _ in range(64):
        evidence.note_time("lockstep", 2.0)
    assert evidence.factor(64, "lockstep", REGION) == 1.0
    evidence.take_in(64, DECISION)
    slower = evidence.factor(64, "lockstep", REGION)
    assert slower < 0.8
    evidence.take_in(64, DECISION)
    assert evidence.factor(64, "lockstep", REGION) == slower
    assert evidence.factor(64, "plain", REGION) == 1.0


def test_what_came_just_before_is_known_of_enough_rounds_and_can_be_forgotten() -> None:
    evidence = RoundEvidence()
    assert evidence.rate_lately(0, "lockstep", DECISION) is None
    for _ in range(16):
        evidence.note_time("lockstep", 2.0)
    assert evidence.rate_lately(16, "lockstep", DECISION) == 50.0
    assert evidence.rate_lately(16, "ping_pong", DECISION) is None
    evidence.forget_lately("lockstep")
    assert evidence.rate_lately(16, "lockstep", DECISION) is None


def test_an_audit_of_rounds_of_both_kinds_is_believed() -> None:
    evidence = RoundEvidence()
    for _ in range(16):
        evidence.note_time("lockstep", 2.0)
    evidence.settle(16, ("plain", "lockstep"), DECISION)  # nothing is known of plain ones
    assert evidence.factor(16, "lockstep", REGION) == 1.0
    for _ in range(16):
        evidence.note_time("plain", 1.0)
    evidence.settle(32, ("plain", "lockstep"), DECISION)
    assert evidence.factor(32, "lockstep", REGION) < 0.7


def test_of_two_modes_that_one_is_better_that_was_so_side_by_side() -> None:
    """Whatever rounds of both have taken at other times: the machine was another one then."""
    evidence = RoundEvidence()
    decision: Any = SimpleNamespace(region=REGION, option=SimpleNamespace(kind="ping_pong"), options={})
    for _ in range(256):
        evidence.note_time("ping_pong", 1.2)
    evidence.take_in(256, decision)
    usual: Any = SimpleNamespace(**{**vars(decision), "option": SimpleNamespace(kind="lockstep")})
    for _ in range(256):
        evidence.note_time("lockstep", 1.0)
    evidence.take_in(512, usual)
    evidence.forget_lately("ping_pong")

    def compare(now: int) -> float:
        for _ in range(16):
            evidence.note_time("lockstep", 1.1)
        evidence.take_in(now, usual)
        for _ in range(16):
            evidence.note_time("ping_pong", 0.99)
        evidence.compare(now + 16, "lockstep", "ping_pong", decision)
        lockstep, ping_pong = (
            evidence.time_factor(now + 16, kind, REGION) for kind in ("lockstep", "ping_pong")
        )
        return ping_pong / lockstep

    assert not evidence.are_compared(512, "lockstep", "ping_pong")
    ratios = [compare(512 + 32 * number) for number in range(3)]
    assert 0.98 < ratios[0] < 1.08, "as much as what was known before"
    assert ratios[0] > ratios[1] > ratios[2] > 0.9
    assert ratios[2] < 0.95
    assert evidence.are_compared(592, "ping_pong", "lockstep")
    assert not evidence.are_compared(1000, "ping_pong", "lockstep")
    kinds: Sequence[Kind] = ("plain", "lockstep", "ping_pong")
    assert evidence.last_compared("lockstep", kinds) == {"ping_pong": 592}
    assert evidence.just_compared(592, "lockstep", kinds) == {"ping_pong"}
    assert evidence.just_compared(1000, "lockstep", kinds) == set()


def test_what_a_comparison_has_shown_of_a_mode_is_believed_of_other_batches_too() -> None:
    """As far as it was not thought before; what was known of their differences stays."""
    evidence, other = RoundEvidence(), Region(4, 1)
    decision: Any = SimpleNamespace(region=REGION, option=SimpleNamespace(kind="ping_pong"), options={})
    there: Any = SimpleNamespace(**{**vars(decision), "region": other})
    for ratio, where in ((1.2, decision), (1.3, there)):
        for _ in range(256):
            evidence.note_time("ping_pong", ratio)
        evidence.take_in(256, where)
    before = evidence.time_factor(256, "ping_pong", other)
    assert before > 1.25
    evidence.forget_lately()
    for _ in range(16):
        evidence.note_time("ping_pong", 0.9)
    evidence.compare(272, "lockstep", "ping_pong", decision)  # nothing is known of lockstep but the model
    assert 0.9 < evidence.time_factor(272, "ping_pong", REGION) < 1.05
    assert evidence.time_factor(272, "ping_pong", other) == pytest.approx(
        before * evidence.time_factor(272, "ping_pong", REGION) / 1.19, rel=0.03
    )


def test_where_too_few_rounds_were_seen_side_by_side_what_was_known_before_counts() -> None:
    """As for a server whose requests come and go in every round: it would never change its mode else."""
    evidence = RoundEvidence()
    for _ in range(16):
        evidence.note_time("lockstep", 1.0)
    evidence.compare(16, "lockstep", "ping_pong", DECISION)
    assert evidence.are_compared(16, "lockstep", "ping_pong")
    assert evidence.time_factor(16, "ping_pong", REGION) == 1.0


def test_newcomers_are_not_odd() -> None:
    """Nothing was expected of them: a batch that is replaced would set off an alarm each time."""
    decision: Any = SimpleNamespace(
        index={RequestId("known"): 0},
        gains_if_drafted=[[0.0, 0.8, 1.4]],
        option=SimpleNamespace(kind="lockstep"),
    )

    def of(*names: str) -> Any:
        drafted = [
            DraftOutcome(request_id=RequestId(name), num_drafted=2, num_accepted=1 if name == "known" else 2)
            for name in names
        ]
        return SimpleNamespace(outcomes=drafted)

    evidence = RoundEvidence()
    assert not any(evidence.gain_goes_off(decision, of("known")) for _ in range(60))
    newcomers = [f"new-{number}" for number in range(15)]
    assert not any(evidence.gain_goes_off(decision, of("known", *newcomers)) for _ in range(60))


def test_drafts_that_are_suddenly_refused_are_odd() -> None:
    names = [RequestId(str(number)) for number in range(16)]
    decision: Any = SimpleNamespace(
        index={name: at for at, name in enumerate(names)},
        gains_if_drafted=[[0.0, 0.8, 1.4]] * 16,
        option=SimpleNamespace(kind="lockstep"),
    )

    def of(number: int, accepted: int) -> Any:
        drafted = [
            DraftOutcome(request_id=name, num_drafted=2, num_accepted=accepted)
            for at, name in enumerate(names)
        ]
        return SimpleNamespace(outcomes=drafted[:number])

    evidence = RoundEvidence()
    assert not any(evidence.gain_goes_off(decision, of(16, accepted)) for accepted in [1] * 40)
    refused = [evidence.gain_goes_off(decision, of(16, 0)) for _ in range(4)]
    assert refused == [False, True, False, False]
    few = RoundEvidence()
    assert not any(few.gain_goes_off(decision, of(4, 1)) for _ in range(30))
    refused = [few.gain_goes_off(decision, of(4, 0)) for _ in range(7)]
    assert refused == [False, False, False, False, False, True, False], "of three rounds together"
