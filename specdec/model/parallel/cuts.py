"""Which part of which parameter a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from specdec.model.parallel.plan import HeadLayout, UnsupportedParallelism

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows `ranges` (first, end), one after the other, of dimension `dim` of a parameter."""

    dim: int
    ranges: Ranges

    @property
    def length(self) -> int:
        """Length of the dimension after the cut."""
        return sum(end - first for first, end in self.ranges)

    def within(self, first: int, end: int) -> Cut:
        """Return what of this cut lies in first .. end, counted from `first`."""
        inside = ((max(low, first) - first, min(high, end) - first) for low, high in self.ranges)
        return Cut(self.dim, tuple((low, high) for low, high in inside if low < high))


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The token ids first .. end - 1 whose logits a rank computes."""

    first: int
    end: int
    vocab_size: int
    """Of the whole model."""


def share_of(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return (first, end) of a rank's contiguous share; shares differ by at most one."""
    return length * rank // size, length * (rank + 1) // size


def vocab_shard(vocab_size: int, rank: int, size: int) -> VocabShard:
    """Return a rank's token ids."""
    return VocabShard(*share_of(vocab_size, rank, size), vocab_size)


def cuts_of(model: torch.nn.Module, plan: Mapping[str, str], layout: HeadLayout) -> dict[str, Cut]:
    """Return the cut parameters of a whole model on the meta device; all others every rank holds in full.

    Args:
        model: not cut yet.
        plan: style by name of module or parameter.
        layout: attention heads and rank.

    Raises:
        UnsupportedParallelism: a module is not what its style needs.
    """
    cuts: dict[str, Cut] = {}
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    for name, style in plan.items():
        if name in parameters:
            cuts[name] = _cut_of_expert_weight(name, style, parameters[name], layout)
            continue
        for parameter, cut in _cuts_of_module(name, style, modules[name], layout):
            cuts[f"{name}.{parameter}"] = cut
    return cuts


def _cut_of_expert_weight(name: str, style: str, weight: torch.Tensor, layout: HeadLayout) -> Cut:
    """Stacked expert weights [experts, out, in]: plans name the parameters themselves."""
    if weight.dim() != 3:
        raise UnsupportedParallelism(f"{name} is not a stack of matrices")
    if style == "packed_colwise":
        return Cut(1, _packed(weight.shape[1], layout))
    if style == "colwise":
        return Cut(1, (share_of(weight.shape[1], layout.rank, layout.size),))
    if style == "rowwise":
        return Cut(2, (share_of(weight.shape[2], layout.rank, layout.size),))
    raise UnsupportedParallelism(f"the parameter {name} cannot be cut in the style {style!r}")


def _cuts_of_module(
    name: str, style: str, module: torch.nn.Module, layout: HeadLayout
) -> Iterable[tuple[str, Cut]]:
    if style in {"replicated_with_grad_allreduce", "norm_over_heads"}:
        return
    if style == "moe_tp_experts":
        if getattr(module, "is_transposed", False) or getattr(module, "has_bias", False):
            raise UnsupportedParallelism(f"{name} has transposed expert weights or biases")
        return
    if style == "embedding_rowwise":
        if not isinstance(module, torch.nn.Embedding):
            raise UnsupportedParallelism(f"{name} is no embedding")
        yield "weight", Cut(0, (share_of(module.num_embeddings, layout.rank, layout.size),))
        return
    if style == "norm_per_head":
        yield "weight", _heads_of_norm(name, module, layout)
        return
    if not isinstance(module, torch.nn.Linear | Conv1D):
        raise UnsupportedParallelism(f"{name} is a {type(module).__name__}, which cannot be cut")
    is_transposed = isinstance(module, Conv1D)
    width_in, width_out = module.weight.shape if is_transposed else reversed(module.weight.shape)
    if style in {"rowwise", "rowwise_split_input", "packed_rowwise"}:
        whole = _packed(width_in, layout) if style == "packed_rowwise" else None
        yield (
            "weight",
            Cut(0 if is_transposed else 1, whole or (share_of(width_in, layout.rank, layout.size),)),
        )
        return
    ranges = _output_ranges(name, style, width_out, layout, module)
    yield "weight", Cut(1 if is_transposed else 0, ranges)
    if module.bias is not None:
        yield "bias", Cut(0, ranges)


