"""What scheduling knows of a request, of the limits of a round, and what it decides."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from specdec.core.ids import RequestId


class ServiceKey(NamedTuple):
    """Order of service: smaller first. Unique, because arrival numbers are."""

    priority: int
    turn: int
    """Among requests of one priority whose turn it is, see `FairTurns`."""
    arrival: int
    """Running number of the request; it keeps it when it is preempted."""


class Schedulable(Protocol):
    """A request as scheduling sees it; nothing here is written to."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def service_key(self) -> ServiceKey: ...
    @property
    def committed_len(self) -> int:
        """Committed tokens, prompt included."""
        ...

    @property
    def draft_context(self) -> int:
        """Committed tokens that a draft attends to: all of them, or its budget (`kv.selection`)."""
        ...

    @property
    def has_own_kv_budget(self) -> bool:
        """Whether what its drafts attend to is not the controller's to choose."""
        ...

    @property
    def own_drafter(self) -> int | None:
        """Which of several drafters it has, where that is not the controller's to choose; None: it is."""
        ...

    @property
    def num_computed(self) -> int:
        """Leading committed tokens whose K/V are in the cache."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks held."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens that could still be of use (0 right before max_tokens or the context limit)."""
        ...

    @property
    def requested_draft_tokens(self) -> int | None:
        """The request's own k; None leaves it to the controller."""
        ...

    @property
    def max_chunk_tokens(self) -> int | None:
        """Most prompt tokens to read in one round; None: as many as there is room for."""
        ...

    @property
    def class_name(self) -> str:
        """What kind of request it is, for those who learn from others of its kind."""
        ...

    @property
    def ttft_s(self) -> float | None:
        """How soon its first token is wanted, in seconds; None: no matter."""
        ...

    @property
    def itl_s(self) -> float | None:
        """Longest time between two rounds of it that its client wants, in seconds; None: any."""
        ...


class CachedPrefix(NamedTuple):
    """What the cache has of a waiting request."""

    num_tokens: int = 0
    """Leading tokens whose K/V are there: whole blocks, and never the request's last token."""
    num_held_blocks: int = 0
    """Of these blocks, those that somebody holds. The others come out of the free ones."""
    next_block: Hashable | None = None
    """Name of the first full block that is not there; None when there is none."""


class BlockSharing(Protocol):
    """What scheduling asks about KV blocks that several requests hold, or that are kept for others."""

    def cached_prefix(self, request_id: RequestId) -> CachedPrefix:
        """Look a waiting request up."""
        ...

    def unread_blocks(self, request_id: RequestId) -> Iterable[Hashable]:
        """Names of the full blocks that a request has yet to compute, when others may find them."""
        ...

    def num_freed(self, request_ids: Collection[RequestId]) -> int:
        """Blocks that become free when all of these running requests give theirs back."""
        ...

    def num_lost(self, request_id: RequestId) -> int:
        """Computed tokens in blocks that a running request alone holds: what preemption may lose."""
        ...


class RoundLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one round may use."""

    max_num_seqs: int
    max_num_batched_tokens: int
    """At least `max_num_seqs`."""
    block_size: int
    num_free_blocks: int
    num_usable_blocks: int
    """Blocks of the whole pool, free or not."""
    num_elsewhere: int = 0
    """Running requests that are none of this round's business: they hold places and blocks, and keep them."""
    num_rows_beside: int = 0
    """Rows that drafting for a sequence takes beside those of its drafts."""
    max_sequence_len: int | None = None
    """Tokens and rows of a sequence, at most; needed where there are rows beside."""
    pressed: frozenset[RequestId] = frozenset()
    """Requests without a first token for which the time is running out, and not over (`slo.ttft_ms`)."""


class RoundPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who gets how many rows in a round. Keys of both mappings are in order of service."""

    num_tokens: Mapping[RequestId, int]
    """Rows of each scheduled request, draft rows included."""
    num_draft_tokens: Mapping[RequestId, int]
    """Of those, rows kept for draft tokens. Decoding requests only; no entry means 0."""
    num_rows_beside: Mapping[RequestId, int] = msgspec.field(default_factory=dict)
    """Of those, rows kept beside drafts. No entry means 0."""
    preempted: tuple[RequestId, ...] = ()
    """Running requests that give all their blocks back, before anything else happens."""
    admitted: tuple[RequestId, ...] = ()
    """Waiting requests that run from now on, in order; they get blocks for all their tokens at once."""
    num_cached: Mapping[RequestId, int] = msgspec.field(default_factory=dict)
    """Tokens of admitted requests that need not be computed: `CachedPrefix.num_tokens`, where not 0."""
