"""Few cases for the default run: what they hold, and that the rest is left to the full run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.pairwise import chosen_cover

pytest_plugins = ["pytester"]

PRODUCT = [
    {"color": color, "size": size, "is_loud": is_loud}
    for color, size, is_loud in itertools.product(("red", "green", "blue"), (1, 2, 4, 8), (False, True))
]


def held(cases: Sequence[Mapping[str, Any]], ways: int) -> set[tuple[tuple[str, Any], ...]]:
    return {together for case in cases for together in itertools.combinations(case.items(), ways)}


@pytest.mark.parametrize(("ways", "most"), [(1, 4), (2, 14), (3, 24), (9, 24)])
def test_a_cover_holds_what_all_cases_hold(ways: int, most: int) -> None:
    chosen = chosen_cover(PRODUCT, ways)
    assert held([PRODUCT[index] for index in chosen], min(ways, 3)) == held(PRODUCT, min(ways, 3))
    assert len(chosen) <= most
    assert chosen == sorted(set(chosen)) == chosen_cover(PRODUCT, ways)


def test_values_take_turns() -> None:
    """One axis decides how many cases there are; the other's values come about as often each."""
    cases = [{"number": number, "is_loud": is_loud} for number in range(8) for is_loud in (False, True)]
    chosen = [cases[index] for index in chosen_cover(cases, 1)]
    assert [case["number"] for case in chosen] == list(range(8))
    assert sum(case["is_loud"] for case in chosen) == 4


def test_values_of_other_names_need_not_occur() -> None:
    chosen = chosen_cover(PRODUCT, 1, "color", "is_loud")
    assert len(chosen) == 3
    assert {PRODUCT[index]["is_loud"] for index in chosen} == {False, True}


@dataclass(frozen=True)
class _Setting:
    depth: int
    names: Any


def test_fields_are_values_of_their_own() -> None:
    unhashable, nothing = ["x"], dict[str, int]()
    cases = [
        {"setting": _Setting(1, unhashable), "more": nothing},
        {"setting": _Setting(2, unhashable), "more": {"k": 1}},
        {"setting": _Setting(1, ["x"]), "more": {"k": 1}},
        {"setting": _Setting(2, unhashable), "more": nothing},
    ]
    assert chosen_cover(cases, 1) == [0, 1, 2]
    assert chosen_cover(cases, 1, "setting.depth") == [0, 1]


def test_one_is_no_true() -> None:
    assert chosen_cover([{"a": 1}, {"a": True}, {"a": 1}], 1) == [0, 1]


def test_cases_beyond_the_cover_are_left_to_the_full_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.cover(1)
        @pytest.mark.parametrize("one", [1, 2, pytest.param(3, marks=pytest.mark.full)])
        @pytest.mark.parametrize("other", "ab")
        def test_it(one, other):
            pass

        def test_another():
            pass
        """
    )
    pytester.runpytest_inprocess("-m", "not full").assert_outcomes(passed=2 + 1, deselected=4)
    pytester.runpytest_inprocess().assert_outcomes(passed=6 + 1)
