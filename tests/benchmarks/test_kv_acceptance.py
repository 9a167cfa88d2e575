"""That acceptance is counted of the same texts for every drafter, and rises with what drafts attend to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from benchmarks.kv_acceptance import FULL, Plan, draw, headlines_of, measure, table_of
from benchmarks.long_context_engines import Drafter
from specdec.kv.selection import KvPolicyName

pytestmark = pytest.mark.usefixtures("threads_as_before")
DEMO = Path(__file__).parents[2] / "models" / "demo"


def test_acceptance_rises_with_the_budget_on_the_same_texts(tmp_path: Path) -> None:
    drafters = (
        Drafter(method="self", policy="streaming", budget=32),
        Drafter(method="self", policy="streaming", budget=256),
        Drafter(method="self"),
        Drafter(method="draft_model", policy="streaming", budget=64),
    )
    plan = Plan(drafters=drafters, lengths=(768,), num_texts=4, num_tokens=32)

    def tick(name: str, total: int) -> Callable[[], None]:
        return lambda: None

    cells = measure(plan, DEMO, tick)
    assert len(cells) == 4
    by_name = {(cell["name"], cell["length"]): cell for cell in cells}
    for length in plan.lengths:
        small, large, everything, other = (by_name[one.name, length]["acceptance"] for one in drafters)
        assert 0.2 < small < large <= everything
        assert everything == pytest.approx(1.0, abs=0.05)
        assert 0.1 < other < large
    headlines = headlines_of(cells)
    assert headlines["share_of_lengths_with_one_text"] == 1.0
    assert headlines["acceptance_streaming_256_at_768"] == by_name[drafters[1].name, 768]["acceptance"]
    cells[0]["text"] = "another"
    assert headlines_of(cells)["share_of_lengths_with_one_text"] == 0.0
    Console(quiet=True).print(table_of(cells))
    pytest.importorskip("matplotlib")
    assert "streaming" in draw(cells, tmp_path / "picture.svg").read_text()


def test_every_policy_is_there_with_several_budgets() -> None:
    for method, policies in (("self", set(get_args(KvPolicyName))), ("draft_model", {"full", "streaming"})):
        own = [one for one in FULL.drafters if one.method == method]
        assert {one.policy for one in own} >= policies
        for policy in {one.policy for one in own} - {"full"}:
            assert len({one.budget for one in own if one.policy == policy}) == 6
    assert not Drafter(method="ngram", policy="streaming").is_supported
    assert len(set(FULL.drafters)) == len(FULL.drafters)
