"""What is generated: held-out prompts, split into texts that loop and texts that do not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.core.loops import ends_in_loop


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one class of text; batches take them in turn, from the first again after the last."""

    name: str
    prompts: tuple[tuple[int, ...], ...]

    def batches(self, size: int, number: int) -> list[list[tuple[int, ...]]]:
        """Return `number` batches of `size` prompts."""
        prompts = itertools.cycle(self.prompts)
        return [list(itertools.islice(prompts, size)) for _ in range(number)]


def read_prompts(path: Path) -> list[str]:
    """Read the `prompt` field of every line of a JSONL file."""
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line]


def piece(prompts: Sequence[str], number: int, length: int) -> str:
    """Return piece `number` of some texts, so many characters: of each in turn, from other places each time.

    The prefix cache would find the same prompts again.
    """
    text = prompts[number % len(prompts)]
    start = number // len(prompts) % max(1, len(text) - length + 1)
    return text[start : start + length]


def split_by_looping(
    prompts: Sequence[tuple[int, ...]], continuations: Sequence[Sequence[int]]
) -> tuple[Workload, Workload]:
    """Return (texts that do not loop, texts that do), by the target's own greedy continuations."""
    looping = [ends_in_loop(tokens) for tokens in continuations]
    return (
        Workload("non_looping", tuple(p for p, loops in zip(prompts, looping, strict=True) if not loops)),
        Workload("looping", tuple(p for p, loops in zip(prompts, looping, strict=True) if loops)),
    )


def window(text: Sequence[int], batch: int, length: int, number: int) -> list[tuple[int, ...]]:
    """Return batch `number` of prompts: windows of a text's tokens, other ones in every batch."""
    starts = [(number * batch + index) * 97 % (len(text) - length) for index in range(batch)]
    return [tuple(text[start : start + length]) for start in starts]
