"""The pool of n-grams, against a list of all that was ever added."""

from __future__ import annotations

import random

import pytest

from specdec.proposers.lookahead.pool import NgramPool, tree_of
from specdec.tree.topology import topology_of


@pytest.mark.parametrize("most_behind_one", [1, 3, 8])
def test_the_latest_behind_a_token_are_kept(most_behind_one: int) -> None:
    rng = random.Random(most_behind_one)
    pool = NgramPool(most_behind_one, 10_000)
    added: list[tuple[int, ...]] = []
    for _ in range(400):
        ngram = tuple(rng.choices(range(4), k=3))
        pool.add(ngram)
        added.append(ngram)
        pool.check_integrity()
        latest = dict.fromkeys(one[1:] for one in reversed(added) if one[0] == ngram[0])
        assert pool.behind(ngram[0]) == list(latest)[:most_behind_one]


def test_what_was_longest_not_added_to_gives_way() -> None:
    pool = NgramPool(4, 3)
    for ngram in [(1, 0), (2, 0), (1, 5), (3, 0)]:
        pool.add(ngram)
        pool.check_integrity()
    assert pool.behind(2) == []
    assert pool.behind(1) == [(5,), (0,)]
    assert pool.behind(3) == [(0,)]
    for index in range(50):
        pool.add((index % 7, index))
        pool.check_integrity()
    assert pool.num_ngrams == 3


def test_unknown_tokens_have_nothing_behind_them() -> None:
    assert NgramPool(1, 1).behind(3) == []


@pytest.mark.parametrize("num_nodes", [1, 4, 7, 64])
def test_trees_have_the_chains_as_paths(num_nodes: int) -> None:
    chains = [(1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 6, 3), (1, 2, 3)]
    tokens, parents = tree_of(chains, num_nodes)
    topology = topology_of(len(tokens), parents)
    paths = {tuple(tokens[node] for node in topology.path(end)) for end in range(len(tokens))}
    prefixes = [chain[:end] for chain in chains for end in range(1, 4)]
    assert len(paths) == len(tokens) == min(num_nodes, len(set(prefixes)))
    assert paths == set(list(dict.fromkeys(prefixes))[:num_nodes])
