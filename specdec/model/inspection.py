"""Looks at a freshly loaded model's forward: what its attention layers are, and whether paging is exact.

The engine runs any causal LM of `transformers`, also those that our tests have never seen. For these the
paged forward is compared with the model's own attention when the model loads, so that an architecture
that does something unforeseen is refused instead of served wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from specdec.attention.base import LayerAttention, PagedBatch
from specdec.attention.hf import ATTENTION_NAME, AttentionProbe, UnsupportedAttention
from specdec.attention.metadata import build_metadata
from specdec.attention.sdpa import SdpaAttention
from specdec.core.errors import CheckpointError
from specdec.kv.pool import KvPool, KvShape
from specdec.model.invariance.operations import InvariantForward, UnsupportedInvariance
from specdec.model.parallel.group import same_fate
from specdec.model.parallel.stage import Stage
from specdec.model.support import WHAT_CAN_BE

logger = logging.getLogger(__name__)

TESTED_MODEL_TYPES = frozenset(
    {
        "cohere2",
        "falcon",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "starcoder2",
    }
)
"""Compared in every test run, so not again at every start."""

_NUM_TOKENS = 24
_CHUNKS = (0, 11, 12, 13, _NUM_TOKENS)
_SHORT_WINDOW = 5
_BLOCK_SIZE = 4
_LARGEST_INVARIANT_HEAD = 256
"""Of the attention kernels in C++ and Triton alike."""
_LARGEST_ERROR = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""Norm of the difference over norm of the logits around their mean. Forwards that differ only in rounding
stay far below, a wrong position or a lost token lies far above."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    parents: None = None


class ForwardFacts(NamedTuple):
    """What a look at a model's forward told."""

    layers: tuple[LayerAttention, ...]
    vocab_size: int
    """Width of its logits."""


def inspect_forward(
    model: PreTrainedModel,
    path: Path,
    stage: Stage | None = None,
    invariant: InvariantForward | None = None,
    *,
    max_model_len: int | None = None,
) -> ForwardFacts:
    """Run a few tokens through a model, or a stage of it, that was loaded with the paged attention.

    With `invariant` it has to be a forward that runs so. `max_model_len` is its longest sequence, None:
    windows of attention may be longer.

    Raises:
        CheckpointError: its layers ask for attention that is not supported, or (model types that no test
            covers) its paged forward is not the function that its own attention computes.
    """
    error = window_error = 0.0
    try:
        facts = _probe(model, stage, invariant)
        _require_kept_windows(model, facts.layers, max_model_len)
        if model.config.model_type not in TESTED_MODEL_TYPES:
            error = paged_forward_error(model, facts.layers, stage)
            window_error = masked_window_error(model, facts.layers, stage)
    except UnsupportedAttention as failure:
        raise _refusal(model, path, str(failure)) from failure
    except UnsupportedInvariance as failure:
        raise _variance(model, path, failure) from failure
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as failure:
        raise _refusal(model, path, f"its forward fails with paged attention: {failure}") from failure
    with same_fate(None if stage is None else stage.grid.ranks):
        # Written so that a NaN is refused too.
        if not error <= _LARGEST_ERROR[model.dtype]:
            raise _refusal(
                model,
                path,
                f"over a paged cache its logits differ from its own attention's by {error:.2g} of their "
                "spread",
            )
        if not window_error <= _LARGEST_ERROR[model.dtype]:
            raise _refusal(
                model,
                path,
                "its sliding window shows either in the mask of its attention alone, or in what its layers "
                f"ask for alone: with a short one its logits over a paged cache differ by {window_error:.2g} "
                "of their spread",
            )
    return facts


