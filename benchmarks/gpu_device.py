"""What benchmarks of a GPU share: its bandwidth, times of work on it, and what they were measured on."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import Spread

_BANDWIDTH_BYTES = 4 << 30
_CACHE_BYTES = 256 << 20
"""More than any GPU's L2 cache: writing so much leaves nothing of what was there."""


def require_cuda() -> torch.device:
    """Return the device to measure.

    Raises:
        SystemExit: there is none.
    """
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def device_facts(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on, beside `report.environment`."""
    import triton

    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "num_processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def device_seconds(
    run: Callable[[], object], *, repeats: int, warm_ups: int = 3, cold: bool = False
) -> Spread:
    """Seconds that the device takes for `run`, by its own clock; `cold`: with nothing in its L2 cache."""
    for _ in range(warm_ups):
        run()
    flush = torch.empty(_CACHE_BYTES // 4, dtype=torch.int32, device="cuda") if cold else None
    pairs: list[tuple[Any, Any]] = []
    for _ in range(repeats):
        if flush is not None:
            flush.zero_()
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return Spread(tuple(begin.elapsed_time(end) / 1e3 for begin, end in pairs))


def bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes per second of the fastest ways to read, and to copy (both directions counted), 4 GiB."""
    numbers = torch.ones(_BANDWIDTH_BYTES // 4, dtype=torch.float32, device=device)
    halves = numbers.view(torch.bfloat16)
    target = torch.empty_like(numbers)
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "sum_fp32": (numbers.sum, _BANDWIDTH_BYTES),
        "max_fp32": (numbers.max, _BANDWIDTH_BYTES),
        "max_bf16": (halves.max, _BANDWIDTH_BYTES),
        "copy": (lambda: target.copy_(numbers), 2 * _BANDWIDTH_BYTES),
    }
    return {
        name: num_bytes / statistics.median(device_seconds(run, repeats=10).values)
        for name, (run, num_bytes) in ways.items()
    }
