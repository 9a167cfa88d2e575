"""Who belongs together while one version replaces another, and when the old one may go."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.directory import Member, Role
from cluster.generation import draft_generation, target_generation
from cluster.handover import Turn, are_others_there, may_refuse
from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerAddress, PeerId


def member(name: str, role: Role, generation: str = "old", **more: Any) -> Member:
    address = PeerAddress(peer_id=PeerId(name), endpoint="tcp://127.0.0.1:1", public_key="")
    return Member(address=address, role=role, generation=generation, **more)


LEAVING = member("leaving", "coordinator", is_leaving=True)
DOOR = member("door", "ingress")


@pytest.mark.parametrize(
    ("others", "may"),
    [
        ([], True),
        ([DOOR], False),
        ([member("wild", "ingress", "")], False),
        ([member("new-door", "ingress", "new")], True),
        ([DOOR, member("other", "coordinator")], True),
        ([DOOR, member("other", "coordinator", is_leaving=True)], False),
        ([DOOR, member("new", "coordinator", "new")], False),
        ([DOOR, member("draft", "draft")], False),
    ],
)
def test_the_last_of_a_generation_serves_until_its_doors_close(others: list[Member], may: bool) -> None:
    assert may_refuse(LEAVING, [LEAVING, *others]) == may


@pytest.mark.parametrize(
    ("others", "may_be_none", "are_there"),
    [
        ([], False, False),
        ([member("old-group", "coordinator")], False, True),
        ([member("old-group", "coordinator")], True, True),
        ([member("old-draft", "draft")], False, False),
        ([member("new-door", "ingress", "new"), member("new-group", "coordinator", "new")], False, False),
        # The old groups are silent, for however long: their door still is there, and waits for them.
        ([DOOR], False, True),
        # Where there may be no groups, none of which may be left: the new door has one started.
        ([DOOR], True, False),
    ],
)
def test_a_door_does_not_replace_one_that_may_serve_again(
    others: list[Member], may_be_none: bool, are_there: bool
) -> None:
    assert are_others_there("new", others, may_be_none=may_be_none) == are_there
    assert not are_others_there("", others, may_be_none=may_be_none), "it speaks to all of them"


def test_a_door_opens_at_once_where_it_takes_nobody_s_place() -> None:
    assert Turn(patience_s=12.0).has_come(has_own=False, has_others=False, now_s=0.0)
    assert Turn(patience_s=12.0).has_come(has_own=True, has_others=True, now_s=0.0)


def test_a_door_waits_for_its_own_while_others_are_there_or_only_late() -> None:
    turn = Turn(patience_s=12.0)
    seen = [(0.0, True), (5.0, True), (5.5, False), (11.0, False), (12.0, True), (23.9, False)]
    for now_s, has_others in seen:
        assert not turn.has_come(has_own=False, has_others=has_others, now_s=now_s)
    assert turn.has_come(has_own=False, has_others=False, now_s=24.0), "they are gone"


def engine(**parts: Any) -> EngineConfig:
    return EngineConfig.model_validate({"target": {"model": "t"}, **parts})


def test_what_an_update_leaves_alone_is_shared_by_old_and_new() -> None:
    base = engine()
    drafter = engine(speculative_config={"method": "draft_model", "model": "d"})
    assert target_generation(drafter) == target_generation(base)
    assert draft_generation(drafter) != draft_generation(base)
    other = engine(target={"model": "other"})
    assert target_generation(other) != target_generation(base)
    assert draft_generation(other) != draft_generation(base)
    busier = engine(scheduler={"max_num_seqs": 7})
    assert (target_generation(busier), draft_generation(busier)) == (
        target_generation(base),
        draft_generation(base),
    )
    ratio = engine(
        speculative_config={
            "method": "draft_model",
            "model": "d",
            "rejection_sample_method": "rejection",
        }
    )
    assert target_generation(ratio) != target_generation(drafter)
