"""Losses against their formulas, and drafts from every position against drafts one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from specdec.drafters.attention import CausalRows
from specdec.drafters.base import FINAL_NORM, Drafter, FeatureDrafter, TargetParts
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.drafters.vocabulary import DraftVocabulary
from training.drafters.capture import Capture
from training.drafters.drafting import accepted_per_round, draft_everywhere
from training.drafters.objectives import (
    TargetRows,
    decayed_mean,
    eagle_losses,
    hydra_losses,
    medusa_losses,
    parallel_losses,
    soft_cross_entropy,
    unrolled_losses,
)


def rows_of(model: PreTrainedModel, drafter: Drafter, tokens: torch.Tensor) -> TargetRows:
    capture = Capture(model, drafter.hidden_layers)
    states = capture.states(tokens)
    return TargetRows(
        tokens=tokens,
        hidden=capture.hidden(states),
        final=capture.final(states),
        logits=capture.logits(states),
    )


def spread(drafter: Drafter, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            drawn = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + drawn if parameter.ndim == 1 else drawn)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(2, 128, (2, 10), generator=torch.Generator().manual_seed(0))


def eagle3(target: TargetParts) -> Eagle3:
    settings = Eagle3Settings(config=target.config, fused_layers=(2, 3, 4))
    return Eagle3(target, settings, DraftVocabulary.of_ids(torch.arange(3, 128, 2), 128))


DRAFTERS: dict[str, Callable[[TargetParts], Drafter]] = {
    "medusa": lambda target: Medusa(target, num_heads=3),
    "hydra": lambda target: Hydra(target, num_heads=3),
    "hydra++": lambda target: Hydra(target, num_heads=3, has_prefix_layer=True),
    "eagle": lambda target: Eagle(target, target.config),
    "eagle3": eagle3,
    "mtp": Mtp,
    "parallel_heads": lambda target: ParallelHeads(target, num_heads=3),
}


def test_soft_cross_entropy_is_its_formula() -> None:
    q, p = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    expected = -(p.softmax(-1) * q.softmax(-1).log()).sum(-1).mean()
    torch.testing.assert_close(soft_cross_entropy(q, p, None), expected)


def test_soft_cross_entropy_over_a_part_of_the_vocabulary() -> None:
    vocabulary = DraftVocabulary.of_ids(torch.tensor([1, 4]), 5)
    p = torch.tensor([[[0.0, 2.0, 0.0, 0.0, 1.0], [9.0, 2.0, 0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.5, 1.5], [7.0, -7.0]]])
    # Only the first row's likeliest token is known.
    known = torch.tensor([2.0, 1.0]).softmax(0)
    expected = -(known * q[0, 0].softmax(0).log()).sum()
    torch.testing.assert_close(soft_cross_entropy(q, p, vocabulary), expected)
    nothing = soft_cross_entropy(q[:, 1:], p[:, 1:], vocabulary)
    assert nothing == 0.0


def test_depths_weigh_less_and_less() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)]
    torch.testing.assert_close(decayed_mean(losses, 0.5), torch.tensor((1 + 1 + 1) / 1.75))


def test_medusa(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    heads = Medusa(TargetParts.of(model), num_heads=3)
    spread(heads)
    rows = rows_of(model, heads, tokens)
    losses = medusa_losses(heads, rows.hidden, rows.tokens)
    every = heads.logits(rows.hidden)
    picked = [F.cross_entropy(every[2, b, t], tokens[b, t + 4]) for b in range(2) for t in range(6)]
    torch.testing.assert_close(losses[2], torch.stack(picked).mean())
    assert len(losses) == 3


def test_parallel_heads(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    heads = ParallelHeads(TargetParts.of(model), num_heads=2)
    spread(heads)
    rows = rows_of(model, heads, tokens)
    positions = torch.arange(10).expand(2, 10)
    every = heads.logits(heads.prepare(rows.hidden, positions, CausalRows()))
    picked = [F.cross_entropy(every[1, b, t], tokens[b, t + 3]) for b in range(2) for t in range(7)]
    torch.testing.assert_close(parallel_losses(heads, rows)[1], torch.stack(picked).mean())


def test_hydra_sees_the_text_before_what_it_drafts(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    heads = Hydra(TargetParts.of(model), num_heads=3, has_prefix_layer=True)
    spread(heads)
    rows = rows_of(model, heads, tokens)
    positions = torch.arange(10).expand(2, 10)
    prepared = heads.prepare(rows.hidden, positions, CausalRows())
    picked = []
    for b in range(2):
        for t in range(7):
            q = heads.logits(2, prepared[b, t], tokens[b, t + 1 : t + 4]).log_softmax(-1)
            picked.append(-(rows.logits[b, t + 3].softmax(-1) * q).sum())
    torch.testing.assert_close(hydra_losses(heads, rows)[2], torch.stack(picked).mean())


def test_eagle_regresses_features_and_classifies_tokens(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    head = Eagle(TargetParts.of(model), model.config)
    spread(head)
    rows = rows_of(model, head, tokens)
    generator = torch.Generator().manual_seed(0)
    regression, classification = eagle_losses(head, rows, noise=0.0, generator=generator)
    positions = torch.arange(9).expand(2, 9)
    step = head.step(head.embed(tokens[:, 1:]), rows.hidden[:, :-1], positions, CausalRows())
    torch.testing.assert_close(regression, F.smooth_l1_loss(step.features, rows.hidden[:, 1:]))
    q = model.get_output_embeddings()(step.features).log_softmax(-1)
    torch.testing.assert_close(classification, -(rows.logits[:, 1:].softmax(-1) * q).sum(-1).mean())
    noisy, _ = eagle_losses(head, rows, noise=0.5, generator=generator)
    assert noisy != regression


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_unrolled_losses_are_those_of_drafting_on(
    model: PreTrainedModel, tokens: torch.Tensor, name: str
) -> None:
    """Depth 2 from one position, by hand: features of the drafter's own, tokens of the text."""
    drafter = DRAFTERS[name](TargetParts.of(model))
    assert isinstance(drafter, FeatureDrafter)
    spread(drafter)
    rows = rows_of(model, drafter, tokens)
    losses = unrolled_losses(drafter, rows, 3)
    drafts: list[torch.Tensor] = []

    def follow_the_text(depth: int, logits: torch.Tensor) -> torch.Tensor:
        drafts.append(logits)
        return F.pad(tokens[:, 2 + depth :], (0, 1 + depth))[:, :9]

    draft_everywhere(drafter, rows.hidden[:, :-1], tokens, 3, follow_the_text)
    logits = drafts[2][:, :7]
    if drafter.vocabulary is not None:
        logits = logits[..., drafter.vocabulary.target_ids]
    expected = soft_cross_entropy(logits, rows.logits[:, 3:], drafter.vocabulary)
    torch.testing.assert_close(losses[2], expected)
    assert [loss.requires_grad for loss in losses] == [True] * 3


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_do_not_see_what_comes_after_them(
    model: PreTrainedModel, tokens: torch.Tensor, name: str
) -> None:
    """What is drafted behind position t is the same where the text ends at t + 1."""
    drafter = DRAFTERS[name](TargetParts.of(model))
    spread(drafter)
    rows = rows_of(model, drafter, tokens)

    def greedy(depth: int, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    drafts = draft_everywhere(drafter, rows.hidden[:, :-1], tokens, 3, greedy)
    assert drafts.shape == (2, 9, 3)
    for end in (3, 6):
        short = draft_everywhere(drafter, rows.hidden[:, : end - 1], tokens[:, :end], 3, greedy)
        assert torch.equal(short[:, -1], drafts[:, end - 2])
    if drafter.vocabulary is not None:
        assert bool((drafts % 2 == 1).all()), "only odd ids are known"
    assert drafter.hidden_layers in ((FINAL_NORM,), (2, 3, 4), (5,))


def test_rounds_along_a_text() -> None:
    matches = torch.tensor(
        [
            [True, True],  # a round from 0: both, next from 3
            [False, True],
            [True, True],
            [False, True],  # none, next from 4
            [True, False],  # one, next from 6
            [True, True],
            [True, True],
            [True, True],  # 6 + 2 reaches the end: not counted
        ]
    )
    assert accepted_per_round(matches, 0) == [2, 0, 1]
    assert accepted_per_round(matches, 4) == [1]