def inspect_on_paper(
    model: PreTrainedModel,
    path: Path,
    invariant: InvariantForward | None = None,
    *,
    max_model_len: int | None = None,
) -> None:
    """Look at what the attention layers of a model on the meta device ask for: no weights are needed.

    What cannot run without numbers (a choice of experts, say) is looked at once the weights are there.
    `max_model_len` as in `inspect_forward`.

    Raises:
        CheckpointError: its layers ask for attention that is not supported; or, with `invariant`, it computes
            something that has no batch-invariant form.
    """
    try:
        facts = _probe(model, None, None if invariant is None else invariant.on_paper())
        _require_kept_windows(model, facts.layers, max_model_len)
        if invariant is not None:
            _require_invariant_heads(facts.layers)
    except UnsupportedAttention as failure:
        raise _refusal(model, path, str(failure)) from failure
    except UnsupportedInvariance as failure:
        raise _variance(model, path, failure) from failure
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as failure:
        logger.debug("%s: the forward cannot run on paper: %s", path, failure)


def _refusal(model: PreTrainedModel, path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: model type {model.config.model_type} cannot be served: {reason}; {WHAT_CAN_BE}"
    )


def _require_kept_windows(
    model: PreTrainedModel, layers: Sequence[LayerAttention], max_model_len: int | None
) -> None:
    """Refuse layers that attend to more than transformers keeps of a long text.

    Its cache follows `sliding_window`, also of models whose code knows no window (Llama). What its `generate`
    says of longer texts is then not what its forward over a whole text says.

    Raises:
        UnsupportedAttention: there are such layers, and `max_model_len` tokens are more than are kept.
    """
    for layer, cached in zip(layers, _cached_windows(model, layers), strict=True):
        if not cached or max_model_len is None or max_model_len <= cached:
            continue
        if layer.sliding_window is None or layer.sliding_window > cached:
            reach = "all tokens" if layer.sliding_window is None else f"{layer.sliding_window} tokens"
            raise UnsupportedAttention(
                f"layer {layer.layer_idx} attends to {reach}, and transformers keeps the last {cached} of "
                f"them (sliding_window in config.json): set max_model_len to {cached} at most, or take the "
                "key out of config.json"
            )


def _cached_windows(model: PreTrainedModel, layers: Sequence[LayerAttention]) -> list[int | None]:
    """Return how many tokens of each layer transformers keeps; None: all, or it cannot say."""
    try:
        kept = DynamicCache(config=model.config.get_text_config()).layers
    except (TypeError, ValueError, LookupError, AttributeError) as failure:  # of a model with own code
        logger.debug("transformers has no cache for model type %s: %s", model.config.model_type, failure)
        kept = []
    # Layers that find K/V in another's cache have none of their own.
    windows = {index: getattr(one, "sliding_window", None) for index, one in enumerate(kept)}
    return [windows.get(layer.layer_idx) for layer in layers]


def _variance(model: PreTrainedModel, path: Path, reason: UnsupportedInvariance) -> CheckpointError:
    return CheckpointError(
        f"{path}: model type {model.config.model_type} cannot be served with batch_invariant: {reason}; "
        "leave batch_invariant out"
    )


def _require_invariant_heads(layers: Sequence[LayerAttention]) -> None:
    widest = max((layer.head_dim for layer in layers), default=0)
    if widest > _LARGEST_INVARIANT_HEAD:
        raise UnsupportedInvariance(
            f"its heads are of {widest}, our attention kernels run up to {_LARGEST_INVARIANT_HEAD}"
        )


def _probe(
    model: PreTrainedModel,
    stage: Stage | None,
    mode: AbstractContextManager[Any] | None,
) -> ForwardFacts:
    probe = AttentionProbe()
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    # Any: transformers types its forward too narrowly.
    hf_model: Any = model

    def forward() -> torch.Tensor:
        logits: torch.Tensor = hf_model(
            input_ids=token, position_ids=token, use_cache=False, paged=probe
        ).logits
        return logits

    with torch.inference_mode(), nullcontext() if mode is None else mode:
        if stage is None:
            num_layers = model.config.get_text_config().num_hidden_layers
            vocab_size = int(forward().shape[-1])
            return ForwardFacts(probe.layers(range(num_layers)), vocab_size)
        hidden = torch.ones((1, 1, stage.plan.hidden_size), dtype=model.dtype, device=model.device)
        output = stage.run(forward, None if stage.is_first else hidden)
    if not stage.is_last and output.dtype != model.dtype:
        raise UnsupportedAttention(f"its hidden states are {output.dtype}, its weights {model.dtype}")
    return ForwardFacts(probe.layers(stage.layers), stage.plan.vocab_size)


