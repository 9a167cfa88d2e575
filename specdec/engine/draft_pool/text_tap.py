"""What a draft worker keeps of texts that have ended, for a trainer to fetch.

A draft worker is told everything that was committed, so nothing more has to be sent to learn from it. What
may not be learnt from is not kept.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.proposers.online_config import OnlineConfig

_MOST_TOKENS = 1 << 18
"""Kept until they are fetched. The oldest give way: there is always more to learn from."""


class LearnableText(msgspec.Struct, frozen=True):
    """A text that the target wrote, and by what it was chosen."""

    owner: str | None
    token_ids: tuple[int, ...]
    """Prompt and what was committed behind it."""
    num_prompt_tokens: int
    params: SamplingParams
    """What decides which tokens are chosen from given logits; nothing else of the request."""
    seed: int

    @property
    def num_generated(self) -> int:
        """Tokens that the target chose."""
        return len(self.token_ids) - self.num_prompt_tokens


class TextTap:
    """Hears of sequences that end. `note` is for one thread, `take` for another."""

    def __init__(self, config: OnlineConfig) -> None:
        """Keep nothing yet."""
        self._config = config
        self._lock = threading.Lock()
        self._texts: deque[LearnableText] = deque()
        self._num_tokens = 0
        self.counters = Counter({"online_texts_heard": 0, "online_texts_dropped": 0})
        """By metric name: `online_texts_heard`, `online_texts_dropped` (nobody has fetched them in time)."""

    def note(self, view: SequenceView) -> None:
        """Keep the text of a sequence that ends, if it may be learnt from, and if any of it was chosen."""
        if not self._config.may_learn_from(view.owner) or view.committed_len <= view.num_prompt_tokens:
            return
        params = view.params
        text = LearnableText(
            owner=view.owner,
            token_ids=tuple(view.token_ids),
            num_prompt_tokens=view.num_prompt_tokens,
            params=SamplingParams(
                temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
            ),
            seed=view.seed,
        )
        with self._lock:
            self._texts.append(text)
            self._num_tokens += len(text.token_ids)
            self.counters["online_texts_heard"] += 1
            while self._num_tokens > _MOST_TOKENS and len(self._texts) > 1:
                self._num_tokens -= len(self._texts.popleft().token_ids)
                self.counters["online_texts_dropped"] += 1

    def take(self) -> Sequence[LearnableText]:
        """Return, once, what has ended since the last call."""
        with self._lock:
            texts, self._texts = self._texts, deque()
            self._num_tokens = 0
        return tuple(texts)
