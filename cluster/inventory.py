"""What the nodes of a cluster have: amounts of resources, and labels that selectors ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

NODE_ID_LABEL = "ray.io/node-id"
"""Ray gives every node this label."""

ACCELERATOR_PREFIX = "accelerator_type:"
"""Ray gives a node with GPUs a resource of this name and their kind."""

_PRECISION = 1e-4
"""Ray counts resources in ten-thousandths."""

Amounts = Mapping[str, float]
"""Resources by Ray's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """What one node has, and what of it is free."""

    node_id: str
    available: Amounts
    labels: Mapping[str, str]
    total: Amounts | None = None
    """None: all of it is free."""
    address: str | None = None
    """How people know it; None: by its id."""

    @property
    def has(self) -> Amounts:
        """What there is of everything, free or not."""
        return self.available if self.total is None else self.total

    @property
    def name(self) -> str:
        """For messages. Several nodes may share an address."""
        return self.node_id if self.address is None else f"{self.address} ({self.node_id[:8]})"

    def unmet(self, selectors: Mapping[str, str]) -> dict[str, str]:
        """Return those of the label selectors that this node does not meet."""
        labels = {NODE_ID_LABEL: self.node_id, **self.labels}
        return {
            name: selector for name, selector in selectors.items() if not _meets(labels.get(name), selector)
        }


def with_changed(nodes: Sequence[NodeSnapshot], changes: Iterable[tuple[str, Amounts]]) -> list[NodeSnapshot]:
    """Return the nodes with so much more, or less, of everything free, by node id."""
    available = {node.node_id: dict(node.available) for node in nodes}
    for node_id, amounts in changes:
        free = available.get(node_id)
        if free is not None:
            for name, amount in amounts.items():
                free[name] = free.get(name, 0.0) + amount
    return [replace(node, available=available[node.node_id]) for node in nodes]


def how_many(free: Amounts, unit: Amounts, at_most: int) -> int:
    """Return how many times `unit` fits into what is free."""
    fitting = (_fitting(name, free.get(name, 0.0), amount) for name, amount in unit.items())
    return min([at_most, *fitting])


def _fitting(name: str, free: float, amount: float) -> int:
    """Return how many times an amount fits. A part of a GPU is of one device: two rests of 0.3 are no 0.6.

    Ray does not tell which devices are taken in part: at most one is thought to be.
    """
    if name != "GPU" or amount >= 1.0:
        return math.floor((free + _PRECISION / 2) / amount)
    devices = math.floor(free + _PRECISION / 2)
    of_each, of_the_rest = (
        math.floor((one + _PRECISION / 2) / amount) for one in (1.0, max(free - devices, 0.0))
    )
    return devices * of_each + of_the_rest


def less(free: Amounts, unit: Amounts, times: int) -> dict[str, float]:
    """Return what is left of `free`."""
    return {name: amount - times * unit.get(name, 0.0) for name, amount in free.items()}


def times(unit: Amounts, number: int) -> dict[str, float]:
    """Return so many units together."""
    return {name: number * amount for name, amount in unit.items()}


def lacking(free: Amounts, wanted: Amounts) -> dict[str, float]:
    """Return by how much `free` falls short of what is wanted, where it does."""
    short = {name: amount - free.get(name, 0.0) for name, amount in wanted.items()}
    return {name: amount for name, amount in short.items() if amount >= _PRECISION / 2}


def listed(amounts: Amounts) -> str:
    """Return amounts for messages: `4 CPU + 1 GPU + H100`."""
    return " + ".join(_shown(name, amount) for name, amount in amounts.items())


def _shown(name: str, amount: float) -> str:
    kind = name.removeprefix(ACCELERATOR_PREFIX)
    if kind != name:  # its amount means nothing
        return kind if amount else f"no {kind}"
    return f"{amount:g} {name}"


def all_but(values: Iterable[str]) -> str:
    """Return the label selector that takes every node but those with one of these values."""
    return f"!in({','.join(sorted(set(values)))})"


def excluded_by(selector: str) -> frozenset[str] | None:
    """Return the label values that are not selected; None: those that are selected are named instead."""
    return _values(selector) if selector.startswith("!") else None


def _meets(value: str | None, selector: str) -> bool:
    """Whether a node with this label value, or without the label, is selected: Ray's own rules."""
    return (value in _values(selector)) != selector.startswith("!")


def _values(selector: str) -> frozenset[str]:
    """Return the values that a selector names."""
    wanted = selector.removeprefix("!")
    if not wanted.startswith("in("):
        return frozenset({wanted})
    return frozenset(one.strip() for one in wanted.removeprefix("in(").removesuffix(")").split(","))
