"""One status of members and of what coordinators tell."""

from __future__ import annotations

import pytest

from cluster.directory import Member, Role
from cluster.status import service_status
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.status import DraftLinkStatus, TargetGroupStatus


def member(name: str, role: Role, since: float, *, incarnation: int = 1) -> Member:
    address = PeerAddress(peer_id=PeerId(name), endpoint=f"tcp://127.0.0.1:{int(since)}", public_key="k")
    return Member(address=address, role=role, since=since, incarnation=incarnation, capacity=8)


def told(**links: tuple[int, bool]) -> TargetGroupStatus:
    return TargetGroupStatus(
        num_running=sum(num for num, _ in links.values()),
        draft_workers=tuple(
            DraftLinkStatus(worker=worker, num_requests=num, is_waited_for=is_waited_for)
            for worker, (num, is_waited_for) in links.items()
        ),
    )


MEMBERS = (
    member("c2", "coordinator", 20.0),
    member("door", "ingress", 1.0),
    member("d1", "draft", 15.0, incarnation=3),
    member("c1", "coordinator", 10.0),
    member("d2", "draft", 16.0),
)


def test_draft_workers_are_what_all_target_groups_say_of_them() -> None:
    status = service_status(
        MEMBERS,
        {
            PeerId("c1"): told(d1=(2, False), d2=(1, False)),
            PeerId("c2"): told(d1=(3, True), d2=(0, False)),
        },
    )
    assert [group.id for group in status.target_groups] == ["c1", "c2"]
    assert [group.num_running for group in status.target_groups] == [3, 3]
    d1, d2 = status.draft_workers
    assert (d1.id, d1.num_requests, d1.max_requests, d1.is_waited_for) == ("d1", 5, 8, True)
    assert (d1.since, d1.incarnation) == (15.0, 3)
    assert (d2.num_requests, d2.is_waited_for) == (1, False)


def busy(share: float | None, *, is_serving: bool = True) -> TargetGroupStatus:
    link = DraftLinkStatus(worker="d1", num_requests=1, is_waited_for=True, utilization=share)
    return TargetGroupStatus(is_serving=is_serving, draft_workers=(link,))


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ((busy(0.25), busy(0.5)), 0.75),
        ((busy(0.75), busy(0.5)), 1.0),
        ((busy(0.25), busy(None)), 0.25),
        ((busy(0.25), busy(0.5, is_serving=False)), 0.25),
        ((busy(None),), None),
    ],
    ids=["adds up", "a batch for both", "an older version", "a group without target", "nobody says"],
)
def test_a_draft_worker_is_as_busy_as_all_target_groups_keep_it(
    groups: tuple[TargetGroupStatus, ...], share: float | None
) -> None:
    told = {PeerId(f"c{place}"): group for place, group in enumerate(groups, 1)}
    d1, d2 = service_status(MEMBERS, told).draft_workers
    assert (d1.utilization, d2.utilization) == (share, None)


def test_a_coordinator_that_does_not_answer_is_there_all_the_same() -> None:
    status = service_status(MEMBERS, {PeerId("c2"): told()})
    silent, answering = status.target_groups
    assert (silent.id, silent.is_answering, silent.is_serving) == ("c1", False, False)
    assert (silent.since, silent.max_num_running) == (10.0, 8)
    assert silent.choice is None
    assert answering.is_answering


def test_of_a_draft_worker_that_nobody_has_asked_nobody_knows() -> None:
    (d1, d2) = service_status(MEMBERS, {PeerId("c1"): told(d1=(0, False))}).draft_workers
    assert (d1.is_waited_for, d2.is_waited_for) == (False, None)


def test_who_has_left_and_answers_late_is_not_shown() -> None:
    status = service_status((), {PeerId("c1"): told(d1=(2, True))})
    assert status.target_groups == status.draft_workers == ()
