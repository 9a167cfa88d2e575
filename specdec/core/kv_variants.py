"""When equal tokens have other K/V because of the length of their sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KvVariants:
    """Says which K/V a sequence has, by number: 0 are the ordinary ones.

    K/V of one variant are of no use to a sequence of another, whatever its tokens are.
    """

    original_len: int
    """Sequences of up to so many tokens have the ordinary ones."""
    by_prompt: bool
    """The length of the prompt decides, once and for all, and each length has a variant of its own; otherwise
    the length of the sequence does: when it grows beyond `original_len`, everything is computed anew."""

    def of(self, *, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return the variant of a sequence of `num_tokens` tokens, prompt included."""
        if self.by_prompt:
            return num_prompt_tokens if num_prompt_tokens > self.original_len else 0
        return int(num_tokens > self.original_len)

    def num_tokens_left(self, num_tokens: int) -> int | None:
        """Return how many tokens a sequence can grow before it changes its variant; None: any number."""
        is_left = not self.by_prompt and num_tokens <= self.original_len
        return self.original_len - num_tokens if is_left else None
