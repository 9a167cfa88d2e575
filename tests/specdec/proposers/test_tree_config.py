"""The `tree` block: what it makes, and what is said of mistakes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specdec.proposers.tree_config import StaticTreeConfig, tree_shape
from specdec.tree.static import StaticTree, best_tree

RATES = (0.6, 0.15, 0.08, 0.05)
HEADS = ((0.7, 0.1, 0.05), (0.4, 0.15), (0.2, 0.1, 0.1))


def test_measured_acceptance_makes_the_tree_that_brings_most() -> None:
    shape = tree_shape(StaticTreeConfig(shape="static", acceptance=RATES, num_nodes=12, max_depth=4))
    assert shape == best_tree(RATES, 12, 4)
    assert (shape.max_nodes, shape.max_depth) == (12, 4)


def test_heads_are_measured_by_depth() -> None:
    shape = tree_shape(StaticTreeConfig(shape="static", acceptance=HEADS, num_nodes=12))
    assert shape == best_tree(HEADS, 12)
    assert (shape.max_nodes, shape.max_depth) == (12, 3)
    assert StaticTreeConfig(shape="static", acceptance=HEADS, max_depth=2).make().max_depth == 2


def test_where_nothing_is_said_it_has_16_nodes() -> None:
    shape = tree_shape(StaticTreeConfig(shape="static", acceptance=RATES))
    assert isinstance(shape, StaticTree)
    assert shape.max_nodes == 16


def test_the_largest_tree_of_many_ranks_is_made_soon_and_once() -> None:
    config = StaticTreeConfig(shape="static", acceptance=(0.0625,) * 16, num_nodes=64, max_depth=16)
    assert config.make() is config.make()
    assert config.make().max_nodes == 64


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "static needs one of paths, widths and acceptance"),
        ({"widths": [2], "acceptance": [0.5]}, "static needs one of paths, widths and acceptance"),
        ({"widths": [2], "num_nodes": 4}, "num_nodes: it goes with acceptance"),
        ({"paths": [[0]], "max_depth": 4}, "max_depth: it goes with acceptance"),
        ({"acceptance": [0.9, 0.3]}, "these sum to 1 at most, not to 1.2"),
        ({"acceptance": [0.0, 0.0]}, "there is nothing to draft"),
        ({"acceptance": [0.5], "num_nodes": 65}, "less than or equal to 64"),
        ({"acceptance": [1.5]}, "acceptance: shares are from 0 to 1, got"),
        ({"acceptance": [0.5, "often"]}, "acceptance: must be shares from 0 to 1"),
        ({"acceptance": 0.5}, "acceptance"),
        ({"acceptance": [[0.5], [0.5, -0.1]]}, r"acceptance\[1\]: shares are from 0 to 1"),
        ({"acceptance": [[0.5], [0.9, 0.3]]}, r"acceptance\[1\]: .* sum to 1 at most, not to 1.2"),
        ({"acceptance": [[0.5], 0.3]}, r"acceptance\[1\]: must be shares from 0 to 1, .* got 0.3"),
        ({"acceptance": [[0.5], []]}, r"acceptance\[1\]: is empty"),
        ({"acceptance": [[0.0], [0.5]]}, "there is nothing to draft"),
        ({"acceptance": [[0.5], [0.5]], "max_depth": 3}, "max_depth: 3 is more than acceptance has lists"),
        ({"acceptance": [[0.05] * 17]}, "at most 16"),
    ],
)
def test_mistakes_are_named(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        StaticTreeConfig.model_validate({"shape": "static", **fields})


def test_rates_may_sum_to_one() -> None:
    rates = (0.7, 0.2, 0.1)
    assert sum(rates) != 1.0, "as floats are"
    StaticTreeConfig(shape="static", acceptance=rates)


@pytest.mark.parametrize(
    "fields",
    [
        {"widths": [3, 2]},
        {"paths": [[0], [1]]},
        {"acceptance": [0.5, 0.2]},
        {"acceptance": [[1, 0], [0.5]]},
    ],
)
def test_what_is_written_down_is_read_again(fields: dict[str, object]) -> None:
    config = StaticTreeConfig.model_validate({"shape": "static", **fields})
    assert StaticTreeConfig.model_validate(config.model_dump()) == config
    assert StaticTreeConfig.model_validate_json(config.model_dump_json()).make() == config.make()
