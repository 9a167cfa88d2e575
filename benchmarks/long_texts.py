"""Long prompts: pieces of the demo family's held-out files, which neither model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.core.errors import UserError
from specdec.engine.text.tokenizer import Tokenizer
from training.corpus import load_corpus

_STEP_SHARES = (1, 2, 4, 8)
"""Pieces of a file begin where others end; where these do not do, in their middle, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTexts:
    """The token ids of every held-out file."""

    files: Sequence[tuple[int, ...]]

    @classmethod
    def read(cls, tokenizer: Tokenizer) -> LongTexts:
        """Read the standard library's held-out files (`training.corpus`)."""
        return cls(files=[tuple(tokenizer.encode(file.text)) for file in load_corpus().held_out])

    def prompts(self, number: int, length: int) -> list[tuple[int, ...]]:
        """Return so many different pieces of this length, from as many files as there are; fewer first.

        A larger number of the same length begins with the same pieces.

        Raises:
            UserError: the files are not long enough.
        """
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for share in _STEP_SHARES:
            step = max(1, length // share)
            longest = max((len(file) for file in self.files), default=0)
            for start in range(0, longest, step):
                for name, file in enumerate(self.files):
                    if start + length <= len(file):
                        found.setdefault((name, start), file[start : start + length])
            if len(found) >= number:
                return list(found.values())[:number]
        raise UserError(f"the held-out files have {len(found)} pieces of {length} tokens, not {number}")
