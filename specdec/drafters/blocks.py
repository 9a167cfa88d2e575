"""Decoder layers of drafters: those of a model family of transformers, with the attention of drafters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.attention.base import LayerAttention
from specdec.attention.hf import AttentionProbe, UnsupportedAttention
from specdec.core.errors import CheckpointError
from specdec.drafters.attention import DRAFTER_ATTENTION

logger = logging.getLogger(__name__)

_AUTO_MODEL: Any = AutoModel
_BY_LENGTH = ("longrope", "dynamic")
"""Rotary embeddings of which transformers takes other frequencies for a forward with a far position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFamily:
    """What a model of one kind is built from."""

    config: PretrainedConfig
    """With the attention of drafters; layers behind its last attend fully, where there are several kinds."""
    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: nn.Module
    """Positions [B, T] turn by the same angles, whatever else is in the batch."""

    def make_layer(self, layer_idx: int) -> nn.Module:
        """Return a decoder layer with random weights; `layer_idx` names its K/V.

        Raises:
            CheckpointError: layers of this kind of model are not made so.
        """
        make: Any = self.layer
        try:
            made: nn.Module = make(self.config, layer_idx=layer_idx)
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            raise _not_usable(self.config, "decoder layers", error) from error
        return made

    def make_norm(self, size: int | None = None) -> nn.Module:
        """Return a norm over `size` features, all of the hidden state by default.

        Raises:
            CheckpointError: norms of this kind of model are no RMS norms, or have no size.
        """
        eps = getattr(self.config, "rms_norm_eps", None)
        if eps is None:
            raise CheckpointError(
                f"no norms of a drafter can be made as those of model type {self.config.model_type!r}, which "
                "are no RMS norms; models like llama, mistral, qwen2 and qwen3 can be used"
            )
        make: Any = self.norm
        try:
            made: nn.Module = make(self.config.hidden_size if size is None else size, eps=eps)
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            raise _not_usable(self.config, "norms", error) from error
        return made


def _not_usable(config: PretrainedConfig, what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"no drafter can be made of {what} of model type {config.model_type!r}: {error}; models like llama, "
        "mistral, qwen2 and qwen3 can be used"
    )


def block_family(config: PretrainedConfig, num_layers: int) -> BlockFamily:
    """Return the parts of the kind of model that `config` describes, for layers 0 .. num_layers - 1.

    Raises:
        CheckpointError: it is of a kind whose decoder layers cannot be used one by one.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = DRAFTER_ATTENTION
    _check_rotary(config)
    for name, values in _by_layer(config).items():
        # Modules behind the last layer are of its kind: a mixture's have experts.
        setattr(config, name, [*values, *values[-1:] * (num_layers - len(values))])
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        kinds = list(kinds)
        config.num_hidden_layers = max(num_layers, len(kinds))
        config.layer_types = kinds + ["full_attention"] * (num_layers - len(kinds))
    one_layer = copy.deepcopy(config)
    if kinds is not None:
        one_layer.layer_types = ["full_attention"]
    one_layer.num_hidden_layers = 1
    # Only embeddings would have it, and those of a head's may be none of this vocabulary's.
    one_layer.pad_token_id = None
    try:
        with torch.device("meta"):
            model: Any = _AUTO_MODEL.from_config(one_layer)
        layer, norm, rotary = type(model.layers[0]), type(model.norm), type(model.rotary_emb)
        rotary = rotary(config)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise _not_usable(config, "layers", error) from error
    _turn_by_position_alone(rotary)
    return BlockFamily(config=config, layer=layer, norm=norm, rotary=rotary)


def _by_layer(config: PretrainedConfig) -> dict[str, list[Any]]:
    """Return the keys that have an entry for each layer, but for the kinds of attention."""
    return {
        name: list(values)
        for name, values in vars(config).items()
        if name != "layer_types"
        and isinstance(values, list | tuple)
        and len(values) == getattr(config, "num_hidden_layers", None)
    }


def _check_rotary(config: PretrainedConfig) -> None:
    """Check that `transformers` has the kind of rotary embedding that is stated: else it says but its name.

    Raises:
        CheckpointError: it has not.
    """
    rope = getattr(config, "rope_parameters", None)
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    known = ("default", *ROPE_INIT_FUNCTIONS)
    if isinstance(kind, str) and kind not in known:
        raise CheckpointError(
            f"rope_scaling: type {kind!r} is none that a drafter's layers can have; known: "
            f"{', '.join(sorted(set(known)))}"
        )


def _turn_by_position_alone(rotary: Any) -> None:
    """Keep the ordinary frequencies at every position, where transformers chooses them in each forward.

    It goes by the farthest position of the whole batch: a long text would change the drafts of all others,
    and K/V that are kept would not go with what is read next. Rows to train on are short.
    """
    kind = rotary.rope_type if isinstance(getattr(rotary, "rope_type", None), str) else ""
    if any(one in kind for one in _BY_LENGTH):
        logger.info(
            "rope_type %s: frequencies of drafters' layers do not depend on the length of a text; those of "
            "short ones are used at every position",
            kind,
        )
        rotary.rope_type = "default"  # what it is asked for in a forward; its tables are made


@torch.no_grad()
def probe_layers(
    blocks: Sequence[nn.Module], rotary: nn.Module, width: int, first_idx: int
) -> tuple[LayerAttention, ...]:
    """Return what the attention of consecutive `blocks` is, by calling each with one row of `width` features.

    Raises:
        CheckpointError: a layer asks for what the paged attention does not do.
    """
    probe = AttentionProbe()
    try:
        for block in blocks:
            weight = next(block.parameters())
            row = torch.zeros(1, 1, width, dtype=weight.dtype, device=weight.device)
            positions = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
            block(row, position_embeddings=rotary(row, positions), paged=probe)
        return probe.layers(range(first_idx, first_idx + len(blocks)))
    except TypeError as error:  # Gemma 3 has another table of positions for each kind of layer
        raise CheckpointError(
            f"decoder layers with {type(rotary).__name__} cannot be used one by one: {error}"
        ) from error
    except UnsupportedAttention as refusal:
        raise CheckpointError(f"the drafter's attention is not supported: {refusal}") from refusal


def run_block(block: nn.Module, hidden: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """Call a decoder layer; some return a tuple."""
    output: Any = block(hidden, **keywords)
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result
