"""Random schedules of a bad network around an engine with workers, and that nothing is left of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.proposers.base import Proposer
from specdec.scheduling.speculation.controller import SpeculationController
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.memory import Faults
from tests.specdec.engine.remote_cluster import CAPABILITIES, VOCAB, Cluster, a_request, expected
from tests.specdec.engine.tree_drafters import Bushy

MODES: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")


def random_faults(rng: random.Random) -> Faults:
    slow_s = rng.choice([0.0, 0.01, 0.1, 0.5])
    return Faults(
        delay_s=(0.0, slow_s),
        loss=rng.choice([0.0, 0.0, 0.05, 0.3]),
        duplication=rng.choice([0.0, 0.05, 0.3]),
        in_order=rng.random() < 0.5,
    )


def run_random_schedule(
    seed: int,
    mode: OverlapMode = "lockstep",
    *,
    fallback: Proposer | None = None,
    is_fallback_first: bool = False,
    make_request: Callable[[str, random.Random], Request] = a_request,
    has_trees: bool = False,
    controller: SpeculationController | None = None,
) -> tuple[Cluster, int]:
    """Run five requests through a random schedule; return the cluster and the number of accepted drafts."""
    rng = random.Random(seed)
    cluster = Cluster(
        random_faults(rng),
        seed,
        num_drafters=rng.randint(0, 3),
        num_blocks=rng.choice([14, 24, 64]),
        mode=mode,
        fallback=fallback,
        is_fallback_first=is_fallback_first,
        capabilities=replace(CAPABILITIES, shape="tree", looks_ahead=False) if has_trees else CAPABILITIES,
        around=partial(Bushy, vocab_size=VOCAB) if has_trees else None,
        num_draft_tokens=9 if has_trees else 4,
        controller=controller,
    )
    requests = [make_request(f"r{index}", rng) for index in range(5)]
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or cluster.engine.has_work:
        if waiting and (rng.random() < 0.3 or not cluster.engine.has_work):
            cluster.engine.add_request(waiting.pop())
        fate = rng.random()
        if fate < 0.05 and cluster.drafters:
            cluster.stop_drafter(rng.choice(list(cluster.drafters)), told=rng.random() < 0.5)
        elif fate < 0.1:
            cluster.start_drafter(busy_s=rng.choice([0.0, 0.02, 0.3]))
        elif fate < 0.15:
            cluster.network.faults = random_faults(rng)
        cluster.step(tokens)
    for request in requests:
        assert tokens[request.request_id] == expected(request), (seed, request)
    num_accepted = cluster.engine.metrics().num_accepted_tokens
    assert_nothing_is_left(cluster)
    return cluster, num_accepted


def assert_nothing_is_left(cluster: Cluster) -> None:
    """Once what was in flight has landed and a last request without faults has gone through.

    A release that was lost is made up for by the end of the lease.
    """
    cluster.network.faults = Faults()
    cluster.network.run_for(10.0)
    request = a_request("last", random.Random(0))
    assert cluster.run([request])["last"] == expected(request)
    proposer = cluster.proposer
    assert not proposer._registry.registrations
    assert not proposer._prepared
    assert not proposer._registry._outgrown
    assert not any(link.num_registered for link in proposer._registry.links.values())
    assert not any(its.values() for its in proposer._ahead.pending.values())
    assert cluster.toy._sequences.keys() <= {"last"}, "the target is told with its next step"
    assert not cluster.target_server._early
    cluster.network.run_for(DraftShareConfig().lease_s + 1.0)
    for name, server in cluster.servers.items():
        server.step(0)
        assert server.num_sequences == 0
        assert not cluster.drafters[name].known
        assert not any(client.mirrors or client.wishes for client in server._clients.values())
