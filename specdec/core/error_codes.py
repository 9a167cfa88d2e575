"""What the last output of a request that failed says of why, for programs (`RequestOutput.error_code`).

Clients see most of these as `error.code`; the three of coordinators never leave the cluster.
"""

from __future__ import annotations

from typing import Final

NON_FINITE_LOGITS: Final = "non_finite_logits"
"""The model computed infinities or NaN for this request."""
NO_TOKEN_ALLOWED: Final = "no_token_allowed"
"""What the request asks for forbids every token."""
INVALID_GRAMMAR: Final = "invalid_grammar"
"""Its grammar is malformed, too complex or allows nothing; nothing was generated."""
GRAMMAR_NOT_COMPILED: Final = "grammar_not_compiled"
"""The server could not try or compile its grammar, for want of memory or processes, say: nothing of it is
known to be wrong, and nothing was generated."""
GRAMMAR_FAILED: Final = "grammar_failed"
"""Its grammar became impossible, or too expensive, on the way."""
OUTPUT_TOO_LARGE: Final = "output_too_large"
"""One of its outputs is more than any message can hold."""

TIMED_OUT: Final = "request_timeout"
"""It was not complete in the time that it was given."""
DISPLACED: Final = "displaced"
"""It had to leave a full queue, before it ran, for one that goes before it."""
SHUTTING_DOWN: Final = "shutting_down"
"""The service ended before the stream did. Nothing was wrong with the request: it may be sent again."""
ENGINE_FAILED: Final = "engine_failed"
"""The engine in this process raised what nobody foresaw."""

TARGET_LOST: Final = "target_lost"
"""An engine gives its requests up; in a cluster they are replayed, and this is not delivered."""
COORDINATOR_FAILED: Final = "coordinator_failed"
"""A whole coordinator gives up; the ingress takes its streams elsewhere.

No crash: it was meant to end, or cannot bring back a target whose loss it has told of (`Admitted`)."""
COORDINATOR_CRASHED: Final = "coordinator_crashed"
"""As `COORDINATOR_FAILED`, because its loop raised what nobody foresaw: a stream may be to blame."""
COORDINATOR_LOST: Final = "coordinator_lost"
"""Who served it was lost, and nobody came back in `cluster.failover_timeout_s`."""
REPLAY_FAILED: Final = "replay_failed"
"""Who served it was lost, and nobody else takes it as it is: they are of another configuration, say."""
FAILED_REPEATEDLY: Final = "request_failed_repeatedly"
"""It was in flight alone when the target, or the coordinator, was lost again."""
