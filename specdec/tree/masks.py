"""Attention masks of trees."""

from __future__ import annotations

import torch

from specdec.tree.topology import Topology


def ancestor_mask(topology: Topology, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return bool [n, n]: [i, j] is true when node i attends to node j, that is, itself or an ancestor."""
    num_nodes = topology.num_nodes
    num_bytes = (num_nodes + 7) // 8
    if num_nodes == 0:
        return torch.zeros(0, 0, dtype=torch.bool, device=device)
    packed = b"".join(bits.to_bytes(num_bytes, "little") for bits in topology.ancestors)
    rows = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(num_nodes, num_bytes)
    bits = rows[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).bool().view(num_nodes, num_bytes * 8)[:, :num_nodes].contiguous().to(device)
