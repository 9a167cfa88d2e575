"""Goodput of a batch that stays the same: every request decodes from the first to the last moment counted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.draft_counts import DraftCounts
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
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """In these rounds."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    def add(self, other: Counted) -> None:
        """Count what was decoded at another time too."""
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds
        self.num_rounds += other.num_rounds
        self.drafts += other.drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that decode together."""

    prompts: Sequence[tuple[int, ...]]
    num_tokens: int
    """That a request may generate before another one with the same prompt takes its place."""
    temperature: float = 0.0
    """Above 0, every pass over the prompts draws from other seeds."""
    seed: int | None = None
    """Every pass draws from this one instead, so that the same texts are written again."""


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
    return _decode(engine, batch, lambda counted: counted.seconds >= seconds, prepare, is_cold=is_cold)


def decode_tokens(
    engine: Engine, batch: Batch, num_tokens: int, *, prepare: Prepare = nothing_to_prepare
) -> Counted:
    """As `decode_for`, until so many tokens of all requests together are counted: whoever decodes them.

    Raises:
        ValueError: requests end before they have settled.
    """
    return _decode(engine, batch, lambda counted: counted.num_tokens >= num_tokens, prepare, is_cold=False)


def _decode(
    engine: Engine, batch: Batch, is_enough: Callable[[Counted], bool], prepare: Prepare, *, is_cold: bool
) -> Counted:
    def is_done(counted: Counted) -> bool:
        return is_enough(counted) and counted.num_rounds >= _FEWEST_ROUNDS

    total = Counted()
    while not is_done(total):
        requests = _requests(batch)
        prepare(requests)
        _decode_once(engine, requests, batch.num_tokens, total, is_done, is_cold=is_cold)
        if not total.num_rounds:
            raise ValueError(f"{batch.num_tokens} tokens are too few: requests end before they have settled")
        is_cold = False
    return total


def read(engine: Engine, prompts: Sequence[tuple[int, ...]], tick: Callable[[], None]) -> None:
    """Have prompts read, so that later requests find them in the cache."""
    for prompt in prompts:
        engine.generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        tick()


def _decode_once(
    engine: Engine,
    requests: Sequence[Request],
    num_tokens: int,
    counted: Counted,
    is_done: Callable[[Counted], bool],
    *,
    is_cold: bool,
) -> None:
    lengths = dict.fromkeys((request.request_id for request in requests), 0)
    for request in requests:
        engine.add_request(request)
    settling_since_s: float | None = None
    num_settling, is_settled = 0, False
    before: DraftCounts | None = None
    last_s = time.perf_counter()
    while not is_settled or (max(lengths.values()) < num_tokens and not is_done(counted)):
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
        if is_settled and before is None:
            before = DraftCounts.of(engine.metrics())
        last_s = now_s
    if before is not None:
        counted.drafts += DraftCounts.of(engine.metrics()) - before
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
            seed=choice_seed(number if batch.seed is None else batch.seed, index),
        )
        for index, prompt in enumerate(batch.prompts)
    ]
