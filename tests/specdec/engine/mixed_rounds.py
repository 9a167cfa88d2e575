"""Requests of many kinds at one target that drafts for itself, in the same steps: scheduled by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork, WorkResult
from specdec.core.sampling_params import Grammar, SamplingParams
from specdec.engine.targets.local_target import LocalTarget, run_to_the_end
from tests.architectures import VOCAB_SIZE
from tests.specdec.engine.self_drafting import BLOCK_SIZE

CHUNK = 5
NUM_STEPS = 10
NUM_BLOCKS_EACH = 20
NUM_BLOCKS = 200
_PREEMPTED_AT, _JOINS_AT = 6, 4
_COMMON: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
_ALL_BUT_FEW = bytes(0b01111111 for _ in range(VOCAB_SIZE // 8))


@dataclass
class Request:
    """One sequence, and how many of its tokens have K/V."""

    name: str
    params: SamplingParams
    num_drafted: int
    token_ids: list[int]
    blocks: tuple[int, ...] = ()
    num_cached: int = 0
    num_prompt_tokens: int = field(init=False)
    is_known: bool = False
    """Whether the target knows its block table."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    def work(self) -> TargetWork:
        """Return the next chunk, or the last committed token with a draft behind it."""
        rest = tuple(self.token_ids[self.num_cached :])
        is_last = len(rest) <= CHUNK
        is_free = is_last and self.params.grammar is None
        work = TargetWork(
            RequestId(self.name),
            rest[:CHUNK],
            self.num_cached,
            int(is_last),
            len(self.blocks) if self.is_known else 0,
            () if self.is_known else self.blocks,
            num_self_drafted=self.num_drafted if is_free else 0,
            masks=(_ALL_BUT_FEW,) if is_last and not is_free else None,
        )
        self.is_known = True
        return work

    def commit(self, work: TargetWork, answer: WorkResult) -> None:
        self.num_cached += len(work.token_ids)
        for index, token_id in enumerate(answer.token_ids):
            self.token_ids.append(token_id)
            if index >= len(answer.drafted) or answer.drafted[index] != token_id:
                break
            self.num_cached += 1

    def admitted(self) -> AdmittedSequence:
        return AdmittedSequence(
            RequestId(self.name), 12345, self.params, self.num_prompt_tokens, tuple(self.token_ids)
        )


def prompt(length: int, seed: int) -> list[int]:
    return [(7 * index * index + 11 * seed + index) % 120 + 2 for index in range(length)]


def requests(*, wants_logits: bool) -> list[Request]:
    """Without and with draft tokens, of which `wants_logits` adds some whose logits Python looks at."""
    greedy, plain = SamplingParams(temperature=0.0, **_COMMON), SamplingParams(temperature=1.0, **_COMMON)
    mix = [
        Request("greedy", greedy, 4, prompt(13, 0)),
        Request("plain", plain, 3, prompt(9, 1)),
        Request("without", plain, 0, prompt(3, 2)),
        Request("one", SamplingParams(temperature=1.8, min_p=0.02, **_COMMON), 1, prompt(24, 3)),
    ]
    if wants_logits:
        penalties = SamplingParams(repetition_penalty=1.4, presence_penalty=-0.3, **_COMMON)
        constrained = SamplingParams(grammar=Grammar("regex", ".*"), **_COMMON)
        mix += [
            Request("penalties", penalties, 4, prompt(7, 4)),
            Request("grammar", constrained, 4, prompt(6, 5)),
            Request("told", SamplingParams(temperature=0.7, logprobs=3, **_COMMON), 2, prompt(5, 6)),
        ]
    return mix


class MixedRounds:
    """Several steps: chunks of prompts, drafts, one that is preempted, one that finds its prefix cached."""

    def __init__(self, target: LocalTarget, *, wants_logits: bool = False) -> None:
        self.target = target
        self.requests = requests(wants_logits=wants_logits)
        self._unused = iter(range(1, NUM_BLOCKS))
        for one in self.requests:
            one.blocks = self._blocks(NUM_BLOCKS_EACH)
        self._arrived = list(self.requests)

    def run(self, num_steps: int = NUM_STEPS) -> list[tuple[WorkResult, ...]]:
        """Return the answers of every step."""
        return [self._step(number) for number in range(num_steps)]

    def pool(self) -> list[torch.Tensor]:
        """K and V of all layers, whatever is in them, but for the scratch block."""
        pool = self.target.runner.pool
        return [one[1:].clone() for one in (*pool.keys, *pool.values)]

    def _blocks(self, count: int) -> tuple[int, ...]:
        return tuple(next(self._unused) for _ in range(count))

    def _step(self, number: int) -> tuple[WorkResult, ...]:
        released: tuple[RequestId, ...] = ()
        if number == _PREEMPTED_AT:
            released = (self._preempt(self.requests[0]),)
        if number == _JOINS_AT:
            self._join_behind(self.requests[1])
        admitted, self._arrived = tuple(one.admitted() for one in self._arrived), []
        works = tuple(one.work() for one in self.requests)
        step = TargetStep(number, works, admitted, released)
        answers = run_to_the_end(self.target.run, step).results
        for one, work, answer in zip(self.requests, works, answers, strict=True):
            assert bool(answer.token_ids) == bool(work.num_sampled_rows), answer.error
            one.commit(work, answer)
        return answers

    def _preempt(self, one: Request) -> RequestId:
        one.blocks, one.num_cached, one.is_known = self._blocks(NUM_BLOCKS_EACH), 0, False
        self._arrived.append(one)
        return RequestId(one.name)

    def _join_behind(self, other: Request) -> None:
        """A request that begins like another, whose full blocks of the prompt it shares."""
        num_shared = 2
        late = Request("late", other.params, 4, [*other.token_ids[: num_shared * BLOCK_SIZE], 17, 18, 19])
        late.blocks = (*other.blocks[:num_shared], *self._blocks(NUM_BLOCKS_EACH - num_shared))
        late.num_cached = num_shared * BLOCK_SIZE
        self.requests.append(late)
        self._arrived.append(late)


def assert_same_bits(mine: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(mine) == len(expected)
    for one, other in zip(mine, expected, strict=True):
        assert torch.equal(one, other)
