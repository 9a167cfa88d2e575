"""How many drafts the target accepts: measured on texts that it writes itself behind held-out excerpts.

With `sample_and_match` the target's text does not depend on drafts, and an accepted draft is the target's own
token: so what would be drafted from every position of the finished text gives every round exactly. A text
ends where the target ends it: what it would say behind is never served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from rich.progress import track
from transformers import PreTrainedModel

from specdec.drafters.base import Drafter, IndependentHeads, TargetParts
from training.drafters.capture import Capture
from training.drafters.drafting import Choose, accepted_per_round, draft_everywhere, unfold_chains
from training.evaluation import acceptance_summary
from training.generation import gumbel_noise, noisy_choice, sample, text_length
from training.progress import console

TEMPERATURES = (0.0, 0.7)
NUM_RANKS = 8
"""Ranks that hits are counted by: children of a node in a tree."""
_NOISE_BYTES = 1 << 30
"""Most memory for noise, where it holds that of one text at least."""


Drafts = Callable[[torch.Tensor, Choose], torch.Tensor]
"""(text int64 [1, T], how to choose) -> drafts int64 [1, T - 1, k] behind tokens 0 .. t + 1, for every t."""


def evaluate_acceptance(
    capture: Capture,
    drafter: Drafter,
    prompts: torch.Tensor,
    *,
    num_generated: int,
    num_drafted: int,
    ends: Collection[int],
    seed: int = 0,
    temperatures: tuple[float, ...] = TEMPERATURES,
) -> dict[str, Any]:
    """Acceptance by position, per temperature, and hits by depth and rank; ``prompts`` int64 [N, P].

    ``ends``: token ids that end a text.
    """
    limit = drafter.max_depth
    k = num_drafted if limit is None else min(num_drafted, limit)
    # As in training: weights are float32, and those of the target's that they compute with may not be.
    is_mixed = next(drafter.parameters()).dtype != capture.model.dtype

    def drafts(text: torch.Tensor, choose: Choose) -> torch.Tensor:
        hidden = capture.hidden(capture.states(text))[:, :-1]
        with torch.autocast(text.device.type, torch.bfloat16, enabled=is_mixed):
            return draft_everywhere(drafter, hidden, text, k, choose)

    return measure_acceptance(
        capture.model,
        drafts,
        prompts,
        num_generated=num_generated,
        k=k,
        ends=ends,
        seed=seed,
        temperatures=temperatures,
        # Heads that see no drafts say the same behind each path of a tree; others see their own drafts here.
        num_standing_ranks=NUM_RANKS if isinstance(drafter, IndependentHeads) else 1,
    )


def evaluate_language_model(
    target: PreTrainedModel,
    logits: Callable[[torch.Tensor], torch.Tensor],
    prompts: torch.Tensor,
    *,
    num_generated: int,
    num_drafted: int,
    ends: Collection[int],
    seed: int = 0,
) -> dict[str, Any]:
    """The same of a drafter that is a language model: ``logits`` [1, T, V] of a text int64 [1, T]."""

    def drafts(text: torch.Tensor, choose: Choose) -> torch.Tensor:
        return unfold_chains(choose(0, logits(text)[:, 1:]), num_drafted)

    return measure_acceptance(
        target, drafts, prompts, num_generated=num_generated, k=num_drafted, ends=ends, seed=seed
    )


def measure_acceptance(
    target: PreTrainedModel,
    drafts: Drafts,
    prompts: torch.Tensor,
    *,
    num_generated: int,
    k: int,
    ends: Collection[int],
    seed: int,
    temperatures: tuple[float, ...] = TEMPERATURES,
    num_standing_ranks: int = 0,
) -> dict[str, Any]:
    """Acceptance by position of ``k`` drafts a round, per temperature; ``prompts`` int64 [N, P].

    ``generated`` tokens are asked for behind each prompt; those up to the first of ``ends`` count.
    With ``num_standing_ranks`` also `acceptance_by_depth`, of drafters that choose at every depth.
    """
    return {
        str(temperature): {
            "k": k,
            "texts": len(prompts),
            "generated": num_generated,
            **_at(target, drafts, prompts, num_generated, k, ends, seed, temperature, num_standing_ranks),
        }
        for temperature in temperatures
    }


class _Choice:
    """Chooses drafts of one text as the target would: with the noise of the place that a draft would take."""

    def __init__(
        self,
        temperature: float,
        noise: torch.Tensor | None,
        prompt_length: int,
        text: torch.Tensor | None = None,
    ) -> None:
        """``noise`` float32 [generated, V], None at temperature 0. With the ``text``, int64 [T], ranks of its
        tokens are noted.
        """
        self._temperature = temperature
        self._noise = noise
        self._prompt_length = prompt_length
        self._text = text
        self.ranks: list[torch.Tensor] = []
        """By depth, int64 [rows]: how many tokens would be chosen rather than the target's own."""

    def __call__(self, depth: int, logits: torch.Tensor) -> torch.Tensor:
        """int64 [1, R] of logits [1, R, V]; row t drafts the token at t + 2 + depth."""
        flat = logits[0].float().cpu()
        if self._noise is None:
            self._note(depth, flat)
            return flat.argmax(dim=-1)[None].to(logits.device)
        places = torch.arange(len(flat)) + 2 + depth - self._prompt_length
        aligned = self._noise[places.clamp(0, len(self._noise) - 1)]
        self._note(depth, flat / self._temperature + aligned)
        chosen = noisy_choice(flat, torch.full((len(flat),), self._temperature), aligned)
        return chosen[None].to(logits.device)

    def _note(self, depth: int, scores: torch.Tensor) -> None:
        if self._text is None:
            return
        own = self._text[2 + depth :, None]
        scores, ids = scores[: len(own)], torch.arange(scores.shape[1])
        own_scores = scores.gather(1, own)
        before = (scores > own_scores) | ((scores == own_scores) & (ids < own))
        self.ranks.append(before.sum(dim=1))


