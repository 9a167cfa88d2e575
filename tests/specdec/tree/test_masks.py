from __future__ import annotations

import random

import pytest
import torch

from specdec.tree.masks import ancestor_mask
from specdec.tree.topology import Topology, chain


@pytest.mark.parametrize("num_nodes", [0, 1, 7, 8, 9, 64, 65])
def test_the_mask_is_the_ancestor_relation(num_nodes: int) -> None:
    topology = Topology.from_parents([random.randint(-1, node - 1) for node in range(num_nodes)])
    mask = ancestor_mask(topology)
    assert mask.shape == (num_nodes, num_nodes)
    assert mask.dtype == torch.bool
    expected = [[topology.is_ancestor(j, i) for j in range(num_nodes)] for i in range(num_nodes)]
    assert mask.tolist() == expected


def test_a_chain_is_causal() -> None:
    assert torch.equal(ancestor_mask(chain(12)), torch.ones(12, 12).tril().bool())
