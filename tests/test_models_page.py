"""docs/models.md says of every family what the tests show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

from specdec.model.inspection import TESTED_MODEL_TYPES
from specdec.model.parallel.plan import _DECLARED
from specdec.model.parallel.surgery import check_parallel
from tests.architectures import ARCHITECTURES, CORE_ARCHITECTURES, LOWERED, OTHER_ARCHITECTURES
from tests.specdec.engine.ranked_engines import RANKS_BY_ARCHITECTURE

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


class Row(NamedTuple):
    model_type: str
    compiled: str
    ranks: str
    architectures: tuple[str, ...]


def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not re.match(r"\| [^|]+ \| `[a-z0-9_]+` \| (fp32|eager)", line):
            continue
        family, model_type, compiled, ranks, _, architectures = line.strip("|").split("|")
        names = tuple(re.findall(r"`(\w+)`", architectures))
        found[family.strip()] = Row(model_type.strip(" `"), compiled.strip(), ranks.strip(), names)
    return found


def test_every_architecture_of_the_tests_is_on_the_page_once() -> None:
    listed = [name for row in rows().values() for name in row.architectures]
    assert sorted(listed) == sorted(ARCHITECTURES)
    assert {row.model_type for row in rows().values()} == TESTED_MODEL_TYPES


def test_what_is_compared_with_transformers() -> None:
    assert {*CORE_ARCHITECTURES, *OTHER_ARCHITECTURES} == set(ARCHITECTURES)


@pytest.mark.parametrize("family", rows())
def test_a_family(family: str) -> None:
    row = rows()[family]
    for name in row.architectures:
        config = ARCHITECTURES[name]()
        assert config.model_type == row.model_type
        assert (row.compiled == "fp32, bf16") == (name in LOWERED), "test_graphs compiles it in both"
        assert row.ranks in {"published plan", "declared here"}
        assert (row.ranks == "declared here") == (row.model_type in _DECLARED)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        check_parallel(model, 2)
    assert set(row.architectures) & set(RANKS_BY_ARCHITECTURE), "test_ranks runs it over ranks"
