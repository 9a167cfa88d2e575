"""Dynamic trees: what they look behind, and that the best nodes of all are proposed."""

from __future__ import annotations

import random

import pytest

from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import Child, TokenTree
from specdec.tree.topology import tree


def children(rng: random.Random, count: int) -> list[Child]:
    values = sorted((-3.0 * rng.random() for _ in range(count)), reverse=True)
    return [Child(rng.randrange(1000), value) for value in values]


def grown(shape: DynamicTree, num_nodes: int, seed: int) -> tuple[TokenTree, list[float], list[int]]:
    """A tree, the values of its nodes, and how many nodes were looked behind at each level."""
    rng = random.Random(seed)
    growth = shape.begin(num_nodes)
    asked, asked_per_level = [-1], []
    value_of = {-1: 0.0}
    number = 0
    while asked:
        found = [children(rng, shape.top_k + 2) for _ in asked]
        taken = growth.num_children
        for node, its in zip(asked, found, strict=True):
            for child in its[:taken]:
                value_of[number] = value_of[node] + child.log_confidence
                number += 1
        asked = list(growth.grow(found))
        asked_per_level.append(len(asked))
    best = growth.best()
    return best, [value_of[node] for node in best.nodes], asked_per_level


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 30])
def test_the_best_nodes_come_first_each_behind_its_parent(num_nodes: int, seed: int) -> None:
    shape = DynamicTree(top_k=3, depth=4)
    best, values, asked = grown(shape, num_nodes, seed)
    assert len(best.token_ids) <= num_nodes
    assert values == sorted(values, reverse=True)
    assert tree(best.parents).max_depth <= min(4, num_nodes)  # and each parent comes first
    assert all(count <= 3 for count in asked)
    assert sum(asked) <= shape.num_looked_behind(num_nodes)
    assert len(asked) <= shape.num_levels(num_nodes) <= shape.max_depth


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_nodes", [1, 3, 8])
def test_a_frugal_tree_looks_behind_no_more_than_it_proposes(num_nodes: int, seed: int) -> None:
    shape = DynamicTree(top_k=4, depth=6)
    best, values, asked = grown(shape.frugal(), num_nodes, seed)
    assert values == sorted(values, reverse=True)
    assert sum(asked) <= len(best.token_ids) <= num_nodes
    assert sum(asked) <= shape.frugal().num_looked_behind(num_nodes) <= num_nodes


def test_others_look_behind_more() -> None:
    asked = [sum(grown(DynamicTree(top_k=4, depth=6), 8, seed)[2]) for seed in range(20)]
    assert max(asked) > 8


def test_nobody_is_looked_behind_who_cannot_have_a_child_among_the_best() -> None:
    growth = DynamicTree(top_k=3, depth=3).begin(3)
    asked = growth.grow([[Child(1, -0.1), Child(2, -2.0), Child(3, -3.0)]])
    assert list(asked) == [0, 1], "the third could only be the last of the tree"
    growth.grow([[Child(4, -0.1), Child(5, -0.2), Child(6, -9.0)], [Child(7, -0.1)] * 3])
    assert growth.best().token_ids == (1, 4, 5)


def test_confidence_above_one_does_not_put_a_child_before_its_parent() -> None:
    growth = DynamicTree(top_k=2, depth=2).begin(4)
    growth.grow([[Child(1, -1.0), Child(2, -1.5)]])
    growth.grow([[Child(3, 0.5), Child(4, -2.0)], [Child(5, 0.0), Child(6, -1.0)]])
    best = growth.best()
    assert best.token_ids == (1, 3, 2, 5)
    assert best.parents == (-1, 0, -1, 2)
