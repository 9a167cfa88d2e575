"""Choosing a draft worker for a sequence, and giving one up."""

from __future__ import annotations

from specdec.engine.draft_choice import choose_draft_worker, is_given_up
from specdec.engine.draft_patience import DraftDeadlineConfig, DraftPatience


def test_the_least_busy_is_chosen_and_of_equals_the_first() -> None:
    busy = {"a": 3, "b": 1, "c": 1}
    assert choose_draft_worker(list(busy), busy.__getitem__) == "b"
    assert choose_draft_worker(["c", "b"], busy.__getitem__) == "c"
    assert choose_draft_worker(["a"], busy.__getitem__) == "a"
    assert choose_draft_worker([], busy.__getitem__) is None


def test_sequences_given_one_by_one_are_evened_out() -> None:
    busy = dict.fromkeys("abc", 0)
    for _ in range(10):
        chosen = choose_draft_worker(list(busy), busy.__getitem__)
        assert chosen is not None
        busy[chosen] += 1
    assert sorted(busy.values()) == [3, 3, 4]


def test_a_worker_is_given_up_when_it_stays_silent_and_not_before() -> None:
    patience = DraftPatience(DraftDeadlineConfig())
    assert not is_given_up(patience, 100.0, 0.5)
    patience.missed(10.0)
    assert not is_given_up(patience, 10.4, 0.5)
    assert is_given_up(patience, 10.6, 0.5)
    patience.heard()
    assert not is_given_up(patience, 10.6, 0.5)
