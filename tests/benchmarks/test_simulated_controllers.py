"""Controllers in a loop like the engine's: several groups that share a draft worker, and changes of mode."""

from __future__ import annotations

import pytest

from benchmarks.simulation.cluster import Cluster, ClusterSpec, MakeController
from benchmarks.simulation.experiments import fixed, goodput
from benchmarks.simulation.group import GroupLimits
from benchmarks.simulation.hardware import llama_pair
from benchmarks.simulation.traffic import SimulatedRequest
from specdec.core.ids import RequestId
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.state import ServiceKey

GOOD, BAD = 0, 1
"""Places of the groups: drafts for requests of one are mostly accepted, those for the other hardly ever."""
_LEARNING_S, _MEASURED_S = 3.0, 6.0
"""Seconds. A comparison of modes alone takes 4 % of three, once."""


def add_requests(cluster: Cluster, place: int, number: int, acceptance: float) -> None:
    """Requests that outlive the run, in the middle of their texts."""
    for index in range(number):
        cluster.ledger.num_arrived += 1
        cluster.groups[place].add_running(
            SimulatedRequest(
                request_id=RequestId(f"{place}-{index}"),
                service_key=ServiceKey(0, 0, index),
                committed_len=1000,
                num_computed=999,
                num_to_generate=50_000,
                acceptance=acceptance,
            )
        )


def run(controller: MakeController) -> tuple[Cluster, list[float]]:
    """Return the cluster and the tokens per second of each group."""
    spec = ClusterSpec(hardware=llama_pair(), controller=controller, groups_per_pool=2, workers_per_pool=1)
    cluster = Cluster(spec, seed=1)
    add_requests(cluster, GOOD, 4, 0.95)
    add_requests(cluster, BAD, 24, 0.02)
    cluster.run(_LEARNING_S)
    before = [group.counts.tokens for group in cluster.groups]
    cluster.run(_LEARNING_S + _MEASURED_S)
    return cluster, [
        (group.counts.tokens - then) / _MEASURED_S for group, then in zip(cluster.groups, before, strict=True)
    ]


def test_each_group_does_what_is_best_for_its_own_requests() -> None:
    _, plain = run(fixed(0))
    _, drafting = run(fixed(4))
    assert drafting[GOOD] > 1.5 * plain[GOOD]
    assert drafting[BAD] < 0.9 * plain[BAD], "one k for both is wrong for one of them"
    cluster, chosen = run(goodput(llama_pair(), GroupLimits()))
    assert chosen[GOOD] > 0.97 * drafting[GOOD]
    assert chosen[BAD] > 0.97 * plain[BAD]
    good, bad = (group.controller.state for group in cluster.groups)
    assert good.pool_worth is not None
    assert bad.pool_worth is not None
    assert good.pool_worth > 1.0 > bad.pool_worth, "the pool is worth it for one of them"
    assert good.mean_num_draft_tokens > 2.0
    assert bad.mean_num_draft_tokens < 1.0


@pytest.mark.parametrize(("number", "is_busy"), [(4, False), (16, False), (8, True)])
def test_one_comparison_makes_a_mode_known(number: int, is_busy: bool) -> None:
    """What was prepared is used, and the drafter ends what it is at: two rounds say nothing. Requests that
    come and go, with prompts that are read, say no less of a mode; thinking takes no time here.
    """
    hardware = llama_pair()
    spec = ClusterSpec(hardware=hardware, controller=goodput(hardware, GroupLimits(), thinking_s=0.0))
    cluster = Cluster(spec, seed=1)
    if is_busy:
        cluster.keep_busy(number)
    else:
        add_requests(cluster, 0, number, 0.8)
    (group,) = cluster.groups
    controller = group.controller
    assert isinstance(controller, GoodputController)
    while controller.state.reason != "comparing":
        assert cluster.events.now_s < _LEARNING_S
        cluster.events.run(cluster.events.now_s + 0.002)
    other = controller.mode
    assert other in ("lockstep", "ping_pong")
    while controller.state.reason == "comparing":
        cluster.events.run(cluster.events.now_s + 0.002)
    assert 2 + 7 <= controller.state.num_comparison_rounds <= 3 + 16, "more of what is nearly as good"
    assert not controller._evidence.little_known(controller._round, [other])
    cluster.events.run(cluster.events.now_s + 2.0 * _LEARNING_S)
    assert controller._switch.kind == "draft_ahead"
    assert not controller._evidence.little_known(controller._round, [other])
    assert controller.state.num_comparison_rounds < 0.08 * controller._round, "it is seldom asked again"
