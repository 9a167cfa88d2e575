"""What every peer's program says and hears: one JSON object per line.

In comes first a `Setup`, then any number of `{"prompts": [[...]], "num_tokens": n}`; out go
`{"versions": ...}` when the model is ready and `{"seconds": ..., "token_ids": [[...]]}` for each. Seconds are
those of the generation alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a peer is to run."""

    model: str
    """Folder of a checkpoint of transformers."""
    folder: str
    """Where to put the model in a form of one's own, and caches."""
    num_threads: int
    max_batch: int
    max_context: int
    """Tokens of one sequence, prompt and new ones."""
    max_prompt_tokens: int
    """Tokens of all prompts of a batch."""


class Generator(Protocol):
    """A model that continues prompts."""

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return exactly `num_tokens` greedy tokens for every prompt."""
        ...


def serve(
    build: Callable[[Setup], Generator], packages: Sequence[str], requests: TextIO, replies: TextIO
) -> None:
    """Answer requests until there are no more."""
    generator = build(Setup(**json.loads(requests.readline())))
    versions = {name: importlib.metadata.version(name) for name in packages}
    _reply(replies, {"versions": versions})
    for line in requests:
        request = json.loads(line)
        started_s = time.perf_counter()
        token_ids = generator.generate(request["prompts"], request["num_tokens"])
        seconds = time.perf_counter() - started_s
        _reply(replies, {"seconds": seconds, "token_ids": token_ids})


def serve_standard_streams(build: Callable[[Setup], Generator], packages: Sequence[str]) -> None:
    """Serve on stdin and stdout; what libraries print to stdout goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(build, packages, sys.stdin, replies)


def _reply(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
