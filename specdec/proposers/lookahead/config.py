"""The `speculative_config.lookahead` block."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig

_KEYS_ELSEWHERE = {
    "max_window_size": "window_size",
    "max_ngram_size": "ngram_size",
    "max_verification_set_size": "verification_set_size",
    "window": "window_size",
    "level": "ngram_size",
    "guess_set_size": "verification_set_size",
}
"""What other implementations call these settings."""


class LookaheadConfig(StrictConfig):
    """How far method lookahead looks ahead, and what it keeps."""

    window_size: int = Field(default=5, ge=1, le=32)
    """W: positions that the window covers: n-grams that are made up in each round."""
    ngram_size: int = Field(default=4, ge=3, le=8)
    """N: tokens of an n-gram. The window has N - 1 levels, so each request's part of a round has
    W - 1 + (N - 2) * W rows beside those of its draft."""
    verification_set_size: int = Field(default=5, ge=1, le=32)
    """G: n-grams behind one token that are kept, the latest, and proposed together: trees of at most
    G * (N - 1) tokens, of which `num_speculative_tokens` are proposed."""
    max_pool_ngrams: int = Field(default=4096, ge=1, le=1 << 20)
    """N-grams that are kept of one request, at most; about 200 bytes of memory for each."""
    reads_text: bool = True
    """Whether n-grams of the request's own text, prompt included, are kept too, not only those of the
    window."""

    @property
    def num_rows_beside(self) -> int:
        """Rows that the window adds to a round, for each request."""
        return self.window_size - 1 + (self.ngram_size - 2) * self.window_size

    @property
    def max_nodes(self) -> int:
        """Tokens of the largest tree."""
        return self.verification_set_size * (self.ngram_size - 1)

    @model_validator(mode="before")
    @classmethod
    def _explain_keys(cls, data: Any) -> Any:
        for key in _KEYS_ELSEWHERE.keys() & data.keys() if isinstance(data, dict) else ():
            raise ValueError(f"there is no key {key} here; write {_KEYS_ELSEWHERE[key]}")
        return data
