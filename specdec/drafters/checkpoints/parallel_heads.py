"""Parallel heads. Meta published its own in a file of its own codebase, so this layout is ours.

config.json: `model_type` parallel_heads, `n_future_tokens` (the target's own next token counts as one);
`model.safetensors`: `extra_heads.{i}.*` as in Meta's, with the names of transformers for the decoder layer.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.files import DrafterFolder, write_drafter
from specdec.drafters.checkpoints.fit import fit
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.parallel_heads import ParallelHeads

HEAD_PREFIX = "extra_heads."


def load_parallel_heads(
    folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None
) -> ParallelHeads:
    """Read the heads of `folder`.

    Raises:
        CheckpointError: naming the key or tensor at fault.
    """
    keys = Keys(folder.path, folder.config)
    keys.check_target(target, keys.positive("hidden_size"))
    num_tokens = keys.positive("n_future_tokens")
    if num_tokens < 2:
        raise keys.wrong("n_future_tokens", "it must be at least 2: the target's own token and one more")
    return fit(ParallelHeads(target, num_heads=num_tokens - 1), folder, lambda name: name, dtype=dtype)


def save_parallel_heads(drafter: ParallelHeads, folder: Path, *, base_model: str) -> None:
    """Write the heads; `base_model` names the target they were made for."""
    config = {
        "model_type": "parallel_heads",
        "n_future_tokens": len(drafter.extra_heads) + 1,
        "base_model_name_or_path": base_model,
        "hidden_size": drafter.target.hidden_size,
        "vocab_size": drafter.target.vocab_size,
    }
    write_drafter(folder, config, drafter.state_dict())
