"""The state of one stream inside an engine. Only `commit` advances it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.request import Request
from specdec.core.sampling_params import Grammar, SamplingParams


class TokenConstraint(Protocol):
    """What a grammar allows behind the committed tokens of one sequence."""

    @property
    def grammar(self) -> Grammar:
        """In full: `SequenceView.params` may have it without its text."""
        ...

    def allowed_after(self, drafted: Seq[int]) -> bytes | None:
        """Return which tokens may follow drafted ones, as `TargetWork.masks`; None: not those themselves."""
        ...


class SequenceView(Protocol):
    """What a proposer may see of a sequence. Nothing here can be written to."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def token_ids(self) -> Seq[int]:
        """Committed tokens, prompt included."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def committed_len(self) -> int:
        """`len(token_ids)`: also the absolute position of the next token."""
        ...

    @property
    def prefix_hash(self) -> int:
        """Hash of `token_ids` (`core.prefix_hash`)."""
        ...

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int:
        """Unsigned 64-bit noise key of the stream."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Only sequences of one salt may share K/V."""
        ...

    @property
    def owner(self) -> str | None:
        """Whose text it is (`Request.owner`), as far as whoever shows it knows."""
        ...

    @property
    def kv_budget(self) -> int:
        """Tokens that drafts may attend to, at present; 0: as whoever drafts is configured."""
        ...

    @property
    def constraint(self) -> TokenConstraint | None:
        """What a grammar allows, where there is one; it makes drafts better, no more."""
        ...


class Sequence:
    """Committed tokens of one request and how many of them have K/V in the target's cache.

    `num_computed` counts leading tokens whose target K/V are valid. While a sequence decodes it is
    `committed_len - 1`: the last committed token is fed in the next round.
    """

    __slots__ = ("_prefix_hash", "_token_ids", "num_computed", "num_prompt_tokens", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._token_ids = [*request.prompt_token_ids, *request.delivered_token_ids]
        self._prefix_hash = extend_prefix_hash(EMPTY_PREFIX, self._token_ids)
        self.num_computed = 0

    @property
    def request_id(self) -> RequestId:
        """Id of the request."""
        return self.request.request_id

    @property
    def token_ids(self) -> Seq[int]:
        """Committed tokens, prompt included; do not write to it."""
        return self._token_ids

    @property
    def committed_len(self) -> int:
        """Number of committed tokens; the absolute position of the next one."""
        return len(self._token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens, those delivered by earlier epochs included."""
        return len(self._token_ids) - self.num_prompt_tokens

    @property
    def prefix_hash(self) -> int:
        """Hash of the committed tokens."""
        return self._prefix_hash

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the request."""
        return self.request.params

    @property
    def seed(self) -> int:
        """Noise key of the stream."""
        return self.request.seed

    @property
    def cache_salt(self) -> str | None:
        """Only sequences of one salt may share K/V."""
        return self.request.cache_salt

    @property
    def owner(self) -> str | None:
        """Whose text it is."""
        return self.request.owner

    @property
    def is_decoding(self) -> bool:
        """Whether everything but the last committed token is in the cache."""
        return self.num_computed == len(self._token_ids) - 1

    def advance_computed(self, num_tokens: int) -> None:
        """Record that K/V of the next `num_tokens` committed tokens are now in the cache (prefill)."""
        assert self.num_computed + num_tokens <= len(self._token_ids)
        self.num_computed += num_tokens

    def commit(self, token_ids: Seq[int]) -> None:
        """Append verified tokens. All of them but the last have K/V in the cache afterwards.

        The caller has cut `token_ids` at the first finishing token.
        """
        assert token_ids, "a commit carries at least one token"
        self.num_computed = len(self._token_ids) + len(token_ids) - 1
        self._token_ids.extend(token_ids)
        self._prefix_hash = extend_prefix_hash(self._prefix_hash, token_ids)

    def evict(self) -> None:
        """Forget that anything is cached (preemption by recompute)."""
        self.num_computed = 0
