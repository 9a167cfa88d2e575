"""Runs a drafter of several modules, each for a depth of its own: MTP as DeepSeek-V3 has it.

Seen from a token, module m reads what module m - 1 made of the token before it (module 0: the target's
state), and its row lies m places before the token's: the first m tokens of a sequence have none. Committed
tokens go through all modules. A token drafted at depth d goes through those from d on: what they make of it
belongs to rows whose states are the target's, and later tokens of theirs attend to it. Module d drafts behind
it, or the last module, which behind its own depth reads its own features.

Shape letters: R rows of a batch, M modules, H features of one module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from specdec.model.batch import SequenceSlice, logit_rows
from specdec.proposers.feature_runner import FeatureRunner, placed
from specdec.tree.topology import ROOT


@dataclass(frozen=True, slots=True)
class _Rows:
    """The tokens of a forward, piece after piece."""

    pieces: Sequence[SequenceSlice]
    token_ids: list[int]
    depths: list[int]
    """How many were drafted up to each; 0: committed."""
    before: list[int]
    """Rows of the tokens before; -1 where that was run earlier, or there is none."""

    @classmethod
    def of(cls, pieces: Sequence[SequenceSlice]) -> _Rows:
        before: list[int] = []
        for piece in pieces:
            follows = piece.states is not None
            first, length = len(before), len(piece.token_ids)
            before.extend(first + row - 1 if follows and row > 0 else -1 for row in range(length))
        token_ids = list(chain.from_iterable(piece.token_ids for piece in pieces))
        return cls(pieces, token_ids, list(chain.from_iterable(map(_depths, pieces))), before)

    def of_module(self, module: int) -> tuple[list[int], list[SequenceSlice]]:
        """Return the rows that a module has, and their slices with the places that they have in it.

        A window holds a draft, and so as many places behind its gap as there are modules; where a request
        asks for less, rows of later modules lie before the gap, and its drafts are worse.
        """
        there: list[int] = []
        shifted: list[SequenceSlice] = []
        first = 0
        for piece in self.pieces:
            length = len(piece.token_ids)
            # Trees behind fewer tokens than that are kept whole: they cost a row too many, and no tokens.
            skipped = max(0, module - piece.start) if piece.parents is None else 0
            if skipped < length:
                there.extend(range(first + skipped, first + length))
                token_ids, start = piece.token_ids[skipped:], max(0, piece.start - module)
                shifted.append(replace(piece, token_ids=token_ids, start=start, num_logit_rows=0))
            first += length
        return there, shifted


class ModuleRunner(FeatureRunner):
    """A `FeatureRunner` that runs `num_kept` modules, and keeps for every slot what each of them made."""

    can_be_native = False

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """See `FeatureRunner.forward`."""
        pieces = [piece for piece in map(placed, slices) if piece.token_ids]
        if not pieces:
            return torch.empty(0, self.vocab_size, device=self._pool.device)
        rows = _Rows.of(pieces)
        wanted = logit_rows(pieces)
        last = self.num_kept - 1
        token_ids = torch.tensor(rows.token_ids, device=self._pool.device)
        embedded_RH = self._drafter.embed(token_ids[None])[0]
        kept_RMH = torch.cat([self._behind_parents(piece) for piece in pieces])
        made_RMH = torch.zeros_like(kept_RMH)
        drafting: list[torch.Tensor] = [embedded_RH[:0]] * len(wanted)
        for module in range(min(last, *rows.depths), self.num_kept):
            there, shifted = rows.of_module(module)
            if not shifted:
                continue
            batch = self._pool.batch(shifted)
            features_RH = self._inputs_of(module, rows, kept_RMH, made_RMH)
            step = self._drafter.step(
                embedded_RH[there][None],
                features_RH[there][None],
                self._pool.positions(shifted, batch.metadata)[None],
                batch,
                module,
            )
            made_RMH[there, module] = step.features[0]
            place = {row: index for index, row in enumerate(there)}
            for number, row in enumerate(wanted):
                if min(rows.depths[row], last) == module:
                    drafting[number] = step.outputs[0, place[row]]
        slots = self._pool.batch(pieces).metadata.slot_mapping
        self._features.write(slots, made_RMH.flatten(1))
        if not wanted:
            return torch.empty(0, self.vocab_size, device=self._pool.device)
        logits = self._drafter.logits(torch.stack(drafting))
        vocabulary = self._drafter.vocabulary
        return (logits if vocabulary is None else vocabulary.expand(logits)).float()

    def _inputs_of(
        self, module: int, rows: _Rows, kept_RMH: torch.Tensor, made_RMH: torch.Tensor
    ) -> torch.Tensor:
        """Return what a module reads beside the tokens, [R, H]; of rows that it has not, anything."""
        device = kept_RMH.device
        if module == 0:
            width = kept_RMH.shape[-1]
            return torch.cat([self._states(piece, width) for piece in rows.pieces])
        before = torch.tensor(rows.before, device=device)
        features = torch.where(
            (before >= 0)[:, None], made_RMH[before.clamp(min=0), module - 1], kept_RMH[:, module - 1]
        )
        if module == self.num_kept - 1:
            goes_on = torch.tensor(rows.depths, device=device) > module
            features = torch.where(goes_on[:, None], kept_RMH[:, module], features)
        return features

    def _states(self, piece: SequenceSlice, width: int) -> torch.Tensor:
        if piece.states is None:
            shape = len(piece.token_ids), width
            return torch.zeros(shape, dtype=self._pool.dtype, device=self._pool.device)
        return self._drafter.fuse(piece.states.to(self._pool.device, self._pool.dtype)[None])[0]

    def _behind_parents(self, piece: SequenceSlice) -> torch.Tensor:
        """Return what was made earlier of the tokens before a piece's, [R, M, H]; zeros where nothing was."""
        if piece.states is None:
            parents = (ROOT,) if piece.parents is None else piece.parents
            there = self._features.read(piece.block_table, piece.start - 1, piece.start + len(parents))
            return there[[parent - ROOT for parent in parents]].view(len(parents), self.num_kept, -1)
        behind = torch.zeros(
            len(piece.token_ids), self._features.width, dtype=self._pool.dtype, device=self._pool.device
        )
        if piece.start > 0:
            behind[:1] = self._features.read(piece.block_table, piece.start - 1, piece.start)
        return behind.view(len(behind), self.num_kept, -1)


def _depths(piece: SequenceSlice) -> list[int]:
    """How many tokens were drafted up to each of a piece."""
    if piece.parents is None:
        return [piece.depth] * len(piece.token_ids)
    depths: list[int] = []
    for parent in piece.parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths
