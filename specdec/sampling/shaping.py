"""What a request does to logits before the token function: penalties, bias, and tokens that it forbids.

At the position behind tokens x (prompt and output, drafted tokens included) the logit l_v becomes, in fp32:

    1. l_v / r if l_v > 0 else l_v * r    v occurs in x               repetition_penalty r
    2. l_v - f * c_v                      c_v: how often v occurs in the output part of x
    3. l_v - a                            c_v > 0                     frequency_penalty f, presence_penalty a
    4. l_v + b_v                                                      logit_bias b
    5. -inf                               v is forbidden behind x     bad_words, min_tokens,
                                                                      allowed_token_ids, grammar

Each verified position is evaluated with its own drafted tokens behind the committed ones, so that what is
chosen there is what would be chosen without speculation. Only committed tokens change a shaper's state.

R rows, V token ids here (all, or one rank's columns), H token ids that occurred.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.core.sampling_params import SamplingParams

_NEVER = float("-inf")


class LogitShaper:
    """Changes the logits of one sequence's rows as its parameters ask for."""

    def __init__(
        self, params: SamplingParams, *, eos_token_ids: Collection[int], num_prompt_tokens: int
    ) -> None:
        """`eos_token_ids` are the model's; min_tokens forbids them unless `ignore_eos`."""
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._num_committed = 0
        self._bias_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._stop_ids = sorted(params.stop_ids(eos_token_ids)) if params.min_tokens else []
        self._always_bad = [word[0] for word in params.bad_words if len(word) == 1]
        # Lists are taken too, and equal no tuple.
        self._bad_sequences = [tuple(word) for word in params.bad_words if len(word) > 1]
        self._longest_begin = max((len(word) - 1 for word in self._bad_sequences), default=0)
        self._output_end: list[int] = []
        """The last committed output tokens, as many as a forbidden sequence may begin with."""
        self._allowed: torch.Tensor | None = None
        self._stops: torch.Tensor | None = None
        self._slots: dict[int, int] = {}
        """Token id to its index in the two arrays below."""
        self._ids = array("q")
        self._counts = array("f")
        """How often each occurs in the committed output."""

    @property
    def num_committed(self) -> int:
        """Committed tokens that are accounted for, prompt included."""
        return self._num_committed

    def commit(self, token_ids: Sequence[int]) -> None:
        """Account for further committed tokens."""
        num_prompt = min(len(token_ids), max(0, self._num_prompt_tokens - self._num_committed))
        self._num_committed += len(token_ids)
        if self._params.has_penalties:
            for index, token_id in enumerate(token_ids):
                self._counts[self._slot(token_id)] += index >= num_prompt
        if self._longest_begin:
            self._output_end = [*self._output_end, *token_ids[num_prompt:]][-self._longest_begin :]

    def shape(
        self, logits_RV: torch.Tensor, paths: Sequence[Sequence[int]], *, first_token_id: int = 0
    ) -> None:
        """Change fp32 logits in place.

        Args:
            logits_RV: rows of this sequence.
            paths: drafted tokens between the last committed one and each row's position.
            first_token_id: token id of the first column.
        """
        if self._params.has_penalties:
            self._penalise(logits_RV, paths, first_token_id)
        if len(self._bias_ids):
            kept = self._columns(self._bias_ids, logits_RV, first_token_id)
            columns = torch.from_numpy(self._bias_ids[kept] - first_token_id).to(logits_RV.device)
            logits_RV[:, columns] += torch.from_numpy(self._bias[kept]).to(logits_RV.device)
        if self._params.allowed_token_ids is not None:
            logits_RV.masked_fill_(~self._allowed_columns(logits_RV, first_token_id), _NEVER)
        width = logits_RV.shape[1]
        for row, path in enumerate(paths):
            forbidden = [token_id - first_token_id for token_id in self._forbidden(path)]
            here = [column for column in forbidden if 0 <= column < width]
            if here:
                logits_RV[row, here] = _NEVER
        if self._stop_ids:
            num_missing = self._num_prompt_tokens + self._params.min_tokens - self._num_committed
            early = [row for row, path in enumerate(paths) if len(path) < num_missing]
            if early:  # of thousands of ids, too, one operation for all rows
                rows = torch.tensor(early, device=logits_RV.device)
                logits_RV[rows[:, None], self._stop_columns(logits_RV, first_token_id)] = _NEVER

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._ids)
            self._ids.append(token_id)
            self._counts.append(0.0)
        return slot

    def _penalise(self, logits_RV: torch.Tensor, paths: Sequence[Sequence[int]], first_token_id: int) -> None:
        params = self._params
        num_known = len(self._ids)
        drafted = {token_id for path in paths for token_id in path}
        new_ids = sorted(drafted - self._slots.keys())
        slots = {token_id: num_known + index for index, token_id in enumerate(new_ids)}
        slots |= {token_id: self._slots[token_id] for token_id in drafted - slots.keys()}
        ids_H = np.concatenate((np.array(self._ids, dtype=np.int64), np.array(new_ids, dtype=np.int64)))
        counts_RH = np.zeros((len(paths), len(ids_H)), dtype=np.float32)
        counts_RH[:, :num_known] = np.array(self._counts, dtype=np.float32)
        occurs_RH = np.zeros(counts_RH.shape, dtype=np.bool_)
        occurs_RH[:, :num_known] = True
        for row, path in enumerate(paths):
            for token_id in path:
                counts_RH[row, slots[token_id]] += 1.0
                occurs_RH[row, slots[token_id]] = True
        kept = self._columns(ids_H, logits_RV, first_token_id)
        device = logits_RV.device
        columns = torch.from_numpy(ids_H[kept] - first_token_id).to(device)
        counts = torch.from_numpy(counts_RH[:, kept]).to(device)
        values = logits_RV[:, columns]
        if params.repetition_penalty != 1.0:
            penalised = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
            values = torch.where(torch.from_numpy(occurs_RH[:, kept]).to(device), penalised, values)
        if params.frequency_penalty != 0.0:
            values = values - counts * params.frequency_penalty
        if params.presence_penalty != 0.0:
            values = values - (counts > 0).float() * params.presence_penalty
        logits_RV[:, columns] = values

    def _allowed_columns(self, logits_RV: torch.Tensor, first_token_id: int) -> torch.Tensor:
        """bool [V]; made once, because a sequence's logits always have the same columns."""
        if self._allowed is None:
            ids = np.array(self._params.allowed_token_ids, dtype=np.int64)
            ids = ids[self._columns(ids, logits_RV, first_token_id)] - first_token_id
            allowed = torch.zeros(logits_RV.shape[1], dtype=torch.bool)
            allowed[torch.from_numpy(ids)] = True
            self._allowed = allowed.to(logits_RV.device)
        return self._allowed

    def _stop_columns(self, logits_RV: torch.Tensor, first_token_id: int) -> torch.Tensor:
        """int64; made once, as above."""
        if self._stops is None:
            ids = np.array(self._stop_ids, dtype=np.int64)
            ids = ids[self._columns(ids, logits_RV, first_token_id)] - first_token_id
            self._stops = torch.from_numpy(ids).to(logits_RV.device)
        return self._stops

    def _forbidden(self, path: Sequence[int]) -> list[int]:
        """Token ids that `bad_words` let not follow the committed tokens and `path`."""
        forbidden = list(self._always_bad)
        if self._bad_sequences:
            end = [*self._output_end, *path]
            for word in self._bad_sequences:
                num_before = len(word) - 1
                if len(end) >= num_before and tuple(end[len(end) - num_before :]) == word[:-1]:
                    forbidden.append(word[-1])
        return forbidden

    @staticmethod
    def _columns(ids: NDArray[np.int64], logits_RV: torch.Tensor, first_token_id: int) -> NDArray[np.bool_]:
        """bool: which ids have a column here."""
        kept: NDArray[np.bool_] = (ids >= first_token_id) & (ids < first_token_id + logits_RV.shape[1])
        return kept


def apply_masks(logits_RV: torch.Tensor, masks: Sequence[bytes], *, first_token_id: int = 0) -> None:
    """Forbid, in place, every token whose bit is not set in its row's mask (see `TargetWork.masks`)."""
    bits = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(masks), -1)
    width = logits_RV.shape[1]
    allowed_RV = np.zeros(logits_RV.shape, dtype=np.bool_)
    here = np.unpackbits(bits, axis=1, bitorder="little")[:, first_token_id : first_token_id + width]
    allowed_RV[:, : here.shape[1]] = here
    logits_RV.masked_fill_(torch.from_numpy(~allowed_RV).to(logits_RV.device), _NEVER)


def shaper_for(
    params: SamplingParams, *, eos_token_ids: Collection[int], num_prompt_tokens: int
) -> LogitShaper | None:
    """Return a shaper that knows no tokens yet, or None when `params` leave logits as they are."""
    if not params.shapes_logits:
        return None
    return LogitShaper(params, eos_token_ids=eos_token_ids, num_prompt_tokens=num_prompt_tokens)
