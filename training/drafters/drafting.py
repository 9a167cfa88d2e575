"""Drafts from every position of rows at once, whatever the drafter's kind: what evaluation compares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from specdec.drafters.attention import CausalRows, UnrolledRows
from specdec.drafters.base import Drafter, FeatureDrafter, IndependentHeads, SequentialHeads

Choose = Callable[[int, torch.Tensor], torch.Tensor]
"""(depth, logits [B, R, V] over all of the target's token ids) -> token ids int64 [B, R]."""


@torch.no_grad()
def draft_everywhere(
    drafter: Drafter, hidden: torch.Tensor, tokens: torch.Tensor, num_tokens: int, choose: Choose
) -> torch.Tensor:
    """int64 [B, T - 1, num_tokens]: drafts behind tokens 0 .. t + 1, for every t.

    ``hidden`` [B, T - 1, F] of positions 0 .. T - 2 and ``tokens`` int64 [B, T]. A drafter of several modules
    goes on behind the text, not behind its drafts: what it drafts is the same as long as all drafts before
    stand, and its later modules attend to rows of the text.
    """
    limit = drafter.max_depth
    depths = num_tokens if limit is None else min(num_tokens, limit)
    following = tokens[:, 1:]
    drafts: list[torch.Tensor] = []

    def add(logits: torch.Tensor) -> torch.Tensor:
        known = logits if drafter.vocabulary is None else drafter.vocabulary.expand(logits)
        drafts.append(choose(len(drafts), known))
        return drafts[-1]

    positions = torch.arange(following.shape[1], device=tokens.device).expand(following.shape)
    if isinstance(drafter, FeatureDrafter):
        attention, features = UnrolledRows(), drafter.fuse(hidden)
        for depth in range(depths):
            embedded = drafter.embed(following)
            step = drafter.step(embedded, features, positions + depth, attention, depth)
            features, following = step.features, add(drafter.logits(step.outputs))
            if drafter.num_modules > 1:
                following = F.pad(tokens[:, 2 + depth :], (0, 1 + depth))
    elif isinstance(drafter, IndependentHeads):
        for logits in drafter.logits(drafter.prepare(hidden, positions, CausalRows()))[:depths]:
            add(logits)
    else:
        assert isinstance(drafter, SequentialHeads)
        prepared = drafter.prepare(hidden, positions, CausalRows())
        path = following[..., None]
        for depth in range(depths):
            path = torch.cat([path, add(drafter.logits(depth, prepared, path))[..., None]], dim=-1)
    return torch.stack(drafts, dim=-1)


def unfold_chains(choices: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 [B, R, num_tokens] of a language model's next choices int64 [B, R] behind every prefix of a text.

    Its d-th draft behind a prefix is read for its d-th choice along the text: the same, as long as all before
    it were accepted, and nothing counts behind one that was not. -1 where the text ends.
    """
    columns = [F.pad(choices[:, depth:], (0, depth), value=-1) for depth in range(num_tokens)]
    return torch.stack(columns, dim=-1)


def accepted_per_round(matches: torch.Tensor, first: int) -> list[int]:
    """Accepted drafts of the rounds along one text: ``matches`` bool [T, k], of drafts from every position.

    A round from position t accepts the matches of its row up to the first that is none, and the next round
    starts behind them and the token of the target. Rounds that could reach past the end are not counted.
    """
    runs = matches.cumprod(dim=-1).sum(dim=-1).tolist()
    num_positions, k = matches.shape
    accepted: list[int] = []
    position = first
    while position + k < num_positions:
        accepted.append(runs[position])
        position += runs[position] + 1
    return accepted
