"""Drives a generation service the way a door does: one stream per request, all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.in_process import batch_requests
from specdec.core.sampling_params import SamplingParams
from specdec.engine.service import GenerationService


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRun:
    """One batch of streams, as its consumer saw it."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    first_token_s: float
    """Until every stream had its first token."""
    num_outputs: int
    """Of the stream that had most: a round brings at most one."""

    @property
    def decode_s(self) -> float:
        """After every stream had its first token."""
        return self.seconds - self.first_token_s


async def run_batch(
    service: GenerationService, prompts: Sequence[tuple[int, ...]], num_tokens: int, k: int, name: str
) -> StreamedRun:
    """Generate `num_tokens` greedy tokens for all prompts at once."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = batch_requests(prompts, params, k, name)

    async def one(index: int) -> tuple[tuple[int, ...], float, int]:
        tokens: list[int] = []
        num_outputs, first_s = 0, 0.0
        async for output in service.generate(requests[index]):
            if output.token_ids and not tokens:
                first_s = time.perf_counter() - started_s
            tokens.extend(output.token_ids)
            num_outputs += 1
        return tuple(tokens), first_s, num_outputs

    started_s = time.perf_counter()
    streams = await asyncio.gather(*(one(index) for index in range(len(requests))))
    seconds = time.perf_counter() - started_s
    token_ids, first_s, num_outputs = zip(*streams, strict=True)
    return StreamedRun(
        token_ids=token_ids, seconds=seconds, first_token_s=max(first_s), num_outputs=max(num_outputs)
    )
