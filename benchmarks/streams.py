"""Drives a generation service the way a door does: one stream per request, all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.in_process import batch_requests
from specdec.core.sampling_params import SamplingParams
from specdec.engine.service import GenerationService


async def run_batch(
    service: GenerationService, prompts: Sequence[tuple[int, ...]], num_tokens: int, k: int, name: str
) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Generate for all prompts at once; return seconds and tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = batch_requests(prompts, params, k, name)

    async def one(index: int) -> tuple[int, ...]:
        tokens: list[int] = []
        async for output in service.generate(requests[index]):
            tokens.extend(output.token_ids)
        return tuple(tokens)

    started_s = time.perf_counter()
    results = await asyncio.gather(*(one(index) for index in range(len(requests))))
    return time.perf_counter() - started_s, tuple(results)
