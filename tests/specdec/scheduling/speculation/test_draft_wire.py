"""The wire to a drafter, told from what lay before one's own drafts in its queue."""

from __future__ import annotations

import pytest

from specdec.scheduling.speculation.draft_wire import DraftWire


def test_it_is_what_was_measured_until_rounds_tell() -> None:
    assert DraftWire(0.0).seconds == 0.0
    wire = DraftWire(0.002)
    assert wire.seconds == 0.002
    for _ in range(64):
        wire.note(0.003)
    assert wire.seconds == 0.003


def test_the_first_round_tells_it_where_nothing_was_measured() -> None:
    wire = DraftWire(0.0)
    wire.note(0.003)
    assert wire.seconds == 0.003


def test_waiting_in_a_queue_does_not_count_nor_does_what_a_few_rounds_lack() -> None:
    wire = DraftWire(0.0)
    for number in range(200):
        wire.note(0.0 if number % 24 == 0 else 0.003 + 0.01 * (number % 4))
    assert wire.seconds == pytest.approx(0.003)
