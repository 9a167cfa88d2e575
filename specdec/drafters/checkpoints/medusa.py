"""Medusa heads as FasterDecoding publishes them, and as they are converted for vLLM.

`medusa_lm_head.pt` or `.safetensors`: head i has `{i}.{j}.linear.{weight,bias}` for every residual block j,
then `{i}.{n}.weight`, or nothing where the target's LM head is used (the authors' `version` 2). Checkpoints
with the target in one file (Medusa-2) have `medusa_head.` before that.

Converted: `blocks.{i}.layers.{j}.{weight,bias}` and `lm_heads.{i}.weight`, or one `lm_head.weight` for all
(`original_lm_head`), with or without `medusa_heads.` before; a `token_map` where they know a part of the
vocabulary. config.json has `num_heads`, `num_hidden_layers` and `truncated_vocab_size`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from specdec.core.errors import CheckpointError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.files import DrafterFolder, TensorFormat, write_drafter
from specdec.drafters.checkpoints.fit import check_shapes, fit, is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.medusa import LmHeads, Medusa
from specdec.drafters.vocabulary import DraftVocabulary

logger = logging.getLogger(__name__)

_HEAD_TENSOR = re.compile(r"^(medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")
_BLOCK_TENSOR = re.compile(r"^(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_TOKEN_MAP = "token_map"


def has_medusa(folder: DrafterFolder) -> bool:
    """Whether a folder holds Medusa heads, in either layout."""
    return any(_HEAD_TENSOR.match(name) or _BLOCK_TENSOR.match(name) for name in folder.shapes)


def load_medusa(folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None) -> Medusa:
    """Read the heads of `folder`.

    Raises:
        CheckpointError: naming the key or tensor at fault.
    """
    keys = Keys(folder.path, folder.config)
    keys.check_target(target, keys.content.get("hidden_size"))
    if any(_BLOCK_TENSOR.match(name) for name in folder.shapes):
        return _load_converted(folder, keys, target, dtype)
    found = [match for name in folder.shapes if (match := _HEAD_TENSOR.match(name))]
    prefix = (found[0].group(1) or "") if found else ""
    has_lm_heads = any(match.group(4) is None for match in found)
    drafter = Medusa(
        target,
        num_heads=_num_heads(keys, "medusa_num_heads", max(int(match.group(2)) for match in found) + 1),
        num_layers=keys.positive("medusa_num_layers", 1),
        lm_heads="each" if has_lm_heads else "target",
    )

    def is_ignored(name: str) -> bool:
        is_of_target = bool(prefix) and name.startswith(("model.", "lm_head."))
        return is_of_target or is_rotary_buffer(name)

    return fit(
        drafter,
        folder,
        lambda name: prefix + name.removeprefix("heads."),
        is_ignored=is_ignored,
        dtype=dtype,
    )


def _num_heads(keys: Keys, key: str, found: int) -> int:
    """Return how many heads there are: those that `key` states, or those `found` where they are more.

    Where it is missing, those found are all that can be meant.
    """
    if keys.content.get(key) is None:
        logger.warning(
            "%s: config.json has no %s, the weights hold %d heads: all are used", keys.path, key, found
        )
        return found
    stated = keys.positive(key)
    if found > stated:
        # The heads of the paper were published so: five of them, beside a config.json of two.
        logger.warning("%s: %s is %d, the weights hold %d heads: all are used", keys.path, key, stated, found)
    return max(found, stated)


def _load_converted(
    folder: DrafterFolder, keys: Keys, target: TargetParts, dtype: torch.dtype | None
) -> Medusa:
    """Read heads that were converted for vLLM."""
    if keys.content.get("logit_scale", 1.0) != 1.0:
        raise keys.wrong("logit_scale", "Medusa heads with scaled logits are not supported")
    stored_as = {name.removeprefix("medusa_heads."): name for name in folder.shapes}
    blocks = [match for name in folder.shapes if (match := _BLOCK_TENSOR.match(name))]
    has_bias = any(match.group(3) == "bias" for match in blocks)
    one = "lm_head.weight"
    if keys.flag("original_lm_head", default=False) and one not in stored_as:
        one = "lm_heads.0.weight"
    lm_heads: LmHeads = "each"
    if one == "lm_heads.0.weight" or one in stored_as:
        lm_heads = "one"
    elif not any(name.startswith("lm_heads.") for name in stored_as):
        lm_heads = "target"
    first = stored_as.get(one if lm_heads == "one" else "lm_heads.0.weight", "")
    num_rows = folder.shapes[first][0] if first else target.vocab_size
    drafter = Medusa(
        target,
        num_heads=_num_heads(keys, "num_heads", max(int(match.group(1)) for match in blocks) + 1),
        num_layers=keys.positive("num_hidden_layers", 1),
        has_bias=has_bias or keys.flag("medusa_fc_bias", default=False),
        lm_heads=lm_heads,
        known_ids=_known_ids(folder, keys, target, stored_as, num_rows),
    )

    def published(name: str) -> str | None:
        if name.startswith("known_ids."):
            return None
        plain = one
        if name.startswith("heads."):
            head, part = name.removeprefix("heads.").split(".", 1)
            layer, _, kind = part.partition(".linear.")
            plain = f"blocks.{head}.layers.{layer}.{kind}" if kind else f"lm_heads.{head}.weight"
        return stored_as.get(plain, plain)

    def is_ignored(name: str) -> bool:
        plain = name.removeprefix("medusa_heads.")
        return plain == _TOKEN_MAP or (lm_heads == "one" and plain.startswith("lm_heads."))

    return fit(drafter, folder, published, is_ignored=is_ignored, dtype=dtype)


def _known_ids(
    folder: DrafterFolder, keys: Keys, target: TargetParts, stored_as: Mapping[str, str], num_rows: int
) -> DraftVocabulary | None:
    """Return which ids LM heads of `num_rows` rows know; None: all of the target's.

    `token_map` has them as they are. vLLM takes its rows of heads that know all ids; here those stay whole.
    """
    size = keys.positive("truncated_vocab_size", target.vocab_size)
    if size > target.vocab_size:
        raise keys.wrong("truncated_vocab_size", f"the target's vocabulary has {target.vocab_size} ids")
    if target.vocab_size in (size, num_rows):
        return None
    stored = stored_as.get(_TOKEN_MAP, _TOKEN_MAP)
    check_shapes(folder, {stored: (size,)})
    ids = folder.read([stored])[stored]
    try:
        return DraftVocabulary(ids - torch.arange(size), target.vocab_size)
    except ValueError as error:
        raise CheckpointError(f"{folder.path}: {stored}, as offsets d2t: {error}") from error


def save_medusa(
    drafter: Medusa, folder: Path, *, base_model: str, file_format: TensorFormat = "safetensors"
) -> None:
    """Write the heads in their authors' layout; `base_model` names the target they were made for.

    Raises:
        CheckpointError: the layout does not hold such heads.
    """
    if drafter.lm_heads == "one" or drafter.known_ids is not None:
        raise CheckpointError(f"{folder}: the authors' layout holds an LM head for each head, of all ids")
    config = {
        "medusa_num_heads": len(drafter.heads),
        "medusa_num_layers": drafter.num_layers,
        "base_model_name_or_path": base_model,
        "hidden_size": drafter.target.hidden_size,
        "vocab_size": drafter.target.vocab_size,
        "model_type": "medusa",
    }
    tensors = {name.removeprefix("heads."): tensor for name, tensor in drafter.state_dict().items()}
    write_drafter(folder, config, tensors, file_name=f"medusa_lm_head.{file_format}")
