"""What crashes are counted for whom: each once, however often and from where it is told."""

from __future__ import annotations

import pytest

from cluster.crash_policy import Crash, CrashRecord, response_of
from specdec.transport.base import PeerId

A, B = PeerId("a"), PeerId("b")


@pytest.mark.parametrize(
    ("request_id", "response"),
    [
        ("cmpl-0123456789abcdef-0", "cmpl-0123456789abcdef"),
        ("cmpl-0123456789abcdef-12", "cmpl-0123456789abcdef"),
        ("cmpl-0123456789abcdef-12~0a1b2c3d", "cmpl-0123456789abcdef"),
        ("cmpl-0123456789abcdef-x", "cmpl-0123456789abcdef-x"),
        ("r", "r"),
        ("-1", "-1"),
    ],
)
def test_choices_have_their_response_in_common(request_id: str, response: str) -> None:
    assert response_of(request_id) == response


def test_a_crash_counts_once() -> None:
    record = CrashRecord()
    for crash in (Crash.of_target(A, 1), Crash.of_target(A, 1), Crash.of_target(A, 2), Crash.of_target(B, 1)):
        record.note(crash)
    assert len(record.without(frozenset())) == 3
    assert record.without(frozenset({Crash.of_target(A, 1)})) == {
        Crash.of_target(A, 2),
        Crash.of_target(B, 1),
    }


def test_who_has_said_that_it_fails_and_is_silent_then_has_crashed_once() -> None:
    record = CrashRecord()
    record.note(Crash.of_loop(A))
    record.note(Crash.of_link(A))
    record.note(Crash.of_link(B))
    assert record.without(frozenset()) == {Crash.of_loop(A), Crash.of_link(B)}


def test_what_was_none_is_taken_back() -> None:
    record = CrashRecord()
    record.note(Crash.of_link(A))
    record.note(Crash.of_loop(B))
    record.take_back(Crash.of_link(A))
    record.take_back(Crash.of_link(B))
    assert record.without(frozenset()) == {Crash.of_loop(B)}
