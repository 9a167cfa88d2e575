"""The token function: from rows of logits to token ids, the same wherever and with whomever it runs.

    y = argmax_v (log p_v + g(seed, t, v))      temperature > 0
    y = argmax_v  log p_v                       temperature = 0

It is evaluated as argmax_v (s_v + g_v) over the scores of `transforms`: s_v is log p_v plus a constant of
the row, which moves no argmax, so no log-sum-exp is needed, and a token that is cut has s_v = -inf. Ties
go to the lowest token id. Everything after the logits is fp32; each row depends on nothing but itself.

R rows, V token ids.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from specdec.attention.native import NativeUnavailable
from specdec.core.outputs import TokenLogprobs
from specdec.core.proposal import NoiseStream
from specdec.core.sampling_params import LogprobsMode, SamplingParams
from specdec.model.batch import NativeChooser
from specdec.sampling.native import NativeRanker, NativeTokenFunction
from specdec.sampling.noise_rows import gumbel_rows, row_keys
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.sampling.transforms import scores_of

__all__ = [
    "RowSpec",
    "SampledRows",
    "Sampler",
    "SamplingRows",
    "SequenceSampling",
    "TokenChooser",
    "logprobs_of",
    "most_likely",
    "noisy_scores",
    "ranked_tokens",
    "target_distribution",
]

_logger = logging.getLogger(__name__)


class SampledRows(NamedTuple):
    """What sampling made of R rows."""

    token_ids: torch.Tensor
    """int64 [R]; 0 where `finite` is false."""
    finite: torch.Tensor
    """bool [R]: false where the row holds NaN or +inf, or nothing above -inf. Its request cannot go on."""


class TokenChooser(Protocol):
    """Evaluates the token function on logits as the runner gives them: whole rows, or this rank's columns."""

    @property
    def first_token_id(self) -> int:
        """Token id of the logits' first column."""
        ...

    def sample(
        self, logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream = "target"
    ) -> SampledRows:
        """Return each row's token."""
        ...

    def ranked(
        self, logits_RV: torch.Tensor, rows: SamplingRows, num: int, stream: NoiseStream | None = "target"
    ) -> list[list[int]]:
        """Return each row's most promising tokens, as `ranked_tokens` does."""
        ...

    def distributions(self, logits_RV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Return what each row is sampled from, fp32 [R, all V], as `target_distribution` does."""
        ...

    def log_probabilities(
        self, logits_RV: torch.Tensor, ids_RN: torch.Tensor, rows: SamplingRows
    ) -> torch.Tensor:
        """Return how likely tokens are among all, fp32 [R, N], as `log_probabilities_at` does."""
        ...

    def agreed(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Return what was decided on `distributions` (at most `most` tokens): rank 0's decision."""
        ...

    def logprobs(
        self,
        logits_RV: torch.Tensor,
        token_ids: Sequence[int],
        num_top: int,
        mode: LogprobsMode,
        rows: SamplingRows,
    ) -> list[TokenLogprobs]:
        """Return log-probabilities as `logprobs_of` does."""
        ...

    def chooser(
        self, sequences: Sequence[SequenceSampling], vocab_size: int, stream: NoiseStream = "target"
    ) -> NativeChooser | None:
        """Return the token function for a compiled forward to call itself, when there is such a form of it.

        Args:
            sequences: those of the forward, in their order.
            vocab_size: tokens from here on are never chosen.
            stream: noise to use, as in `sample`.
        """
        ...

    def ranker(
        self,
        sequences: Sequence[SequenceSampling],
        vocab_size: int,
        stream: NoiseStream | None,
        *,
        num: int,
        num_rows: int,
        has_confidence: bool,
    ) -> NativeRanker | None:
        """Return what ranks tokens as `ranked_tokens` does for a compiled forward, if there is such a form.

        Args:
            sequences: those of the forward, in their order.
            vocab_size: tokens from here on are never ranked.
            stream: by what the token function compares, noise of this stream included; None: by probability.
            num: most tokens per row.
            num_rows: logit rows of the forward.
            has_confidence: whether the log of how likely each token is thought to stand is wanted (else 0).
        """
        ...


class Sampler:
    """Evaluates the token function: with tensor ops anywhere, with compiled code on CPUs once warmed up.

    Both make the same choices. `warm_up` may run in another thread while `sample` is in use.
    """

    first_token_id = 0

    def __init__(self, cache_dir: str | Path | None = None) -> None:
        """Create a sampler that keeps compiled code in `cache_dir` (None: the user's cache folder)."""
        self._cache_dir = cache_dir
        self._native: NativeTokenFunction | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether CPU rows go through compiled code."""
        return self._native is not None

    def warm_up(self) -> None:
        """Compile the CPU code, or load it from the cache; about a second the first time.

        Where that is not possible, or its choices differ from the tensor ops', one log line says so and
        the tensor ops stay in use.
        """
        try:
            native = NativeTokenFunction(self._cache_dir)
        except NativeUnavailable as error:
            _logger.warning("sampling with plain tensor ops, which is slower: %s", error)
            return
        if _agrees(native):
            self._native = native
        else:
            _logger.error("sampling with plain tensor ops: the compiled code chooses other tokens")

    def sample(
        self, logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream = "target"
    ) -> SampledRows:
        """Return each row's token.

        Args:
            logits_RV: any floating dtype, not written to.
            rows: as many rows, on the same device.
            stream: noise to use; "target" is the token function, others are for drafters of ratio rules.
        """
        _check_shapes(logits_RV, rows)
        if self._native is None or not logits_RV.is_cpu:
            return sample_eager(logits_RV, rows, stream)
        return SampledRows(*self._native(_as_native(logits_RV), rows, stream))

    def ranked(
        self, logits_RV: torch.Tensor, rows: SamplingRows, num: int, stream: NoiseStream | None = "target"
    ) -> list[list[int]]:
        """See `ranked_tokens`."""
        _check_shapes(logits_RV, rows)
        if self._native is None or not logits_RV.is_cpu:
            return ranked_tokens(logits_RV, rows, num, stream)
        return self._native.ranked(_as_native(logits_RV), rows, num, stream)

    def distributions(self, logits_RV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """See `target_distribution`."""
        return target_distribution(logits_RV, rows)

    def log_probabilities(
        self, logits_RV: torch.Tensor, ids_RN: torch.Tensor, rows: SamplingRows
    ) -> torch.Tensor:
        """See `log_probabilities_at`."""
        return log_probabilities_at(logits_RV, ids_RN, rows)

    def agreed(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Return them: nobody else decides."""
        return token_ids

    def logprobs(
        self,
        logits_RV: torch.Tensor,
        token_ids: Sequence[int],
        num_top: int,
        mode: LogprobsMode,
        rows: SamplingRows,
    ) -> list[TokenLogprobs]:
        """See `logprobs_of`."""
        return logprobs_of(logits_RV, token_ids, num_top, mode, rows)

    def chooser(
        self, sequences: Sequence[SequenceSampling], vocab_size: int, stream: NoiseStream = "target"
    ) -> NativeChooser | None:
        """See `TokenChooser`; None where it is not compiled."""
        return None if self._native is None else self._native.chooser(sequences, vocab_size, stream)

    def ranker(
        self,
        sequences: Sequence[SequenceSampling],
        vocab_size: int,
        stream: NoiseStream | None,
        *,
        num: int,
        num_rows: int,
        has_confidence: bool,
    ) -> NativeRanker | None:
        """See `TokenChooser`; None where it is not compiled."""
        if self._native is None:
            return None
        return self._native.ranker(
            sequences, vocab_size, stream, num=num, num_rows=num_rows, has_confidence=has_confidence
        )


def _as_native(logits_RV: torch.Tensor) -> torch.Tensor:
    logits_RV = logits_RV.float()
    return logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()


def _agrees(native: NativeTokenFunction) -> bool:
    """Return whether compiled code and tensor ops choose the same tokens on a small batch of every kind."""
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=2.0, top_k=40, min_p=0.01),
    )
    rows = SamplingRows.build([RowSpec(one, seed, 1000 * seed, 8) for seed, one in enumerate(params)])
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(rows.num_rows, 1000, generator=generator) * 3
    expected = sample_eager(logits_RV, rows, "target")
    return all(map(torch.equal, native(logits_RV, rows, "target"), expected)) and all(
        native.ranked(logits_RV, rows, 5, stream) == ranked_tokens(logits_RV, rows, 5, stream)
        for stream in (None, "target")
    )


