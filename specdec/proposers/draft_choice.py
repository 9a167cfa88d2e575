"""How a draft model's tokens are chosen from what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.proposers.bonus import BonusBy
from specdec.proposers.draft_sampling import SHARED_NOISE, DraftSampling
from specdec.sampling.sampler import TokenChooser


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    """Who chooses, among which tokens, and with which noise."""

    sampler: TokenChooser
    """Evaluates the token function."""
    vocab_size: int
    """Tokens that the target knows; the draft model's others are never proposed."""
    eos_token_ids: Sequence[int] = ()
    """Tokens that min_tokens keeps from being drafted; nothing is prepared behind them."""
    sampling: DraftSampling = SHARED_NOISE
    """How tokens are drawn, as the verification rule needs it."""
    bonus_by: BonusBy = "noise"
    """What ranks the tokens that `propose_ahead` prepares for."""
