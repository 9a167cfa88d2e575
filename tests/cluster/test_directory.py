from __future__ import annotations

import msgspec
import pytest

from cluster.directory import Desertion, DirectoryState, DirectoryView, Member, Reports, Role, count_workers
from specdec.core.idle_work import WorkState
from specdec.transport.base import PeerId
from tests.cluster.draft_members import A, B, member


def test_a_lease_ends_unless_it_is_renewed() -> None:
    state = DirectoryState(lease_s=3.0, incarnation=1)
    state.announce(A, 0.0)
    state.announce(B, 0.0)
    state.announce(B, 2.0)
    assert state.snapshot(2.9).members == (A, B)
    assert state.snapshot(3.0).members == (B,)
    assert state.snapshot(5.0).members == ()


def test_ingresses_whose_lease_ends_are_counted() -> None:
    """Those that leave are not, nor are others."""
    door = msgspec.structs.replace(A, role="ingress")
    state, view = DirectoryState(lease_s=3.0, incarnation=1), DirectoryView(lease_s=3.0)
    assert view.num_lost_ingresses is None
    state.announce(door, 0.0)
    state.announce(B, 0.0)
    view.take(state.snapshot(1.0), 1.0)
    assert view.num_lost_ingresses == 0
    view.take(state.snapshot(3.0), 3.0)
    assert (view.num_lost_ingresses, view.members) == (1, ())
    state.announce(door, 4.0)
    state.leave(door.peer_id)
    view.take(state.snapshot(8.0), 8.0)
    assert view.num_lost_ingresses == 1


def test_who_renews_says_for_how_long() -> None:
    """The register was made by a version that had another lease: by that one its successors would flap."""
    state = DirectoryState(lease_s=6.0, incarnation=1)
    for now_s in (0.0, 10.0, 20.0):
        state.announce(A, now_s, 30.0)
        state.announce(B, now_s)
        assert state.snapshot(now_s + 5.9).members == (A, B)
        assert state.snapshot(now_s + 6.0).members == (A,), "B says nothing, and has the register's own lease"
        assert state.snapshot(now_s + 9.9).members == (A,)
    assert state.snapshot(35.0).members == (A,)
    assert state.snapshot(50.0).members == ()


def test_what_stands_still_goes_by_the_longest_lease() -> None:
    """Who has it is heard so seldom that by a short lease the register would seem to stand still."""
    state = DirectoryState(lease_s=6.0, incarnation=1)
    state.announce(A, 0.0, 30.0)
    state.announce(B, 0.0, 6.0)
    for now_s in (10.0, 20.0):
        state.announce(A, now_s, 30.0)
        assert state.snapshot(now_s).members == (A,), "B has ended"
    state.leave(A.peer_id)
    state.announce(B, 20.0, 6.0)
    assert state.snapshot(25.0).members == (B,), "it stood still for nearly all of the lease that is left"
    assert state.snapshot(26.5).members == (B,), "the time of standing still is not counted"
    assert state.snapshot(29.0).members == (B,)
    assert state.snapshot(31.5).members == ()


def test_a_directory_is_deserted_after_ten_leases_without_a_call() -> None:
    desertion = Desertion(look_s=3.0, min_quiet_s=60.0)
    desertion.hear(6.0)
    assert [desertion.look() for _ in range(20)] == [False] * 19 + [True]
    assert desertion.is_complete
    desertion.hear(6.0)
    assert not desertion.is_complete, "a call that had waited was heard"
    desertion.hear(30.0)
    desertion.hear(6.0)
    assert [desertion.look() for _ in range(100)] == [False] * 99 + [True], "the longest lease counts"


def test_who_was_stopped_as_a_whole_is_not_deserted() -> None:
    """However long it was: it looks once when it goes on, and its callers are waiting."""
    desertion = Desertion(look_s=3.0, min_quiet_s=60.0)
    for _ in range(1000):
        desertion.hear(6.0)
        assert not desertion.look()


@pytest.mark.parametrize("is_first_to_ask", [True, False])
def test_a_directory_that_stood_still_takes_nobody_for_dead(is_first_to_ask: bool) -> None:
    """Renewals wait to be taken in as well, behind whoever asks first."""
    state = DirectoryState(lease_s=3.0, incarnation=1)
    for now_s in (0.0, 1.0, 2.0):
        state.announce(A, now_s)
        state.announce(B, now_s)
    if is_first_to_ask:
        assert state.snapshot(60.0).members == (A, B)
    state.announce(B, 60.1)
    assert state.snapshot(60.1).members == (A, B)
    for now_s in (61.0, 62.0, 63.0):
        state.announce(B, now_s)
    assert state.snapshot(63.2).members == (B,), "A did end meanwhile"


