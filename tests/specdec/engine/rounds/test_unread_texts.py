"""Text that is read later belongs to the same outputs as text that is read at once."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from tests.specdec.engine.toy_engines import SAMPLED, make_proposer, request, toy_engine

Facts = list[tuple[str, int, tuple[int, ...], str, str | None]]


def requests_of(generator: random.Random) -> list[Request]:
    """Requests with and without stop strings, of all lengths."""
    params: list[SamplingParams] = []
    for index in range(6):
        stop = ("".join(generator.choices("abcdefgh", k=generator.randrange(1, 3))),) if index % 2 else ()
        params.append(
            replace(
                SAMPLED,
                max_tokens=generator.randrange(1, 24),
                stop=stop,
                stop_token_ids=(generator.randrange(8),) if index % 3 == 0 else (),
                include_stop_str_in_output=index % 4 < 2,
            )
        )
    return [
        request(f"r{index}", tuple(generator.choices(range(8), k=generator.randrange(1, 9))), one, seed=index)
        for index, one in enumerate(params)
    ]


def facts_of(outputs: list[RequestOutput]) -> Facts:
    return [
        (one.request_id, one.first_index, one.token_ids, one.text, one.finish_reason)
        for one in sorted(outputs, key=lambda one: one.request_id)
    ]


def play(engine: Engine, requests: list[Request], seed: int, *, reads_text: bool) -> list[Facts]:
    """Outputs by step, as they are once the next step has been made: before that they leave."""
    generator = random.Random(seed)
    steps: list[Facts] = []
    held: list[RequestOutput] = []
    for one in requests:
        engine.add_request(one)
    for number in range(200):
        if not engine.has_work:
            break
        if number == 3:
            engine.abort(requests[0].request_id)
        reads_before = generator.random() < 0.5
        if not reads_text and reads_before:
            engine.read_texts()
        outputs = engine.step(reads_text=reads_text)
        steps.append(facts_of(held))
        held = outputs
    engine.read_texts()
    steps.append(facts_of(held))
    assert not engine.has_work
    return steps


@pytest.mark.parametrize("proposer", ["none", "oracle"])
@pytest.mark.parametrize("seed", range(20))
def test_outputs_are_the_same(proposer: str, seed: int) -> None:
    requests = requests_of(random.Random(seed))
    at_once, later = (
        play(toy_engine(make_proposer(proposer)), requests, seed, reads_text=reads_text)
        for reads_text in (True, False)
    )
    assert later == at_once
    assert any(text for facts in at_once for _, _, _, text, _ in facts)


def test_text_is_there_only_once_it_has_been_read() -> None:
    engine = toy_engine(make_proposer("none"))
    engine.add_request(request("r", (1, 2), replace(SAMPLED, max_tokens=4)))
    outputs = engine.step(reads_text=False)
    assert (outputs[0].text, len(outputs[0].token_ids)) == ("", 1)
    engine.read_texts()
    assert len(outputs[0].text) == 1