@torch.no_grad()
def _at(
    target: PreTrainedModel,
    drafts: Drafts,
    prompts: torch.Tensor,
    num_generated: int,
    k: int,
    ends: Collection[int],
    seed: int,
    temperature: float,
    num_standing_ranks: int,
) -> dict[str, Any]:
    num_rows, prompt_length = prompts.shape
    written = sample(
        target,  # type: ignore[arg-type]
        prompts.tolist(),
        num_tokens=num_generated,
        temperatures=torch.full((num_rows,), temperature),
        seed=seed,
    )
    texts = [
        torch.cat([prompt, said[: text_length(said.tolist(), ends)]])
        for prompt, said in zip(prompts, written, strict=True)
    ]
    vocab_size = TargetParts.of(target).vocab_size
    rounds: list[int] = []
    ranks: list[list[torch.Tensor]] = []
    described = f"drafting at temperature {temperature}"
    noises: Iterable[torch.Tensor | None] = (
        _noise_by_row(seed, num_generated, num_rows, vocab_size)
        if temperature > 0
        else repeat(None, num_rows)
    )
    told = track(zip(texts, noises, strict=True), described, total=num_rows, console=console, transient=True)
    for tokens, noise in told:
        own = tokens[None].to(target.device)
        choice = _Choice(temperature, noise, prompt_length, tokens if num_standing_ranks else None)
        drafted = drafts(own, choice)[0].cpu()
        ranks.append([of_depth[prompt_length - 1 :] for of_depth in choice.ranks])
        true = torch.stack([_shifted(tokens, 2 + depth) for depth in range(k)], dim=-1)
        rounds += accepted_per_round(drafted == true[: len(drafted)], prompt_length - 1)
    summary = acceptance_summary(rounds, k)
    if num_standing_ranks:
        summary["acceptance_by_depth"] = acceptance_by_depth(ranks, num_standing_ranks)
    return summary


def acceptance_by_depth(
    ranks: Sequence[Sequence[torch.Tensor]], num_standing_ranks: int
) -> list[list[float]]:
    """Return how often the child of each rank stands where its parent does, by depth: a tree's `acceptance`.

    ``ranks``: by text and depth, int64 [positions], that of the target's own token. Parents are those of the
    first ``num_standing_ranks`` ranks, at each depth before: 1 where it is not known what would be drafted
    behind others than the likeliest.
    """
    rates: list[list[float]] = []
    for depth in range(max(map(len, ranks), default=0)):
        hits, num_parents = torch.zeros(NUM_RANKS, dtype=torch.int64), 0
        for text in ranks:
            number = len(text[depth])
            stands = torch.ones(number, dtype=torch.bool)
            for before in text[:depth]:
                stands &= before[:number] < num_standing_ranks
            standing = text[depth][stands]
            hits += torch.bincount(standing.clamp(max=NUM_RANKS), minlength=NUM_RANKS + 1)[:NUM_RANKS]
            num_parents += len(standing)
        if num_parents == 0:
            break
        # Rounded down: together they are no more than 1.
        rates.append([math.floor(1e4 * count / num_parents) / 1e4 for count in hits.tolist()])
    return rates


def _noise_by_row(seed: int, num_generated: int, num_rows: int, vocab_size: int) -> Iterator[torch.Tensor]:
    """Yield for each row float32 [num_generated, V]: what the target's own choices of it were made with.

    That of a step is drawn for all rows at once, so it is kept for as many rows as there is memory for, and
    not drawn again for each. What is yielded is written over when the next is asked for.
    """
    group = min(num_rows, max(1, _NOISE_BYTES // (4 * num_generated * vocab_size)))
    kept = torch.empty(group, num_generated, vocab_size)
    for first in range(0, num_rows, group):
        last = min(num_rows, first + group)
        for step in range(num_generated):
            kept[: last - first, step] = gumbel_noise(seed, step, num_rows, vocab_size)[first:last]
        yield from kept[: last - first]


def _shifted(tokens: torch.Tensor, by: int) -> torch.Tensor:
    """Tokens int64 [T] moved to the front; -1 where there are none."""
    return torch.cat([tokens[by:], tokens.new_full((by,), -1)])
