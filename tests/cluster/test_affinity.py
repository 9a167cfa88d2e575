"""Requests go where their prompt's beginning has been read, as long as that group is not much busier."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.affinity import Load, PrefixRoutes, Route, RoutingConfig, choose
from cluster.stream_book import StreamBook
from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.transport.base import PeerId
from tests.cluster.simulation import Simulation

A, B, C = (PeerId(name) for name in "abc")
SMALL = RoutingConfig(block_tokens=4, max_blocks=8, max_prompt_blocks=5)


def loads(*shares: float) -> list[Load]:
    return [Load(group, share) for group, share in zip((A, B, C), shares, strict=False)]


def a_request(prompt: list[int], salt: str | None = None, name: str = "r") -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=4, ignore_eos=True),
        seed=1,
        cache_salt=salt,
    )


def test_without_a_known_prefix_the_idlest_is_chosen() -> None:
    assert choose(loads(0.5, 0.2, 0.3), {}, 0.25) == Route(B, "new", 0)
    assert choose(loads(0.0, 0.0), {}, 0.25) == Route(A, "new", 0)


def test_the_longest_known_prefix_decides_within_the_margin() -> None:
    assert choose(loads(0.2, 0.0, 0.1), {A: 2, C: 5}, 0.25) == Route(C, "prefix", 5)
    assert choose(loads(0.2, 0.0, 0.1), {A: 5, C: 5}, 0.25) == Route(C, "prefix", 5)
    assert choose(loads(0.25, 0.0), {A: 1}, 0.25) == Route(A, "prefix", 1)
    assert choose(loads(0.26, 0.0), {A: 3}, 0.25) == Route(B, "balance", 0)
    assert choose(loads(0.6, 0.0), {A: 3, B: 1}, 0.25) == Route(B, "balance", 1)


def test_nobody_waits_for_a_prefix_while_another_group_has_room() -> None:
    assert choose(loads(1.0, 0.9), {A: 9}, 0.25) == Route(B, "balance", 0)
    assert choose(loads(1.1, 1.0), {A: 9}, 0.25) == Route(A, "prefix", 9)


@given(
    shares=st.lists(st.floats(0, 2), min_size=1, max_size=3),
    known=st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 5)),
    imbalance=st.floats(0, 1),
)
def test_the_choice_is_never_far_from_the_least_load(
    shares: list[float], known: dict[PeerId, int], imbalance: float
) -> None:
    offered = loads(*shares)
    route = choose(offered, known, imbalance)
    chosen = dict(offered)[route.group]
    assert chosen <= min(shares) + imbalance
    assert route.num_known_blocks == known.get(route.group, 0)
    assert (route.reason == "new") == (not known.keys() & dict(offered).keys())
    if route.reason != "prefix":
        assert chosen == min(shares)


def test_prefixes_are_known_by_whole_blocks_and_by_salt() -> None:
    routes = PrefixRoutes(SMALL)
    prompt = list(range(14))
    routes.note(routes.names(a_request(prompt)), A)
    assert routes.known(routes.names(a_request(prompt))) == {A: 3}
    assert routes.known(routes.names(a_request([*prompt, 99, 98]))) == {A: 3}
    assert routes.known(routes.names(a_request([*prompt[:9], 99, 98, 97]))) == {A: 2}
    assert routes.known(routes.names(a_request([1, *prompt]))) == {}
    assert routes.known(routes.names(a_request(prompt[:3]))) == {}
    assert routes.known(routes.names(a_request(prompt, salt="other"))) == {}
    assert len(routes.names(a_request(list(range(100))))) == SMALL.max_prompt_blocks


def test_a_group_has_only_what_it_was_sent_from_the_beginning_on() -> None:
    routes = PrefixRoutes(SMALL)
    names = routes.names(a_request(list(range(16))))
    routes.note(names[:2], A)
    routes.note(names, B)
    assert routes.known(names) == {A: 2, B: 4}
    routes.forget(B)
    assert routes.known(names) == {A: 2}
    routes.forget(A)
    assert len(routes) == 0


def test_the_table_is_bounded_and_forgets_the_least_recently_used() -> None:
    routes = PrefixRoutes(SMALL)
    names = [routes.names(a_request([index] * 16)) for index in range(3)]
    routes.note(names[0], A)
    routes.note(names[1], B)
    routes.note(names[0], A)
    routes.note(names[2][:2], C)
    assert len(routes) == 8
    assert routes.known(names[0]) == {A: 4}
    assert routes.known(names[1]) == {B: 2}, "the end of a prefix is forgotten before its beginning"
    for index in range(20):
        routes.note(names[0], PeerId(f"g{index}"))
    assert len(routes.known(names[0])) == 4


def simulated(routing: RoutingConfig, num_groups: int = 4) -> tuple[Simulation, StreamBook]:
    """Groups as in a cluster, and a door that routes like this."""
    sim = Simulation()
    for _ in range(num_groups):
        sim.start_coordinator()
    ingress = sim.start_ingress(routing=routing)
    sim.network.run_for(1.0)
    return sim, ingress.book


def talk(routing: RoutingConfig, num_people: int = 6, num_turns: int = 5) -> tuple[float, dict[str, int]]:
    """Conversations whose every turn brings all of it again; return hits per query, and the counters."""
    sim, book = simulated(routing)
    (ingress,) = sim.ingresses
    rng = random.Random(7)
    texts = [rng.choices(range(9), k=8) for _ in range(num_people)]
    for turn in range(num_turns):
        people = rng.sample(range(num_people), num_people)
        for person in people:
            request = a_request(texts[person], name=f"{turn}-{person}")
            ingress.open(request)
            sim.network.run_for(0.1)
        sim.run_until_done()
        for person in people:
            texts[person] += ingress.tokens[RequestId(f"{turn}-{person}")] + rng.choices(range(9), k=4)
    metrics = [coordinator.engine.metrics().snapshot() for coordinator in sim.coordinators]
    hits = sum(values["prefix_cache_hits"] for values in metrics)
    return hits / sum(values["prefix_cache_queries"] for values in metrics), dict(book.counters)


def test_conversations_find_their_beginning_in_the_cache() -> None:
    """The engines' own prefix caches, asked about the same conversations with and without affinity."""
    config = RoutingConfig(block_tokens=4)
    with_affinity, counters = talk(config)
    without, uncounted = talk(config.model_copy(update={"prefix_affinity": False}))
    assert with_affinity > 1.5 * without
    assert with_affinity > 0.5
    assert counters['routed_requests{reason="prefix"}'] > 20
    assert counters['routed_requests{reason="new"}'] >= 6
    assert counters["routed_prefix_tokens"] > 0
    assert not [name for name in uncounted if name.startswith("routed_")]


