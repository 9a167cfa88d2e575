"""What a head's recipe is worth, seen after few steps: EAGLE-3 beside EAGLE on the demo target.

    python -m benchmarks.head_recipes --json benchmarks/results/head-recipes.json   # some minutes
    python -m benchmarks.head_recipes --quick

EAGLE-3 learns from what some layers of the target make of a text, through an LM head of its own for a part of
the vocabulary; EAGLE reads the state behind the last layer, through the target's. Each trial is trained with
the same rows in the same order, each read once, by the optimizers and the schedule of `drafthouse train`;
what differs is what its line says. Only the first draft is trained.

    agreement   share of positions of held-out texts where the first draft is the target's likeliest token
    known       share where that token is in the draft vocabulary: agreement cannot be more
    losses      by step: cross entropy of the first draft to the target's distribution over the draft
                vocabulary; trials with the same vocabulary can be compared

Heads that are there (`models/demo/heads`) are asked the same.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.plain_tool import PlainTool
from benchmarks.report import progress_bar
from specdec.drafters.attention import UnrolledRows
from specdec.drafters.base import FeatureDrafter, TargetParts
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings, default_fused_layers
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.model.tokenizer import load_tokenizer
from training.corpus import load_corpus
from training.drafters.capture import Capture
from training.drafters.groundwork import load_frozen
from training.drafters.objectives import TargetRows, eagle_losses, unrolled_losses
from training.drafters.recipe import DrafterRecipe
from training.optimization import ORDINARY, learning_rate_factor, make_optimizers, set_learning_rates

_ROWS_OF_A_TEXT = 4
"""No more are read, so that few steps see many texts."""
_SETTLED = 8
"""Tokens at the beginning of a held-out row that are not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What differs from the others."""

    name: str
    is_eagle: bool = False
    """EAGLE; else EAGLE-3."""
    fused_layers: tuple[int, ...] | None = None
    """None: those of the paper."""
    draft_vocab_size: int | None = None
    """None: the target's."""
    starts_from_target: bool = True
    """Whether LM head and final norm begin as the target's."""


