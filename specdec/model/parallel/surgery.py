"""Turns a model on the meta device into one rank's part of it.

Parameters shrink to what the rank holds, and modules whose part of the work is a partial result get a
forward that completes it with a collective. The model's own code stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from specdec.model.parallel.cuts import (
    Cut,
    VocabShard,
    cuts_of,
    local_attributes,
    share_of,
    vocab_shard,
)
from specdec.model.parallel.group import RankGroup
from specdec.model.parallel.plan import HeadLayout, UnsupportedParallelism, layout_of, plan_of
from specdec.model.quantized_linear import QuantizedLinear
from specdec.model.recording import ALL_GATHER, ALL_REDUCE, EmbeddingShard, active_recorder

_Forward = Callable[..., Any]
_Completion = Callable[[torch.nn.Module], _Forward]
"""Makes, of a linear layer that is a rank's part, the forward of the whole. A function: copies of a module
keep the same."""
_COMPLETION = "completion_over_ranks"


class RankPart:
    """What `cut_model` did to a model."""

    def __init__(self, cuts: Mapping[str, Cut], vocab: VocabShard) -> None:
        self.cuts = cuts
        """By parameter name; parameters that are not here are held in full."""
        self.vocab = vocab
        """Token ids of the logits that the model now computes."""


def check_parallel(model: torch.nn.Module, size: int) -> None:
    """Check that a whole model, on the meta device, can be cut over `size` ranks.

    Raises:
        UnsupportedParallelism: it cannot.
    """
    for rank in range(size):
        _plan_and_cuts(model, layout_of(_config(model), rank, size))


def cut_model(model: torch.nn.Module, group: RankGroup) -> RankPart:
    """Make a whole model on the meta device into this rank's part.

    Raises:
        UnsupportedParallelism: as `check_parallel`.
    """
    layout = layout_of(_config(model), group.rank, group.size)
    plan, cuts, vocab = _plan_and_cuts(model, layout)
    modules = dict(model.named_modules())
    for name, style in plan.items():
        if name in modules:
            _install(modules[name], style, layout, group)
    for name, cut in cuts.items():
        _shrink(modules, name, cut)
    for name in {name.rsplit(".", 1)[0] for name, style in plan.items() if style in _ATTENTION_STYLES}:
        _tell_heads(modules[name], layout)
    return RankPart(cuts, vocab)


_ATTENTION_STYLES = frozenset({"fused_qkv", "falcon_qkv", "colwise"})


def _config(model: torch.nn.Module) -> Any:
    return model.config


def _plan_and_cuts(
    model: torch.nn.Module, layout: HeadLayout
) -> tuple[dict[str, str], dict[str, Cut], VocabShard]:
    plan = dict(plan_of(model, layout.size))
    names = {module: name for name, module in model.named_modules()}
    hf_model: Any = model
    head, embedding = hf_model.get_output_embeddings(), hf_model.get_input_embeddings()
    if not isinstance(head, torch.nn.Linear) or not isinstance(embedding, torch.nn.Embedding):
        raise UnsupportedParallelism("its head or its embedding is not a plain matrix")
    plan[names[head]] = "colwise"
    if _config(model).get_text_config().tie_word_embeddings:
        plan[names[embedding]] = "embedding_rowwise"
    vocab = vocab_shard(head.out_features, layout.rank, layout.size)
    if vocab.first == vocab.end:
        raise UnsupportedParallelism(f"{head.out_features} token ids are too few for {layout.size} ranks")
    return plan, cuts_of(model, plan, layout), vocab


def _shrink(modules: Mapping[str, torch.nn.Module], name: str, cut: Cut) -> None:
    owner, _, leaf = name.rpartition(".")
    module = modules[owner]
    whole = module.get_parameter(leaf)
    shape = list(whole.shape)
    shape[cut.dim] = cut.length
    part = torch.empty(shape, dtype=whole.dtype, device="meta")
    module._parameters[leaf] = torch.nn.Parameter(part, requires_grad=False)
    if leaf != "weight":
        return
    anything: Any = module
    if isinstance(module, Conv1D):
        anything.nx, anything.nf = shape
    elif isinstance(module, torch.nn.Linear):
        anything.out_features, anything.in_features = shape
    elif isinstance(module, torch.nn.Embedding):
        anything.num_embeddings, anything.padding_idx = shape[0], None


def _tell_heads(attention: Any, layout: HeadLayout) -> None:
    """Let an attention module know how many heads it has now."""
    for name, value in local_attributes(attention, layout).items():
        setattr(attention, name, value)
    if hasattr(attention, "qkv_proj"):  # Phi-3 slices the fused projection by its configuration
        attention.config = _LocalConfig(attention.config, layout)


class _LocalConfig:
    """A model's configuration, but for the number of heads, which is this rank's."""

    def __init__(self, config: Any, layout: HeadLayout) -> None:
        self._config = config
        self.num_attention_heads = len(layout.local_heads)
        self.num_key_value_heads = len(layout.local_kv_heads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def complete_like(module: torch.nn.Module, part: torch.nn.Module) -> None:
    """Let a linear layer that takes the place of one of a rank complete its product as that does."""
    completion: _Completion | None = getattr(part, _COMPLETION, None)
    if completion is not None:
        _complete(module, completion)


def _install(module: torch.nn.Module, style: str, layout: HeadLayout, group: RankGroup) -> None:
    match style:
        case "rowwise" | "packed_rowwise":
            _complete(module, lambda its: _summed_product(its, group))
        case "rowwise_split_input":
            _complete(module, lambda its: _on_own_share(_summed_product(its, group), group))
        case "colwise_gather_output":
            width = _width(module)
            _complete(module, lambda its: _gathered(its.forward, width, group))
        case "embedding_rowwise":
            module.forward = _vocabulary_parallel(module, group)
        case "moe_tp_experts":
            module.forward = _summed(module.forward, group)
        case "norm_over_heads":
            module.forward = _on_all_heads(module.forward, layout, group)


def _complete(module: torch.nn.Module, completion: _Completion) -> None:
    """Give a linear layer its forward among ranks, and let it remember what makes one."""
    module.forward = completion(module)
    setattr(module, _COMPLETION, completion)


def all_reduce(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum of everyone's contiguous `tensor`, in its place."""
    recorder = active_recorder()
    if recorder is None:
        return group.sum_(tensor)
    with recorder.paused():
        output = torch.ones_like(tensor)
    return recorder.note(ALL_REDUCE, (tensor,), output)


