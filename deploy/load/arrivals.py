"""When requests arrive, and how long they are: drawn from a seed, or read from a trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from specdec.core.errors import ConfigError

Length = Callable[[random.Random], int]
_FORMS = "N, LOW-HIGH, lognormal:MEDIAN,SIGMA or exponential:MEAN"


class Arrival(BaseModel):
    """One request to come. A line of a trace is one of these in JSON, or the seconds alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_s: float = Field(ge=0, allow_inf_nan=False)
    """Seconds after the start."""
    prompt_length: int | None = Field(default=None, ge=1)
    """Tokens or words; None: as the options say."""
    output_length: int | None = Field(default=None, ge=1)
    """Tokens; None: as the options say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomArrivals:
    """Gaps from a gamma distribution with a given mean."""

    rate: float
    """Requests per second."""
    burstiness: float
    """Squared coefficient of variation of the gaps: 1 is a Poisson process, 0 a clock, more is bursts."""
    seed: int

    def times_s(self) -> Iterator[float]:
        """Yield times without end; the first gap counts from the start."""
        generator = random.Random(f"arrivals {self.seed}")
        at_s = 0.0
        while True:
            at_s += self._gap_s(generator)
            yield at_s

    def _gap_s(self, generator: random.Random) -> float:
        if self.burstiness == 0:
            return 1.0 / self.rate
        return generator.gammavariate(1.0 / self.burstiness, self.burstiness / self.rate)


def take(
    arrivals: RandomArrivals, *, num_requests: int | None, duration_s: float | None
) -> tuple[Arrival, ...]:
    """Return the first arrivals: so many, or those before a time, whichever ends first."""
    taken: list[Arrival] = []
    for at_s in arrivals.times_s():
        if (duration_s is not None and at_s >= duration_s) or len(taken) == num_requests:
            break
        taken.append(Arrival(at_s=at_s))
    return tuple(taken)


def read_trace(file: Path, *, speedup: float = 1.0) -> tuple[Arrival, ...]:
    """Return the arrivals of a trace, `speedup` times as fast, in order of time.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong: names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--trace: {file} cannot be read as text: {reason}") from None
    arrivals = [_arrival(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise ConfigError(f"--trace: {file} holds no arrival")
    scaled = [arrival.model_copy(update={"at_s": arrival.at_s / speedup}) for arrival in arrivals]
    return tuple(sorted(scaled, key=lambda arrival: arrival.at_s))


def _arrival(file: Path, number: int, line: str) -> Arrival:
    try:
        value = from_json(line)
        return Arrival.model_validate(value if isinstance(value, dict) else {"at_s": value})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--trace: {file}:{number}: {field}: {first['msg']}") from None
    except ValueError:
        raise ConfigError(
            f'--trace: {file}:{number}: is neither a number of seconds nor {{"at_s": ...}}'
        ) from None


def length_of(text: str, option: str) -> Length:
    """Return the distribution that an option names: N, LOW-HIGH, lognormal:MEDIAN,SIGMA, exponential:MEAN.

    Lengths are at least 1.

    Raises:
        ConfigError: it names none.
    """
    kind, _, rest = text.rpartition(":")
    try:
        if kind == "lognormal":
            median, sigma = _numbers(rest.split(","), 2)
            return lambda generator: max(1, round(median * generator.lognormvariate(0.0, sigma)))
        if kind == "exponential":
            (mean,) = _numbers([rest], 1)
            return lambda generator: max(1, round(generator.expovariate(1.0 / mean)))
        if not kind:
            low, high = (int(part) for part in (rest.split("-") if "-" in rest else (rest, rest)))
            if 1 <= low <= high:
                return lambda generator: generator.randint(low, high)
    except ValueError:
        pass
    raise ConfigError(f"{option}: must be {_FORMS}, got {text!r}")


def _numbers(parts: Sequence[str], count: int) -> list[float]:
    numbers = [float(part) for part in parts]
    if len(numbers) != count or not all(0 < number < 1e9 for number in numbers):
        raise ValueError(parts)
    return numbers
