"""Medusa heads as FasterDecoding publishes them.

`medusa_lm_head.pt` or `.safetensors`: head i has `{i}.{j}.linear.{weight,bias}` for every residual block j,
then `{i}.{n}.weight`. Checkpoints with the target in one file (Medusa-2) have `medusa_head.` before that.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.files import DrafterFolder, TensorFormat, write_drafter
from specdec.drafters.checkpoints.fit import fit, is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.medusa import Medusa

logger = logging.getLogger(__name__)

HEAD_TENSOR = re.compile(r"^(medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)$")


def load_medusa(folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None) -> Medusa:
    """Read the heads of `folder`.

    Raises:
        CheckpointError: naming the key or tensor at fault.
    """
    keys = Keys(folder.path, folder.config)
    keys.check_target(target, keys.content.get("hidden_size"))
    num_layers = keys.positive("medusa_num_layers", 1)
    stated = keys.positive("medusa_num_heads")
    found = [match for name in folder.shapes if (match := HEAD_TENSOR.match(name))]
    prefix = (found[0].group(1) or "") if found else ""
    num_heads = max((int(match.group(2)) + 1 for match in found), default=stated)
    if num_heads > stated:
        # The heads of the paper were published so: five of them, beside a config.json of two.
        logger.warning(
            "%s: medusa_num_heads is %d, the weights hold %d heads: all are used",
            folder.path,
            stated,
            num_heads,
        )
    drafter = Medusa(target, num_heads=max(num_heads, stated), num_layers=num_layers)

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


def save_medusa(
    drafter: Medusa, folder: Path, *, base_model: str, file_format: TensorFormat = "safetensors"
) -> None:
    """Write the heads; `base_model` names the target they were made for."""
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
