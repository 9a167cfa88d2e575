"""Exact output distributions: a rule is run once for every way its random decisions can go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

Outcome = TypeVar("Outcome")
Tokens = tuple[int, ...]


@dataclass
class BranchingChance:
    """A `Chance` that follows a script of option numbers, then takes first options, and keeps the odds."""

    script: list[int]
    options: list[list[float]] = field(default_factory=list)

    def choose(self, weights: Sequence[float]) -> int:
        step = len(self.options)
        self.options.append([float(weight) for weight in weights])
        if step == len(self.script):
            self.script.append(self._next_possible(step, 0))
        return self.script[step]

    def accept(self, probability: float, position: int, test: int) -> bool:
        del position, test
        probability = min(1.0, probability)
        return self.choose([probability, 1.0 - probability]) == 0

    def draw_residual(self, weights: torch.Tensor, position: int) -> int:
        del position
        return self.choose((weights / weights.sum()).tolist())

    draw_target = draw_residual

    @property
    def probability(self) -> float:
        product = 1.0
        for odds, option in zip(self.options, self.script, strict=True):
            product *= odds[option]
        return product

    def advance(self) -> bool:
        """Turn the script to the next way not yet gone; false when there is none."""
        while self.script:
            step = len(self.script) - 1
            option = self._next_possible(step, self.script.pop() + 1)
            if option < len(self.options[step]):
                self.script.append(option)
                self.options.clear()
                return True
            self.options.pop()
        return False

    def _next_possible(self, step: int, option: int) -> int:
        odds = self.options[step]
        while option < len(odds) and odds[option] <= 0.0:
            option += 1
        return option


def outcomes(run: Callable[[BranchingChance], Outcome]) -> dict[Outcome, float]:
    """Probability of each outcome of `run`, whose only randomness is the chance it is given."""
    found: dict[Outcome, float] = {}
    chance = BranchingChance([])
    while True:
        outcome = run(chance)
        found[outcome] = found.get(outcome, 0.0) + chance.probability
        if not chance.advance():
            return found


@dataclass(frozen=True)
class MarkovModel:
    """The next token depends on the last one: float64 [vocab, vocab], rows sum to 1."""

    matrix: torch.Tensor

    def row(self, prefix: Tokens) -> torch.Tensor:
        return self.matrix[prefix[-1]]

    def sequence_probability(self, prefix: Tokens, continuation: Tokens) -> float:
        probability, last = 1.0, prefix[-1]
        for token in continuation:
            probability *= float(self.matrix[last, token])
            last = token
        return probability


def random_model(vocab_size: int, seed: int, sharpness: float = 1.5, holes: bool = False) -> MarkovModel:
    """A random model; with holes, some transitions have probability 0 (as after top-k)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64) * sharpness
    if holes:
        logits[:, 1:].masked_fill_(
            torch.rand(vocab_size, vocab_size - 1, generator=generator) < 0.4, -torch.inf
        )
    return MarkovModel(logits.softmax(-1))


def total_variation_from(
    target: MarkovModel, prefix: Tokens, emitted: dict[Tokens, float], length: int
) -> float:
    """Distance between p and what comes out when `emitted` is continued by p, over `length` tokens."""
    vocab = range(target.matrix.shape[0])
    sequences: list[Tokens] = [()]
    for _ in range(length):
        sequences = [(*sequence, token) for sequence in sequences for token in vocab]
    distance = 0.0
    for sequence in sequences:
        probability = sum(
            emitted.get(sequence[:cut], 0.0)
            * target.sequence_probability((*prefix, *sequence[:cut]), sequence[cut:])
            for cut in range(1, length + 1)
        )
        distance += abs(probability - target.sequence_probability(prefix, sequence)) / 2
    return distance
