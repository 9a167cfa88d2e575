"""Runs the rotary embedding of a model on a GPU as one kernel per layer, where its own code takes ten.

An attention module that calls a function `apply_rotary_pos_emb` of its own source file calls ours instead, if
theirs gives the same bits on numbers: in its forward that name means something else, and nothing is changed
in it. What ours was not compared for goes to theirs.
"""

from __future__ import annotations

import importlib
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from specdec.attention.triton import launch

logger = logging.getLogger(__name__)

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(queries [1, H, T, D], keys [1, G, T, D], cos [1, T, D], sin [1, T, D]) -> both, rotated"""

_NAME = "apply_rotary_pos_emb"
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_HEADS_AT_ONCE = 8
_PROBED = ((3, 1, 5, 16), (8, 2, 4, 24), (4, 4, 1, 64))
"""Query heads, key heads, rows and head size of what both ways are compared on."""


def fuse_rotary(model: torch.nn.Module) -> int:
    """Replace the rotary embedding in the forwards of attention modules; return how many were replaced.

    The model is on a device that Triton runs on, and the package is installed.
    """
    forwards: dict[type[torch.nn.Module], types.FunctionType | None] = {}
    num_fused = 0
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.dtype not in _DTYPES:
        return 0
    for module in model.modules():
        kind = type(module)
        if "forward" in vars(module):
            continue
        if kind not in forwards:
            forwards[kind] = _fused_forward(kind, parameter)
        forward = forwards[kind]
        if forward is not None:
            anything: Any = module
            anything.forward = types.MethodType(forward, module)
            num_fused += 1
    return num_fused


def _fused_forward(kind: type[torch.nn.Module], like: torch.Tensor) -> types.FunctionType | None:
    """Return the forward of these modules with the fused embedding, or None where it does not fit."""
    own = kind.forward
    if not isinstance(own, types.FunctionType) or _NAME not in own.__code__.co_names:
        return None
    rotate = own.__globals__.get(_NAME)
    if not callable(rotate):
        return None
    if not _gives_the_same(rotate, like):
        logger.info("%s rotates in a way of its own: it keeps it", kind.__name__)
        return None
    names = {**own.__globals__, _NAME: fused_rotation(rotate)}
    forward = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


def fused_rotation(own: Rotate) -> Rotate:
    """Return what rotates whatever `own` does, and in one kernel what that can do."""
    kernels: Any = importlib.import_module("specdec.model.rotary_kernels")

    def rotate(
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if args or options or not _can_be_fused(query, key, cos, sin):
            return own(query, key, cos, sin, *args, **options)
        num_heads, num_rows, head_dim = query.shape[1:]
        num_kv_heads = key.shape[1]
        outs = [
            torch.empty((num_rows, heads, head_dim), dtype=query.dtype, device=query.device)
            for heads in (num_heads, num_kv_heads)
        ]
        launch(
            kernels.rotary_kernel,
            (num_rows, -(-(num_heads + num_kv_heads) // _HEADS_AT_ONCE)),
            query,
            key,
            cos,
            sin,
            *outs,
            query.stride(2),
            query.stride(1),
            key.stride(2),
            key.stride(1),
            cos.stride(1),
            sin.stride(1),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            BLOCK_HEADS=_HEADS_AT_ONCE,
            BLOCK_HALF=1 << (head_dim // 2 - 1).bit_length(),
            num_warps=4,
            enable_fp_fusion=False,
        )
        rotated_query, rotated_key = (out.transpose(0, 1).unsqueeze(0) for out in outs)
        return rotated_query, rotated_key

    return rotate


def _can_be_fused(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether these are one sequence of rows, of one dtype, all of whose lanes are rotated."""
    if query.dim() != 4 or key.dim() != 4:
        return False
    num_rows, head_dim = query.shape[2:]
    return (
        query.shape[0] == key.shape[0] == 1
        and key.shape[2:] == query.shape[2:]
        and cos.shape == sin.shape == (1, num_rows, head_dim)
        and num_rows > 0
        and head_dim % 2 == 0
        and query.dtype == key.dtype == cos.dtype == sin.dtype
        and query.dtype in _DTYPES
        and all(one.stride(-1) == 1 for one in (query, key, cos, sin))
    )


def _gives_the_same(own: Rotate, like: torch.Tensor) -> bool:
    """Whether the model's function and ours give the same bits, for the dtype and the device of `like`."""
    rotate = fused_rotation(own)
    with torch.inference_mode():
        for num_heads, num_kv_heads, num_rows, head_dim in _PROBED:
            shapes = (num_rows, num_heads), (num_rows, num_kv_heads)
            query, key = (_numbers((1, *shape, head_dim), like).transpose(1, 2) for shape in shapes)
            cos, sin = (_numbers((1, num_rows, head_dim), like, shift) for shift in (1.0, 2.0))
            try:
                expected = own(query, key, cos, sin)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return False  # of other arguments
            if not all(map(torch.equal, rotate(query, key, cos, sin), expected)):
                return False
    return True


def _numbers(shape: tuple[int, ...], like: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """Numbers between -3 and 3 that look random, without touching a generator."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, device=like.device, dtype=torch.float32)
    return index.mul(12.9898).add(shift).sin().mul(3.0).view(shape).to(like.dtype)
