"""The token function over logits that are cut by vocabulary: each rank has the columns of its token ids.

The choice is that of `sampler`, from the same numbers: the row's largest logit is found over all ranks
before scores are formed, cuts compare with thresholds that all ranks share, and ties go to the lowest token
id, across shards too. What travels, per row:

    greedy, temperature    two candidates (logit, noise, id) and the largest logit of each rank; one gather
    top-k                  each rank's k largest logits, then (score, id)
    top-p                  each rank's largest logits, the mass of all, then (score, id); when the listed
                           logits do not reach the cut, the rows in full
    min-p                  the largest logit, then (score, id)
    logprobs               each rank's largest logits, their log-sum-exp and the chosen token's logit
    logprobs, processed    the rows in full
    distributions, ranked  the rows in full

Thresholds and ids are rank 0's: exp and log of different machines may differ in the last bit.
R rows, V token ids here, N ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from specdec.core.outputs import TokenLogprobs
from specdec.core.proposal import NoiseStream
from specdec.core.sampling_params import LogprobsMode
from specdec.model.batch import NativeChooser
from specdec.model.parallel.cuts import VocabShard
from specdec.model.parallel.group import RankGroup
from specdec.model.parallel.surgery import gather_columns
from specdec.sampling.noise_rows import gumbel_rows, row_keys
from specdec.sampling.rows import SamplingRows
from specdec.sampling.sampler import (
    SampledRows,
    log_probabilities_at,
    logprobs_of,
    most_likely,
    ranked_tokens,
    sample_eager,
    target_distribution,
)
from specdec.sampling.sequence_sampling import SequenceSampling

_NEVER = float("-inf")
_NUM_LISTED = 256
"""Logits that each rank lists for a top-p cut."""
_LARGEST_EXACT_FLOAT = 1 << 24
_NOTHING = -1
"""Stands behind the last of a row's ranked tokens."""