def all_gather(tensor: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return everyone's `tensor`, stacked."""
    recorder = active_recorder()
    if recorder is None:
        return group.gather(tensor)
    with recorder.paused():
        output = tensor.new_ones((group.size, *tensor.shape))
    return recorder.note(ALL_GATHER, (tensor,), output)


def _summed(whole: _Forward, group: RankGroup) -> _Forward:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return all_reduce(whole(*args, **kwargs).contiguous(), group)

    return forward


def _summed_product(module: Any, group: RankGroup) -> _Forward:
    """Every rank multiplies its part of the inputs; the bias is added once, to the sum."""
    multiply = _without_bias(module)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        outputs = all_reduce(multiply(inputs).contiguous(), group)
        return outputs if module.bias is None else outputs.add_(module.bias)

    return forward


def _without_bias(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a linear layer's product; its weight is looked up each time, since it may be another one."""
    if isinstance(module, QuantizedLinear):
        return module.multiply
    if isinstance(module, Conv1D):
        return lambda inputs: inputs @ module.weight
    return lambda inputs: F.linear(inputs, module.weight)


def _on_own_share(partial: _Forward, group: RankGroup) -> _Forward:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        first, end = share_of(inputs.shape[-1], group.rank, group.size)
        outputs: torch.Tensor = partial(inputs[..., first:end])
        return outputs

    return forward


def _gathered(part: _Forward, width: int, group: RankGroup) -> _Forward:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return gather_columns(part(inputs), width, group)

    return forward


def _width(module: torch.nn.Module) -> int:
    """Output width of a projection that is still whole."""
    weight: Any = module.weight
    return int(weight.shape[1 if isinstance(module, Conv1D) else 0])


def gather_columns(part: torch.Tensor, width: int, group: RankGroup) -> torch.Tensor:
    """Return [..., width], everyone's contiguous share of the last dimension side by side."""
    largest = -(-width // group.size)
    num_missing = largest - part.shape[-1]
    everyone = all_gather(F.pad(part, (0, num_missing)) if num_missing else part, group)
    shares = [share_of(width, rank, group.size) for rank in range(group.size)]
    return torch.cat([everyone[rank][..., : end - first] for rank, (first, end) in enumerate(shares)], -1)


def _vocabulary_parallel(module: torch.nn.Module, group: RankGroup) -> _Forward:
    """Each rank looks up the ids that it has, and zeros; one of the summands is not zero."""
    lookup = module.forward
    weight: Any = module.weight
    vocab_size = int(weight.shape[0])
    first, end = share_of(vocab_size, group.rank, group.size)

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        recorder = active_recorder()
        if recorder is not None:
            anything: Any = module
            recorder.shards[anything.weight.data_ptr()] = EmbeddingShard(first, vocab_size)
            return all_reduce(lookup(input_ids), group)
        is_ours = (input_ids >= first) & (input_ids < end)
        rows: torch.Tensor = lookup((input_ids - first).masked_fill_(~is_ours, 0))
        return group.sum_(rows.masked_fill_(~is_ours[..., None], 0))

    return forward


def _on_all_heads(norm: _Forward, layout: HeadLayout, group: RankGroup) -> _Forward:
    def forward(part: torch.Tensor) -> torch.Tensor:
        everyone = all_gather(part, group)
        if part.shape[-1] * layout.num_heads != _norm_width(norm) * len(layout.local_heads):
            everyone = everyone[:: layout.kv_copies]
            index = group.rank // layout.kv_copies
        else:
            index = group.rank
        whole = norm(torch.cat(list(everyone), -1))
        mine: torch.Tensor = whole[..., index * part.shape[-1] : (index + 1) * part.shape[-1]]
        return mine

    return forward


def _norm_width(norm: _Forward) -> int:
    module: Any = norm.__self__  # type: ignore[attr-defined]
    return int(module.weight.shape[0])
