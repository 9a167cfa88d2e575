"""Whatever drafts, wherever it does, in whatever company: a request says what it says alone without drafts.

One table for all of it (`drafter_table`), compared with the registry: what is registered and not there, or
there and neither had nor refused, fails. Models are tiny, random and fp32; heads are fitted to them, so that
drafts stand and fall. By default few cases run, in which all pairs of values occur; all of them in the long
run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import pytest
from pydantic import ValidationError

from specdec.core.ids import RequestId
from specdec.core.proposal import Verdict
from specdec.core.request import Request
from specdec.engine.engine import Engine
from specdec.engine.rounds import round as rounds
from specdec.proposers.registry import FACTORIES
from specdec.sampling.noise import choice_seed
from tests.rank_pool import Pools
from tests.specdec.engine.drafter_files import DrafterFiles
from tests.specdec.engine.drafter_table import DRAFTERS, PLACES, SHAPES, Files, Place, Shape
from tests.specdec.engine.placed_engines import lead, over_workers
from tests.specdec.engine.targets.test_target_drafting import KINDS, PROMPTS, Bench
from tests.specdec.engine.test_identity import Models

pytestmark = pytest.mark.usefixtures("one_thread", "quantizer")
Kind = Literal["greedy", "sampled"]
Load = Literal["alone", "mix", "preempted", "cached"]
"""alone: one request after the other; mix: greedy and sampled ones that come one by one, with wishes of their
own; preempted: the same in a pool that is too small; cached: texts that were begun before are continued."""
NAME_OF: dict[Kind, str] = {"greedy": "greedy", "sampled": "plain"}
OTHER: dict[Kind, Kind] = {"greedy": "sampled", "sampled": "greedy"}
WISHES = (None, 3, None, 0)
FEW_BLOCKS = 20
Streams = dict[RequestId, list[int]]


class Served(NamedTuple):
    """What an engine has done."""

    streams: Streams
    num_drafted: int
    num_accepted: int
    num_preemptions: int
    num_hits: int
    num_dropped: int


class Wanted(NamedTuple):
    """What an engine is to do, wave after wave, and what has to come of it."""

    waves: list[list[Request]]
    expected: Streams


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def files(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return DrafterFiles(bench, tmp_path_factory)


def wanted(bench: Bench, kind: Kind, load: Load, names: Sequence[str]) -> Wanted:
    """Return requests for some prompts, and the streams that each has when it is alone."""
    requests, expected = [], {}
    for index, prompt in enumerate(PROMPTS):
        its = kind if index % 2 == 0 or load in ("alone", "cached") else OTHER[kind]
        params = KINDS[NAME_OF[its]]
        request = Request(
            request_id=RequestId(f"r{index}"),
            prompt_token_ids=prompt,
            params=params,
            seed=choice_seed(params.seed or 0, 0),
            num_draft_tokens=WISHES[index % 4] if load == "mix" else None,
            drafter=names[index % len(names)] if names else None,
        )
        requests.append(request)
        expected[request.request_id] = list(
            bench.alone("llama", "greedy" if its == "greedy" else "plain")[index]
        )
    if load == "alone":
        some = requests[1::3]
        return Wanted([[one] for one in some], {one.request_id: expected[one.request_id] for one in some})
    if load != "cached":
        return Wanted([requests], expected)
    some = requests[2:7]
    again = [continued(one, expected[one.request_id]) for one in some]
    later = {f"again-{one.request_id}": expected[one.request_id] for one in some}
    for one in again:
        stream = later[one.request_id]
        expected[one.request_id] = stream[len(stream) // 2 :]
    return Wanted([some, again], {one.request_id: expected[one.request_id] for one in (*some, *again)})


def continued(request: Request, stream: Sequence[int]) -> Request:
    """Return a request for the second half of a stream; its prompt ends with the first half."""
    known = stream[: len(stream) // 2]
    params = request.params
    assert params.max_tokens is not None
    return msgspec.structs.replace(
        request,
        request_id=RequestId(f"again-{request.request_id}"),
        prompt_token_ids=(*request.prompt_token_ids, *known),
        params=msgspec.structs.replace(params, max_tokens=params.max_tokens - len(known)),
    )


def serve(engine: Engine, waves: Sequence[Sequence[Request]]) -> Served:
    """Serve wave after wave; requests of one come a round apart."""
    streams: Streams = {one.request_id: [] for wave in waves for one in wave}
    for wave in waves:
        waiting = deque(wave)
        while waiting or engine.has_work:
            if waiting:
                engine.add_request(waiting.popleft())
            for output in engine.step():
                assert output.error is None, output.error
                streams[output.request_id] += output.token_ids
            engine.check_integrity()
    metrics = engine.metrics()
    return Served(
        streams,
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
        metrics.num_preemptions,
        metrics.prefix_cache_hits,
        metrics.proposals_dropped.total(),
    )


def compile_all(engine: Engine) -> None:
    """Skip the test where nothing can be compiled."""
    engine.warm_up()
    states = [work.state for work in engine.idle_work]
    if states[0] == "failed":
        pytest.skip("no compiled forward here")
    assert set(states) == {"ready"}


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
