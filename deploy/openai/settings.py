"""What the door must know beside the service: resolved once, immutable."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from deploy.openai.certificates import CertificateFiles
from deploy.openai.delivery_budget import DEFAULT_MAX_DELIVERIES_PER_S
from deploy.openai.keys import ApiKey
from deploy.openai.tracing import TracingConfig
from specdec.core.description import TargetDescription

DEFAULT_MAX_BODY_BYTES = 4 << 20
MAX_BODY_BYTES = 64 << 20
"""The longest that any door may be set to take: servers in front of doors hold no more."""
DEFAULT_MAX_CHOICES = 256
DEFAULT_MAX_LOGPROBS = 1 << 20
DEFAULT_BODY_TIMEOUT_S = 60.0
DEFAULT_WRITE_TIMEOUT_S = 30.0
DEFAULT_MAX_UNREAD_OUTPUTS = 512
DEFAULT_RESUME_WINDOW_S = 60.0
DEFAULT_STREAM_KEEP_ALIVE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """Limits, names and keys of one HTTP door."""

    served_model_name: str | None = None
    """Name that clients use; None: the loaded model's own id."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    """Longest request body; longer ones are answered with 413 and never held in memory."""
    max_choices: int = DEFAULT_MAX_CHOICES
    """Most choices (prompts times n) of one request."""
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    """Most log-probabilities of one response that is not streamed, and of the prompts of any request; those
    of alternatives count."""
    max_grammar_bytes: int | None = None
    """Longest grammar of a request, as the engine has it: what is refused here is not sent there first, once
    for each choice. None: the engine alone refuses."""
    request_timeout_s: float | None = None
    """Longest time for one request, queueing included; None: no limit."""
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S
    """Longest time for a request's body to arrive; later ones are answered with 408."""
    write_timeout_s: float = DEFAULT_WRITE_TIMEOUT_S
    """How long a client may be behind, and a second more for every 16 KiB that it takes meanwhile."""
    max_unread_outputs: int = DEFAULT_MAX_UNREAD_OUTPUTS
    """Most outputs of one choice that wait within the door; with more the request ends in an error. (What
    Serve has taken from it waits there: `slow_readers`.)"""
    max_deliveries_per_s: float = DEFAULT_MAX_DELIVERIES_PER_S
    """Deliveries of all streams together, per second: with many, each gets more at a time, less often."""
    niceness: int = 0
    """How far the door's process gives way to others."""
    stream_keep_alive_s: float | None = DEFAULT_STREAM_KEEP_ALIVE_S
    """Seconds without a delivery after which a stream gets a comment; None: it never does."""
    resume_window_s: float = DEFAULT_RESUME_WINDOW_S
    """Seconds for which a client that lost its connection may go on with its stream; 0: it may not."""
    failover_timeout_s: float = 0.0
    """Seconds for which streams wait for another coordinator when theirs is lost."""
    api_keys: tuple[ApiKey, ...] = ()
    """API keys that are accepted; empty: no key is asked for, unless the door has a ring of its own, with the
    keys of a file."""
    takes_model_defaults: bool = True
    """Whether requests that do not say how they are sampled are as the checkpoint says; else as OpenAI's."""
    share_prefixes_between_keys: bool = False
    """Let requests of one API key find prompts of others in the prefix cache: by the time until the first
    token, whoever guesses can tell what others have sent."""
    request_classes: frozenset[str] = frozenset()
    """Values of `metadata.class` that are told apart; all others count as one."""
    access_log: bool = False
    """Whether each request to the API is a line in the log."""
    ray_metrics: bool = True
    """Whether what /metrics says is published through Ray's metrics API, too."""
    tracing: TracingConfig | None = None
    """Where traces of requests go; None: there are none."""
    allowed_origins: tuple[str, ...] = ()
    """Web sites whose pages may send requests; `*`: all."""
    certificate: CertificateFiles | None = None
    """What clients are shown by the proxy in front of the door, which says when it ends; None: HTTP."""
    parallelism: str = "tp1"
    """How the target is split, for `system_fingerprint`."""

    @property
    def replay_window_s(self) -> float:
        """Seconds after its last event for which a stream is generated again that nobody remembers; 0: never.

        Who remembered it is lost then: it may have waited for another coordinator before it was cut off, and
        nobody can come back before there is one.
        """
        return self.resume_window_s + self.failover_timeout_s if self.resume_window_s > 0 else 0.0

    def model_name(self, description: TargetDescription) -> str:
        """Return the name that clients call the loaded model by."""
        return self.served_model_name or description.model_id

    def system_fingerprint(self, description: TargetDescription) -> str:
        """Return what tokens depend on beside the request: weights, numbers, split and rule."""
        promised = "invariant" if description.batch_invariant else None
        numbers = "-".join(filter(None, (description.dtype, description.quantization, promised)))
        fingerprint = f"{description.revision[:12]}-{numbers}-{self.parallelism}-{description.rule}"
        defaults = description.sampling_defaults.given() if self.takes_model_defaults else {}
        if not defaults:
            return fingerprint
        digest = hashlib.sha256(msgspec.json.encode(defaults, order="sorted")).hexdigest()
        return f"{fingerprint}-{digest[:8]}"
