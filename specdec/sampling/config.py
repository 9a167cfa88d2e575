"""Bounds of what requests may ask of grammars."""

from __future__ import annotations

from pydantic import Field

from specdec.core.config import StrictConfig


class GrammarConfig(StrictConfig):
    """How much a grammar (JSON schema, regular expression, ...) of one request may cost."""

    max_bytes: int = Field(default=65_536, ge=1)
    """Longest schema, regular expression, list of choices or grammar, in bytes of UTF-8."""
    max_size: int = Field(default=100_000, ge=1)
    """Most symbols that a compiled grammar may have."""
    max_memory_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Most memory that a grammar may need."""
    compile_timeout_s: float = Field(default=5.0, gt=0)
    """Longest time (seconds of a CPU) to compile a grammar. Threads and processes of its own do it: no round
    waits for it."""
    mask_timeout_s: float = Field(default=0.25, gt=0)
    """A request whose grammar takes longer (seconds of a CPU) to find what may come next, twice or four times
    as long, is ended: a round waits for it."""
    num_threads: int = Field(default=2, ge=1)
    """Grammars that are compiled at once."""