def sample_eager(logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream) -> SampledRows:
    """Evaluate the token function with ordinary tensor ops, on any device."""
    logits_RV = logits_RV.float()
    finite_R = logits_RV.amax(-1).isfinite()
    scores_RV = noisy_scores(logits_RV, rows, stream) if rows.has_sampled else logits_RV
    return SampledRows(scores_RV.argmax(-1).masked_fill_(~finite_R, 0), finite_R)


def noisy_scores(logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream = "target") -> torch.Tensor:
    """Return what each row's token is the argmax of, fp32 [R, V]: s + g, or s in greedy rows.

    On a drafter's logits its order predicts the target's choice: the first entries are the children of a
    tree that are worth proposing.
    """
    scores_RV = scores_of(logits_RV.float(), rows)
    noise_RV = gumbel_rows(row_keys(rows.seeds, rows.positions, stream), logits_RV.shape[1])
    if rows.has_greedy:
        noise_RV.masked_fill_(rows.temperature[:, None] == 0.0, 0.0)
    return scores_RV.add_(noise_RV)


def ranked_tokens(
    logits_RV: torch.Tensor, rows: SamplingRows, num: int, stream: NoiseStream | None = "target"
) -> list[list[int]]:
    """Return each row's `num` most promising tokens, the best first and equal ones by rising id.

    On a drafter's logits they are guesses at what the target chooses. Tokens that a cut (top-k, top-p, min-p)
    leaves out come after all others: the target may cut elsewhere. Tokens whose logit is -inf never come, and
    a row whose logits are not finite has none.

    Args:
        logits_RV: any floating dtype, not written to.
        rows: as many rows, on the same device.
        num: most tokens per row.
        stream: by what the token function compares, noise of this stream included; None: by probability.
    """
    _check_shapes(logits_RV, rows)
    logits_RV = logits_RV.float()
    finite = logits_RV.amax(-1).isfinite().tolist()
    ranked = _by_score(logits_RV, rows, num, stream)
    has_cuts = bool(rows.largest_top_k or rows.has_top_p or rows.has_min_p)
    if has_cuts and min(map(len, ranked), default=num) < num:
        uncut = replace(rows, largest_top_k=0, has_top_p=False, has_min_p=False)
        for ids, others in zip(ranked, _by_score(logits_RV, uncut, num, stream), strict=True):
            ids += [one for one in others if one not in ids][: num - len(ids)]
    return [ids if is_finite else [] for ids, is_finite in zip(ranked, finite, strict=True)]


