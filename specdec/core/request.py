"""One generation stream as it is handed to an engine."""

from __future__ import annotations

import msgspec

from specdec.core.ids import Epoch, RequestId
from specdec.core.sampling_params import SamplingParams

OTHER_CLASS = "other"
"""Class of requests that name none."""


_LEAST_TTFT_MS = 1.0
"""Left of a limit that is over."""


class LatencyTarget(msgspec.Struct, frozen=True, kw_only=True):
    """How soon a client wants its tokens. What was taken in is served, be it late."""

    ttft_ms: float | None = None
    """Milliseconds to the first token: rows that read its prompt go before draft rows of others; with
    `scheduler.refuse_late` a request is refused that could not have it by then."""
    itl_ms: float | None = None
    """Milliseconds between two rounds of the stream: a controller that chooses k makes no round longer than
    that by drafting, as long as rounds without drafts are not."""


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """By what a client that lost its connection may go on with a stream, and for how long."""

    name: str
    """Of the stream, the same in all attempts at it (request ids differ between connections)."""
    proof: bytes
    """Digest of API key, model and request: whoever does not show the same is told nothing."""
    window_s: float
    """Seconds after its end for which its tokens are kept."""
    replay_window_s: float = 0.0
    """Seconds after its last event for which they are generated again where they are lost. Doors of an older
    version do not say: as long as they are kept."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine needs to start, or to continue elsewhere, one stream.

    A replay after a failure is the same request with `delivered_token_ids` filled: by the token
    function (see docs/architecture.md) the stream continues exactly where it was.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The noise key of this stream, as an unsigned 64-bit number (already hashed with the choice index)."""
    epoch: Epoch = Epoch(0)
    delivered_token_ids: tuple[int, ...] = ()
    """Generated tokens that the client already has; they count towards usage and max_tokens."""
    priority: int = 0
    """Smaller is served first, and takes the place of larger; equals are served in order of arrival."""
    num_draft_tokens: int | None = None
    """Per-request override of k; 0 switches speculation off for this request; None: the server decides."""
    kv_budget: int | float | str | None = None
    """How much of its K/V drafts attend to, where there is a selection policy: an int is tokens, a float (or
    a text such as "5%") a share of the length. Changes speed alone; None: the server decides."""
    drafter: str | None = None
    """Which of several drafters drafts for it, by name; changes speed alone; None: the server decides."""
    owner: str | None = None
    """Whose it is: owners (API keys) take turns in the queue; None is an owner of its own."""
    cache_salt: str | None = None
    """Only requests of one salt share cached K/V; None is a salt of its own."""
    timeout_s: float | None = None
    """Seconds from its arrival at an engine after which it ends, complete or not; None: no limit."""
    class_name: str = OTHER_CLASS
    """What kind of request it is; how far drafts of its kind are accepted is where it begins."""
    slo: LatencyTarget | None = None
    """How soon its tokens are wanted; None: as soon as may be."""
    num_crashes: int = 0
    """Losses of a target or coordinator at which it was in flight, elsewhere: it may be to blame."""
    was_admitted: bool = False
    """Whether it was taken in before, here or elsewhere: then it is served, be it late, and gives its place
    to nobody."""
    resumption: Resumption | None = None
    """None: its tokens are forgotten with its end."""

    is_traced: bool = False
    """Whether its rounds are timed one by one, for whoever shows them (`RequestStats.trace`)."""

    @property
    def goes_on(self) -> bool:
        """Whether it was promised to be served."""
        return self.was_admitted or bool(self.delivered_token_ids)

    def continued(self, *, delivered_token_ids: tuple[int, ...], elapsed_s: float) -> Request:
        """Return what is left of it after some time, to be submitted again, be it elsewhere."""
        timeout_s = None if self.timeout_s is None else max(0.0, self.timeout_s - elapsed_s)
        slo = self.slo
        if slo is not None and slo.ttft_ms is not None and not delivered_token_ids:
            left_ms = max(_LEAST_TTFT_MS, slo.ttft_ms - 1000.0 * elapsed_s)
            slo = msgspec.structs.replace(slo, ttft_ms=left_ms)
        return msgspec.structs.replace(
            self, delivered_token_ids=delivered_token_ids, timeout_s=timeout_s, slo=slo
        )
