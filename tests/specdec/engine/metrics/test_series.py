"""Every number that an engine exports is described, and every description is of a number that is exported."""

from __future__ import annotations

import random
import re

from specdec.core.plan import TargetResult
from specdec.core.series import name_of
from specdec.engine.metrics.draft_counts import DrafterCounts, DraftKind
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.metrics.series import ENGINE_SERIES
from specdec.engine.targets.remote_target import RemoteTarget
from specdec.scheduling.speculation.explanation import ControllerState
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults
from specdec.transport.messages import Ping, StepDone
from tests.specdec.engine.remote_cluster import TARGET, Cluster, a_request

OF_DRAFT_WORKERS = {
    "draft_prefix_cache_queries",
    "draft_prefix_cache_hits",
    "draft_ahead_branches",
    "draft_ahead_branches_left_out",
    "draft_ahead_branches_true",
    "draft_windows_reread",
    "draft_grammar_failures",
}
"""Counted where a draft model is."""
OF_ONLINE_LEARNING = {name for name in ENGINE_SERIES if name.startswith("online_")}
"""Counted by draft workers and trainers, where draft models learn (tests/training/online)."""
OF_THE_POOL = {
    "draft_workers",
    "draft_pool_usage_perc",
    "draft_utilization",
    "draft_deadline_misses",
    "stale_drafts_dropped",
    "invalid_drafts_dropped",
    "draft_sequences_refused",
    "draft_sequences_outgrown",
    "draft_sequences_moved",
    "worker_messages_dropped",
}
"""Only there once it has happened, or added by whoever knows the pool."""


def full_metrics() -> EngineMetrics:
    """Metrics in which everything has happened."""
    metrics = EngineMetrics()
    metrics.count_draft(3, 2)
    metrics.count_choices([3], 1)
    metrics.draft_latencies.add(0.01)
    metrics.by_kind.count(DraftKind("code", "0", "1", "later"), 3, 2)
    metrics.proposals_dropped["late"] += 1
    metrics.finished["stop"] += 1
    metrics.refusals["late"] += 1
    metrics.rounds_by_mode["ping_pong"] += 1
    metrics.mean_kv_budget = 512.0
    metrics.local_draft_utilization = 0.5
    metrics.by_drafter["lookup"] = metrics.by_shadow["small"] = DrafterCounts()
    metrics.num_running_by_drafter["lookup"] += 1
    metrics.speculation = ControllerState(num_requests_by_k=(1, 2), acceptance=(0.5,), pool_worth=1.5)
    return metrics


def test_what_an_engine_exports_is_described() -> None:
    cluster = Cluster(Faults(), mode="draft_ahead")
    rng = random.Random(1)
    cluster.run([a_request(f"r{index}", rng) for index in range(4)])
    exported = {*full_metrics().snapshot(), *cluster.proposer.counters}
    names = {name_of(series) for series in exported}
    assert names <= ENGINE_SERIES.keys()
    for series in exported:
        assert tuple(re.findall(r'(\w+)="', series)) == ENGINE_SERIES[name_of(series)].labels
    assert ENGINE_SERIES.keys() - names <= OF_DRAFT_WORKERS | OF_THE_POOL | OF_ONLINE_LEARNING


def test_a_pool_that_nobody_compares_has_no_worth() -> None:
    assert "speculation_pool_worth" not in EngineMetrics().snapshot()
    assert full_metrics().snapshot()["speculation_pool_worth"] == 1.5


def test_what_is_dropped_between_coordinators_and_workers_is_exported() -> None:
    """Rubbish at all four ends, an answer that nobody waits for, and a message that is for an ingress."""
    cluster = Cluster(Faults())
    rng = random.Random(1)
    cluster.run([a_request("r0", rng)])
    network = cluster.network
    (drafter,) = cluster.addresses
    coordinator = PeerId("coordinator-draft")
    network._channels[coordinator].inject(drafter, b"rubbish")
    network._channels[drafter].inject(coordinator, b"rubbish")
    network._channels[TARGET].inject(PeerId("coordinator"), b"rubbish")
    network._channels[TARGET].send(PeerId("coordinator"), StepDone(1, 1 << 20, TargetResult(0, ())))
    network._channels[PeerId("coordinator")].inject(TARGET, b"rubbish")
    network._channels[PeerId("coordinator")].send(TARGET, Ping(1))
    network._channels[coordinator].send(drafter, Ping(1))
    cluster.run([a_request("r1", rng)])
    target = cluster.engine._rounds._target
    assert isinstance(target, RemoteTarget)
    exported = {**cluster.proposer.counters, **target.messages_dropped}
    found = {series: n for series, n in exported.items() if name_of(series) == "worker_messages_dropped"}
    assert found == {
        'worker_messages_dropped{channel="draft",dropped_by="coordinator",reason="malformed"}': 1,
        'worker_messages_dropped{channel="draft",dropped_by="draft_worker",reason="malformed"}': 1,
        'worker_messages_dropped{channel="draft",dropped_by="draft_worker",reason="unexpected_kind"}': 1,
        'worker_messages_dropped{channel="target",dropped_by="coordinator",reason="malformed"}': 1,
        'worker_messages_dropped{channel="target",dropped_by="coordinator",reason="stale"}': 1,
        'worker_messages_dropped{channel="target",dropped_by="target_worker",reason="malformed"}': 1,
        'worker_messages_dropped{channel="target",dropped_by="target_worker",reason="unexpected_kind"}': 1,
    }
    for series in found:
        assert tuple(re.findall(r'(\w+)="', series)) == ENGINE_SERIES[name_of(series)].labels
