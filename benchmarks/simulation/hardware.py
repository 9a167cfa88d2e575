"""What steps cost on GPUs, by rooflines: bytes over bandwidth, operations over peak."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.speculation.cost_profile import CostProfile, DraftPoint, VerifyPoint

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator, and what share of its data sheet kernels reach."""

    bandwidth: float
    """Bytes per second."""
    flops: float
    """Dense bf16 operations per second."""
    memory_bytes: float
    bandwidth_share: float = 0.8
    flops_share: float = 0.6


H100 = Gpu(bandwidth=3.35e12, flops=989e12, memory_bytes=80e9)
"""H100 SXM5, NVIDIA's data sheet (without sparsity)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a forward reads and computes. Two bytes per parameter and per element of the cache."""

    num_parameters: float
    num_layers: int
    kv_width: int
    """Key/value heads times head size."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return 2.0 * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token."""
        return 2.0 * 2.0 * self.num_layers * self.kv_width


LLAMA_70B = ModelShape(num_parameters=70.6e9, num_layers=80, kv_width=8 * 128)
LLAMA_8B = ModelShape(num_parameters=8.03e9, num_layers=32, kv_width=8 * 128)
LLAMA_3B = ModelShape(num_parameters=3.21e9, num_layers=28, kv_width=8 * 128)
LLAMA_1B = ModelShape(num_parameters=1.24e9, num_layers=16, kv_width=8 * 64)
"""Llama 3.1 70B and 8B, Llama 3.2 3B and 1B: the `config.json` of the published models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model on tensor-parallel GPUs."""

    shape: ModelShape
    num_gpus: int = 1
    gpu: Gpu = H100
    step_s: float = 0.15e-3
    """Per step: launches, sampling, copies."""
    allreduce_s: float = 10e-6
    """Per reduction, two a layer, where there are several GPUs."""
    memory_share: float = 0.9

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds."""
        free = self.memory_share * self.num_gpus * self.gpu.memory_bytes - self.shape.weight_bytes
        return int(free / self.shape.kv_bytes_per_token)

    def seconds(self, rows: Floats | float, context_tokens: Floats | float) -> Floats:
        """Return what a step of so many rows over so many cached tokens takes.

        Weights are read while it computes, so the longer of both counts; the cache is read beside that.
        """
        gpu, number = self.gpu, self.num_gpus
        bandwidth = number * gpu.bandwidth * gpu.bandwidth_share
        reading = self.shape.weight_bytes / bandwidth
        computing = 2.0 * self.shape.num_parameters / (number * gpu.flops * gpu.flops_share)
        cache = self.shape.kv_bytes_per_token / bandwidth
        fixed_s = self.step_s + (2 * self.shape.num_layers * self.allreduce_s if number > 1 else 0.0)
        seconds: Floats = np.maximum(reading, computing * np.asarray(rows)) + cache * context_tokens + fixed_s
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Both sides of a cluster, and what is between them."""

    target: Placement
    draft: Placement
    wire_s: float = 0.15e-3
    """One hop between two processes; docs/performance.md measures it."""
    overhead_s: float = 0.3e-3
    """The coordinator's own time per round,"""
    overhead_per_sequence_s: float = 0.03e-3
    """and per sequence of it."""

    def verify_s(self, num_rows: float, context_tokens: float) -> float:
        """T_verify."""
        return float(self.target.seconds(num_rows, context_tokens))

    @property
    def kv_tokens_beside_draft(self) -> int:
        """Tokens that the target's cache holds where the draft model, and its cache, lie on the same GPUs.

        On each of them there is room for as many: the one that holds most else says for how many.
        """
        target, draft = self.target, self.draft
        assert draft.num_gpus <= target.num_gpus, "the draft model lies on GPUs of the target"
        weights = target.shape.weight_bytes / target.num_gpus + draft.shape.weight_bytes / draft.num_gpus
        per_token = (
            target.shape.kv_bytes_per_token / target.num_gpus
            + draft.shape.kv_bytes_per_token / draft.num_gpus
        )
        return int((target.memory_share * target.gpu.memory_bytes - weights) / per_token)

    def in_one_process(self) -> Hardware:
        """Return the same with nothing between coordinator, target and drafter."""
        return replace(self, wire_s=0.0)

    def draft_s(
        self, taking_part: Floats, mean_context: float, num_unseen: float = 0.0, *, num_beside: float = 0.0
    ) -> float:
        """T_draft: [K] sequences that take part in each step.

        `num_unseen` prompt tokens are read before, `num_beside` together with the first step.
        """
        seconds = 0.0
        if len(taking_part):
            rows = taking_part.copy()
            rows[0] *= 2.0  # the last verdict is read with the first step: about one token more
            rows[0] += num_beside
            seconds = float(self.draft.seconds(rows, taking_part * mean_context)[taking_part > 0].sum())
        if num_unseen:
            seconds += float(self.draft.seconds(num_unseen, 0.0))
        return seconds

    def round_overhead_s(self, num_sequences: int) -> float:
        """Neither drafting nor verification."""
        return self.overhead_s + self.overhead_per_sequence_s * num_sequences

    def profile(self, max_rows: int, seed: int = 0, noise: float = 0.02) -> CostProfile:
        """Return what a profiler would measure here before the first request: few points, with noise."""
        generator = np.random.default_rng(seed)

        def noisy(seconds: float) -> float:
            return seconds * float(np.exp(generator.normal(0.0, noise)))

        sizes = [rows for rows in (1, 4, 16, 64, 128, 192, 256, 384, 512, 1024) if rows <= max_rows]
        shapes = [(min(rows, 64), rows, 64 * min(rows, 64)) for rows in sizes]
        shapes += [(8, rows, 8 * length) for rows in (16, 64) for length in (64, 2048)]
        verify = [
            VerifyPoint(
                num_sequences=number,
                context_tokens=context,
                num_rows=rows,
                seconds=noisy(self.verify_s(rows, context) + 2.0 * self.wire_s),
            )
            for number, rows, context in shapes
        ]
        draft = [
            DraftPoint(
                num_sequences=number,
                context_tokens=length * number,
                num_steps=steps,
                num_unseen=1,
                wire_s=2.0 * self.wire_s,
                seconds=noisy(self.draft_s(np.full(steps, float(number)), length)),
            )
            for number, steps, length in (
                *itertools.product((1, 8, 32, 128, 256), (1, 8), (64,)),
                (8, 8, 2048),
            )
        ]
        return CostProfile(key="simulated", verify=tuple(verify), draft=tuple(draft))


def llama_pair(draft: ModelShape = LLAMA_1B, draft_gpus: int = 1) -> Hardware:
    """Return Llama 70B on eight H100 beside a smaller Llama."""
    return Hardware(
        target=Placement(shape=LLAMA_70B, num_gpus=8), draft=Placement(shape=draft, num_gpus=draft_gpus)
    )
