"""A part of the target's vocabulary, which a drafter chooses from (EAGLE-3, FR-Spec)."""

from __future__ import annotations

import torch
from torch import nn

from specdec.model.recording import SPREAD, active_recorder


class DraftVocabulary(nn.Module):
    """Token ids that a drafter knows, in ascending order of the target's.

    Buffers as they are published: `d2t` int64 [num_draft], an offset (target id = draft id + d2t[draft id]),
    and `t2d` bool [num_target], which of the target's ids are among them.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, d2t: torch.Tensor, num_target: int) -> None:
        """Take the offsets `d2t`, integers [num_draft].

        Raises:
            ValueError: they are no integers, leave the target's `num_target` ids, or meet.
        """
        super().__init__()
        if d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool:
            raise ValueError(f"d2t holds {d2t.dtype}; offsets of token ids are integers")
        d2t = d2t.to(torch.int64)
        self.register_buffer("d2t", d2t)
        ids = d2t + torch.arange(len(d2t), device=d2t.device)
        if not bool(((ids >= 0) & (ids < num_target)).all()):
            raise ValueError(f"d2t leads to token ids outside of 0 .. {num_target - 1}")
        if len(torch.unique(ids)) != len(ids):
            raise ValueError("d2t leads from two draft ids to the same token id")
        known = torch.zeros(num_target, dtype=torch.bool, device=d2t.device)
        known[ids] = True
        self.register_buffer("t2d", known)

    @classmethod
    def of_ids(cls, token_ids: torch.Tensor, num_target: int) -> DraftVocabulary:
        """Return the vocabulary of these target ids, which must be different."""
        ids = token_ids.to(torch.int64).sort().values
        return cls(ids - torch.arange(len(ids), device=ids.device), num_target)

    @property
    def size(self) -> int:
        """Number of draft ids."""
        return self.d2t.shape[0]

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [size]: the target's id of each draft id."""
        return self.d2t + torch.arange(self.size, device=self.d2t.device)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Translate draft ids into the target's."""
        return draft_ids + self.d2t[draft_ids]

    def expand(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [..., num_target] of logits [..., size]; -inf for ids that it does not know."""
        recorder = active_recorder()
        if recorder is None:
            return self._expand(logits)
        with recorder.paused():
            full, target_ids = self._expand(logits), self.target_ids
        return recorder.note(SPREAD, (logits, target_ids), full)

    def _expand(self, logits: torch.Tensor) -> torch.Tensor:
        full = logits.new_full((*logits.shape[:-1], self.t2d.shape[0]), float("-inf"))
        full[..., self.target_ids] = logits
        return full
