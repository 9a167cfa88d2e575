"""Requests in waves and mixed company for an engine with any drafter, and what has to come of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.engine.engine import Engine
from specdec.sampling.noise import choice_seed
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.sampling_kinds import KINDS
from tests.specdec.engine.tiny_models import PROMPTS

Kind = Literal["greedy", "sampled"]
Load = Literal["alone", "mix", "preempted", "cached"]
"""alone: one request after the other; mix: greedy and sampled ones that come one by one, with wishes of their
own; preempted: the same in a pool that is too small; cached: texts that were begun before are continued."""
NAME_OF: dict[Kind, str] = {"greedy": "greedy", "sampled": "plain"}
OTHER: dict[Kind, Kind] = {"greedy": "sampled", "sampled": "greedy"}
WISHES = (None, 3, None, 0)
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
