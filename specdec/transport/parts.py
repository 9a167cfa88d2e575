"""What is too long for one message, in several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_parts(sized: Iterable[tuple[T, int]], most_bytes: int) -> Iterator[tuple[T, ...]]:
    """Yield items, each given with its bytes, in order: of one message after the other.

    None is longer than `most_bytes` together; what is longer by itself is alone.
    """
    part: list[T] = []
    num_bytes = 0
    for item, its_bytes in sized:
        if part and num_bytes + its_bytes > most_bytes:
            yield tuple(part)
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += its_bytes
    if part:
        yield tuple(part)
