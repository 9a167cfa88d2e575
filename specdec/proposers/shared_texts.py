"""What requests that have ended generated, for those that come later: bounded, and kept apart by cache salt.

Whoever has most gives way, so that nobody's texts are pushed out by those of another who generates more: of
texts that are not read yet the oldest of the salt that has most tokens of them, of all others those of the
salt that has most.

Nothing is ever taken out of a suffix automaton, so that each salt has two: texts go to the young one, which
takes the place of the old one when it holds half of what there may be. Where there is no old one it becomes
that at half of an equal share already: what a salt loses then is its older texts, not all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.proposers.suffix_automaton import NO_TOKEN, SuffixAutomaton

_MOST_SALTS = 4096
"""Whose texts are kept at once: the one with most is looked for among them, and requests name salts as they
like. Of more, the one that was used least recently gives way."""


@dataclass(slots=True)
class _Memory:
    """Texts of one salt."""

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton | None = None

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        return (self.young,) if self.old is None else (self.young, self.old)

    @property
    def num_tokens(self) -> int:
        return self.young.num_tokens + (0 if self.old is None else self.old.num_tokens)


@dataclass(slots=True)
class _Unread:
    """Texts of one salt that are not read yet."""

    numbers: deque[int] = field(default_factory=deque)
    """Which they are, the oldest first."""
    num_tokens: int = 0


class SharedTexts:
    """Keeps texts of at most `max_tokens` tokens in all, of each salt the latest."""

    def __init__(self, max_tokens: int) -> None:
        """Keep nothing where `max_tokens` is 0."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._memories: OrderedDict[str | None, _Memory] = OrderedDict()
        """By salt, the one that was used least recently first."""
        self._unread: OrderedDict[int, tuple[str | None, Sequence[int]]] = OrderedDict()
        """By number, in the order in which they came."""
        self._unread_of: dict[str | None, _Unread] = {}
        self._num_learnt = 0
        self._num_unread = 0
        self._is_first_half_read = False

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, those that are not read yet among them."""
        return self._num_tokens + self._num_unread

    def learn(self, salt: str | None, token_ids: Sequence[int]) -> None:
        """Keep a text for later requests of the same salt; it is read by `read`."""
        kept = token_ids[-(self._max_tokens // 2) :] if self._max_tokens > 1 else ()
        if len(kept) < 2:
            return
        number, self._num_learnt = self._num_learnt, self._num_learnt + 1
        of_salt = self._unread_of.setdefault(salt, _Unread())
        self._unread[number] = salt, kept
        of_salt.numbers.append(number)
        of_salt.num_tokens += len(kept)
        self._num_unread += len(kept)
        while self._num_unread > self._max_tokens // 2:
            self._drop_unread()

    def read(self, num_tokens: int) -> None:
        """Read about so many tokens of what was learnt, so that nobody waits for a long text as a whole."""
        while self._unread and num_tokens > 0:
            number, (salt, text) = next(iter(self._unread.items()))
            now = text[:num_tokens]
            num_tokens -= len(now)
            self._shorten(number, len(now))
            self._is_first_half_read = number in self._unread
            self._append(salt, now, is_whole=not self._is_first_half_read)

    def automata(self, salt: str | None) -> tuple[SuffixAutomaton, ...]:
        """Return what a request of this salt may look things up in, the latest texts first."""
        memory = self._memories.get(salt)
        if memory is None:
            return ()
        self._memories.move_to_end(salt)
        return memory.automata

    def clear(self) -> None:
        """Forget everything."""
        self._memories.clear()
        self._unread.clear()
        self._unread_of.clear()
        self._num_tokens = self._num_unread = 0
        self._is_first_half_read = False

    def _shorten(self, number: int, num_tokens: int) -> None:
        """Take away the first tokens of an unread text, the oldest of its salt, or all of it."""
        salt, text = self._unread[number]
        of_salt, later = self._unread_of[salt], text[num_tokens:]
        of_salt.num_tokens -= num_tokens
        self._num_unread -= num_tokens
        if later:
            self._unread[number] = salt, later
            return
        del self._unread[number]
        assert of_salt.numbers[0] == number
        of_salt.numbers.popleft()
        if not of_salt.numbers:
            del self._unread_of[salt]

    def _drop_unread(self) -> None:
        salt, of_salt = max(self._unread_of.items(), key=lambda one: one[1].num_tokens)
        number = of_salt.numbers[0]
        is_half_read = self._is_first_half_read and number == next(iter(self._unread))
        self._shorten(number, len(self._unread[number][1]))
        if is_half_read:  # the next one does not go on from what was read of it
            self._is_first_half_read = False
            self._append(salt, (), is_whole=True)

    def _append(self, salt: str | None, token_ids: Sequence[int], *, is_whole: bool) -> None:
        memory = self._memories.setdefault(salt, _Memory())
        self._memories.move_to_end(salt)
        before = memory.young.num_tokens
        for token_id in token_ids:
            memory.young.append(token_id)
        if is_whole:
            memory.young.append(NO_TOKEN)
        self._num_tokens += memory.young.num_tokens - before
        if is_whole and self._is_old(memory):
            if memory.old is not None:
                self._num_tokens -= memory.old.num_tokens
            memory.young, memory.old = SuffixAutomaton(), memory.young
        if len(self._memories) > _MOST_SALTS:
            self._num_tokens -= self._memories.popitem(last=False)[1].num_tokens
        while self._num_tokens > self._max_tokens:
            self._forget_something()

    def _is_old(self, memory: _Memory) -> bool:
        """Whether the young automaton of a salt holds so much that there is to be another."""
        num_sharing = len(self._memories) if memory.old is None else 1
        return 2 * num_sharing * memory.young.num_tokens >= self._max_tokens

    def _forget_something(self) -> None:
        """Forget texts of whoever has most; of those who have as much, of whoever was here least recently."""
        salt, memory = max(self._memories.items(), key=lambda one: one[1].num_tokens)
        if memory.old is not None and memory.young.num_tokens > 0:
            self._num_tokens -= memory.old.num_tokens
            memory.old = None
        else:
            self._num_tokens -= memory.num_tokens
            del self._memories[salt]