class ParallelSampler:
    """Implements `sampler.TokenChooser`; every rank calls it with the same rows and its own columns.

    What changes logits before the choice (`shaping`) applies to columns `shard.first` to `shard.end - 1` of
    the vocabulary, before they come here.
    """

    def __init__(self, group: RankGroup, shard: VocabShard, *, vocab_size: int | None = None) -> None:
        """Choose among the first `vocab_size` token ids (None: all)."""
        assert shard.vocab_size < _LARGEST_EXACT_FLOAT, "token ids travel as fp32"
        self.shard = shard
        self.num_full_gathers = 0
        """Batches for which a top-p cut needed the rows in full."""
        self._group = group
        self._vocab_size = shard.vocab_size if vocab_size is None else vocab_size
        self._widest = -(-shard.vocab_size // group.size)

    @property
    def first_token_id(self) -> int:
        """Token id of this rank's first column."""
        return self.shard.first

    def sample(
        self, logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream = "target"
    ) -> SampledRows:
        """Return each row's token, the same in every rank."""
        logits_RV = self._known(logits_RV)
        if rows.has_sampled and (rows.largest_top_k or rows.has_top_p or rows.has_min_p):
            sampled = self._sample_cut(logits_RV, rows, stream)
        else:
            sampled = self._sample_plain(logits_RV, rows, stream)
        ids_R = sampled.token_ids.masked_fill(~sampled.finite, 0)
        return SampledRows(self._group.broadcast_(ids_R), sampled.finite)

    def chooser(
        self, sequences: Sequence[SequenceSampling], vocab_size: int, stream: NoiseStream = "target"
    ) -> NativeChooser | None:
        """Return None: ranks have to talk to each other before they can choose."""
        return None

    def ranker(self, *_: object, **__: object) -> None:
        """Return None, as `chooser` does."""

    def ranked(
        self, logits_RV: torch.Tensor, rows: SamplingRows, num: int, stream: NoiseStream | None = "target"
    ) -> list[list[int]]:
        """Return each row's most promising tokens, from the rows in full; the same in every rank."""
        ranked = ranked_tokens(self._in_full(self._known(logits_RV)), rows, num, stream)
        told = [[*ids, *([_NOTHING] * (num - len(ids)))] for ids in ranked]
        # Scores of different machines may differ in the last bit.
        told_RN = torch.tensor(told, dtype=torch.int64, device=logits_RV.device).view(len(ranked), num)
        agreed: list[list[int]] = self._group.broadcast_(told_RN).tolist()
        return [[token_id for token_id in ids if token_id != _NOTHING] for ids in agreed]

    def distributions(self, logits_RV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Return what each row is sampled from, over the whole vocabulary."""
        return target_distribution(self._in_full(self._known(logits_RV)), rows)

    def log_probabilities(
        self, logits_RV: torch.Tensor, ids_RN: torch.Tensor, rows: SamplingRows
    ) -> torch.Tensor:
        """Return how likely tokens are among all, from the rows in full; the same in every rank."""
        found_RN = log_probabilities_at(self._in_full(self._known(logits_RV)), ids_RN, rows)
        return self._group.broadcast_(found_RN)

    def agreed(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Return rank 0's decision: exp and log of different machines may differ in the last bit."""
        told = [len(token_ids), *token_ids, *([0] * (most - len(token_ids)))]
        length, *ids = self._group.broadcast_(torch.tensor(told, device=self._group.device)).tolist()
        return ids[:length]

    def logprobs(
        self,
        logits_RV: torch.Tensor,
        token_ids: Sequence[int],
        num_top: int,
        mode: LogprobsMode,
        rows: SamplingRows,
    ) -> list[TokenLogprobs]:
        """See `sampler.logprobs_of`."""
        logits_RV = self._known(logits_RV)
        if mode == "processed":
            return logprobs_of(self._in_full(logits_RV), token_ids, num_top, mode, rows)
        chosen_R = self._logits_at(logits_RV, token_ids)
        num_listed = min(max(num_top, 1), self._widest)
        ids_RN = most_likely(logits_RV, num_listed)
        listed_RN = logits_RV.gather(1, ids_RN)
        missing = num_listed - ids_RN.shape[1]
        listed_RN = F.pad(listed_RN, (0, missing), value=_NEVER)
        ids_RN = F.pad(ids_RN + self.shard.first, (0, missing))
        sums_R1 = logits_RV.logsumexp(-1, keepdim=True)
        packed = torch.cat((listed_RN, ids_RN.float(), sums_R1, chosen_R[:, None]), 1)
        everyone = self._group.gather(packed)
        sums_R = everyone[:, :, -2].logsumexp(0)
        chosen_R = everyone[:, :, -1].amax(0) - sums_R
        # Stable, and ids rise over the ranks: equal logits stay in the order of their ids.
        order = _side_by_side(everyone[:, :, :num_listed]).sort(dim=-1, descending=True, stable=True)
        top_ids = _side_by_side(everyone[:, :, num_listed : 2 * num_listed]).gather(1, order.indices)
        return _as_logprobs(
            token_ids,
            chosen_R,
            top_ids[:, :num_top].long(),
            order.values[:, :num_top] - sums_R[:, None],
        )

    def _known(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits, -inf for token ids that must not be chosen."""
        logits_RV = logits_RV.float()
        num_known = max(0, self._vocab_size - self.shard.first)
        if num_known < logits_RV.shape[1]:
            logits_RV = logits_RV.clone()
            logits_RV[:, num_known:] = _NEVER
        return logits_RV

    def _sample_plain(self, logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream) -> SampledRows:
        """One gather: the scores are formed again, from the candidates, once the largest logit is known.

        With the rank's own largest logit scores are rounded differently, so that the best two are sent: that
        three contend within the rounding is as good as impossible, and greedy rows are not rounded at all.
        """
        own_R1 = logits_RV.amax(-1, keepdim=True)
        temperature_R1 = _temperature(rows)
        noise_RV = self._noise(rows, stream)
        scores_RV = (logits_RV - own_R1.masked_fill(~own_R1.isfinite(), 0.0)) / temperature_R1 + noise_RV
        best = []
        for _ in range(2):
            index_R1 = scores_RV.argmax(-1, keepdim=True)
            ids_R1 = (index_R1 + self.shard.first).float()
            best += [logits_RV.gather(1, index_R1), noise_RV.gather(1, index_R1), ids_R1]
            scores_RV.scatter_(1, index_R1, _NEVER)
        everyone = self._group.gather(torch.cat((*best, own_R1), 1))
        largest_R = everyone[:, :, -1].amax(0)
        candidates = torch.cat((everyone[:, :, 0:3], everyone[:, :, 3:6]))  # [2 N, R, 3]
        scores = (candidates[:, :, 0] - largest_R) / temperature_R1[:, 0] + candidates[:, :, 1]
        return SampledRows(_best(scores, candidates[:, :, 2]), largest_R.isfinite())

    def _sample_cut(self, logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream) -> SampledRows:
        """As `transforms.scores_of` and `sampler.sample_eager`, step by step."""
        listed = self._list_largest(logits_RV, max(rows.largest_top_k, _NUM_LISTED if rows.has_top_p else 1))
        everyone_RL = _side_by_side(listed).sort(dim=-1, descending=True).values
        largest_R1 = everyone_RL[:, :1]
        temperature_R1 = _temperature(rows)
        scores_RV = (logits_RV - largest_R1).div_(temperature_R1)
        falling_RL = (everyone_RL - largest_R1).div_(temperature_R1)
        if rows.largest_top_k:
            lowest_R1 = self._top_k_threshold(falling_RL, rows)
            scores_RV.masked_fill_(scores_RV < lowest_R1, _NEVER)
            falling_RL = falling_RL.masked_fill(falling_RL < lowest_R1, _NEVER)
        if rows.has_top_p:
            unlisted_R1 = (self._unlisted(listed) - largest_R1).div_(temperature_R1)
            lowest = self._top_p_threshold(scores_RV, falling_RL, unlisted_R1, rows)
            if lowest is None:
                self.num_full_gathers += 1
                return sample_eager(self._in_full(logits_RV), rows, stream)
            scores_RV.masked_fill_(scores_RV < lowest, _NEVER)
        if rows.has_min_p:
            scores_RV.masked_fill_(scores_RV < rows.log_min_p[:, None], _NEVER)
        scores_RV.add_(self._noise(rows, stream))
        index_R1 = scores_RV.argmax(-1, keepdim=True)
        ids_R1 = (index_R1 + self.shard.first).float()
        everyone = self._group.gather(torch.cat((scores_RV.gather(1, index_R1), ids_R1), 1))
        return SampledRows(_best(everyone[:, :, 0], everyone[:, :, 1]), largest_R1[:, 0].isfinite())

    def _noise(self, rows: SamplingRows, stream: NoiseStream) -> torch.Tensor:
        """Noise of this rank's token ids, 0 in greedy rows."""
        width = self.shard.end - self.shard.first
        if not rows.has_sampled:
            return torch.zeros(rows.num_rows, width, device=rows.integers.device)
        noise_RV = gumbel_rows(row_keys(rows.seeds, rows.positions, stream), width, self.shard.first)
        if rows.has_greedy:
            noise_RV.masked_fill_(rows.temperature[:, None] == 0.0, 0.0)
        return noise_RV

    def _list_largest(self, logits_RV: torch.Tensor, num: int) -> torch.Tensor:
        """Return every rank's `num` largest logits (or all), falling: [N, R, min(num, widest shard)]."""
        num = min(num, self._widest)
        own_RL = logits_RV.topk(min(num, logits_RV.shape[1]), dim=-1, sorted=True).values
        return self._group.gather(F.pad(own_RL, (0, num - own_RL.shape[1]), value=_NEVER))

    def _unlisted(self, listed_NRL: torch.Tensor) -> torch.Tensor:
        """Return a bound that no logit exceeds that is not listed, [R, 1]."""
        if listed_NRL.shape[2] == self._widest:
            return torch.full_like(listed_NRL[0, :, :1], _NEVER)
        return listed_NRL[:, :, -1].amax(0)[:, None]

    def _top_k_threshold(self, falling_RL: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        index_R1 = (rows.top_k - 1).clamp(max=min(rows.largest_top_k, falling_RL.shape[1]) - 1)[:, None]
        lowest_R1 = falling_RL.gather(1, index_R1)
        return lowest_R1.masked_fill_(rows.top_k[:, None] >= self._vocab_size, _NEVER)

    def _top_p_threshold(
        self, scores_RV: torch.Tensor, falling_RL: torch.Tensor, unlisted_R1: torch.Tensor, rows: SamplingRows
    ) -> torch.Tensor | None:
        """Return each row's lowest kept score [R, 1], or None when a row's is not among the listed ones."""
        mass_R1 = self._group.gather(scores_RV.double().exp_().sum(-1, keepdim=True)).sum(0)
        reached_RL = falling_RL.double().exp_().cumsum_(-1)
        wanted_R1 = mass_R1 * rows.top_p[:, None]
        num_taken_R1 = 1 + (reached_RL[:, :-1] < wanted_R1).sum(-1, keepdim=True)
        lowest_R1 = falling_RL.gather(1, num_taken_R1 - 1)
        is_listed_R1 = (reached_RL.gather(1, num_taken_R1 - 1) >= wanted_R1) & (lowest_R1 >= unlisted_R1)
        needs_none_R1 = (rows.top_p[:, None] >= 1.0) | (rows.temperature[:, None] == 0.0) | mass_R1.isnan()
        lowest_R1 = lowest_R1.masked_fill(needs_none_R1, _NEVER)
        # Everything of every rank may be listed: then rounding alone keeps the sum from being reached.
        is_known = is_listed_R1 | needs_none_R1 | (unlisted_R1 == _NEVER)
        decision = torch.cat((lowest_R1[:, 0], is_known.all().float()[None]))
        self._group.broadcast_(decision)
        return decision[:-1, None] if decision[-1] else None

    def _logits_at(self, logits_RV: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [R] of one token id per row, -inf where it is another rank's."""
        ids_R = torch.tensor(token_ids, device=logits_RV.device) - self.shard.first
        is_ours_R = (ids_R >= 0) & (ids_R < logits_RV.shape[1])
        chosen_R = logits_RV.gather(1, ids_R.masked_fill(~is_ours_R, 0)[:, None])[:, 0]
        return chosen_R.masked_fill(~is_ours_R, _NEVER)

    def _in_full(self, logits_RV: torch.Tensor) -> torch.Tensor:
        whole = gather_columns(logits_RV, self.shard.vocab_size, self._group)
        return whole[:, : self._vocab_size]


def _temperature(rows: SamplingRows) -> torch.Tensor:
    """fp32 [R, 1], 1 in greedy rows."""
    temperature_R = rows.temperature
    return temperature_R.masked_fill(temperature_R == 0.0, 1.0)[:, None]


def _side_by_side(everyone_NRL: torch.Tensor) -> torch.Tensor:
    """[N, R, L] to [R, N L]."""
    return everyone_NRL.transpose(0, 1).flatten(1)


def _best(scores_CR: torch.Tensor, ids_CR: torch.Tensor) -> torch.Tensor:
    """Return int64 [R]: of the candidates with the highest score, the lowest id."""
    is_best_CR = scores_CR == scores_CR.amax(0)
    return ids_CR.masked_fill(~is_best_CR, math.inf).amin(0).nan_to_num(0.0, 0.0, 0.0).long()


def _as_logprobs(
    token_ids: Sequence[int], chosen_R: torch.Tensor, ids_RN: torch.Tensor, logprobs_RN: torch.Tensor
) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=chosen,
            top=tuple(pair for pair in zip(ids, values, strict=True) if pair[1] != _NEVER),
        )
        for token_id, chosen, ids, values in zip(
            token_ids, chosen_R.tolist(), ids_RN.tolist(), logprobs_RN.tolist(), strict=True
        )
    ]