def paged_forward_error(
    model: PreTrainedModel, layers: Sequence[LayerAttention], stage: Stage | None = None
) -> float:
    """Return how far the paged forward, in chunks, is from the model's own eager attention.

    The result is relative: 0 is equal, 1 as far apart as unrelated logits. The model's attention
    implementation is switched to eager and back. All stages of a model call it at the same time; only the
    last one, which has logits, can tell, and the others return 0.
    """
    with torch.inference_mode():
        own, paged = _own_rows(model, stage), _paged_rows(model, layers, stage)
    return 0.0 if stage is not None and not stage.is_last else _distance(paged, own)


def masked_window_error(
    model: PreTrainedModel, layers: Sequence[LayerAttention], stage: Stage | None = None
) -> float:
    """Return what `paged_forward_error` would be over more tokens than the sliding window is long.

    A model may have it in its mask alone, and its layers not ask for it; or the other way around. That shows
    beyond the window only, which is mostly thousands of tokens: a shorter one is put into the model's
    configuration for a moment. Without a window the result is 0.
    """
    text_config: Any = model.config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    if not isinstance(window, int) or window < _NUM_TOKENS:
        return 0.0
    shorter = [
        replace(layer, sliding_window=_SHORT_WINDOW) if layer.sliding_window == window else layer
        for layer in layers
    ]
    with torch.inference_mode():
        text_config.sliding_window = _SHORT_WINDOW
        try:
            own = _own_rows(model, stage)
        finally:
            text_config.sliding_window = window
        paged = _paged_rows(model, shorter, stage)
    return 0.0 if stage is not None and not stage.is_last else _distance(paged, own)


def _distance(rows: torch.Tensor, others: torch.Tensor) -> float:
    spread = (others - others.mean(-1, keepdim=True)).norm()
    return float((rows - others).norm() / spread)


def _token_ids(model: PreTrainedModel) -> list[int]:
    vocab_size = int(model.config.get_text_config().vocab_size)
    return [(7919 * (index + 1)) % vocab_size for index in range(_NUM_TOKENS)]


def _own_rows(model: PreTrainedModel, stage: Stage | None) -> torch.Tensor:
    """`_rows` of the model's own attention."""
    # Any: transformers types this switch too narrowly.
    hf_model: Any = model
    hf_model.set_attn_implementation("eager")
    try:
        return _rows(hf_model, stage, _token_ids(model))
    finally:
        hf_model.set_attn_implementation(ATTENTION_NAME)


def _rows(model: Any, stage: Stage | None, token_ids: list[int], **arguments: Any) -> torch.Tensor:
    """fp32 [T, vocab] logits, or [T, hidden_size] in stages before the last."""
    input_ids = torch.tensor([token_ids], device=model.device)

    def forward() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=False, **arguments).logits
        return logits

    output = forward() if stage is None else stage.relay(forward, len(token_ids), model.dtype, model.device)
    return output[0].float()


def _paged_rows(
    model: PreTrainedModel, layers: Sequence[LayerAttention], stage: Stage | None
) -> torch.Tensor:
    """`_rows` of a chunked prefill over blocks in falling order."""
    num_blocks = _NUM_TOKENS // _BLOCK_SIZE
    pool = KvPool(
        [KvShape(num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim) for layer in layers],
        num_blocks=1 + num_blocks,
        block_size=_BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
    )
    backend, rows, token_ids = SdpaAttention(), [], _token_ids(model)
    for low, high in pairwise(_CHUNKS):
        chunk = _Chunk(token_ids[low:high], low, range(num_blocks, 0, -1))
        metadata = build_metadata([chunk], block_size=_BLOCK_SIZE, device=model.device)
        paged = PagedBatch(
            backend=backend, layers=layers, caches=pool, metadata=metadata, plan=backend.begin(metadata)
        )
        positions = metadata.positions[None]
        rows.append(_rows(model, stage, token_ids[low:high], position_ids=positions, paged=paged))
    return torch.cat(rows)