def test_what_everybody_sends_does_not_pile_up_on_one_group() -> None:
    sim, book = simulated(RoutingConfig(block_tokens=4, imbalance=0.25))
    (ingress,) = sim.ingresses
    shared = [3, 1, 4, 1, 5, 2, 6, 5]
    for index in range(12):
        long = msgspec.structs.replace(
            a_request([*shared, index % 9], name=f"r{index}"),
            params=SamplingParams(max_tokens=150, ignore_eos=True),
        )
        ingress.open(long)
    sim.network.run_for(0.1)
    served = [coordinator.desk.num_streams for coordinator in sim.coordinators]
    assert sum(served) == 12
    assert max(served) - min(served) <= 2, served
    assert book.counters['routed_requests{reason="balance"}'] > 0
    sim.run_until_done()


def test_a_group_that_is_gone_is_not_remembered() -> None:
    sim, book = simulated(RoutingConfig(block_tokens=4), num_groups=2)
    (ingress,) = sim.ingresses
    ingress.open(a_request([1] * 12))
    sim.run_until_done()
    (had_it,) = [c for c in sim.coordinators if c.engine.metrics().snapshot()["generation_tokens"]]
    sim.crash(had_it, told_after_s=0.0)
    sim.start_coordinator()
    sim.network.run_for(1.0)
    assert len(book._routes) == 0


def test_one_group_needs_no_memory() -> None:
    sim, book = simulated(RoutingConfig(), num_groups=1)
    sim.ingresses[0].open(a_request([1] * 200))
    sim.run_until_done()
    assert len(book._routes) == 0
    assert not [name for name in book.counters if name.startswith("routed_")]


@pytest.mark.parametrize("key", ["imbalance", "block_tokens", "max_blocks"])
def test_nonsense_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        RoutingConfig.model_validate({key: -1})
