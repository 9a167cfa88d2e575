"""EAGLE-3 and 3.1 heads as SafeAILab, SpecForge and `speculators` publish them.

The tensors are the same (names of modules in `drafters.eagle3`) but for the decoder layer: `midlayer.` or
`layers.0.`; SGLang once called the norms of 3.1 `aux_norm_{low,mid,high}`.
config.json has all keys at its top, or as `speculators` has it (`speculators.py`). At the top `model_type`
and `num_hidden_layers` may be the target's: there is one layer, of the kind that its tensors are
(`layers.py`).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from specdec.core.errors import CheckpointError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.borrowed import embedding_rows, has_own, weight_of
from specdec.drafters.checkpoints.described import described
from specdec.drafters.checkpoints.eagle import name_prefix
from specdec.drafters.checkpoints.files import DrafterFolder, write_drafter
from specdec.drafters.checkpoints.fit import check_shapes, fit, is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.checkpoints.layers import match_biases, read_layer_config
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings, default_fused_layers
from specdec.drafters.vocabulary import DraftVocabulary

logger = logging.getLogger(__name__)

_VOCABULARY = "_vocabulary."
_EMBEDDINGS = "embed_tokens.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SECOND_LAYER = re.compile(
    r"^(model\.)?(layers\.[1-9]\d*|midlayer\.\d+|midlayers\.\d+|additional_layers\.\d+)\."
)
_ONCE = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}
"""What SGLang called tensors before."""


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
    """Read a head.

    `layer` is the part of config.json that describes the decoder layer; where it is `keys`, all of it, its
    `model_type` is believed only of what the tensors do not tell.
    """
    _check_states_are_fused(keys)
    outer, midlayer = name_prefix(folder, "fc.weight"), _midlayer(folder)
    _check_one_layer(folder, layer)
    config = (
        read_layer_config(folder, keys, outer + midlayer, 1)
        if layer is keys
        else layer.layer_config(num_layers=1)
    )
    layer.check_target(target)
    vocabulary = _read_vocabulary(folder, target, keys, layer)
    settings = _read_settings(
        folder, target, keys, config, is_whole=vocabulary is None, is_speculators=layer is not keys
    )
    drafter = Eagle3(target, settings, vocabulary)
    match_biases(drafter.midlayer.self_attn, folder, outer + midlayer)

    def published(name: str) -> str | None:
        if name.startswith(_VOCABULARY):
            return None
        if name.startswith("lm_head."):
            return name
        for now, once in _ONCE.items():
            if f"{outer}{name.replace(now, once)}" in folder.shapes:
                return outer + name.replace(now, once)
        return outer + name.replace("midlayer.", midlayer)

    return fit(
        drafter,
        folder,
        published,
        is_ignored=lambda name: name in ("d2t", "t2d", f"{outer}{_EMBEDDINGS}") or is_rotary_buffer(name),
        dtype=dtype,
    )


def _midlayer(folder: DrafterFolder) -> str:
    """Return what names of the decoder layer's tensors begin with, inside of the head."""
    names = {name.removeprefix("model.") for name in folder.shapes}
    return "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."


def _check_states_are_fused(keys: Keys) -> None:
    """Check this first: of a head without fused states all else is different, too."""
    eagle = keys.object("eagle_config")
    if not eagle.flag("use_aux_hidden_state", default=True):
        raise eagle.wrong("use_aux_hidden_state", "heads without fused states are not supported")


def _check_one_layer(folder: DrafterFolder, layer: Keys) -> None:
    """Check that the weights hold one decoder layer, whatever is stated: SafeAILab's code does not ask."""
    second = sorted(name for name in folder.shapes if _SECOND_LAYER.match(name))
    if second:
        raise CheckpointError(
            f"{folder.path}: the weights hold {len(second)} tensors of more than one decoder layer, first "
            f"{second[0]}; EAGLE-3 heads of one are supported"
        )
    stated = layer.positive("num_hidden_layers", 1)
    if stated != 1:
        logger.warning(
            "%s: %snum_hidden_layers is %d, the weights hold one decoder layer: one is used",
            folder.path,
            layer.prefix,
            stated,
        )


