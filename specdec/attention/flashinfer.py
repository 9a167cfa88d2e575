"""Paged attention on CUDA devices by the library FlashInfer, an option that must be asked for by name.

Its wrapper for batches of prompts over paged K/V runs every step: rows of a sequence are its last tokens,
whether it is a prompt, one decoded token, a verification, or (with a mask) a tree. The template `fa2` is
taken for all of them: it is there for every device, and the only one that takes masks.

It plans on the host, for each step anew, so that its steps are not recorded as CUDA graphs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from specdec.attention.base import LayerAttention
from specdec.attention.flashinfer_steps import LayerKind, StepPages, plan_arguments, step_pages, tree_mask
from specdec.attention.metadata import AttentionMetadata
from specdec.attention.slots import PoolSlots
from specdec.core.extras import how_to_install

WORKSPACE_BYTES = 128 << 20
"""Partial results of one layer, as FlashInfer recommends; every kind of layer takes some 8 MiB more."""
EXTRA = "flashinfer"
"""The extra of our distribution that brings the library."""
_TEMPLATE = "fa2"
_LAYOUT = "HND"
"""[pages, heads, page size, head size]: our pools."""


class FlashInferUnavailable(Exception):
    """The library cannot be used here; the text says why and what to do."""


class PagedPrefill(Protocol):
    """What is used of `flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(self, **arguments: Any) -> None:
        """Lay out the work of one step; see `flashinfer_steps.plan_arguments`."""
        ...

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Attend as planned: q [T, H, D], pools [N, G, P, D] each; fills and returns `out` [T, H, D]."""
        ...


MakeWrapper = Callable[..., PagedPrefill]
"""(workspace, kv_layout, *, backend) -> a wrapper."""


def load_flashinfer(device: torch.device) -> MakeWrapper:
    """Return the library's wrapper class.

    Raises:
        FlashInferUnavailable: `device` is no CUDA device, or the library is not there or does not load.
    """
    if device.type != "cuda":
        raise FlashInferUnavailable(f"it runs on CUDA devices, not on {device.type}")
    try:
        wrapper: MakeWrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    except ModuleNotFoundError as error:
        raise FlashInferUnavailable(
            f"it needs the package `{error.name}`: {how_to_install(EXTRA)}"
        ) from error
    except (ImportError, OSError, AttributeError) as error:
        raise FlashInferUnavailable(
            f"the installed package `flashinfer` does not load ({error}): {how_to_install(EXTRA)}"
        ) from error
    return wrapper


@dataclass(slots=True, kw_only=True, eq=False)
class _Step:
    metadata: AttentionMetadata
    slots: PoolSlots
    pages: StepPages
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """`tree_mask` by window, made on demand."""

    def mask(self, window: int | None) -> torch.Tensor | None:
        if window not in self.masks:
            self.masks[window] = tree_mask(self.metadata, window)
        return self.masks[window]


class _Planned:
    """One wrapper, and the step that it is planned for: layers of a kind plan once per step."""

    def __init__(self, wrapper: PagedPrefill) -> None:
        self._wrapper = wrapper
        self._step: _Step | None = None
        self._copied: Any = None

    def for_step(self, step: _Step, kind: LayerKind) -> PagedPrefill:
        if self._step is not step:
            self._plan(step, kind)
            self._step = step
        return self._wrapper

    def _plan(self, step: _Step, kind: LayerKind) -> None:
        """Plan, once the plan before has left the pinned memory that both of them are written to."""
        if self._copied is not None:
            self._copied.synchronize()
        self._step = None  # planning may fail half-way
        metadata = step.metadata
        mask = step.mask(kind.sliding_window)
        self._wrapper.plan(**plan_arguments(step.pages, kind, block_size=metadata.block_size, mask=mask))
        device = metadata.positions.device
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))


class FlashInferAttention:
    """Attention backend for bf16 and fp16 heads of 64, 128 and 256 on CUDA devices.

    FlashInfer cuts contexts by what else is in the batch: a row's last bits depend on its company.
    """

    name = "flashinfer"
    observes = False
    reads_packed = False

    def __init__(self, device: torch.device, make_wrapper: MakeWrapper) -> None:
        """Allocate the workspace on `device`; `make_wrapper` is what `load_flashinfer` returned."""
        self._make_wrapper = make_wrapper
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[LayerKind, _Planned] = {}

    def begin(self, metadata: AttentionMetadata) -> _Step:
        """List the step's pages; plans are made when the first layer of a kind asks for one."""
        return _Step(metadata=metadata, slots=PoolSlots.of(metadata), pages=step_pages(metadata))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: _Step,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        plan.slots.write(key, value, key_cache, value_cache)
        kind = LayerKind.of(layer, query.dtype)
        num_rows = plan.pages.num_rows
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[num_rows:] = 0.0
        wrapper = self._wrapper_of(kind).for_step(plan, kind)
        wrapper.run(query[:num_rows].contiguous(), (key_cache, value_cache), out=out[:num_rows])
        return out

    def _wrapper_of(self, kind: LayerKind) -> _Planned:
        planned = self._planned.get(kind)
        if planned is None:
            wrapper = self._make_wrapper(self._workspace, _LAYOUT, backend=_TEMPLATE)
            planned = self._planned[kind] = _Planned(wrapper)
        return planned
