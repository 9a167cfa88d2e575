"""A target without a network: a small random Markov model that reads its past from real KV blocks.

It has everything of a real target that can go wrong in an engine. Each slot of its "cache" holds a number
that depends on the token there and on all slots before it, read through the sequence's block table, as
the K/V of a transformer do; the next token depends on the last token and, a little, on all of those
numbers. So a wrong block, a stale slot, a wrong position or a lost table update changes what comes out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.core.errors import ChannelClosed, InputError
from specdec.core.ids import RequestId
from specdec.core.outputs import TokenLogprobs
from specdec.core.plan import SlotMove, TargetResult, TargetStep, TargetWork, WorkResult
from specdec.core.proposal import NoiseStream
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.judge import Judge
from specdec.engine.targets.target import TargetDescription
from specdec.engine.targets.work_rows import all_rows, rows_of_answer
from specdec.sampling.noise import MASK_64, WEYL, gumbel, mix64
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.tree.topology import ROOT, topology_of


class ToyModel:
    """Logits as a function of a prefix: a random table by last token, perturbed by the whole prefix."""

    def __init__(
        self, vocab_size: int, *, seed: int = 0, sharpness: float = 3.0, perturbation: float = 0.5
    ) -> None:
        """`perturbation` scales what depends on the whole prefix; at 0 the model is first-order Markov."""
        generator = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self._table = generator.normal(scale=sharpness, size=(vocab_size, vocab_size))
        self._ripples = generator.normal(scale=perturbation, size=(64, vocab_size))

    def logits(self, last_token: int, prefix_sum: int) -> NDArray[np.float64]:
        """Return float64 [vocab] after a prefix, given its last token and the sum of its slot values."""
        row: NDArray[np.float64] = self._table[last_token] + self._ripples[mix64(prefix_sum) & 63]
        return row

    def choose(
        self,
        logits: NDArray[np.float64],
        params: SamplingParams,
        seed: int,
        position: int,
        stream: NoiseStream = "target",
    ) -> int:
        """Apply the token function (temperature only), with noise of a stream."""
        if params.is_greedy:
            return int(logits.argmax())
        noise = [gumbel(seed, position, token_id, stream) for token_id in range(self.vocab_size)]
        return int((logits / params.temperature + np.array(noise)).argmax())

    def continuation(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, seed: int, num_tokens: int
    ) -> list[int]:
        """Return the next tokens, computed without any engine: what an engine must reproduce."""
        token_ids = list(prompt_token_ids)
        total = 0
        for position, token_id in enumerate(token_ids):
            total = (total + slot_value(total, position, token_id)) & MASK_64
        for _ in range(num_tokens):
            position = len(token_ids)
            token_ids.append(self.choose(self.logits(token_ids[-1], total), params, seed, position))
            total = (total + slot_value(total, position, token_ids[-1])) & MASK_64
        return token_ids[len(prompt_token_ids) :]


def slot_value(prefix_sum: int, position: int, token_id: int) -> int:
    """Return what the cache holds for a token behind a prefix of this sum."""
    return mix64((prefix_sum + WEYL * (position + 1) + token_id) & MASK_64)


def move_toy_slots(slots: list[int], moves: Sequence[SlotMove]) -> None:
    """Move what toy caches hold, all at once."""
    moved = [slots[move.source] for move in moves]
    for move, value in zip(moves, moved, strict=True):
        slots[move.destination] = value


@dataclass(slots=True)
class _ToySequence:
    seed: int
    params: SamplingParams
    block_ids: list[int] = field(default_factory=list)


class ToyTarget:
    """A `Target` over a `ToyModel`, with failures on demand."""

    def __init__(
        self,
        model: ToyModel,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        max_model_len: int = 256,
        eos_token_ids: tuple[int, ...] = (),
        judge: Judge | None = None,
    ) -> None:
        """Run `model`; `judge` verifies drafts (None: sample_and_match, by whoever asked)."""
        self.model = model
        self.description = TargetDescription(
            model_id="toy",
            revision="toy",
            dtype="float64",
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            num_blocks=num_blocks,
            block_size=block_size,
            rule="sample_and_match" if judge is None else judge.rule.capabilities.name,
        )
        self._judge = judge
        self._draft_stream: NoiseStream = "target" if judge is None else judge.rule.capabilities.draft_stream
        self.num_steps_until_lost: int | None = None
        """Steps answered before the target is lost; None: never."""
        self.failing_requests: set[RequestId] = set()
        """Requests that end in an error at their next step."""
        self._slots = [0] * (num_blocks * block_size)
        self._sequences: dict[RequestId, _ToySequence] = {}
        self._results: deque[TargetResult] = deque()

    @property
    def known_requests(self) -> frozenset[RequestId]:
        """Requests that the target keeps state of."""
        return frozenset(self._sequences)

    @property
    def is_elsewhere(self) -> bool:
        """No: `submit` runs them."""
        return False

    def submit(self, step: TargetStep) -> None:
        """Compute a round."""
        move_toy_slots(self._slots, step.moves)
        for request_id in step.released:
            del self._sequences[request_id]
        for admitted in step.admitted:
            assert admitted.request_id not in self._sequences, f"{admitted.request_id} is admitted twice"
            self._sequences[admitted.request_id] = _ToySequence(admitted.seed, admitted.params)
        results = tuple([self._run(work) for work in step.works])
        self._results.append(TargetResult(step_id=step.step_id, results=results))

    def collect(self) -> TargetResult:
        """Return the oldest round.

        Raises:
            ChannelClosed: `num_steps_until_lost` has come to 0.
        """
        if self.num_steps_until_lost is not None:
            if self.num_steps_until_lost == 0:
                raise ChannelClosed("the toy target is lost, as asked")
            self.num_steps_until_lost -= 1
        return self._results.popleft()

    def close(self) -> None:
        """Nothing to free."""

    def _run(self, work: TargetWork) -> WorkResult:
        sequence = self._sequences[work.request_id]
        sequence.block_ids[work.table_start :] = work.block_ids
        if work.request_id in self.failing_requests:
            return WorkResult(token_ids=(), error="non-finite logits")
        block_size = self.description.block_size
        slots = [block * block_size + offset for block in sequence.block_ids for offset in range(block_size)]
        end = work.start + work.num_rows
        assert end <= len(slots), f"{work.request_id}: {end} tokens in {len(slots)} slots"
        assert 0 not in sequence.block_ids, "the scratch block is in a table"
        before = sum(self._slots[slot] for slot in slots[: work.start]) & MASK_64
        totals: list[int] = []
        all_tokens, all_parents = all_rows(work)
        topology = topology_of(len(all_tokens), all_parents)
        num_own = len(work.token_ids)
        first_answered = work.num_rows - (0 if work.beside is None else work.beside.num_answered)
        answers: list[int] = []
        first_sampled = len(work.token_ids) - work.num_sampled_rows
        chosen: list[int] = []
        logits_of_rows: list[NDArray[np.float64]] = []
        scores: list[TokenLogprobs] = []
        num_scored, num_listed = len(work.scored_token_ids), sequence.params.prompt_logprobs or 0
        for row, (token_id, parent) in enumerate(zip(all_tokens, topology.parents, strict=True)):
            total = before if parent == ROOT else totals[parent]
            position = work.start + topology.depths[row] - 1
            value = slot_value(total, position, token_id)
            self._slots[slots[work.start + row]] = value
            total = (total + value) & MASK_64
            totals.append(total)
            if row < num_scored:
                logits = self.model.logits(token_id, total)
                scores.append(_logprobs(logits, work.scored_token_ids[row], num_listed))
            if row >= first_answered:
                logits = self.model.logits(token_id, total)
                answers.append(
                    self.model.choose(
                        logits, sequence.params, sequence.seed, position + 1, self._draft_stream
                    )
                )
            if first_sampled <= row < num_own:
                logits = self.model.logits(token_id, total)
                chosen.append(self.model.choose(logits, sequence.params, sequence.seed, position + 1))
                logits_of_rows.append(logits)
        num_top = sequence.params.logprobs
        token_ids = self._judged(work, sequence, logits_of_rows)
        if token_ids:
            logits_of_rows = [logits_of_rows[row] for row in rows_of_answer(work, token_ids)]
        token_ids = token_ids or tuple(chosen)
        logprobs = [
            _logprobs(logits, token_id, num_top or 0)
            for logits, token_id in zip(logits_of_rows, token_ids, strict=False)
        ]
        return WorkResult(
            token_ids=token_ids,
            logprobs=None if num_top is None else tuple(logprobs),
            prompt_logprobs=tuple(scores) if scores else None,
            beside=tuple(answers),
        )

    def _judged(
        self, work: TargetWork, sequence: _ToySequence, logits: Sequence[NDArray[np.float64]]
    ) -> tuple[int, ...]:
        """Return what the rule makes of a draft; nothing where it has none to look at."""
        sampling = SequenceSampling(sequence.params, sequence.seed)
        if self._judge is None or not self._judge.concerns(work, sampling):
            return ()
        scores = np.stack(logits) / sequence.params.temperature
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        p_rows = torch.from_numpy(weights / weights.sum(-1, keepdims=True))
        return self._judge.decide(work, sampling, p_rows)


def _logprobs(logits: NDArray[np.float64], chosen: int, num_top: int) -> TokenLogprobs:
    normalised = logits - np.logaddexp.reduce(logits)
    best = np.argsort(-normalised, kind="stable")[:num_top]
    return TokenLogprobs(
        token_id=chosen,
        logprob=float(normalised[chosen]),
        top=tuple((int(token_id), float(normalised[token_id])) for token_id in best),
    )


class ToyTokenizer:
    """Token i is the i-th of the given strings; text is matched greedily, longest string first."""

    def __init__(self, pieces: Sequence[str], *, special_ids: Sequence[int] = ()) -> None:
        self._pieces = tuple(pieces)
        self.special_ids = frozenset(special_ids)

    @classmethod
    def of_letters(cls, vocab_size: int) -> ToyTokenizer:
        """One letter per token, from 'a' upward."""
        return cls([chr(ord("a") + index) for index in range(vocab_size)])

    def to_json(self) -> str | None:
        """Return None: no grammars over toy tokens."""
        return None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            InputError: the text is not made of the pieces.
        """
        token_ids: list[int] = []
        by_length = sorted(range(len(self._pieces)), key=lambda index: -len(self._pieces[index]))
        while text:
            found = next((index for index in by_length if text.startswith(self._pieces[index])), None)
            if found is None:
                raise InputError(f"no token begins {text[:10]!r}", param="prompt")
            token_ids.append(found)
            text = text[len(self._pieces[found]) :]
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens."""
        return "".join(self._pieces[index] for index in token_ids if index not in self.special_ids)