def _read_settings(
    folder: DrafterFolder,
    target: TargetParts,
    keys: Keys,
    config: PretrainedConfig,
    *,
    is_whole: bool,
    is_speculators: bool,
) -> Eagle3Settings:
    """Read everything but layer and vocabulary; `is_whole`: that is the target's, in its order.

    `is_speculators`: config.json says that it is in that format.
    """
    keys_of_target = keys.positive("target_hidden_size", config.hidden_size)
    keys.check_target(target, keys_of_target)
    prefix = name_prefix(folder, "fc.weight")
    has_embeddings = _has_own_embeddings(folder, target, config, f"{prefix}{_EMBEDDINGS}")
    if config.hidden_size != target.hidden_size and not has_embeddings:
        raise CheckpointError(
            f"{folder.path}: the weights lack embed_tokens.weight of shape "
            f"{(target.vocab_size, config.hidden_size)}: the target's embeddings have {target.hidden_size} "
            "columns and cannot be shared"
        )
    eagle = keys.object("eagle_config")
    norm_before_fc = any(at.flag("norm_before_fc", default=False) for at in (keys, eagle))
    normed = [name for name in ("fc_norm", "use_aux_norm") if keys.flag(name, default=False)]
    if norm_before_fc and normed:
        raise keys.wrong(normed[0], "norm_before_fc is true too: a head has one of the two, or neither")
    if keys.content.get("norm_before_residual") is None:
        logger.warning(
            "%s: config.json has no norm_before_residual, false is assumed (as the format defines it; some "
            "engines take true)",
            folder.path,
        )
    has_head = not is_whole or "lm_head.weight" in folder.shapes or config.hidden_size != target.hidden_size
    if not has_head and has_embeddings and keys.flag("tie_word_embeddings", default=False):
        logger.warning(
            "%s: the weights lack lm_head.weight, and the target's is used: if the head was trained with its "
            "own %s for that (tie_word_embeddings is true), store them as lm_head.weight, too",
            folder.path,
            _EMBEDDINGS,
        )
    return Eagle3Settings(
        config=config,
        fused_layers=_fused_layers(keys, eagle, target, is_speculators=is_speculators),
        norm_before_residual=keys.flag("norm_before_residual", default=False),
        norm_before_fc=norm_before_fc,
        fc_norm=bool(normed),
        norm_output=keys.flag("norm_output", default=False),
        has_embeddings=has_embeddings,
        has_head=has_head,
        attention_bias=any(name.endswith("self_attn.q_proj.bias") for name in folder.shapes),
    )


def _has_own_embeddings(
    folder: DrafterFolder, target: TargetParts, config: PretrainedConfig, name: str
) -> bool:
    """Whether the embeddings stored under `name` are others than the target's, which are not kept twice."""
    if name not in folder.shapes or config.hidden_size != target.hidden_size:
        return name in folder.shapes
    if not has_own(folder, [name], target, embedding_rows(target)):
        return False
    # Of a target that scales its embeddings, heads have them as they are stored.
    weight = weight_of(target.embeddings)
    if not weight.is_meta and has_own(folder, [name], target, weight):
        logger.warning(
            "%s: %s is not the target's, and is used as it is: the head may be one for another target",
            folder.path,
            name,
        )
    return True


def _fused_layers(keys: Keys, eagle: Keys, target: TargetParts, *, is_speculators: bool) -> tuple[int, ...]:
    """Return which states are fused, as `Drafter.hidden_layers` counts.

    Ids in `eagle_config` are SpecForge's and SGLang's: outputs of layers, counted from 0, which is one less
    than ours (-1: the embeddings). Those at the top are vLLM's and `speculators`': inputs of layers, which
    count like ours; but outside of `speculators`, lists that begin with 1 were carried there from
    `eagle_config` as they were. Others were carried into `eagle_config`: those that are the default of
    inputs, or have an id that is none of an output, are inputs there, too.

    Raises:
        CheckpointError: the two do not mean the same layers, or the target does not have a layer.
    """
    inside, outside = _layer_ids(eagle, least=-1), _layer_ids(keys, least=0)
    if inside is not None:
        at, layers, kind = eagle, _behind(inside), "outputs"
        meant = () if outside is None else (outside, _of_inputs(outside, is_defined=is_speculators))
        num_layers = target.num_layers
        are_inputs = inside == default_fused_layers(num_layers) or num_layers in inside
        if are_inputs and min(inside) >= 0 and (outside is None or layers not in meant):
            layers, kind = inside, "inputs"
        if outside is not None and layers not in meant:
            raise eagle.wrong(
                _LAYER_IDS,
                f"read as {kind} of layers it means {_named(layers)}, and "
                f"{keys.prefix}{_LAYER_IDS} at the top is {list(outside)}: both must mean the same",
            )
    elif outside is not None:
        at, layers = keys, _of_inputs(outside, is_defined=is_speculators)
        kind = "inputs" if layers == outside else "outputs (they begin with 1)"
        if is_speculators and outside[0] == 1:
            logger.warning(
                "%s: %s begin with 1 and are read as inputs of layers, as speculators defines them; of a "
                "head that was converted with its ids of outputs each must be one more",
                keys.path,
                _LAYER_IDS,
            )
    else:
        layers = default_fused_layers(target.num_layers)
        if min(layers) < 0:
            raise keys.wrong(
                _LAYER_IDS, f"a target of {target.num_layers} layers needs it: {layers} is no default"
            )
        logger.warning(
            "%s: config.json has no %s: %s are assumed to be fused; of a head that was trained on others "
            "hardly any draft will stand",
            keys.path,
            _LAYER_IDS,
            _named(layers),
        )
        return layers
    logger.info(
        "%s: %s%s are read as %s of layers: %s", keys.path, at.prefix, _LAYER_IDS, kind, _named(layers)
    )
    if max(layers) >= target.num_layers:
        raise at.wrong(
            _LAYER_IDS,
            f"read as {kind} of layers it means {_named(layers)}; the target has {target.num_layers} layers, "
            "and what the last one gives before the final norm is not kept",
        )
    return layers


