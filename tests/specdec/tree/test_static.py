"""Static trees: their order, and the best one for measured acceptance."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from specdec.tree.growth import Child, levels_of
from specdec.tree.static import Path, StaticTree, best_tree

RATES = (0.5, 0.2, 0.1)


def paths_of(shape: StaticTree) -> list[Path]:
    paths: list[Path] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), rank))
    return paths


def expected_tokens(paths: list[Path], rates: tuple[float, ...]) -> float:
    return expected_by_depth(paths, (rates,) * max(map(len, paths), default=0))


def expected_by_depth(paths: list[Path], rates: Sequence[Sequence[float]]) -> float:
    return sum(math.prod(rates[depth][rank] for depth, rank in enumerate(path)) for path in paths)


def closed_sets(num_nodes: int, num_ranks: int, max_depth: int) -> list[frozenset[Path]]:
    """All trees of so many nodes, each node with its parent and its siblings of lower rank."""
    found: set[frozenset[Path]] = {frozenset()}
    for _ in range(num_nodes):
        grown: set[frozenset[Path]] = set()
        for tree in found:
            for before in [(), *tree]:
                for rank in range(num_ranks):
                    path = (*before, rank)
                    has_siblings = all((*before, lower) in tree for lower in range(rank))
                    if path not in tree and has_siblings and len(path) <= max_depth:
                        grown.add(tree | {path})
        found = grown or found
    return list(found)


def test_paths_give_parents_and_ranks() -> None:
    shape = StaticTree.of_paths([[0], [0, 0], [1], [0, 1], [1, 0]])
    assert shape.parents == (-1, 0, -1, 0, 2)
    assert shape.ranks == (0, 0, 1, 1, 0)
    assert shape.max_nodes == 5
    assert [shape.num_looked_behind(n) for n in range(1, 6)] == [0, 1, 1, 1, 2]
    assert [shape.num_levels(n) for n in range(1, 6)] == [1, 2, 2, 2, 2]
    assert levels_of(shape) == (1, 2, 2, 2, 2)
    assert levels_of(None) == ()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0]], "twice"),
        ([[]], "no path"),
        ([[0], [-1]], "no path"),
        ([[0, 0], [0]], r"\[0, 0\] comes before \[0\]"),
        ([[1], [0]], r"\[1\] comes before \[0\]"),
        ([[0], [2]], r"\[2\] comes before \[1\], or without it"),
    ],
)
def test_paths_that_make_no_tree_are_refused(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticTree.of_paths(paths)


def test_widths_are_ordered_by_value() -> None:
    shape = StaticTree.of_widths([3, 2], RATES)
    paths = paths_of(shape)
    assert len(paths) == 9
    values = [expected_tokens([path], RATES) for path in paths]
    assert values == sorted(values, reverse=True)
    assert paths[:3] == [(0,), (0, 0), (1,)]


def test_growing_looks_up_what_the_shape_has() -> None:
    growth = StaticTree.of_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]]).begin(5)
    assert growth.num_children == 2
    assert list(growth.grow([[Child(7, 0.0), Child(8, 0.0), Child(9, 0.0)]])) == [0]
    assert growth.num_children == 2
    assert list(growth.grow([[Child(3, 0.0), Child(4, 0.0)]])) == [2]
    assert list(growth.grow([[Child(5, 0.0)]])) == []
    tree = growth.best()
    assert tree.token_ids == (7, 8, 3, 4, 5)
    assert tree.parents == (-1, -1, 0, 0, 2)


def test_what_cannot_be_looked_up_is_left_out_with_what_follows() -> None:
    growth = StaticTree.of_paths([[0], [1], [1, 0], [0, 0]]).begin(4)
    assert list(growth.grow([[Child(7, 0.0)]])) == [0]
    assert list(growth.grow([[]])) == []
    assert growth.best().token_ids == (7,)


@pytest.mark.parametrize("num_nodes", range(1, 6))
@pytest.mark.parametrize("max_depth", [1, 2, 3, 5])
@pytest.mark.parametrize("rates", [(0.5, 0.2, 0.1), (0.4, 0.35), (0.1, 0.6, 0.2), (0.05, 0.05, 0.9), (0.9,)])
def test_no_tree_of_as_many_nodes_is_better(num_nodes: int, max_depth: int, rates: tuple[float, ...]) -> None:
    """Against all trees; also where a later rank is the better one, which a greedy choice would miss."""
    paths = paths_of(best_tree(rates, num_nodes, max_depth))
    best = max(expected_tokens(list(tree), rates) for tree in closed_sets(num_nodes, len(rates), max_depth))
    assert expected_tokens(paths, rates) == pytest.approx(best)
    assert max(map(len, paths)) <= max_depth


@pytest.mark.parametrize("seed", range(10))
def test_the_first_nodes_of_a_best_tree_are_the_best_smaller_tree(seed: int) -> None:
    """As long as lower ranks stand more often: so a budget may be cut to any size."""
    rng = random.Random(seed)
    rates = tuple(sorted((rng.random() / 4 for _ in range(4)), reverse=True))
    paths = paths_of(best_tree(rates, 10))
    for size in range(1, 11):
        best = paths_of(best_tree(rates, size))
        assert expected_tokens(paths[:size], rates) == pytest.approx(expected_tokens(best, rates))


def test_control_greedy_by_value_is_not_best_where_ranks_are_out_of_order() -> None:
    """The first two nodes by value alone, each with what it needs, miss the child of rank 1."""
    rates = (0.1, 0.6)
    greedy = [(0,), (0, 0)]
    assert expected_tokens(paths_of(best_tree(rates, 2)), rates) > expected_tokens(greedy, rates)
    assert list(itertools.chain(*paths_of(best_tree(rates, 2)))) == [0, 1]


HEADS = (
    ((0.6, 0.2, 0.1), (0.4, 0.2), (0.2, 0.2, 0.1)),
    ((0.9, 0.05), (0.1, 0.1, 0.1), (0.9,)),
    ((0.3, 0.3, 0.3), (0.95,)),
)


@pytest.mark.parametrize("num_nodes", range(1, 6))
@pytest.mark.parametrize("rates", HEADS)
def test_no_tree_of_heads_that_are_right_this_often_is_better(
    num_nodes: int, rates: tuple[tuple[float, ...], ...]
) -> None:
    """Against all trees that there are heads and ranks for."""
    paths = paths_of(best_tree(rates, num_nodes))
    possible = [
        list(tree)
        for tree in closed_sets(num_nodes, 3, len(rates))
        if all(rank < len(rates[depth]) for path in tree for depth, rank in enumerate(path))
    ]
    best = max(expected_by_depth(tree, rates) for tree in possible)
    assert expected_by_depth(paths, rates) == pytest.approx(best)
    assert max(map(len, paths)) <= len(rates)


def test_lists_that_are_alike_say_what_one_does() -> None:
    assert best_tree((RATES,) * 4, 12) == best_tree(RATES, 12, 4)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_nodes_of_a_best_tree_of_heads_are_the_best_smaller_tree(seed: int) -> None:
    rng = random.Random(seed)
    rates = [sorted((rng.random() / 4 for _ in range(4)), reverse=True) for _ in range(3)]
    paths = paths_of(best_tree(rates, 10))
    for size in range(1, 11):
        best = paths_of(best_tree(rates, size))
        assert expected_by_depth(paths[:size], rates) == pytest.approx(expected_by_depth(best, rates))


def test_control_one_list_for_all_depths_is_not_best_for_heads() -> None:
    """The first head is nearly sure, the second one is not: by the mean, siblings are drafted in vain."""
    rates = ((0.9, 0.02, 0.02), (0.3, 0.25, 0.2))
    mean = [sum(each) / 2 for each in zip(*rates, strict=True)]
    own, by_mean = paths_of(best_tree(rates, 4)), paths_of(best_tree(mean, 4, 2))
    assert sorted(own) == [(0,), (0, 0), (0, 1), (0, 2)]
    assert expected_by_depth(own, rates) > 1.05 * expected_by_depth(by_mean, rates)