def _output_ranges(name: str, style: str, width: int, layout: HeadLayout, module: torch.nn.Module) -> Ranges:
    leaf = name.rsplit(".", 1)[-1]
    if style == "packed_colwise":
        return _packed(width, layout)
    if style == "fused_qkv":
        return _fused(name, width, layout)
    if style == "falcon_qkv":
        return _falcon(width, layout, module)
    if style == "colwise" and leaf in {"k_proj", "v_proj"}:
        return (_heads(name, width, layout.num_kv_heads, layout.local_kv_heads),)
    if style == "colwise" and leaf in {"q_proj", "query_key_value"}:
        return (_heads(name, width, layout.num_heads, layout.local_heads),)
    return (share_of(width, layout.rank, layout.size),)


def _heads(name: str, width: int, num_heads: int, local: range, offset: int = 0) -> tuple[int, int]:
    """Rows of the heads `local` among `num_heads` equal ones that begin at `offset`."""
    if width % num_heads:
        raise UnsupportedParallelism(f"the {width} outputs of {name} are not those of {num_heads} heads")
    unit = width // num_heads
    return offset + local.start * unit, offset + local.stop * unit


def _heads_of_norm(name: str, norm: torch.nn.Module, layout: HeadLayout) -> Cut:
    """Weights [heads, head size]."""
    is_of_keys = name.rsplit(".", 1)[-1] == "k_norm"
    num_heads = layout.num_kv_heads if is_of_keys else layout.num_heads
    local = layout.local_kv_heads if is_of_keys else layout.local_heads
    weight: Any = norm.weight
    if weight.dim() != 2 or len(weight) != num_heads:
        raise UnsupportedParallelism(f"{name} has no weights for each of {num_heads} heads")
    return Cut(0, ((local.start, local.stop),))


def _packed(width: int, layout: HeadLayout) -> Ranges:
    """A share of each of two halves (gate and up)."""
    half = width // 2
    first, end = share_of(half, layout.rank, layout.size)
    return (first, end), (half + first, half + end)


def _fused(name: str, width: int, layout: HeadLayout) -> Ranges:
    num_units = layout.num_heads + 2 * layout.num_kv_heads
    if width % num_units:
        raise UnsupportedParallelism(f"the {width} outputs of {name} are not queries, keys and values")
    unit = width // num_units
    queries, keys = layout.num_heads * unit, layout.num_kv_heads * unit
    return (
        _heads(name, queries, layout.num_heads, layout.local_heads),
        _heads(name, keys, layout.num_kv_heads, layout.local_kv_heads, queries),
        _heads(name, keys, layout.num_kv_heads, layout.local_kv_heads, queries + keys),
    )


def _falcon(width: int, layout: HeadLayout, module: torch.nn.Module) -> Ranges:
    """[groups, queries of the group | key | value], one group with multi_query, or [heads, q | k | v]."""
    group = layout.num_heads // layout.num_kv_heads + 2
    unit = width // (layout.num_kv_heads * group)
    ranges: list[tuple[int, int]] = []
    for kv_head in layout.local_kv_heads:
        first_head = kv_head * (group - 2)
        heads = range(
            max(layout.local_heads.start, first_head), min(layout.local_heads.stop, first_head + group - 2)
        )
        start = kv_head * group - first_head
        ranges.append(((start + heads.start) * unit, (start + heads.stop) * unit))
        ranges.append(((kv_head * group + group - 2) * unit, (kv_head + 1) * group * unit))
    return tuple(ranges)


def local_attributes(module: Any, layout: HeadLayout) -> dict[str, int]:
    """Return what an attention module knows of its heads, as it must be on this rank."""
    heads, kv_heads = len(layout.local_heads), len(layout.local_kv_heads)
    wanted = {
        "num_heads": heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_kv_heads": kv_heads,
        "num_key_value_groups": heads // kv_heads,
    }
    if hasattr(module, "split_size"):
        wanted["split_size"] = int(module.split_size) // layout.size
    return {name: value for name, value in wanted.items() if hasattr(module, name)}
