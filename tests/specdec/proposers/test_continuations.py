"""Likely continuations: chains and trees, against all trees of a small world."""

from __future__ import annotations

import itertools
import random

import pytest

from specdec.proposers.continuations import likely_chain, likely_tree

World = dict[int, list[tuple[float, int, int]]]


def make_world(seed: int) -> World:
    """Places 0 to 5, each with one to three followers, the largest share first."""
    generator = random.Random(seed)
    world: World = {}
    for place in range(6):
        weights = sorted((generator.random() for _ in range(generator.randint(1, 3))), reverse=True)
        tokens = generator.sample(range(10), k=len(weights))
        world[place] = [
            (weight / sum(weights), token, generator.randrange(6))
            for weight, token in zip(weights, tokens, strict=True)
        ]
    return world


def all_paths(world: World, depth: int) -> dict[tuple[int, ...], float]:
    """Every path of at most so many tokens, and its value."""
    paths: dict[tuple[int, ...], float] = {}
    ends: list[tuple[tuple[int, ...], float, int]] = [((), 1.0, 0)]
    for _ in range(depth):
        ends = [
            ((*path, token), value * share, place)
            for path, value, at in ends
            for share, token, place in world[at]
        ]
        paths.update({path: value for path, value, _ in ends})
    return paths


@pytest.mark.parametrize("seed", range(10))
def test_the_first_n_nodes_are_the_best_tree_of_n_nodes(seed: int) -> None:
    world = make_world(seed)
    tree = likely_tree(lambda place: world[place], 0, 8, 0.0)
    assert tree.parents is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), token))
    values = all_paths(world, 8)
    best = sorted(values.values(), reverse=True)
    assert len(set(paths)) == 8
    for num_nodes in range(1, 9):
        ours = sum(values[path] for path in paths[:num_nodes])
        assert ours == pytest.approx(sum(best[:num_nodes]))


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_takes_the_most_frequent_each_time(seed: int) -> None:
    world = make_world(seed)
    chain = likely_chain(lambda place: world[place], 0, 5, 0.0)
    place, expected = 0, []
    for _ in range(5):
        _, token, place = world[place][0]
        expected.append(token)
    assert (chain.token_ids, chain.parents) == (tuple(expected), None)


@pytest.mark.parametrize("least", [0.2, 0.5, 1.0])
def test_what_is_less_likely_is_left_out(least: float) -> None:
    world = make_world(3)
    values = all_paths(world, 6)
    tree = likely_tree(lambda place: world[place], 0, 64, least)
    assert len(tree.token_ids) == sum(value >= least for value in values.values())
    chain = likely_chain(lambda place: world[place], 0, 6, least)
    shares = itertools.accumulate(values[chain.token_ids[:end]] for end in range(1, len(chain.token_ids) + 1))
    assert all(share >= least for share in shares)
    assert len(chain.token_ids) < 6


def test_nothing_follows() -> None:
    assert likely_chain(lambda place: [], 0, 4, 0.0).token_ids == ()
    assert likely_tree(lambda place: [], 0, 4, 0.0).token_ids == ()
