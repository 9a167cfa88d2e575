"""What is the target's and stored with drafters all the same, as their formats have it.

The authors' engines take it from there. Here it is the target's own, which is not kept twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from specdec.core.errors import CheckpointError
from specdec.drafters.base import Drafter, TargetParts
from specdec.drafters.checkpoints.files import DrafterFolder
from specdec.drafters.checkpoints.fit import check_shapes


def has_own(folder: DrafterFolder, names: Sequence[str], target: TargetParts, borrowed: torch.Tensor) -> bool:
    """Whether what modules share, stored under `names` with each of them, is not the target's `borrowed`.

    Raises:
        CheckpointError: it has another shape, or is not the same in all modules.
    """
    first, *others = names
    stored = [name for name in names if name in folder.shapes]
    check_shapes(folder, dict.fromkeys(stored, (target.vocab_size, target.hidden_size)))

    def read(name: str) -> torch.Tensor:
        return folder.read([name])[name]

    common = read(first) if first in stored else borrowed
    for name in others:
        if name in stored and not _is_copy(read(name), common):
            other = first if first in stored else "that of the target"
            raise CheckpointError(
                f"{folder.path}: tensor {name} is not {other}, and MTP modules share it: several are not "
                "supported"
            )
    return common is not borrowed and not _is_copy(common, borrowed)


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the matrix of embeddings or of an LM head."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


@torch.no_grad()
def embedding_rows(target: TargetParts) -> torch.Tensor:
    """Return what the target's embeddings give for every token id, [V, H].

    It is their matrix, but for models that scale it (Gemma), which engines of heads do not do.
    """
    weight = weight_of(target.embeddings)
    if type(target.embeddings) is nn.Embedding:
        return weight
    rows: torch.Tensor = target.embeddings(torch.arange(target.vocab_size, device=weight.device))
    return rows


def stored_beside(drafter: Drafter, matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix of the target's in the numbers that the drafter's weights are stored in."""
    return matrix.to(next(drafter.parameters()).dtype)


def _is_copy(stored: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether two tensors are the same but for rounding one to the numbers of the other.

    Heads are stored in other numbers than their target, and targets served in others than they were trained.
    Of 16 bits it may be either that was rounded: what is small in bf16 is not there again behind fp16.
    """
    if own.is_meta:  # that of a target of which only the folder has been looked at
        return False
    stored = stored.to(own.device)
    if torch.equal(stored.to(own.dtype), own):
        return True
    is_half = stored.is_floating_point() and stored.dtype.itemsize == 2
    return is_half and torch.equal(stored, own.to(stored.dtype))