def _layer_ids(keys: Keys, *, least: int) -> tuple[int, ...] | None:
    """Return the ids that are stated; none at all, as ModelOpt has it, are those of the default, too."""
    return None if keys.content.get(_LAYER_IDS) == [] else keys.integers(_LAYER_IDS, least=least)


def _of_inputs(ids: tuple[int, ...], *, is_defined: bool) -> tuple[int, ...]:
    """Return the states that ids at the top mean; `is_defined`: they are inputs, whatever they begin with."""
    return _behind(ids) if ids[0] == 1 and not is_defined else ids


def _behind(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the states that are outputs of these layers."""
    return tuple(index + 1 for index in ids)


def _named(layers: tuple[int, ...]) -> str:
    return f"the states after {', '.join(map(str, layers))} layers"


def _read_vocabulary(
    folder: DrafterFolder, target: TargetParts, keys: Keys, layer: Keys
) -> DraftVocabulary | None:
    size = keys.positive("draft_vocab_size", layer.positive("vocab_size"))
    if size > target.vocab_size:
        raise keys.wrong("draft_vocab_size", f"the target's vocabulary has {target.vocab_size} ids")
    is_whole = size == target.vocab_size
    if is_whole and "d2t" not in folder.shapes:
        return None
    check_shapes(folder, {"d2t": (size,)})
    d2t = folder.read(["d2t"])["d2t"]
    try:
        vocabulary = DraftVocabulary(d2t, target.vocab_size)
    except ValueError as error:
        raise CheckpointError(f"{folder.path}: {error}") from error
    if is_whole and not bool(d2t.any()):
        # Offsets of zero say nothing, and beside them t2d is published as it was made: all false.
        return None
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
    """Write the head as SafeAILab and SpecForge do; fused layers for engines of either convention.

    Raises:
        CheckpointError: engines would not agree on which layers are fused.
    """
    settings = drafter.settings
    if settings.fused_layers[0] == 1:
        raise CheckpointError(
            f"{folder}: {_named(settings.fused_layers)} cannot be written as {_LAYER_IDS}: where these begin "
            "with 1 engines read others; the layout of speculators holds them"
        )
    config: dict[str, Any] = described(settings.config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": drafter.num_logits,
        "eagle_config": {
            "use_aux_hidden_state": True,
            _LAYER_IDS: [index - 1 for index in settings.fused_layers],
        },
        **stated_settings(settings),
    }
    # SafeAILab's code takes the target's embeddings only where this key is missing.
    config.pop("target_hidden_size", None)
    if drafter.target.hidden_size != settings.config.hidden_size:
        config["target_hidden_size"] = drafter.target.hidden_size
    write_drafter(folder, config, published_tensors(drafter, "midlayer."))


def stated_settings(settings: Eagle3Settings) -> dict[str, Any]:
    """Return the keys that every layout of the format has at its top."""
    stated: dict[str, Any] = {
        name: getattr(settings, name)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    # The LM head is not the embeddings, whatever it is in the target that layers are described by.
    return stated | {_LAYER_IDS: list(settings.fused_layers), "tie_word_embeddings": False}


def published_tensors(drafter: Eagle3, midlayer: str) -> dict[str, torch.Tensor]:
    """Return the weights by their names; `midlayer` is what the decoder layer's begin with."""
    return {
        name.removeprefix(_VOCABULARY).replace("midlayer.", midlayer): tensor
        for name, tensor in drafter.state_dict().items()
    }