_LATE = (2, 5, 7)
_PART = 2048
TRIALS = (
    Trial(name="eagle", is_eagle=True),
    Trial(name="eagle3_paper", draft_vocab_size=_PART, starts_from_target=False),
    Trial(name="eagle3_started", draft_vocab_size=_PART),
    Trial(name="eagle3_late_started", draft_vocab_size=_PART, fused_layers=_LATE),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is tried."""

    num_steps: int
    trials: tuple[Trial, ...] = TRIALS
    batch_rows: int = 4
    row_length: int = 512
    num_held_out_rows: int = 16
    num_threads: int = 1


FULL = Plan(num_steps=80)
QUICK = Plan(num_steps=10, batch_rows=2, num_held_out_rows=4)


def rows_of(
    texts: Iterable[Sequence[int]], separator: int, count: int, length: int, seed: int = 0
) -> torch.Tensor:
    """Return int64 [count, length]: beginnings of texts, a separator before each, cut, in a seeded order."""
    beginnings = (itertools.chain((separator,), text[: _ROWS_OF_A_TEXT * length]) for text in texts)
    tokens = list(itertools.islice(itertools.chain.from_iterable(beginnings), count * length))
    assert len(tokens) == count * length, f"{len(tokens)} tokens, not {count * length}"
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(tokens).view(count, length)[order]


class InTraining:
    """A head of one trial."""

    def __init__(self, trial: Trial, plan: Plan, target: TargetParts, counts: torch.Tensor) -> None:
        """``counts`` int64 [V]: how often each token id is in the rows."""
        self.trial = trial
        self.losses: list[float] = []
        self._recipe = DrafterRecipe(
            method="eagle" if trial.is_eagle else "eagle3",
            steps=plan.num_steps,
            warmup_steps=plan.num_steps // 8,
        )
        torch.manual_seed(self._recipe.seed)
        self._generator = torch.Generator().manual_seed(self._recipe.seed)
        self.head: Eagle | Eagle3 = _new_head(trial, target, counts)
        num_drafted = trial.draft_vocab_size or target.vocab_size
        self._optimizers = make_optimizers(
            [(self.head, ORDINARY)],
            muon_lr=self._recipe.muon_lr,
            adamw_lr=self._recipe.adamw_lr,
            weight_decay=self._recipe.weight_decay,
            vocabulary_sizes=frozenset({target.vocab_size, num_drafted}),
        )

    def learn(self, step: int, rows: TargetRows) -> None:
        """Take one step."""
        recipe = self._recipe
        if isinstance(self.head, Eagle):
            regression, first = eagle_losses(
                self.head, rows, noise=recipe.feature_noise, generator=self._generator
            )
            total = regression + recipe.classification_weight * first
        else:
            (first,) = unrolled_losses(self.head, rows, 1)
            total = first
        self.losses.append(first.item())
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip_norm)
        factor = learning_rate_factor(step, recipe.steps, recipe.warmup_steps, recipe.constant_share)
        set_learning_rates(self._optimizers, factor)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _new_head(trial: Trial, target: TargetParts, counts: torch.Tensor) -> Eagle | Eagle3:
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    if trial.is_eagle:
        return Eagle(target, config)
    layers = trial.fused_layers or default_fused_layers(target.num_layers)
    vocabulary = None
    if trial.draft_vocab_size is not None:
        most_frequent = counts.argsort(descending=True, stable=True)[: trial.draft_vocab_size]
        vocabulary = DraftVocabulary.of_ids(most_frequent, target.vocab_size)
    head = Eagle3(target, Eagle3Settings(config=config, fused_layers=layers), vocabulary)
    if trial.starts_from_target:
        head.start_from_target()
    return head


@torch.no_grad()
def agreement_of(
    head: FeatureDrafter, hidden: torch.Tensor, tokens: torch.Tensor, likeliest: torch.Tensor
) -> dict[str, float]:
    """How often the first draft from every position is what the target would choose.

    Args:
        head: the head.
        hidden: [B, T - 1, F] of positions 0 .. T - 2: what it reads.
        tokens: int64 [B, T].
        likeliest: int64 [B, T - 1]: the target's choice behind tokens 0 .. t + 1.
    """
    following = tokens[:, 1:]
    positions = torch.arange(following.shape[1]).expand(following.shape)
    step = head.step(head.embed(following), head.fuse(hidden), positions, UnrolledRows(), 0)
    logits = head.logits(step.outputs)
    known = torch.ones_like(likeliest, dtype=torch.bool)
    if head.vocabulary is not None:
        logits, known = head.vocabulary.expand(logits), head.vocabulary.t2d[likeliest].bool()
    agrees, known = (logits.argmax(dim=-1) == likeliest)[:, _SETTLED:], known[:, _SETTLED:]
    return {
        "agreement": agrees.float().mean().item(),
        "known": known.float().mean().item(),
        "agreement_where_known": agrees[known].float().mean().item(),
    }


class States:
    """What the target makes of rows, all of its layers at once."""

    def __init__(self, models: Path) -> None:
        """Load the target."""
        model = load_frozen(models / "target", torch.float32, "cpu")
        self.parts = TargetParts.of(model)
        self._layers = tuple(range(self.parts.num_layers))
        self._capture = Capture(model, self._layers)

    def rows(self, tokens: torch.Tensor) -> _Rows:
        """Compute them, of int64 [B, T]."""
        states = self._capture.states(tokens)
        return _Rows(tokens, states, self._capture.logits(states), self.parts.hidden_size)


@dataclass(frozen=True, slots=True)
class _Rows:
    tokens: torch.Tensor
    states: torch.Tensor
    logits: torch.Tensor
    size: int

    def hidden(self, layers: Sequence[int]) -> torch.Tensor:
        """What a head reads, of `Drafter.hidden_layers`; the last are those behind the final norm."""
        parts = self.states.split(self.size, dim=-1)
        return torch.cat([parts[layer] for layer in layers], dim=-1)

    def read_by(self, head: FeatureDrafter) -> TargetRows:
        return TargetRows(
            tokens=self.tokens,
            hidden=self.hidden(head.hidden_layers),
            final=self.states[..., -self.size :],
            logits=self.logits,
        )

    def asked_of(self, head: FeatureDrafter) -> dict[str, float]:
        hidden = self.hidden(head.hidden_layers)[:, :-1]
        return agreement_of(head, hidden, self.tokens, self.logits[:, 1:].argmax(dim=-1))


def _encoded(tokenizer: PreTrainedTokenizerBase, *, held_out: bool) -> Iterator[list[int]]:
    """Tokens of files that the target was trained on, or of those that nothing was trained on."""
    corpus = load_corpus()
    files = list(corpus.held_out if held_out else corpus.train)
    random.Random(0).shuffle(files)
    return (tokenizer.encode(file.text) for file in files)


def run(plan: Plan, models: Path) -> dict[str, Any]:
    """Train all trials beside each other, and ask them and the heads that are there."""
    torch.set_num_threads(plan.num_threads)
    tokenizer = load_tokenizer(str(models / "target"))
    separator = int(tokenizer.eos_token_id)
    num_rows = plan.num_steps * plan.batch_rows
    train = rows_of(_encoded(tokenizer, held_out=False), separator, num_rows, plan.row_length)
    held_out = rows_of(_encoded(tokenizer, held_out=True), separator, plan.num_held_out_rows, plan.row_length)
    states = States(models)
    counts = torch.bincount(train.flatten(), minlength=states.parts.vocab_size)
    heads = [InTraining(trial, plan, states.parts, counts) for trial in plan.trials]
    with progress_bar() as progress:
        batches = list(train.split(plan.batch_rows))
        for step, tokens in enumerate(progress.track(batches, description="steps")):
            rows = states.rows(tokens)
            for one in heads:
                one.learn(step, rows.read_by(one.head))
    asked = states.rows(held_out)
    there = {
        folder.name: load_drafter(folder, states.parts)
        for folder in sorted((models / "heads").glob("eagle*"))
    }
    return {
        "plan": plan,
        "trained_tokens": train.numel(),
        "trials": [
            {
                **asdict(one.trial),
                "reads": one.head.hidden_layers,
                "losses": one.losses,
                **asked.asked_of(one.head),
            }
            for one in heads
        ],
        "there": {
            name: asked.asked_of(head.float())
            for name, head in there.items()
            if isinstance(head, FeatureDrafter)
        },
    }


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """Agreement of every trial, and of the heads that are there."""
    numbers = {f"agreement_{one['name']}": one["agreement"] for one in results["trials"]}
    return numbers | {f"agreement_there_{name}": one["agreement"] for name, one in results["there"].items()}


TOOL = PlainTool(
    module="head_recipes",
    summary="Compare recipes of EAGLE-3 with that of EAGLE, after few steps.",
    full=FULL,
    quick=QUICK,
    run=run,
    headlines=headlines,
)


if __name__ == "__main__":
    TOOL.main()