def test_the_version_changes_with_the_members_only() -> None:
    state = DirectoryState(lease_s=3.0, incarnation=7)
    versions = [state.snapshot(0.0).version]
    state.announce(A, 0.0)
    versions.append(state.snapshot(0.0).version)
    state.announce(A, 1.0)
    assert state.snapshot(1.0).version == versions[-1]
    state.announce(member("a", key="another process"), 1.0)
    versions.append(state.snapshot(1.0).version)
    state.leave(PeerId("a"))
    state.leave(PeerId("nobody"))
    versions.append(state.snapshot(1.0).version)
    assert versions == sorted(set(versions))
    assert {version.incarnation for version in versions} == {7}


def test_a_view_follows_and_outlives_its_directory() -> None:
    state, view = DirectoryState(lease_s=3.0, incarnation=1), DirectoryView(lease_s=3.0)
    state.announce(A, 0.0)
    assert view.take(state.snapshot(0.0), 0.0)
    assert not view.take(None, 1.0)
    assert not view.take(None, 1e6), "an unreachable directory takes nobody away"
    assert view.members == (A,)
    state.leave(PeerId("a"))
    assert view.take(state.snapshot(1.0), 1.0)
    assert view.members == ()


def test_a_restarted_directory_gives_members_a_lease_s_time_to_come_back() -> None:
    old, new = DirectoryState(lease_s=3.0, incarnation=1), DirectoryState(lease_s=3.0, incarnation=2)
    view = DirectoryView(lease_s=3.0)
    old.announce(A, 0.0)
    old.announce(B, 0.0)
    view.take(old.snapshot(0.0), 0.0)
    assert not view.take(new.snapshot(10.0), 10.0), "it is empty because it is new"
    new.announce(B, 11.0)
    assert not view.take(new.snapshot(11.0), 11.0)
    assert view.take(None, 13.0), "A has not come back"
    assert view.members == (B,)
    new.leave(PeerId("b"))
    assert view.take(new.snapshot(14.0), 14.0), "B is known to the new one, so its word counts"
    assert view.members == ()


def test_a_successor_of_a_process_is_another_member() -> None:
    state, view = DirectoryState(lease_s=3.0, incarnation=1), DirectoryView(lease_s=3.0)
    state.announce(A, 0.0)
    view.take(state.snapshot(0.0), 0.0)
    successor = member("a", key="new")
    state.announce(successor, 1.0)
    assert view.take(state.snapshot(1.0), 1.0)
    assert view.with_role("draft") == (successor,)
    assert view.with_role("ingress") == ()


@pytest.mark.parametrize("role", ["ingress", "coordinator", "draft"])
def test_a_snapshot_tells_roles_apart(role: str) -> None:
    state = DirectoryState(lease_s=3.0, incarnation=1)
    state.announce(A, 0.0)
    found = state.snapshot(0.0).with_role(role)  # type: ignore[arg-type]
    assert found == ((A,) if role == "draft" else ())


def test_workers_are_counted_by_model_and_state_of_compiling() -> None:
    def of(name: str, role: Role, state: WorkState) -> Member:
        return Member(address=member(name).address, role=role, compile_state=state)

    members = [
        of("c", "coordinator", "ready"),
        of("d", "draft", "pending"),
        of("e", "draft", "pending"),
        of("i", "ingress", "off"),
    ]
    counts = count_workers(members)
    assert {name: count for name, count in counts.items() if count} == {
        'num_workers{part="target",compile="ready"}': 1.0,
        'num_workers{part="draft",compile="pending"}': 2.0,
    }
    assert len(counts) == 8, "zeros are there too: a series that disappears cannot be alerted on"


def test_start_reports_end_with_the_start_or_with_silence() -> None:
    reports: Reports[str] = Reports(forget_after_s=10.0)
    reports.note(PeerId("t"), "loading target 20 %", 0.0)
    reports.note(PeerId("d"), "compiling draft 5 %", 1.0)
    reports.note(PeerId("d"), "compiling draft 9 %", 2.0)
    assert set(reports.current(3.0)) == {"compiling draft 9 %", "loading target 20 %"}
    reports.note(PeerId("d"), None, 4.0)
    reports.note(PeerId("nobody"), None, 4.0)
    assert reports.current(9.9) == ("loading target 20 %",)
    assert reports.current(10.0) == ()
    reports.note(PeerId("t"), "loading target 30 %", 20.0)
    reports.keep_for(15.0)
    reports.keep_for(5.0)
    assert reports.current(34.9) == ("loading target 30 %",)
    assert reports.current(35.0) == ()
