"""Whatever drafts, wherever it does, in whatever company: a request says what it says alone without drafts.

One table for all of it (`drafter_table`), compared with the registry: what is registered and not there, or
there and neither had nor refused, fails. Models are tiny, random and fp32; heads are fitted to them, so that
drafts stand and fall. By default few cases run, in which all pairs of values occur; all of them in the long
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from specdec.core.proposal import Verdict
from specdec.engine.engine import Engine
from specdec.engine.rounds import round as rounds
from specdec.proposers.registry import FACTORIES
from tests.rank_pool import Pools
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.drafter_files import DrafterFiles
from tests.specdec.engine.drafter_table import DRAFTERS, PLACES, SHAPES, Files, Place, Shape
from tests.specdec.engine.placed_engines import compile_all, lead, over_workers
from tests.specdec.engine.request_waves import Kind, Load, Served, serve, wanted
from tests.specdec.engine.tiny_models import Models

pytestmark = pytest.mark.usefixtures("one_thread", "quantizer")
FEW_BLOCKS = 20


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def files(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return DrafterFiles(bench, tmp_path_factory)


CASES = [
    pytest.param(name, shape, kind, load, place, id=f"{name}-{shape}-{kind}-{load}-{place}".replace(" ", "_"))
    for name, shape, kind, load, place in product(DRAFTERS, SHAPES, get_args(Kind), get_args(Load), PLACES)
    if DRAFTERS[name].refusal(shape, place) is None
]


@pytest.mark.cover(2)
@pytest.mark.parametrize(("name", "shape", "kind", "load", "place"), CASES)
def test_it_does_not_show(
    bench: Bench,
    files: Files,
    rank_pool: Pools,
    name: str,
    shape: Shape,
    kind: Kind,
    load: Load,
    place: Place,
) -> None:
    drafter = DRAFTERS[name]
    num_blocks = FEW_BLOCKS if load == "preempted" else 200
    config = drafter.config(shape, place, files, num_blocks=num_blocks)
    waves, expected = wanted(bench, kind, load, drafter.names)
    if place == "two ranks":
        done: Served = rank_pool(2).run(lead, config, serve, waves)[0]
    else:
        with Engine(config) if place in ("one process", "compiled") else over_workers(config) as engine:
            if place == "compiled":
                compile_all(engine)
            done = serve(engine, waves)
    assert done.streams == expected
    assert (done.num_drafted > 0) == (name != "none")
    assert done.num_accepted > 0 or not drafter.is_often_right
    assert (done.num_preemptions > 0) == (load == "preempted")
    assert done.num_hits > 0 or load != "cached"
    assert done.num_dropped == 0


# ------------------------------------------------------------------------------------ what is in the table


def missing_methods(registered: Sequence[str], files: Files) -> set[str]:
    """Return methods that are registered and in no line of the table."""
    return set(registered) - {drafter.keys(files)["method"] for drafter in DRAFTERS.values()}


def nowhere(name: str) -> str:
    return f"/nowhere/{name}"


def test_every_method_that_is_registered_is_in_the_table() -> None:
    assert missing_methods(list(FACTORIES), nowhere) == set()


def test_control_a_method_without_a_line_is_missed() -> None:
    assert missing_methods([*FACTORIES, "crystal_ball"], nowhere) == {"crystal_ball"}


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_left_out_is_refused_by_name(name: str) -> None:
    """Else it would be a case like the others."""
    drafter = DRAFTERS[name]
    for shape, place in product(SHAPES, PLACES):
        message = drafter.refusal(shape, place)
        if message is None:
            drafter.config(shape, place, nowhere)
            continue
        with pytest.raises(ValidationError, match=message):
            drafter.config(shape, place, nowhere)


def test_every_drafter_is_had_somewhere_and_everywhere_else_refused() -> None:
    values = [case.values for case in CASES]
    for position, every in enumerate((DRAFTERS, SHAPES, get_args(Kind), get_args(Load), PLACES)):
        assert {one[position] for one in values} == set(every)


@pytest.mark.parametrize("name", ["draft_model", "self"])
def test_control_drafts_that_are_believed_show(
    bench: Bench, files: Files, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of drafters that are nearly always right; the cases above would notice."""
    verdict_of = rounds.verdict_of

    def believing(drafted: Sequence[int], parents: Any, token_ids: Sequence[int]) -> Verdict:
        believed = (*drafted, *token_ids[len(drafted) :])[: len(token_ids)]
        return verdict_of(drafted, parents, believed)

    waves, expected = wanted(bench, "sampled", "mix", ())
    with Engine(DRAFTERS[name].config("chain", "one process", files)) as engine:
        monkeypatch.setattr(rounds, "verdict_of", believing)
        assert serve(engine, waves).streams != expected
