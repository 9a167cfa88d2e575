"""Settings of drafters that look texts up: `speculative_config.suffix` and `speculative_config.retrieval`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
_MOST_TOKENS = 1 << 28
_SHARED_TOKENS = 1 << 20
_SUFFIX_KEYS_ELSEWHERE = {
    "suffix_decoding_max_spec_factor": "suffix.max_spec_factor",
    "suffix_decoding_min_token_prob": "suffix.min_token_probability",
    "suffix_decoding_max_cached_requests": "suffix.max_shared_tokens, in tokens",
    "suffix_decoding_max_tree_depth": "num_speculative_tokens, the only bound here",
}
"""What other engines call these settings."""


class SuffixConfig(StrictConfig):
    """What method suffix (or fallback suffix) looks up, and how much it proposes."""

    shape: Literal["chain", "tree"] = "chain"
    """chain: the most frequent continuation; tree: the most frequent ones, `num_speculative_tokens` tokens in
    all, where continuations differ."""
    max_spec_factor: float = Field(default=1.0, gt=0.0, le=64.0)
    """Most draft tokens for each token of the match: behind a match of 3 tokens, 3 are proposed at 1.0. At
    least one is, and never more than `num_speculative_tokens`."""
    min_token_probability: Probability = 0.1
    """Draft tokens that are reached less often than this, by counts of what followed before, are left out."""
    min_match_tokens: int = Field(default=1, ge=1, le=64)
    """Shortest match (tokens) that anything is proposed behind."""
    max_text_tokens: int = Field(default=32768, ge=64, le=_MOST_TOKENS)
    """Last tokens of a request's own text that are looked at: all of them in shorter texts, at least half as
    many in longer ones. About 150 bytes of memory for each."""
    max_shared_tokens: int | None = Field(default=None, ge=0, le=_MOST_TOKENS)
    """Generated tokens of ended requests that are kept for later ones, the latest; about 150 bytes of memory
    for each. None: 2^20 under `rejection_sample_method: sample_and_match` (and typical), 0 under other rules.
    0: requests learn nothing from each other. Requests of different API keys never do, unless
    `http.share_prefixes_between_keys`."""

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of ended requests that are kept, where the rule allows any."""
        return _SHARED_TOKENS if self.max_shared_tokens is None else self.max_shared_tokens


class RetrievalConfig(StrictConfig):
    """The corpus that method retrieval looks up in, and how much it proposes."""

    path: str = Field(min_length=1)
    """A file or a folder (with all folders in it) of UTF-8 text; of files that end in .jsonl, a text for each
    line. Where the coordinators run."""
    text_field: str = Field(default="text", min_length=1)
    """Field of a .jsonl line that has the text."""
    shape: Literal["chain", "tree"] = "chain"
    """As in `suffix.shape`."""
    min_match_tokens: int = Field(default=2, ge=1, le=32)
    """Shortest match (tokens) that anything is proposed behind."""
    max_match_tokens: int = Field(default=16, ge=1, le=32)
    """Last tokens of a request that are looked up at most."""
    min_token_probability: Probability = 0.1
    """As in `suffix.min_token_probability`."""
    cache_dir: str | None = None
    """Folder where indices of corpora are kept, 8 bytes for each token; None:
    `~/.cache/drafthouse/retrieval`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_match_tokens > self.max_match_tokens:
            raise ValueError(
                f"min_match_tokens ({self.min_match_tokens}) must not exceed max_match_tokens "
                f"({self.max_match_tokens})"
            )
        return self


def explain_suffix_keys(data: Any) -> None:
    """Raise ValueError, for a block of configuration with keys of other engines."""
    for key in _SUFFIX_KEYS_ELSEWHERE.keys() & data.keys() if isinstance(data, dict) else ():
        raise ValueError(f"there is no key {key} here; write {_SUFFIX_KEYS_ELSEWHERE[key]}")
