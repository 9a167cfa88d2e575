"""Reading a target's answer to a draft."""

from __future__ import annotations

import random

import pytest

from specdec.core.errors import ProtocolError
from specdec.tree.topology import tree
from specdec.verification.answers import rows_of_verdict, verdict_of

DRAFTED = (7, 8, 9, 8, 5)
PARENTS = (-1, -1, 1, 2, 0)


def test_one_token_for_every_row() -> None:
    verdict = verdict_of(DRAFTED, PARENTS, (8, 1, 9, 8, 3, 2))
    assert verdict.accepted_nodes == (1, 2, 3)
    assert verdict.token_ids == (8, 9, 8, 3)
    assert list(rows_of_verdict(verdict, PARENTS, 5, 6)) == [0, 2, 3, 4]


def test_the_tokens_that_stand_and_one_more() -> None:
    verdict = verdict_of(DRAFTED, PARENTS, (8, 9, 4))
    assert verdict.accepted_nodes == (1, 2)
    assert verdict.token_ids == (8, 9, 4)
    assert list(rows_of_verdict(verdict, PARENTS, 5, 3)) == [0, 1, 2]


def test_a_token_behind_the_path_that_was_drafted_too_does_not_stand() -> None:
    """A rule may reject a child and still emit its token."""
    assert verdict_of(DRAFTED, PARENTS, (8, 9)).accepted_nodes == (1,)
    assert verdict_of(DRAFTED, PARENTS, (7,)).accepted_nodes == ()


def test_equal_siblings_are_told_apart_by_what_follows() -> None:
    parents = (-1, -1, 0, 1)
    assert verdict_of((4, 4, 1, 2), parents, (4, 2, 9)).accepted_nodes == (1, 3)
    assert verdict_of((4, 4, 1, 2), parents, (4, 1, 9)).accepted_nodes == (0, 2)


def test_what_was_not_drafted_cannot_stand() -> None:
    with pytest.raises(ProtocolError, match="was not drafted"):
        verdict_of(DRAFTED, PARENTS, (7, 9, 1))


def test_chains() -> None:
    assert verdict_of((1, 2, 3), None, (1, 2, 9, 9)).accepted_nodes == (0, 1)
    assert verdict_of((1, 2, 3), None, (1, 5)).accepted_nodes == (0,)
    assert verdict_of((), None, (5,)).token_ids == (5,)


@pytest.mark.parametrize("seed", range(20))
def test_both_kinds_of_answers_mean_the_same(seed: int) -> None:
    rng = random.Random(seed)
    parents = tuple(rng.randrange(-1, node) for node in range(8))
    drafted = tuple(rng.randrange(3) for _ in parents)
    if tree(parents).is_chain:
        return
    by_row = [rng.randrange(3) for _ in range(9)]
    verdict = verdict_of(drafted, parents, by_row)
    assert verdict_of(drafted, parents, verdict.token_ids).token_ids == verdict.token_ids
    assert [by_row[row] for row in rows_of_verdict(verdict, parents, 8, 9)] == list(verdict.token_ids)