def _by_score(
    logits_RV: torch.Tensor, rows: SamplingRows, num: int, stream: NoiseStream | None
) -> list[list[int]]:
    has_noise = stream is not None and rows.has_sampled
    scores_RV = noisy_scores(logits_RV, rows, stream or "target") if has_noise else scores_of(logits_RV, rows)
    ids_RN = most_likely(scores_RV, num)
    can_be_RN = scores_RV.gather(1, ids_RN) > float("-inf")
    return [
        [token_id for token_id, can_be in zip(*row, strict=True) if can_be]
        for row in zip(ids_RN.tolist(), can_be_RN.tolist(), strict=True)
    ]


def target_distribution(logits_RV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return what each row is sampled from, fp32 [R, V]: p after all transforms, one-hot in greedy rows."""
    _check_shapes(logits_RV, rows)
    logits_RV = logits_RV.float()
    p_RV = scores_of(logits_RV, rows).softmax(-1)
    if rows.has_greedy:
        one_hot_RV = torch.zeros_like(p_RV).scatter_(1, logits_RV.argmax(-1, keepdim=True), 1.0)
        p_RV = torch.where(rows.temperature[:, None] == 0.0, one_hot_RV, p_RV)
    return p_RV


def log_probabilities_at(logits_RV: torch.Tensor, ids_RN: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the log of how likely tokens are at each row's temperature (1 where it is greedy), without cuts.

    Args:
        logits_RV: any floating dtype, over the whole vocabulary.
        ids_RN: int64, tokens of each row.
        rows: as many rows, on the same device.

    Returns:
        fp32 [R, N].
    """
    temperature_R = rows.temperature.masked_fill(rows.temperature == 0.0, 1.0)
    return (logits_RV.float() / temperature_R[:, None]).log_softmax(-1).gather(1, ids_RN)


def logprobs_of(
    logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: int, mode: LogprobsMode, rows: SamplingRows
) -> list[TokenLogprobs]:
    """Return the log-probability of each row's token and of its `num_top` most likely ones.

    Ties are ordered by token id; tokens of probability zero are not listed.

    Args:
        logits_RV: any floating dtype, not written to.
        token_ids: chosen token of each row.
        num_top: most entries in `top`; 0 for none.
        mode: raw is the log-softmax of the logits as they are, processed that of the scores after the
            transforms (a greedy row then gives all to its peak).
        rows: parameters of the rows.
    """
    _check_shapes(logits_RV, rows)
    logits_RV = logits_RV.float()
    if mode == "processed":
        logits_RV = target_distribution(logits_RV, rows).log_()
    logprobs_RV = logits_RV.log_softmax(-1)
    ids_R1 = torch.tensor(token_ids, device=logits_RV.device).view(-1, 1)
    chosen: list[float] = logprobs_RV.gather(1, ids_R1).squeeze(1).tolist()
    top_ids_RN = most_likely(logits_RV, num_top)
    top_logprobs: list[list[float]] = logprobs_RV.gather(1, top_ids_RN).tolist()
    top_ids: list[list[int]] = top_ids_RN.tolist()
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            top=tuple(pair for pair in zip(ids, values, strict=True) if pair[1] != float("-inf")),
        )
        for token_id, logprob, ids, values in zip(token_ids, chosen, top_ids, top_logprobs, strict=True)
    ]


def most_likely(logits_RV: torch.Tensor, num_top: int) -> torch.Tensor:
    """Rank fp32 logits: return int64 [R, num_top] token ids by falling logit, equal ones by rising id."""
    # topk leaves the order of ties open, so the keys are made distinct: the float's bits, ordered like
    # the float, above the complement of the id. Adding 0 turns -0 into +0.
    bits_RV = (logits_RV + 0.0).view(torch.int32)
    ordered_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)).long()
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    keys_RV = (ordered_RV << 32) + (0xFFFFFFFF - ids_V)
    return 0xFFFFFFFF - (keys_RV.topk(min(num_top, logits_RV.shape[1]), dim=-1).values & 0xFFFFFFFF)


def _check_shapes(logits_RV: torch.Tensor, rows: SamplingRows) -> None:
    if logits_RV.dim() != 2 or logits_RV.shape[0] != rows.num_rows:
        raise ValueError(f"logits of shape {tuple(logits_RV.shape)} for {rows.num_rows} rows")
