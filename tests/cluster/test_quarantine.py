from __future__ import annotations

import pytest

from cluster.crash_policy import MAX_CLEARED, MAX_CRASHES, PROBATION_OUTPUTS
from cluster.desk_stream import DeskStream
from cluster.quarantine import Quarantine
from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.transport.base import PeerId


class Ward:
    """A quarantine over streams, and what became of those that had a turn."""

    def __init__(self) -> None:
        self.streams: dict[RequestId, DeskStream] = {}
        self.quarantine = Quarantine(self.streams)
        self.is_busy = False
        self.run: list[str] = []
        self.let_go: list[str] = []

    def take_in(self, name: str, *, num_crashes: int = 0, num_cleared: int = 0) -> DeskStream:
        request = Request(
            request_id=RequestId(name),
            prompt_token_ids=(1,),
            params=SamplingParams(),
            seed=1,
            num_crashes=num_crashes,
        )
        stream = DeskStream.of(request, PeerId("door"), 0.0, num_cleared=num_cleared)
        self.streams[stream.request_id] = stream
        return stream

    def take_in_suspect(self, name: str, *, num_cleared: int = 0) -> DeskStream:
        stream = self.take_in(name, num_crashes=MAX_CRASHES, num_cleared=num_cleared)
        self.quarantine.add(stream)
        return stream

    def take_turns(self) -> bool:
        return self.quarantine.take_turns(
            lambda: self.is_busy,
            lambda stream: self.run.append(stream.request_id),
            lambda stream: self.let_go.append(stream.request_id),
        )


def test_nobody_waits_for_a_suspect_that_has_left_or_is_none_any_more() -> None:
    """What runs could take minutes to end, with nothing new beside it."""
    ward = Ward()
    ward.is_busy = True
    left, cleared = ward.take_in_suspect("left"), ward.take_in_suspect("cleared")
    assert ward.take_turns()
    del ward.streams[left.request_id]
    assert ward.take_turns()
    cleared.num_crashes = 0
    assert not ward.take_turns()
    assert ward.let_go == ["cleared"]
    assert not ward.quarantine.is_occupied
    assert ward.run == []


def test_suspects_run_one_at_a_time_once_nothing_else_runs() -> None:
    ward = Ward()
    assert not ward.take_turns()
    first, second = ward.take_in_suspect("first"), ward.take_in_suspect("second")
    ward.is_busy = True
    assert ward.take_turns()
    assert ward.run == []
    assert ward.quarantine.has_waiting
    ward.is_busy = False
    assert ward.take_turns()
    ward.is_busy = True
    assert ward.take_turns()
    assert ward.run == ["first"]
    assert ward.quarantine.is_alone(first)
    assert not ward.quarantine.is_alone(second)
    del ward.streams[first.request_id]
    ward.is_busy = False
    assert ward.take_turns()
    assert ward.run == ["first", "second"]
    del ward.streams[second.request_id]
    assert not ward.take_turns()
    assert not ward.quarantine.is_occupied


def test_who_is_suspected_no_more_is_let_go_when_its_turn_comes() -> None:
    ward = Ward()
    stream = ward.take_in_suspect("a")
    stream.num_crashes = 1
    assert not ward.take_turns()
    assert (ward.run, ward.let_go) == ([], ["a"])
    assert not stream.awaits_turn


def test_a_turn_that_fails_is_still_to_come() -> None:
    ward = Ward()
    stream = ward.take_in_suspect("a")

    def fail(_: DeskStream) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        ward.quarantine.take_turns(lambda: False, fail, fail)
    ward.quarantine.begin_anew()
    assert stream.awaits_turn
    assert ward.take_turns()
    assert ward.run == ["a"]


@pytest.mark.parametrize("num_cleared", range(MAX_CLEARED + 1))
def test_enough_outputs_clear_who_was_not_cleared_too_often(num_cleared: int) -> None:
    ward = Ward()
    stream = ward.take_in_suspect("a", num_cleared=num_cleared)
    assert not ward.quarantine.clears(stream), "it has had no turn"
    ward.take_turns()
    cleared = [ward.quarantine.clears(stream) for _ in range(2 * PROBATION_OUTPUTS)]
    at = [index for index, one in enumerate(cleared) if one]
    assert at == ([] if num_cleared == MAX_CLEARED else [PROBATION_OUTPUTS - 1])
    assert stream.is_suspect == (num_cleared == MAX_CLEARED)
    assert ward.take_turns() == stream.is_suspect


def test_a_loss_counts_for_all_choices_of_those_in_flight() -> None:
    ward = Ward()
    runs, sibling, other = (ward.take_in(name) for name in ("cmpl-a-0", "cmpl-a-1", "cmpl-b-0"))
    for one in (runs, other):
        one.is_admitted = one.has_begun = True
    assert ward.quarantine.guilty([runs]) == [], "it was not alone"
    assert ward.quarantine.note_loss([runs]) == [runs, other], "the other has begun, as its ingress was told"
    assert [one.losses for one in (runs, sibling, other)] == [(1,), (1,), ()]
    assert [one.num_crashes for one in (runs, sibling, other)] == [1, 1, 0]
    assert not any(one.has_begun for one in ward.streams.values())
    ward.quarantine.note_loss([sibling])
    assert runs.losses == (1, 2)
    ward.quarantine.begin_anew()
    assert [one.awaits_turn for one in (runs, sibling, other)] == [True, True, False]


def test_only_who_ran_alone_is_to_blame() -> None:
    ward = Ward()
    suspect, waiting = ward.take_in_suspect("suspect"), ward.take_in_suspect("waiting")
    ward.take_turns()
    assert ward.quarantine.guilty([suspect, waiting]) == [suspect]
    suspect.num_crashes = 1
    assert ward.quarantine.guilty([suspect, waiting]) == [], "that was taken back meanwhile"
