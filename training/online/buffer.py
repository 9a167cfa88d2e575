"""Texts that may be learnt from, bounded, by whose they are."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator

from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.engine.draft_pool.text_tap import LearnableText
from specdec.proposers.online_config import OnlineConfig


def is_held_back(text: LearnableText, share: float) -> bool:
    """Whether nobody is trained on a text: texts of equal prompts are on the same side."""
    prompt = text.token_ids[: text.num_prompt_tokens]
    return extend_prefix_hash(EMPTY_PREFIX, prompt) < share * 2**64


class KeptText(LearnableText, frozen=True):
    """A text without what is never read of it: of a long prompt the end is."""

    num_before: int
    """Tokens that stood before these."""

    @classmethod
    def of(cls, text: LearnableText, max_text_tokens: int) -> KeptText:
        """Keep what parts of `max_text_tokens` tokens begin with that end with a generated one."""
        num_before = max(0, text.num_prompt_tokens + 1 - max_text_tokens)
        return cls(
            owner=text.owner,
            token_ids=text.token_ids[num_before:],
            num_prompt_tokens=text.num_prompt_tokens - num_before,
            params=text.params,
            seed=text.seed,
            num_before=num_before,
        )


def num_judged(text: LearnableText, max_text_tokens: int) -> int:
    """Return how many tokens of a text a trial scores.

    Of a longer one than it reads these are among the last, whose first has nothing before it to be told by.
    """
    return min(text.num_generated, max_text_tokens - 1)


class _Side:
    """Texts for one purpose, each owner's apart. Of the owner who has most, the oldest give way."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.by_owner: dict[str | None, deque[KeptText]] = {}
        self._tokens_of: Counter[str | None] = Counter()

    def add(self, text: KeptText) -> int:
        """Add a text; return how many tokens gave way.

        One that is longer than all that may be held would drive out all others, and then itself.
        """
        if len(text.token_ids) > self.max_tokens:
            return len(text.token_ids)
        self.by_owner.setdefault(text.owner, deque()).append(text)
        self._count(text, len(text.token_ids))
        num_dropped = 0
        while self.num_tokens > self.max_tokens:
            owner, _ = self._tokens_of.most_common(1)[0]
            oldest = self.by_owner[owner].popleft()
            self._count(oldest, -len(oldest.token_ids))
            if not self.by_owner[owner]:
                del self.by_owner[owner], self._tokens_of[owner]
            num_dropped += len(oldest.token_ids)
        return num_dropped

    def _count(self, text: KeptText, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._tokens_of[text.owner] += num_tokens

    def newest(self) -> Iterator[KeptText]:
        """The newest of every owner, then the next of every owner, and so on."""
        turns = itertools.zip_longest(*(reversed(texts) for texts in self.by_owner.values()))
        return (text for turn in turns for text in turn if text is not None)


class TextBuffer:
    """What a trainer has heard: most of it to train on, a part to judge by. Bounded."""

    def __init__(self, config: OnlineConfig, vocab_size: int) -> None:
        """Hold nothing yet; texts with tokens from `vocab_size` on are of no use to the draft model."""
        self._config = config
        self._vocab_size = vocab_size
        num_held_back = round(config.held_back_share * config.max_buffer_tokens)
        self._to_train_on = _Side(config.max_buffer_tokens - num_held_back)
        self._held_back = _Side(num_held_back)
        self.num_new_tokens = 0
        """Generated tokens to train on that have come since `begin_version`."""
        self.counters = Counter({"online_tokens_buffered": 0, "online_tokens_dropped": 0})
        """By metric name: `online_tokens_buffered`, `online_tokens_dropped` (of these, since dropped)."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts held."""
        return self._to_train_on.num_tokens + self._held_back.num_tokens

    @property
    def owners(self) -> frozenset[str | None]:
        """Whose texts are held."""
        return frozenset((*self._to_train_on.by_owner, *self._held_back.by_owner))

    def add(self, text: LearnableText) -> None:
        """Hold a text, if the configuration lets it be learnt from."""
        is_of_use = text.num_generated > 0 and max(text.token_ids) < self._vocab_size
        if not is_of_use or not self._config.may_learn_from(text.owner):
            return
        is_judge = is_held_back(text, self._config.held_back_share)
        side = self._held_back if is_judge else self._to_train_on
        kept = KeptText.of(text, self._config.max_text_tokens)
        self.counters["online_tokens_buffered"] += len(kept.token_ids)
        self.counters["online_tokens_dropped"] += side.add(kept)
        is_new = not is_judge and len(kept.token_ids) <= side.max_tokens
        self.num_new_tokens += text.num_generated if is_new else 0

    def has_enough(self) -> bool:
        """Whether another version is worth beginning, and can be judged."""
        if self.num_new_tokens < self._config.min_new_tokens or not self._to_train_on.by_owner:
            return False
        wanted = self._config.min_held_back_tokens
        return sum(map(self._num_judged, self.held_back(wanted))) >= wanted

    def begin_version(self) -> None:
        """Count new tokens from here on."""
        self.num_new_tokens = 0

    def draw(self, rng: random.Random) -> KeptText:
        """Return a text to train on, each owner's as likely as another's."""
        owner = rng.choice(list(self._to_train_on.by_owner))
        return rng.choice(self._to_train_on.by_owner[owner])

    def held_back(self, num_tokens: int) -> list[KeptText]:
        """Return texts to judge by, the newest, with so many tokens to score if there are so many."""
        texts: list[KeptText] = []
        for text in self._held_back.newest():
            if num_tokens <= 0:
                break
            texts.append(text)
            num_tokens -= self._num_judged(text)
        return texts

    def _num_judged(self, text: KeptText) -> int:
        return num_judged(text, self._config.max_text_tokens)
