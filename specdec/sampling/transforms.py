"""Temperature and the cuts (top-k, top-p, min-p) on rows of scores, each row with its own parameters.

The score of token v is s_v = (logit_v - largest logit) / temperature in fp32: log p_v up to a constant of
the row, 0 for the most likely token. Subtracting first keeps scores precise at low temperatures. A cut
sets s_v to -inf. Cuts apply in the order top-k, top-p, min-p; each looks at what the one before kept:

- top-k keeps every s_v that is not below the k-th largest (ties at the cut are kept);
- top-p goes through the tokens by falling s_v until their mass, the sum of exp(s_v) in float64, reaches
  top_p times the mass of all; it keeps every s_v that is not below the last one taken (ties are kept);
- min-p keeps every s_v >= float32(log(min_p)).

The most likely token always survives. R rows, V token ids; r rows that are sorted at once.
"""

from __future__ import annotations

import torch

from specdec.sampling.rows import SamplingRows

_NEVER = float("-inf")
_SORTED_AT_ONCE = 1 << 23
"""Scores: on a GPU, sorting takes some 40 bytes for each, for which no pool leaves room but in pieces."""


def scores_of(logits_RV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the scores after temperature and cuts, a new fp32 tensor [R, V], of fp32 logits.

    Greedy rows get the scores of temperature 1. A row with NaN or +inf, or with nothing above -inf, comes
    out as NaN where it is not -inf.
    """
    scores_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    temperature_R = rows.temperature
    if rows.has_greedy:
        temperature_R = temperature_R.masked_fill(temperature_R == 0.0, 1.0)
    scores_RV.div_(temperature_R[:, None])
    if rows.largest_top_k:
        _cut_top_k(scores_RV, rows.top_k, rows.largest_top_k)
    if rows.has_top_p:
        _cut_top_p(scores_RV, rows.top_p)
    if rows.has_min_p:
        scores_RV.masked_fill_(scores_RV < rows.log_min_p[:, None], _NEVER)
    return scores_RV


def _cut_top_k(scores_RV: torch.Tensor, top_k_R: torch.Tensor, largest_top_k: int) -> None:
    vocab_size = scores_RV.shape[1]
    num_kept = min(largest_top_k, vocab_size)
    falling_RK = scores_RV.topk(num_kept, dim=-1, sorted=True).values
    lowest_R = falling_RK.gather(1, (top_k_R - 1).clamp_(max=num_kept - 1)[:, None])
    lowest_R.masked_fill_(top_k_R[:, None] >= vocab_size, _NEVER)
    scores_RV.masked_fill_(scores_RV < lowest_R, _NEVER)


def _cut_top_p(scores_RV: torch.Tensor, top_p_R: torch.Tensor) -> None:
    rows_at_once = max(1, _SORTED_AT_ONCE // scores_RV.shape[1])
    pieces = zip(torch.split(scores_RV, rows_at_once), torch.split(top_p_R, rows_at_once), strict=True)
    for scores_rV, top_p_r in pieces:
        falling_rV = scores_rV.sort(dim=-1, descending=True).values
        mass_rV = falling_rV.double().exp_().cumsum_(-1)
        wanted_r = mass_rV[:, -1:] * top_p_r[:, None]
        num_taken_r = 1 + (mass_rV[:, :-1] < wanted_r).sum(-1, keepdim=True)
        lowest_r = falling_rV.gather(1, num_taken_r - 1)
        lowest_r.masked_fill_(top_p_r[:, None] >= 1.0, _NEVER)
        scores_rV.masked_fill_(scores_rV < lowest_r, _NEVER)
