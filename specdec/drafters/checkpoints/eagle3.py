"""EAGLE-3 and 3.1 heads as SafeAILab, SpecForge and `speculators` publish them.

The tensors are the same (names of modules in `drafters.eagle3`) but for the decoder layer: `midlayer.` or
`layers.0.`.
config.json has all keys at its top, or as `speculators` has it (`speculators.py`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from specdec.core.errors import CheckpointError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.eagle import name_prefix
from specdec.drafters.checkpoints.files import DrafterFolder, write_drafter
from specdec.drafters.checkpoints.fit import check_shapes, fit, is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings, default_fused_layers
from specdec.drafters.vocabulary import DraftVocabulary

logger = logging.getLogger(__name__)

_VOCABULARY = "_vocabulary."


def load_eagle3(folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None) -> Eagle3:
    """Read the head of `folder`, whose config.json has all keys at its top.

    Raises:
        CheckpointError: naming the key or tensor at fault.
    """
    keys = Keys(folder.path, folder.config)
    return read_eagle3(folder, target, keys, keys, dtype)


def read_eagle3(
    folder: DrafterFolder, target: TargetParts, keys: Keys, layer: Keys, dtype: torch.dtype | None
) -> Eagle3:
    """Read a head; `layer` is the part of config.json that describes the decoder layer."""
    settings = read_settings(folder, target, keys, layer)
    vocabulary = _read_vocabulary(folder, target, keys, layer)
    drafter = Eagle3(target, settings, vocabulary)
    outer = name_prefix(folder, "fc.weight")
    is_named = any(name.startswith(f"{outer}midlayer.") for name in folder.shapes)
    midlayer = "midlayer." if is_named else "layers.0."

    def published(name: str) -> str | None:
        if name.startswith(_VOCABULARY):
            return None
        if name.startswith("lm_head."):
            return name
        return outer + name.replace("midlayer.", midlayer)

    return fit(
        drafter,
        folder,
        published,
        is_ignored=lambda name: name in ("d2t", "t2d") or is_rotary_buffer(name),
        dtype=dtype,
    )


def read_settings(folder: DrafterFolder, target: TargetParts, keys: Keys, layer: Keys) -> Eagle3Settings:
    """Read everything but the vocabulary."""
    config = layer.layer_config()
    if layer.positive("num_hidden_layers", 1) != 1:
        raise layer.wrong("num_hidden_layers", "drafters with one decoder layer are supported")
    layer.check_target(target)
    keys_of_target = keys.positive("target_hidden_size", config.hidden_size)
    keys.check_target(target, keys_of_target)
    prefix = name_prefix(folder, "fc.weight")
    has_embeddings = f"{prefix}embed_tokens.weight" in folder.shapes
    if config.hidden_size != target.hidden_size and not has_embeddings:
        raise CheckpointError(
            f"{folder.path}: the weights lack embed_tokens.weight of shape "
            f"{(target.vocab_size, config.hidden_size)}: the target's embeddings have {target.hidden_size} "
            "columns and cannot be shared"
        )
    norm_before_fc, fc_norm = keys.flag("norm_before_fc", default=False), keys.flag("fc_norm", default=False)
    eagle = keys.object("eagle_config")
    norm_before_fc = norm_before_fc or eagle.flag("norm_before_fc", default=False)
    if norm_before_fc and fc_norm:
        raise keys.wrong("fc_norm", "norm_before_fc is true too: a head has one of the two, or neither")
    if not eagle.flag("use_aux_hidden_state", default=True):
        raise eagle.wrong("use_aux_hidden_state", "heads without fused states are not supported")
    if keys.content.get("norm_before_residual") is None:
        logger.warning(
            "%s: config.json has no norm_before_residual, false is assumed (as the format defines it; some "
            "engines take true)",
            folder.path,
        )
    return Eagle3Settings(
        config=config,
        fused_layers=_fused_layers(keys, eagle, target),
        norm_before_residual=keys.flag("norm_before_residual", default=False),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=keys.flag("norm_output", default=False),
        has_embeddings=has_embeddings,
        attention_bias=any(name.endswith("self_attn.q_proj.bias") for name in folder.shapes),
    )


def _fused_layers(keys: Keys, eagle: Keys, target: TargetParts) -> tuple[int, ...]:
    """Return which states are fused, as `Drafter.hidden_layers` counts.

    Published ids are of two kinds: inputs of layers (those count like ours), whose first is usually 2, and
    outputs of layers counted from 0, one less, whose first is usually 1. Engines tell them apart by that.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    at = keys if keys.content.get(name) is not None else eagle
    ids = at.integers(name)
    if ids is None:
        layers = default_fused_layers(target.num_layers)
        if min(layers) < 0:
            raise keys.wrong(name, f"a target of {target.num_layers} layers needs it: {layers} is no default")
        return layers
    if ids[0] == 1:
        logger.warning(
            "%s: %s begins with 1, so %s are taken for outputs of layers counted from 0", keys.path, name, ids
        )
        ids = tuple(index + 1 for index in ids)
    if max(ids) >= target.num_layers:
        raise at.wrong(
            name,
            f"the target has {target.num_layers} layers, and what the last one gives before the final norm "
            "is not kept",
        )
    return ids


def _read_vocabulary(
    folder: DrafterFolder, target: TargetParts, keys: Keys, layer: Keys
) -> DraftVocabulary | None:
    size = keys.positive("draft_vocab_size", layer.positive("vocab_size"))
    if size > target.vocab_size:
        raise keys.wrong("draft_vocab_size", f"the target's vocabulary has {target.vocab_size} ids")
    if size == target.vocab_size:
        return None
    check_shapes(folder, {"d2t": (size,)})
    try:
        vocabulary = DraftVocabulary(folder.read(["d2t"])["d2t"], target.vocab_size)
    except ValueError as error:
        raise CheckpointError(f"{folder.path}: {error}") from error
    if "t2d" in folder.shapes:
        check_shapes(folder, {"t2d": (target.vocab_size,)})
        stored = folder.read(["t2d"])["t2d"].bool()
        if not torch.equal(stored, vocabulary.t2d):
            first = int((stored != vocabulary.t2d).nonzero()[0])
            raise CheckpointError(
                f"{folder.path}: t2d and d2t contradict each other, first at token id {first}: d2t must be "
                "the offset from draft id to token id"
            )
    return vocabulary


def save_eagle3(drafter: Eagle3, folder: Path) -> None:
    """Write the head as SafeAILab and SpecForge do."""
    settings = drafter.settings
    config: dict[str, Any] = settings.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": drafter.lm_head.out_features,
        "target_hidden_size": drafter.target.hidden_size,
        "eagle_config": {"use_aux_hidden_state": True},
        **stated_settings(settings),
    }
    write_drafter(folder, config, published_tensors(drafter, "midlayer."))


def stated_settings(settings: Eagle3Settings) -> dict[str, Any]:
    """Return the keys that every layout of the format has."""
    stated: dict[str, Any] = {
        name: getattr(settings, name)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    if settings.fused_layers[0] == 1:
        raise ValueError("fused layers that begin with 1 would be read as other ones")
    stated["eagle_aux_hidden_state_layer_ids"] = list(settings.fused_layers)
    return stated


def published_tensors(drafter: Eagle3, midlayer: str) -> dict[str, torch.Tensor]:
    """Return the weights by their names; `midlayer` is what the decoder layer's begin with."""
    return {
        name.removeprefix(_VOCABULARY).replace("midlayer.", midlayer): tensor
        for name, tensor in drafter.state_dict().items()
    }
