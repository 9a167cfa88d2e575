"""What a coordinator says of its health, and how it ends, without Serve."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus

from cluster import coordinator
from cluster.autoscaling.draft_demand import DraftDemand, demand_of
from cluster.config import ClusterConfig, MembershipConfig
from cluster.coordinator import CoordinatorReplica
from cluster.desk import RequestDesk
from cluster.directory import Member
from specdec.core.clock import MonotonicClock
from specdec.core.description import TargetDescription
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.status import RecentStatus, TargetGroupStatus

DESCRIPTION = TargetDescription(
    model_id="m",
    revision="r",
    dtype="float32",
    vocab_size=9,
    max_model_len=100,
    eos_token_ids=(),
    num_blocks=4,
    block_size=16,
)


class Parts(CoordinatorReplica):
    """The threads of a replica alone; `ended` is the one that has ended."""

    def __init__(self, ended: str = "") -> None:  # not that of a real one
        self._closed = True
        self._announcing = threading.Lock()
        for name in ("_loop", "_pump", "_directory"):
            setattr(self, name, SimpleNamespace(is_alive=name != ended))


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ("_loop", "the engine's thread has ended"),
        ("_pump", "the channel's thread has ended"),
        ("_directory", "the directory's thread has ended"),
    ],
)
def test_a_coordinator_with_a_thread_that_has_ended_is_not_healthy(ended: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        Parts(ended).check_health()


def test_a_coordinator_whose_threads_run_is_healthy() -> None:
    Parts().check_health()


def member(name: str, **fields: Any) -> Member:
    address = PeerAddress(peer_id=PeerId(name), endpoint=f"tcp://{name}", public_key="k")
    return Member(address=address, role="coordinator", **fields)


class Ending(Parts):
    """A replica that is told to end, beside others."""

    def __init__(self, *others: Member) -> None:
        super().__init__()
        self._closed = False
        self._peer_id = PeerId("me")
        self._member = member("me", generation="g")
        self._cluster = ClusterConfig(membership=MembershipConfig(lease_s=1.0, renew_s=0.01))
        self._desk = RequestDesk(lambda peer_id, message: None, MonotonicClock(), lease_s=60.0)
        self._directory: Any = SimpleNamespace(members=(self._member, *others), announce=lambda member: None)

    def _close(self) -> None:
        self._closed = True

    def drain(self) -> bool:
        """End; return whether doors were told that the whole deployment ends."""
        self._drain()
        return self._desk._end_s is not None


def serve_says(monkeypatch: pytest.MonkeyPatch, status: ApplicationStatus | None) -> None:
    """None: nothing."""

    def say() -> Any:
        if status is None:
            raise RayError("the head node is away")
        return SimpleNamespace(applications={"app": SimpleNamespace(status=status)})

    monkeypatch.setattr(coordinator.serve, "get_replica_context", lambda: SimpleNamespace(app_name="app"))
    monkeypatch.setattr(coordinator.serve, "status", say)


@pytest.mark.parametrize(
    ("status", "others", "is_the_end"),
    [
        (ApplicationStatus.DELETING, (member("other", generation="g"),), True),
        (ApplicationStatus.RUNNING, (), False),
        (None, (), True),
        (None, (member("other", generation="g"),), False),
        (None, (member("other", generation="another"),), True),
        (None, (member("other", generation="g", is_leaving=True),), True),
    ],
)
def test_doors_hear_of_the_end_of_everything_where_serve_says_so_or_nobody_else_is_there(
    status: ApplicationStatus | None,
    others: tuple[Member, ...],
    is_the_end: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_says(monkeypatch, status)
    assert Ending(*others).drain() == is_the_end


@pytest.mark.parametrize("status", [ApplicationStatus.DELETING, ApplicationStatus.RUNNING])
def test_who_has_no_streams_ends_at_once(status: ApplicationStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long streams would be waited for: a Ctrl-C must not hang for a minute."""
    serve_says(monkeypatch, status)
    started_s = time.monotonic()
    replica = Ending()
    replica.drain()
    assert time.monotonic() - started_s < 5.0 < ClusterConfig().drain_timeout_s
    assert replica._closed


def test_what_is_wanted_of_the_draft_pool_is_told_without_waiting_for_rays_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told in the channel's thread: while that waits, doors hear nothing, and take it for lost."""

    def look_up(*_: object, **__: object) -> None:
        raise AssertionError("the head was asked")

    monkeypatch.setattr(ray, "get_actor", look_up)
    told: list[tuple[object, ...]] = []
    replica = Ending()
    replica._cluster = ClusterConfig.model_validate({"draft_pool": {"autoscaling": {"max_workers": 2}}})
    replica._demand_due_s = 0.0
    replica._directory.tell = lambda *args: told.append(args)
    for _ in range(3):
        replica._report_demand()
    replica._closed = True
    assert told == [("report_demand", "me", demand_of({}, None))], "once in a while"


def test_what_rounds_were_like_is_over_when_the_target_is_lost() -> None:
    """A large model loads for minutes, in which draft workers would be added for rounds that are over."""
    recent = RecentStatus(
        num_rounds=10, tokens_per_s=1.0, acceptance=0.5, acceptance_by_method={},
        mean_acceptance_length=2.0, round_s=0.1, draft_wait_s=0.05, draft_s=0.09, verify_s=0.05,
        coordinator_s=0.0, hidden_share=0.4, hit_rate=None, late_rate=None,
    )  # fmt: skip
    told: list[DraftDemand] = []
    replica = Ending()
    replica._cluster = ClusterConfig.model_validate({"draft_pool": {"autoscaling": {"max_workers": 2}}})
    replica._directory.tell = lambda method, me, demand: told.append(demand)
    replica._desk.engine_metrics = {"queue_wait_seconds": 7.0, "draft_utilization": 0.9}
    replica._desk.status = TargetGroupStatus(recent=recent)
    for description in (DESCRIPTION, None):
        replica._desk.set_target(description)
        replica._demand_due_s = 0.0
        replica._report_demand()
    serving, loading = told
    assert (serving.utilization, serving.wait_share, serving.drafting_share) == pytest.approx((0.9, 0.5, 0.9))
    assert loading == demand_of({}, None)
    stats = replica.record_autoscaling_stats()
    assert "round_seconds" not in stats
    assert stats["queue_wait_seconds"] == 0.0
    replica._closed = True
