"""Quantization for tests where torchao is not installed: the same arithmetic, in a few lines."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specdec.model import loader, quantization, views
from specdec.model.quantization import Scheme

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def nearest(rows: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [columns, inputs] and scales [columns, groups]; stands in for torchao's choice."""
    largest = 2 ** (scheme.bits - 1)
    grouped = rows.float().unflatten(1, (scheme.num_groups(rows.shape[1]), -1))
    scales = grouped.abs().amax(-1).to(rows.dtype) / (largest - 0.5)
    scales = (scales.float() if scheme.group_size is None else scales).clamp(min=1e-7)
    values = (grouped / scales.float()[..., None]).round().clamp(-largest, largest - 1)
    return values.flatten(1).to(torch.int8), scales


@contextmanager
def some_quantizer() -> Iterator[None]:
    """Within, models can be quantized: by torchao where it is installed, else by `nearest`."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TORCHAO:
            for module in (loader, views):
                patch.setattr(module, "require_torchao", lambda name: None)
            patch.setattr(quantization, "_quantized_rows", nearest)
        yield
