from __future__ import annotations

import sys
from itertools import pairwise, product
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.tree.topology import (
    ROOT,
    Topology,
    chain,
    path_of_tokens,
    pruned_parents,
    topology_of,
    tree,
)


@st.composite
def parents_of_trees(draw: st.DrawFn, max_nodes: int = 24) -> tuple[int, ...]:
    num_nodes = draw(st.integers(0, max_nodes))
    return tuple(draw(st.integers(ROOT, node - 1)) for node in range(num_nodes))


def test_a_small_tree() -> None:
    #      root
    #     0    1
    #    2 3   4
    topology = Topology.from_parents((-1, -1, 0, 0, 1))
    assert topology.depths == (1, 1, 2, 2, 2)
    assert topology.children == ((0, 1), (2, 3), (4,), (), (), ())
    assert topology.ancestors == (0b1, 0b10, 0b101, 0b1001, 0b10010)
    assert topology.path(4) == (1, 4)
    assert topology.path(ROOT) == ()
    assert topology.max_depth == 2
    assert not topology.is_chain


@given(parents_of_trees())
def test_everything_follows_from_the_parents(parents: tuple[int, ...]) -> None:
    topology = Topology.from_parents(parents)
    assert topology.num_nodes == len(parents)
    for node in range(topology.num_nodes):
        path = topology.path(node)
        assert path[-1] == node
        assert parents[path[0]] == ROOT
        assert all(parents[below] == above for above, below in pairwise(path))
        assert topology.depths[node] == len(path) <= topology.max_depth
        assert topology.ancestors[node] == sum(1 << ancestor for ancestor in path)
        for other in range(topology.num_nodes):
            assert topology.is_ancestor(other, node) == (other in path)
    listed = [(row - 1, child) for row, children in enumerate(topology.children) for child in children]
    assert sorted(listed, key=lambda pair: pair[1]) == [(p, node) for node, p in enumerate(parents)]
    assert all(children == tuple(sorted(children)) for children in topology.children)


@given(parents_of_trees(max_nodes=6))
def test_chains_are_recognised(parents: tuple[int, ...]) -> None:
    topology = Topology.from_parents(parents)
    assert topology.is_chain == (topology == chain(len(parents)))


def test_exactly_one_tree_of_each_size_is_a_chain() -> None:
    for num_nodes in range(5):
        shapes = product(*(range(ROOT, node) for node in range(num_nodes)))
        assert sum(Topology.from_parents(parents).is_chain for parents in shapes) == 1


def test_chain() -> None:
    assert chain(3).parents == (-1, 0, 1)
    assert chain(3).depths == (1, 2, 3)
    assert chain(0).num_nodes == chain(0).max_depth == 0
    assert topology_of(3, None) is chain(3)


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1, 0, 5), (1, -1)])
def test_parents_out_of_order_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has parent"):
        Topology.from_parents(parents)


def test_a_wrong_number_of_parents_is_refused() -> None:
    with pytest.raises(ValueError, match="3 nodes with 2 parents"):
        topology_of(3, (-1, 0))


def test_topology_does_not_need_torch() -> None:
    code = "import sys, specdec.tree.topology; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_paths_by_their_tokens() -> None:
    topology = tree((-1, -1, 0, 1, 3))
    token_ids = (4, 4, 1, 2, 3)
    assert path_of_tokens(topology, token_ids, ()) == ()
    assert path_of_tokens(topology, token_ids, (4,)) == (0,)
    assert path_of_tokens(topology, token_ids, (4, 2, 3)) == (1, 3, 4)
    assert path_of_tokens(topology, token_ids, (4, 3)) is None
    assert path_of_tokens(topology, token_ids, (4, 2, 3, 3)) is None


def test_what_is_left_of_a_tree_keeps_its_shape() -> None:
    parents = (-1, 0, 0, 2, -1, 4)
    assert pruned_parents(parents, (0, 2, 3, 4)) == (-1, 0, 1, -1)
    assert pruned_parents(parents, ()) == ()
