"""Goodput of a batch that stays the same: every request decodes from the first to the last moment counted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.sampling.noise import choice_seed

_SETTLING_ROUNDS, _SETTLED_ROUNDS, _SETTLED_S = 3, 6, 0.2
"""After the last first token, at least so many rounds are not counted, at most so many, and none after so
many seconds: drafters read prompts meanwhile."""
_FEWEST_ROUNDS = 4
"""Rounds that are counted at least, however long they are."""
SPARE_TOKENS = 64
"""Room behind `Batch.num_tokens`: for the last round, and for what is decoded while others settle."""
_numbers = itertools.count()


@dataclass(slots=True)
class Counted:
    """Tokens, and the seconds that they took."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_rounds: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that decode together."""

    prompts: Sequence[tuple[int, ...]]
    num_tokens: int
    """That a request may generate before another one with the same prompt takes its place."""
    temperature: float = 0.0
    """Above 0, every pass over the prompts draws from other seeds."""


Prepare = Callable[[Sequence[Request]], None]
"""Called with requests that are about to be added."""


def nothing_to_prepare(requests: Sequence[Request]) -> None:
    """Do nothing."""


def decode_for(
    engine: Engine,
    batch: Batch,
    seconds: float,
    *,
    is_cold: bool = False,
    prepare: Prepare = nothing_to_prepare,
) -> Counted:
    """Decode for about so many seconds, and at least once.

    Requests are replaced all together, when the first of them is about to end; what happens from then until
    the new ones have settled is not counted. With `is_cold` nothing is left out of the first pass but the
    prompts.

    Raises:
        ValueError: requests end before they have settled.
    """
    counted = Counted()
    while not _is_enough(counted, seconds):
        requests = _requests(batch)
        prepare(requests)
        _decode_once(engine, requests, batch.num_tokens, counted, seconds, is_cold=is_cold)
        if not counted.num_rounds:
            raise ValueError(f"{batch.num_tokens} tokens are too few: requests end before they have settled")
        is_cold = False
    return counted


def read(engine: Engine, prompts: Sequence[tuple[int, ...]], tick: Callable[[], None]) -> None:
    """Have prompts read, so that later requests find them in the cache."""
    for prompt in prompts:
        engine.generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        tick()


def _is_enough(counted: Counted, seconds: float) -> bool:
    return counted.seconds >= seconds and counted.num_rounds >= _FEWEST_ROUNDS


def _decode_once(
    engine: Engine,
    requests: Sequence[Request],
    num_tokens: int,
    counted: Counted,
    seconds: float,
    *,
    is_cold: bool,
) -> None:
    lengths = dict.fromkeys((request.request_id for request in requests), 0)
    for request in requests:
        engine.add_request(request)
    settling_since_s: float | None = None
    num_settling, is_settled = 0, False
    last_s = time.perf_counter()
    while not is_settled or (max(lengths.values()) < num_tokens and not _is_enough(counted, seconds)):
        num_new = 0
        for output in engine.step():
            lengths[output.request_id] += len(output.token_ids)
            num_new += len(output.token_ids)
        now_s = time.perf_counter()
        if is_settled:
            counted.num_tokens += num_new
            counted.seconds += now_s - last_s
            counted.num_rounds += 1
        elif settling_since_s is not None:
            num_settling += 1
            is_long = now_s - settling_since_s >= _SETTLED_S or num_settling >= _SETTLED_ROUNDS
            is_settled = num_settling >= _SETTLING_ROUNDS and is_long
        elif min(lengths.values()) > 0:
            settling_since_s, is_settled = now_s, is_cold
        last_s = now_s
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()


def _requests(batch: Batch) -> list[Request]:
    number = next(_numbers)
    # Nobody comes to its end: all are there until all are taken away.
    params = SamplingParams(
        temperature=batch.temperature, max_tokens=batch.num_tokens + SPARE_TOKENS, ignore_eos=True
    )
    return [
        Request(
            request_id=RequestId(f"steady-{number}-{index}"),
            prompt_token_ids=prompt,
            params=params,
            seed=choice_seed(number, index),
        )
        for index, prompt in enumerate(batch.prompts)
    ]
