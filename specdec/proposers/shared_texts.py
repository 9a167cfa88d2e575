"""What requests that have ended generated, for those that come later: bounded, and kept apart by cache salt.

Nothing is ever taken out of a suffix automaton, so that each salt has two: texts go to the young one, which
takes the place of the old one when it holds half of what there may be. Of several salts the one that was used
least recently gives way.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.proposers.suffix_automaton import NO_TOKEN, SuffixAutomaton


@dataclass(slots=True)
class _Memory:
    """Texts of one salt."""

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton | None = None

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        return (self.young,) if self.old is None else (self.young, self.old)


class SharedTexts:
    """Keeps texts of at most `max_tokens` tokens in all, the latest."""

    def __init__(self, max_tokens: int) -> None:
        """Keep nothing where `max_tokens` is 0."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._memories: OrderedDict[str | None, _Memory] = OrderedDict()
        self._unread: deque[tuple[str | None, Sequence[int]]] = deque()
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
        self._unread.append((salt, kept))
        self._num_unread += len(kept)
        while self._num_unread > self._max_tokens // 2:
            salt, rest = self._unread.popleft()
            self._num_unread -= len(rest)
            if self._is_first_half_read:  # the next one does not go on from what was read of it
                self._is_first_half_read = False
                self._append(salt, (), is_whole=True)

    def read(self, num_tokens: int) -> None:
        """Read about so many tokens of what was learnt, so that nobody waits for a long text as a whole."""
        while self._unread and num_tokens > 0:
            salt, text = self._unread.popleft()
            now, later = text[:num_tokens], text[num_tokens:]
            self._num_unread -= len(now)
            num_tokens -= len(now)
            self._append(salt, now, is_whole=not later)
            self._is_first_half_read = bool(later)
            if later:
                self._unread.appendleft((salt, later))

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
        self._num_tokens = self._num_unread = 0
        self._is_first_half_read = False

    def _append(self, salt: str | None, token_ids: Sequence[int], *, is_whole: bool) -> None:
        memory = self._memories.setdefault(salt, _Memory())
        self._memories.move_to_end(salt)
        before = memory.young.num_tokens
        for token_id in token_ids:
            memory.young.append(token_id)
        if is_whole:
            memory.young.append(NO_TOKEN)
        self._num_tokens += memory.young.num_tokens - before
        if is_whole and 2 * memory.young.num_tokens >= self._max_tokens:
            if memory.old is not None:
                self._num_tokens -= memory.old.num_tokens
            memory.young, memory.old = SuffixAutomaton(), memory.young
        while self._num_tokens > self._max_tokens:
            self._forget_something()

    def _forget_something(self) -> None:
        salt, memory = next(iter(self._memories.items()))
        if memory.old is not None:
            self._num_tokens -= memory.old.num_tokens
            memory.old = None
        else:
            self._num_tokens -= memory.young.num_tokens
            del self._memories[salt]
