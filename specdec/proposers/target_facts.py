"""What a proposer has to know of the target it drafts for."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_READ_TOKENS = 512
"""So many are read at once wherever it can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What a proposer has to know of the target it drafts for."""

    vocab_size: int
    dtype: str
    """As in `ModelConfig.dtype`."""
    max_num_seqs: int
    """Sequences that the target runs at once at most."""
    model: str | None = None
    """Path of the target's folder, to compare tokenizers with; None: not compared."""
    trust_remote_code: bool = False
    """Whether Python code in that folder may be run."""
    max_model_len: int | None = None
    """Longest sequence that it serves, in tokens; None: not known."""
    max_read_tokens: int = LEAST_READ_TOKENS
    """Most tokens of prompts that who drafts on K/V of its own reads at once: no fewer than the target."""
