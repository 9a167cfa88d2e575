"""Requests from a domain of texts, and what a target says to them alone."""

from __future__ import annotations

import random

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.proposers.config import SpeculativeConfig
from tests.training.online.domains import Domain

Tokens = dict[RequestId, list[int]]


def requests(domain: Domain, number: int, name: str, *, seed: int = 0) -> list[Request]:
    rng = random.Random(f"{name} {seed}")
    return [
        Request(
            request_id=RequestId(f"{name}-{index}"),
            prompt_token_ids=tuple(domain.text(rng, 4)),
            params=SamplingParams(temperature=rng.choice([0.0, 0.7]), max_tokens=20, ignore_eos=True),
            seed=rng.getrandbits(64),
        )
        for index in range(number)
    ]


def plain_tokens(config: EngineConfig, wanted: list[Request]) -> Tokens:
    tokens: Tokens = {request.request_id: [] for request in wanted}
    plain = config.model_copy(update={"speculative_config": SpeculativeConfig(method="none")})
    with Engine(plain) as engine:
        for request in wanted:
            engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].extend(output.token_ids)
    return tokens
