"""The loop of a draft model that goes on learning: hear, train, judge, serve or drop, piece by piece."""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from specdec.engine.draft_pool.text_tap import LearnableText
from specdec.model.rotary import longest_sequence
from specdec.proposers.online_config import OnlineConfig
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import TokenChooser
from specdec.transport.status import OnlineStatus
from training.online.buffer import KeptText, TextBuffer
from training.online.guard import Trial, is_better

Weights = Mapping[str, torch.Tensor]

_LARGEST_TRIAL = 1 << 14
"""Held-back tokens by which a version is judged, at most, unless more are asked for."""
_COUNTED = (
    "online_versions_tried",
    "online_versions_served",
    "online_versions_refused",
    "online_training_steps",
    "online_trial_tokens",
    "online_trial_matches_before",
    "online_trial_matches_after",
)
"""All of them from the start: other threads look at them, and must not see a dictionary grow."""
_MAX_NORM = 1.0
_BETAS = (0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Version:
    """Weights that have been found better than those before."""

    number: int
    """1 for the first; 0 are those that the draft model came with."""
    weights: Weights
    """By parameter name, in the numbers that they are served in."""


class OnlineTrainer:
    """Trains a copy of a draft model on what the target committed. For one thread, but `hear`, `take_version`
    and `status`, which are for any.

    Labels are hard: the tokens that the target chose, at the temperature at which it chose them, since that
    is all that draft workers know. What is learnt is the distribution that these tokens were drawn from.
    """

    def __init__(
        self,
        config: OnlineConfig,
        model: PreTrainedModel,
        chooser: TokenChooser,
        *,
        vocab_size: int,
        served_dtype: torch.dtype,
        num_positions: int | None = None,
    ) -> None:
        """Begin with the weights of `model`, which is the trainer's alone, in float32.

        Args:
            config: how to learn.
            model: the draft model.
            chooser: evaluates the token function.
            vocab_size: tokens that the target knows.
            served_dtype: numbers that versions are rounded to before they are judged, as they are served.
            num_positions: those that the draft model is served with; None: all that it has.
        """
        self._num_positions = num_positions or longest_sequence(model.config) or sys.maxsize
        most = min(config.max_text_tokens, self._num_positions)
        self._config = config = config.model_copy(update={"max_text_tokens": most})
        self._model = model.eval().requires_grad_(requires_grad=True)
        self._chooser = chooser
        self._vocab_size = min(vocab_size, int(model.config.get_text_config().vocab_size))
        self._dtype = served_dtype
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._rng = random.Random(config.seed)
        self.buffer = TextBuffer(config, self._vocab_size)
        self._heard: deque[LearnableText] = deque()
        self._served = self._rounded()
        self._number = 0
        self._kept = self._copied()
        self._optimizer = self._new_optimizer()
        self._ready: deque[Version] = deque(maxlen=1)
        self._last_trial: Trial | None = None
        self._counters = Counter(dict.fromkeys(_COUNTED, 0))
        self._pieces = self._learn()

    @property
    def counters(self) -> Mapping[str, int]:
        """By metric name: `online_versions_tried`, `online_versions_served` (found better) and
        `online_versions_refused`; `online_training_steps`; over all trials `online_trial_tokens` and, of
        these, `online_trial_matches_before` and `online_trial_matches_after`; and those of the buffer.
        """
        return {**self._counters, **self.buffer.counters}

    @property
    def status(self) -> OnlineStatus:
        """What has been learnt so far."""
        trial = self._last_trial
        return OnlineStatus(
            version=self._number,
            num_tried=self._counters["online_versions_tried"],
            num_refused=self._counters["online_versions_refused"],
            num_buffered_tokens=self.buffer.num_tokens,
            acceptance_before=None if trial is None else trial.before,
            acceptance_after=None if trial is None else trial.after,
        )

    @property
    def served(self) -> Version:
        """The version that is served now, be it the one that the draft model came with."""
        return Version(self._number, self._served)

    def hear(self, texts: Sequence[LearnableText]) -> None:
        """Take in texts that have ended."""
        self._heard.extend(texts)

    def take_version(self) -> Version | None:
        """Return the newest version that has been found better, once."""
        return self._ready.pop() if self._ready else None

    def begin_with(self, version: Version) -> None:
        """Go on from a version that is served already. Before the first `run_next`."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(version.weights[name])
        self._served, self._kept, self._number = self._rounded(), self._copied(), version.number
        self._optimizer = self._new_optimizer()

    def run_next(self) -> bool:
        """Do a piece of work: one text forward and, in training, backward. False: there is none now."""
        while self._heard:
            self.buffer.add(self._heard.popleft())
        return next(self._pieces)

    def _learn(self) -> Generator[bool, None, None]:
        while True:
            while not self.buffer.has_enough():
                yield False
            self.buffer.begin_version()
            self._counters["online_versions_tried"] += 1
            for _ in range(self._config.steps_per_version):
                yield from self._train()
            tried = self._rounded()
            trial = yield from self._judge(tried)
            self._last_trial = trial
            if is_better(trial, self._config.min_gain):
                self._serve(tried)
                continue
            self._counters["online_versions_refused"] += 1
            # What gains less than it takes to be served is gone on from: many small gains are one large.
            if trial.after <= trial.before:
                self._go_back()
            self._optimizer = self._new_optimizer()

    def _train(self) -> Generator[bool, None, None]:
        """One step of the optimizer, text by text."""
        texts = [self.buffer.draw(self._rng) for _ in range(self._config.batch_texts)]
        parts = [_part(text, self._config.max_text_tokens, self._rng) for text in texts]
        num_tokens = sum(part.num_scored for part in parts)
        for part in parts:
            (self._loss(part) / num_tokens).backward()
            yield True
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._counters["online_training_steps"] += 1

    def _loss(self, part: _Part) -> torch.Tensor:
        """Cross-entropy at the temperature of the text, summed over its scored tokens.

        Times that temperature, by which the logits of nearly greedy texts are divided: their gradients would
        be a thousand times those of others, and clipping would leave nothing of these.
        """
        heat = part.text.params.temperature or 1.0
        return heat * functional.cross_entropy(self._logits(part) / heat, part.scored, reduction="sum")

    def _judge(self, tried: Weights) -> Generator[bool, None, Trial]:
        num_wanted = max(_LARGEST_TRIAL, self._config.min_held_back_tokens)
        served, tried = _widened(self._served), _widened(tried)
        num_tokens = num_before = num_after = num_gained = 0
        for text in self.buffer.held_back(num_wanted):
            part = _part(text, self._config.max_text_tokens, None)
            before, after = self._matches(served, part), self._matches(tried, part)
            num_tokens += part.num_scored
            num_before += int(before.sum())
            num_after += int(after.sum())
            num_gained += int((after & ~before).sum())
            yield True
        self._counters["online_trial_tokens"] += num_tokens
        self._counters["online_trial_matches_before"] += num_before
        self._counters["online_trial_matches_after"] += num_after
        return Trial(num_tokens, num_before, num_after, num_gained)

    def _serve(self, tried: Weights) -> None:
        self._counters["online_versions_served"] += 1
        self._number += 1
        self._served, self._kept = tried, self._copied()
        self._ready.append(Version(self._number, tried))

    def _go_back(self) -> None:
        """Train on from what is served."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self._kept[name])

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self._model.parameters(), lr=self._config.learning_rate, betas=_BETAS, weight_decay=0.0
        )

    def _copied(self) -> Weights:
        return {name: one.detach().clone() for name, one in self._model.named_parameters()}

    def _rounded(self) -> Weights:
        return {name: one.detach().to(self._dtype, copy=True) for name, one in self._model.named_parameters()}

    def _logits(self, part: _Part, weights: Weights | None = None) -> torch.Tensor:
        """Logits [scored tokens, vocab] of the rows before them, by these weights or by the present ones."""
        rows = torch.arange(part.first_scored - 1, len(part.token_ids) - 1)
        # Texts may be longer than the draft model's positions: behind those it drafts with the last ones.
        first = min(part.start, self._num_positions - len(part.token_ids))
        options: dict[str, Any] = {
            "input_ids": part.token_ids[None],
            "position_ids": first + torch.arange(len(part.token_ids))[None],
            "use_cache": False,
        }
        if self._takes_rows:
            options["logits_to_keep"] = rows
        if weights is None:
            output = self._model(**options)
        else:
            output = torch.func.functional_call(self._model, dict(weights), (), options)
        logits: torch.Tensor = output.logits[0] if self._takes_rows else output.logits[0, rows]
        return logits[:, : self._vocab_size].float()

    @torch.no_grad()
    def _matches(self, weights: Weights, part: _Part) -> torch.Tensor:
        """bool [scored tokens]: whether the token function on these weights chooses what the target chose."""
        text = part.text
        logits = self._logits(part, weights).contiguous()
        rows = RowSpec(text.params, text.seed, part.start + part.first_scored, part.num_scored)
        sampled = self._chooser.sample(logits, SamplingRows.build([rows]))
        return (sampled.token_ids == part.scored) & sampled.finite


def _widened(weights: Weights) -> Weights:
    return {name: one.float() for name, one in weights.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive tokens of a text, of which those from `first_scored` on were chosen by the target."""

    text: KeptText
    start: int
    """Of the first of them in the whole text."""
    token_ids: torch.Tensor
    """int64 [T]"""
    first_scored: int

    @property
    def scored(self) -> torch.Tensor:
        return self.token_ids[self.first_scored :]

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first_scored


def _part(text: KeptText, max_tokens: int, rng: random.Random | None) -> _Part:
    """Return a part with as many tokens as may be: one by chance, or, without `rng`, the last."""
    length = len(text.token_ids)
    first_end = min(length, max(max_tokens, text.num_prompt_tokens + 1))
    end = length if rng is None else rng.randint(first_end, length)
    start = max(0, end - max_tokens)
    return _Part(
        text=text,
        start=text.num_before + start,
        token_ids=torch.tensor(text.token_ids[start:end]),
        first_scored=max(1, text.num_prompt_tokens - start),
    )
