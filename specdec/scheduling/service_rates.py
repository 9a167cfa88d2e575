"""How fast requests are served lately, and from that, how soon one that comes now would be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.core.decaying import DecayingMean, kept_after
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request

_HALF_LIFE = 32
"""Finished requests after which one counts half."""
_KEPT = kept_after(1.0, _HALF_LIFE)
_LEAST_FINISHES = 4.0
"""Fewer than that, finished while others waited, are no measurement of the drain rate."""
_LEAST_MARGIN = 1.2
_MOST_MARGIN = 2.0
_LEAST_FORESEEN = 8.0
"""After fewer of them, how well first tokens are foreseen is not known: the least margin holds."""
_DEVIATIONS = 2.5
"""Of how far first tokens were off, added to what is expected: about one in a hundred is later."""
_MOMENT_S, _MOMENT_TOKENS = 0.4, 64.0
"""Of decoding, after which what rounds took counts half: whichever is longer."""
_MOST_CHANGE = 3.0
"""By so much tokens may take more or less than those of finished requests did; a fault counts no further."""


@dataclass(slots=True)
class _MomentaryGap:
    """From rounds: finished requests tell of a change only when most of it is behind them."""

    seconds: DecayingMean = field(default_factory=DecayingMean)
    """Per token, summed over those who decoded."""

    def add(self, elapsed_s: float, seconds: float, num_tokens: int) -> None:
        """Count so many tokens, and what they took: by the clock, and summed over those who decoded."""
        half_lives = min(elapsed_s / _MOMENT_S, num_tokens / _MOMENT_TOKENS)
        self.seconds.add(seconds, num_tokens, kept=kept_after(half_lives, 1.0))

    @property
    def value_s(self) -> float | None:
        """Seconds per token of one request; None: too little was seen."""
        return self.seconds.value if self.seconds.weight >= _MOMENT_TOKENS else None


@dataclass(slots=True)
class _Foresight:
    """How first tokens came beside what was expected: a line through the origin by least squares.

    So a long wait that was foreseen badly counts for more than a short one.
    """

    count: float = 0.0
    expected_squared: float = 0.0
    product: float = 0.0
    actual_squared: float = 0.0

    def add(self, expected_s: float, actual_s: float) -> None:
        """Count one who waited. What was off by far (a fault, newcomers of a higher priority) is cut."""
        actual_s = min(actual_s, _MOST_MARGIN * expected_s)
        self.count = _KEPT * self.count + 1.0
        self.expected_squared = _KEPT * self.expected_squared + expected_s * expected_s
        self.product = _KEPT * self.product + expected_s * actual_s
        self.actual_squared = _KEPT * self.actual_squared + actual_s * actual_s

    @property
    def margin(self) -> float:
        """What to multiply an expectation by, so that few come later than that."""
        if self.count < _LEAST_FORESEEN:
            return _LEAST_MARGIN
        slope = self.product / self.expected_squared
        variance = max(0.0, self.actual_squared / self.expected_squared - slope * slope)
        return min(max(slope + _DEVIATIONS * math.sqrt(variance), _LEAST_MARGIN), _MOST_MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """When things would happen for a request that comes now, in seconds from now.

    They are means: `margin` times as long is what few exceed.
    """

    wait_s: float
    """Until it runs."""
    first_token_s: float
    end_s: float
    margin: float = _LEAST_MARGIN


class ServiceRates:
    """Measured on requests that finished, in the order of their ends, and on the rounds of those who run.

    What requests took is the mean of many, and late: who would be told of a place in two seconds by what was
    true two seconds ago waits for three when the machine has something else to do. So it is scaled by what
    tokens take now. Times are the engine's clock.

    The drain rate is measured while somebody waits: requests finish as seldom as they come otherwise. Before
    that was ever so, it is what `max_num_seqs` requests at once would make of the time that one takes.
    Nothing measured means no time at all: nobody is refused for a guess.
    """

    __slots__ = (
        "_first_token",
        "_foresight",
        "_gap",
        "_length",
        "_max_num_seqs",
        "_momentary_gap",
        "_num_decoding",
        "_saturated_gap",
        "_seen_s",
        "_service",
        "_tokenless_s",
        "_was_saturated",
    )

    def __init__(self, max_num_seqs: int, now_s: float) -> None:
        self._max_num_seqs = max_num_seqs
        self._seen_s = now_s
        self._was_saturated = False
        self._saturated_gap = DecayingMean()
        """Seconds between two ends, while somebody waits."""
        self._service = DecayingMean()
        """Seconds from a request's first round to its end; of those that began here."""
        self._first_token = DecayingMean()
        """Seconds per token that was read, cached or not, from the first round to the first new token."""
        self._gap = DecayingMean()
        """Seconds per token after the first."""
        self._length = DecayingMean()
        """Generated tokens, of requests that were to generate any."""
        self._foresight = _Foresight()
        self._momentary_gap = _MomentaryGap()
        self._num_decoding = 0
        """Behind the last round."""
        self._tokenless_s = 0.0
        """Of decoding, since rounds last brought tokens."""

    def note_first_token(self, expected_s: float, actual_s: float) -> None:
        """Take in when the first token of one who had to wait has come, in seconds from its arrival."""
        self._foresight.add(expected_s, actual_s)

    def note_round(
        self, outputs: list[RequestOutput], now_s: float, *, num_decoding: int, is_saturated: bool
    ) -> None:
        """Take in what a round has brought.

        Args:
            outputs: what is new.
            now_s: when the round was over.
            num_decoding: who has a first token and goes on.
            is_saturated: somebody waits behind it.
        """
        if self._num_decoding > 0:
            self._note_tokens(outputs, now_s - self._seen_s)
        self._num_decoding = num_decoding
        finished = [output for output in outputs if output.finish_reason in ("stop", "length")]
        if self._was_saturated:
            number = len(finished)
            self._saturated_gap.add(now_s - self._seen_s, number, kept=_KEPT**number)
        self._seen_s = now_s
        self._was_saturated = is_saturated
        for output in finished:
            self._note_finish(output)

    def note_idle(self) -> None:
        """Nobody is left: time until somebody comes is none that anything took."""
        self._was_saturated = False
        self._num_decoding = 0
        self._tokenless_s = 0.0

    def _note_tokens(self, outputs: list[RequestOutput], elapsed_s: float) -> None:
        self._tokenless_s += elapsed_s
        # First tokens are not counted; who ends without a token has none that could be one.
        num_tokens = sum(
            len(output.token_ids) - (output.first_index == 0) for output in outputs if output.token_ids
        )
        if num_tokens == 0:
            return
        seconds = self._tokenless_s * self._num_decoding
        if self._gap.value > 0.0:
            seconds = min(seconds, _MOST_CHANGE * self._gap.value * num_tokens)
        self._momentary_gap.add(self._tokenless_s, seconds, num_tokens)
        self._tokenless_s = 0.0

    def _note_finish(self, output: RequestOutput) -> None:
        stats = output.stats
        if stats is None or stats.first_scheduled_s is None or stats.finished_s is None:
            return
        num_delivered = stats.num_delivered_tokens
        if not num_delivered:  # else most of it may have happened elsewhere
            self._service.add(stats.finished_s - stats.first_scheduled_s, kept=_KEPT)
        if output.num_generated_tokens:  # else its prompt was to be scored, which takes a place, too
            self._length.add(output.num_generated_tokens, kept=_KEPT)
        if stats.first_token_s is not None:
            read_s = stats.first_token_s - stats.first_scheduled_s
            num_read = max(1, output.num_prompt_tokens + num_delivered)
            self._first_token.add(read_s, num_read, kept=_KEPT)
            num_more = output.num_generated_tokens - num_delivered - 1
            if num_more > 0:
                self._gap.add(stats.finished_s - stats.first_token_s, num_more, kept=_KEPT)

    @property
    def seconds_per_request(self) -> float:
        """Mean time between two requests that finish while others wait; 0: nothing is known."""
        if self._saturated_gap.weight >= _LEAST_FINISHES:
            return self._saturated_gap.value
        return self._service.value / self._max_num_seqs

    @property
    def usual_tokens(self) -> int:
        """About how many tokens requests generate."""
        return round(self._length.value)

    def expected_tokens(self, request: Request) -> int:
        """Return about how many tokens a request will generate: as others do, but no more than it may."""
        most = request.params.max_tokens
        usual = self.usual_tokens
        if most is None:
            return usual
        return most if request.params.ignore_eos or usual <= 0 else min(most, usual)

    def wait_s(self, num_before: int, running: Sequence[int] = ()) -> float:
        """Return how long one waits who begins to run when so many have finished.

        Args:
            num_before: how many; 0 or less: there is a place.
            running: tokens that each of those who run is expected to generate yet. Who began together ends
                together: places come free in lumps, not evenly. Without, they come at the drain rate.
        """
        if num_before <= 0:
            return 0.0
        if not running:
            return num_before * self.seconds_per_request
        turn, place = divmod(num_before - 1, len(running))
        return self._slowness * (sorted(running)[place] * self._gap.value + turn * self._service.value)

    @property
    def _slowness(self) -> float:
        """How many times as long as of those who have finished tokens take now."""
        now_s, usual_s = self._momentary_gap.value_s, self._gap.value
        if now_s is None or usual_s <= 0.0:
            return 1.0
        return min(max(now_s / usual_s, 1.0 / _MOST_CHANGE), _MOST_CHANGE)

    def expect(self, request: Request, num_before: int, running: Sequence[int] = ()) -> Expectation:
        """Return what a request would experience for which so many others have to finish first (`wait_s`)."""
        wait_s = self.wait_s(num_before, running)
        first_token_s = wait_s + self._slowness * self._first_token.value * len(request.prompt_token_ids)
        num_more = max(0, self.expected_tokens(request) - 1)
        return Expectation(
            wait_s=wait_s,
            first_token_s=first_token_s,
            end_s=first_token_s + self._slowness * self._gap.value * num_more,
            margin=self._foresight.margin,
        )
