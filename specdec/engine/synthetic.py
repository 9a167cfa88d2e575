"""Verdicts that are made up, for measurements: real forwards and messages, any acceptance.

Whether the target agrees with the drafter is decided by a seeded generator. Nothing that comes out is text of
any model, so none is shown, and only benchmarks may ask for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from specdec.core.description import TargetDescription
from specdec.core.errors import ConfigError
from specdec.core.idle_work import IdleWork, idle_work_of
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep, TargetWork, WorkResult
from specdec.engine.config import EngineConfig
from specdec.engine.targets.target import Target
from specdec.engine.text.tokenizer import Tokenizer
from specdec.proposers.synthetic_config import SyntheticAcceptance
from specdec.sampling.made_up_tokens import NUM_TOKENS, guess
from specdec.sampling.noise import uniform


def require_real(config: EngineConfig) -> None:
    """Refuse a configuration whose output is made up.

    Raises:
        ConfigError: it is one.
    """
    if config.speculative_config.synthetic_acceptance is not None:
        raise ConfigError(
            "speculative_config.synthetic_acceptance: what comes out is made up, so only `drafthouse bench` "
            "takes it: leave it out"
        )


class SyntheticTarget:
    """Implements `engine.target.Target`: another target runs, and its choices are replaced."""

    def __init__(self, target: Target, acceptance: SyntheticAcceptance) -> None:
        """Let `target`, owned from now on, do the work.

        Raises:
            ConfigError: its vocabulary is too small to make up tokens of.
        """
        if target.description.vocab_size < NUM_TOKENS:
            raise ConfigError(
                f"speculative_config.synthetic_acceptance makes up {NUM_TOKENS} different tokens, but the "
                f"target knows {target.description.vocab_size}"
            )
        self._target = target
        self.acceptance = acceptance
        """May be changed at any time."""
        self._seeds: dict[RequestId, int] = {}
        self._steps: deque[TargetStep] = deque()

    @property
    def description(self) -> TargetDescription:
        """That of the target."""
        return self._target.description

    @property
    def idle_work(self) -> Sequence[IdleWork]:
        """That of the target."""
        return idle_work_of(self._target)

    @property
    def is_elsewhere(self) -> bool:
        """As the target is."""
        return self._target.is_elsewhere

    def submit(self, step: TargetStep) -> None:
        """Start a round."""
        for request_id in step.released:
            self._seeds.pop(request_id, None)
        for admitted in step.admitted:
            self._seeds[admitted.request_id] = admitted.seed
        self._steps.append(step)
        self._target.submit(step)

    def collect(self) -> TargetResult:
        """Wait for the answer to the oldest round; see `engine.target.Target`."""
        result = self._target.collect()
        works = self._steps.popleft().works
        answers = [self._answer(*pair) for pair in zip(works, result.results, strict=True)]
        return msgspec.structs.replace(result, results=tuple(answers))

    def close(self) -> None:
        """Close the target."""
        self._target.close()

    def _answer(self, work: TargetWork, answer: WorkResult) -> WorkResult:
        seed = self._seeds.get(work.request_id)
        if seed is None or not answer.token_ids:  # ended meanwhile, or nothing was sampled
            return answer
        num_drafted = work.num_sampled_rows - 1
        first = work.start + len(work.token_ids) - num_drafted
        token_ids = [
            verdict(self.acceptance, seed, first + row, row, num_drafted)
            for row in range(len(answer.token_ids))
        ]
        return msgspec.structs.replace(answer, token_ids=tuple(token_ids))


def verdict(acceptance: SyntheticAcceptance, seed: int, position: int, row: int, num_drafted: int) -> int:
    """Return what the target says at sampled row number `row` of a chain of so many draft tokens."""
    chance = uniform(seed, position, 0, "accept")
    if row == num_drafted:
        return guess(seed, position, _rank(acceptance.bonus_after_all, chance))
    if chance < _at(acceptance.acceptance, row):
        return guess(seed, position)
    return guess(seed, position, 1 + _rank(acceptance.bonus_after_miss, uniform(seed, position, 1, "accept")))


def _at(per_position: Sequence[float], position: int) -> float:
    return per_position[min(position, len(per_position) - 1)]


def _rank(hits: Sequence[float], chance: float) -> int:
    """Return the number of the guess that is right, or that of the first one behind the list."""
    return next((rank for rank, hit in enumerate(hits) if chance < hit), len(hits))


class SilentTokenizer:
    """A tokenizer that reads prompts and shows no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids

    def to_json(self) -> str | None:
        """See `Tokenizer`."""
        return self._tokenizer.to_json()

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return nothing."""
        return ""
