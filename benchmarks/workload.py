"""What is generated: held-out prompts, split into texts that loop and texts that do not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOOP_WINDOW = 64
LOOP_MAX_PERIOD = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one class of text; a batch takes the first ones, repeated when there are too few."""

    name: str
    prompts: tuple[tuple[int, ...], ...]

    def batch(self, size: int) -> list[tuple[int, ...]]:
        """Return `size` prompts."""
        repeats = -(-size // len(self.prompts))
        return list(self.prompts * repeats)[:size]


def read_prompts(path: Path) -> list[str]:
    """Read the `prompt` field of every line of a JSONL file."""
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line]


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the last 64 tokens repeat with a period of at most 32."""
    tail = list(token_ids[-LOOP_WINDOW:])
    if len(tail) < LOOP_WINDOW:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_MAX_PERIOD + 1))


def split_by_looping(
    prompts: Sequence[tuple[int, ...]], continuations: Sequence[Sequence[int]]
) -> tuple[Workload, Workload]:
    """Return (texts that do not loop, texts that do), by the target's own greedy continuations."""
    looping = [is_looping(tokens) for tokens in continuations]
    return (
        Workload("non_looping", tuple(p for p, loops in zip(prompts, looping, strict=True) if not loops)),
        Workload("looping", tuple(p for p, loops in zip(prompts, looping, strict=True) if loops)),
    )
