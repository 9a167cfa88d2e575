"""Requests by distribution: when they come, how long they are, how well they can be drafted for.

Lengths are lognormal through the median and the mean of public traces: coding and conversation of the Azure
LLM inference traces of November 2023 (Patel et al., "Splitwise", ISCA 2024), counted in the published files.
Gaps between arrivals are Gamma with a coefficient of variation above 1, the model that Wang et al.
("BurstGPT", arXiv:2401.17644) fit to Azure's traffic; in those files it is 1.1 for conversation and 13 for
coding. On top of it the rate may follow steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.core.ids import RequestId
from specdec.core.request import OTHER_CLASS
from specdec.scheduling.state import ServiceKey

LONGEST = 8192
"""Tokens of a prompt, and of an output, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A lognormal number of tokens."""

    median: float
    mean: float

    def draw(self, generator: np.random.Generator, number: int) -> list[int]:
        """Return so many lengths, from 1 to `LONGEST`."""
        sigma = math.sqrt(2.0 * math.log(self.mean / self.median))
        drawn = generator.lognormal(math.log(self.median), sigma, number)
        return np.clip(drawn, 1.0, LONGEST).astype(int).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One kind of traffic."""

    name: str
    prompt: Lengths
    output: Lengths
    acceptance: float
    """Mean over requests of the probability that a draft token stands."""
    concentration: float = 12.0
    """Of the Beta distribution that requests' acceptances are drawn from."""
    variation: float = 2.0
    """Coefficient of variation of the gaps between arrivals; 1: Poisson."""


CHAT = Trace(
    name="chat",
    prompt=Lengths(median=1020, mean=1155),
    output=Lengths(median=129, mean=211),
    acceptance=0.7,
)
CODE = Trace(
    name="code",
    prompt=Lengths(median=1469, mean=2048),
    output=Lengths(median=13, mean=28),
    acceptance=0.8,
)
"""Acceptance is our assumption: the traces have no texts."""
LONG = Trace(
    name="long",
    prompt=Lengths(median=4000, mean=4200),
    output=Lengths(median=600, mean=800),
    acceptance=0.7,
)
"""Long contexts, an assumption altogether."""


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedRequest:
    """A request as scheduling sees it (`Schedulable`), and what is to become of it."""

    request_id: RequestId
    service_key: ServiceKey
    committed_len: int
    num_to_generate: int
    acceptance: float
    arrived_s: float = 0.0
    num_computed: int = 0
    num_blocks: int = 0
    num_generated: int = 0
    first_token_s: float | None = None
    first_generated: int = 0
    """Tokens that it had when it came: of a request that began before the simulation."""
    has_drafts: bool = False
    """draft_ahead: its last verdict had been prepared for."""
    was_looked_ahead: bool = False
    is_in_flight: bool = False
    num_replays: int = 0
    class_name: str = OTHER_CLASS
    requested_draft_tokens: int | None = None
    max_chunk_tokens: int | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    has_own_kv_budget: bool = True
    own_drafter: int | None = None

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens that could still be of use."""
        return max(0, self.num_to_generate - self.num_generated - 1)

    @property
    def draft_context(self) -> int:
        """Committed tokens that a draft attends to: all of them."""
        return self.committed_len

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt has been read."""
        return self.num_computed == self.committed_len - 1

    @property
    def is_finished(self) -> bool:
        """Whether all its tokens are there."""
        return self.num_generated >= self.num_to_generate


class Source:
    """Draws requests of one trace, the same ones for the same seed."""

    def __init__(self, trace: Trace, seed: int) -> None:
        """Begin with request 0."""
        self._trace = trace
        self._generator = np.random.default_rng([seed, 0xA11])
        self._num_drawn = 0
        self._drawn: Iterator[tuple[int, int, float]] = iter(())

    def draw(self, arrived_s: float) -> SimulatedRequest:
        """Return the next request."""
        values = next(self._drawn, None)
        if values is None:
            self._drawn = self._draw_many(1024)
            values = next(self._drawn)
        prompt, output, acceptance = values
        number = self._num_drawn
        self._num_drawn += 1
        return SimulatedRequest(
            request_id=RequestId(f"{self._trace.name}-{number}"),
            service_key=ServiceKey(0, 0, number),
            committed_len=prompt,
            num_to_generate=output,
            acceptance=acceptance,
            arrived_s=arrived_s,
            class_name=self._trace.name,
        )

    def draw_running(self, arrived_s: float) -> SimulatedRequest:
        """Return a request as it is met at a random moment of a long run: a longer one, part done."""
        candidates = [self.draw(arrived_s) for _ in range(8)]
        weights = np.array([one.num_to_generate for one in candidates], dtype=np.float64)
        request = candidates[self._generator.choice(len(candidates), p=weights / weights.sum())]
        request.num_generated = int(self._generator.integers(0, request.num_to_generate))
        request.first_generated = request.num_generated
        request.committed_len += request.num_generated
        request.num_computed = request.committed_len - 1
        return request

    def _draw_many(self, number: int) -> Iterator[tuple[int, int, float]]:
        trace, generator = self._trace, self._generator
        mean, weight = trace.acceptance, trace.concentration
        return iter(
            list(
                zip(
                    trace.prompt.draw(generator, number),
                    trace.output.draw(generator, number),
                    generator.beta(mean * weight, (1.0 - mean) * weight, number).tolist(),
                    strict=True,
                )
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStep:
    """A rate of arrivals from one moment on."""

    start_s: float
    rate: float
    """Requests per second."""


def arrival_times(
    steps: Sequence[LoadStep], end_s: float, variation: float, generator: np.random.Generator
) -> Iterator[float]:
    """Yield the moments of arrivals up to `end_s`: a Gamma renewal process whose rate follows the steps."""
    shape = 1.0 / variation**2
    now_s, at = steps[0].start_s, 0
    while True:
        gap = float(generator.gamma(shape, 1.0 / shape))  # of mean 1: spent at the rate of the moment
        while True:
            rate = steps[at].rate
            until_s = steps[at + 1].start_s if at + 1 < len(steps) else math.inf
            if rate > 0.0 and now_s + gap / rate <= until_s:
                now_s += gap / rate
                break
            if until_s >= end_s:
                return
            gap -= (until_s - now_s) * rate
            now_s, at = until_s, at + 1
        if now_s >= end_s:
            return
        yield now_s
