"""Heads as vLLM's library `speculators` publishes them: EAGLE-3 and MTP.

config.json: `speculators_model_type`; the decoder layer in `transformer_layer_config`; in
`speculators_config` how the library drafts, and for whom.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from specdec.core.errors import CheckpointError
from specdec.drafters.base import FeatureDrafter, TargetParts
from specdec.drafters.checkpoints.borrowed import has_own, weight_of
from specdec.drafters.checkpoints.described import described
from specdec.drafters.checkpoints.eagle3 import published_tensors, read_eagle3, stated_settings
from specdec.drafters.checkpoints.experts import one_by_one
from specdec.drafters.checkpoints.files import DrafterFolder, write_drafter
from specdec.drafters.checkpoints.fit import fit, is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.mtp import Mtp

SpeculatorKind = Literal["eagle3", "mtp"]
KIND_KEY = "speculators_model_type"
_VERSION = "0.5.0"
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_MTP_NAMES = {
    "hnorm": "hidden_layernorm",
    "enorm": "token_layernorm",
    "eh_proj": "input_proj",
    "norm": "final_layernorm",
}


def kind_of_speculator(folder: DrafterFolder) -> SpeculatorKind:
    """Return what the head of `folder` is.

    Raises:
        CheckpointError: it is of a kind that is not supported.
    """
    keys = Keys(folder.path, folder.config)
    kind = keys.content.get(KIND_KEY)
    if kind == "eagle3":
        return "eagle3"
    if kind == "mtp":
        return "mtp"
    raise keys.wrong(KIND_KEY, "one of eagle3, mtp is supported")


def load_speculator(
    folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None
) -> FeatureDrafter:
    """Read the head of `folder`.

    Raises:
        CheckpointError: naming the key or tensor at fault.
    """
    keys = Keys(folder.path, folder.config)
    layer = keys.object("transformer_layer_config")
    if kind_of_speculator(folder) == "eagle3":
        return read_eagle3(folder, target, keys, layer, dtype)
    return _load_mtp(folder, target, layer, dtype)


def _load_mtp(folder: DrafterFolder, target: TargetParts, layer: Keys, dtype: torch.dtype | None) -> Mtp:
    config = layer.layer_config()
    layer.check_target(target, config.hidden_size)
    drafter = Mtp(
        target,
        config,
        has_embeddings=has_own(folder, [_EMBEDDINGS], target, weight_of(target.embeddings)),
        has_head=has_own(folder, [_HEAD], target, weight_of(target.head)),
    )
    return fit(
        drafter,
        folder,
        _mtp_name,
        is_ignored=lambda name: name in (_EMBEDDINGS, _HEAD) or is_rotary_buffer(name),
        dtype=dtype,
    )


def _mtp_name(name: str) -> str:
    if name.startswith(("embed_tokens.", "head.")):
        return _EMBEDDINGS if name.startswith("embed_tokens.") else _HEAD
    first, _, rest = name.removeprefix("mtp_modules.0.").partition(".")
    return f"mtp_layers.0.{rest}" if first == "block" else f"mtp_layers.0.{_MTP_NAMES[first]}.{rest}"


def save_speculator(
    drafter: Eagle3 | Mtp, folder: Path, *, base_model: str, num_speculative_tokens: int
) -> None:
    """Write the head; `base_model` names the target, `num_speculative_tokens` is what engines draft with.

    Raises:
        CheckpointError: several MTP modules, which the format does not hold.
    """
    architectures = list(getattr(drafter.target.config, "architectures", None) or [])
    config: dict[str, Any] = {
        "speculators_version": _VERSION,
        "speculators_config": {
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": base_model, "architectures": architectures},
        },
    }
    if isinstance(drafter, Eagle3):
        config["architectures"] = ["Eagle3DraftModel"]
        config["draft_vocab_size"] = drafter.num_logits
        config["target_hidden_size"] = drafter.target.hidden_size
        config |= stated_settings(drafter.settings)
        layer = described(drafter.settings.config) | {"tie_word_embeddings": False}
        config["transformer_layer_config"] = layer
        kind, tensors = "eagle3", published_tensors(drafter, "layers.0.")
    else:
        if len(drafter.mtp_modules) != 1 or drafter.embed_tokens is not None or drafter.head is not None:
            raise CheckpointError(
                f"{folder}: the speculators format holds one MTP module that shares embeddings and head with "
                "the target"
            )
        config["architectures"] = ["MTPDraftModel"]
        config["num_nextn_predict_layers"] = 1
        config["transformer_layer_config"] = described(drafter.config)
        kind = "mtp"
        tensors = {_mtp_name(name): tensor for name, tensor in one_by_one(drafter).items()}
    config[KIND_KEY] = kind
    config["speculators_config"]["algorithm"] = kind
    write_drafter(folder, config, tensors)
