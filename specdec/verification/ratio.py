"""What the rules that compare p with q have in common: what they refuse, p/q, and what p has over q."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.verification.base import Draft, TargetRows

if TYPE_CHECKING:
    import torch


def check_draft(draft: Draft) -> None:
    """Refuse drafts that would bias a ratio test.

    Raises:
        ValueError: what is wrong with the draft's noise stream or q rows.
    """
    stream, q_rows = draft.noise_stream, draft.q_rows
    if stream not in (None, "draft"):
        raise ValueError(f'a draft sampled with stream "{stream}" is biased under a ratio rule: use "draft"')
    if (stream is None) != (q_rows is None):
        raise ValueError(
            "a sampled draft needs its q rows" if stream else "q rows of a draft that was not sampled"
        )
    if q_rows is not None and q_rows.shape[0] != draft.num_tokens:
        raise ValueError(f"{draft.num_tokens} draft tokens with {q_rows.shape[0]} q rows")


def normalised_p_rows(draft: Draft, target: TargetRows, rule: str) -> torch.Tensor:
    """Return the target's rows in float64, each summing to 1.

    Raises:
        ValueError: they are missing, or of another number than nodes + 1.
    """
    p_rows = target.p_rows
    if p_rows is None or p_rows.shape[0] != draft.num_tokens + 1:
        raise ValueError(f"{rule} needs {draft.num_tokens + 1} p rows")
    p_rows = p_rows.double()
    return p_rows / p_rows.sum(-1, keepdim=True)


def acceptance(p: torch.Tensor, q: torch.Tensor | None, token: int) -> float:
    """Return p(x)/q(x), to be compared with a uniform by strict "<"; q None is the one-hot q at x.

    Raises:
        ValueError: q(x) is 0, so x cannot have been drawn from q.
    """
    if q is None:
        return float(p[token])
    q_token = float(q[token])
    if not q_token > 0.0:
        raise ValueError(f"token {token} was drafted although its q is {q_token}")
    return float(p[token]) / q_token


def excess(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """Return (p - q)+, a new tensor; q None is the one-hot q at `token`. p need not sum to 1."""
    if q is None:
        left = p.clone()
        left[token] = 0.0
        return left
    return (p - q).clamp_(min=0.0)


def residual(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """Return norm((p - q)+), drawn from after `token` was rejected; p where rounding leaves nothing."""
    left = excess(p, q, token)
    total = left.sum()
    return left / total if total > 0.0 else p
