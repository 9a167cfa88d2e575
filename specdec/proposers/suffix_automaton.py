"""A suffix automaton of a text that grows, with how often everything in it occurs.

After Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985). A state stands for
all strings that end at the same places of the text; its link leads to the longest shorter suffix that ends
elsewhere too. Appending a token costs O(1) amortised, and there are at most two states for each token.

A count has to be added to every state on the way of links, whose number has no bound where a text repeats
itself. It is carried over a few links at a time: the rest is owed, and taken along by whatever passes there
next. What is looked up, long matches, lies at the beginning of the way, where hardly anything is owed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice

ROOT = 0
"""State of the empty string."""
NO_TOKEN = -1
"""Stands between texts that do not follow each other; never proposed."""
_MOST_LINKS = 8
_MOST_FOLLOWERS = 256
"""Followers of a state that are looked at: a string with more of them foretells little."""
_TARGET_BITS = 32
_TARGET = (1 << _TARGET_BITS) - 1


class SuffixAutomaton:
    """Knows every substring of the tokens appended so far, how often it occurred and what followed."""

    __slots__ = ("_counts", "_last", "_lengths", "_links", "_most_links", "_next", "_owed", "num_tokens")

    def __init__(self, *, most_links: int = _MOST_LINKS) -> None:
        """Begin with no text; an occurrence is counted over `most_links` links at once."""
        self.num_tokens = 0
        self._most_links = most_links
        self._lengths = array("i", [0])
        self._links = array("i", [-1])
        self._counts = array("i", [0])
        self._owed = array("i", [0])
        # Most states have one follower: token and target in one number then, 0 for none.
        self._next: list[int | dict[int, int]] = [{}]
        self._last = ROOT

    @property
    def num_states(self) -> int:
        """Number of states; at most twice the tokens."""
        return len(self._lengths)

    @property
    def repeated(self) -> int:
        """State of the longest suffix of the text that occurred before; `ROOT` for none."""
        return max(self._links[self._last], ROOT)

    def length(self, state: int) -> int:
        """Return the length of the longest string that a state stands for."""
        return self._lengths[state]

    def link(self, state: int) -> int:
        """Return the state of the longest suffix that occurs elsewhere too; -1 behind `ROOT`."""
        return self._links[state]

    def count(self, state: int) -> int:
        """Return how often the strings of a state occur, what is owed to it left out."""
        return self._counts[state]

    def owed(self, state: int) -> int:
        """Return how many of the occurrences of a state have not been counted at its link yet."""
        return self._owed[state]

    def step(self, state: int, token_id: int) -> int | None:
        """Return the state of a string and a token behind it; None: this does not occur."""
        found = self._next[state]
        if isinstance(found, dict):
            return found.get(token_id)
        return found & _TARGET if found and found >> _TARGET_BITS == token_id else None

    def followers(self, state: int) -> Iterator[tuple[int, int]]:
        """Yield (token, state) of what followed, a bounded number of them."""
        found = self._next[state]
        if isinstance(found, dict):
            yield from islice(found.items(), _MOST_FOLLOWERS)
        elif found:
            yield found >> _TARGET_BITS, found & _TARGET

    def append(self, token_id: int) -> None:
        """Let the text go on with a token."""
        links, lengths = self._links, self._lengths
        new = self._add_state(lengths[self._last] + 1, ROOT, 0)
        state = self._last
        while state >= 0 and (target := self.step(state, token_id)) is None:
            self._lead(state, token_id, new)
            state = links[state]
        if state >= 0:
            assert target is not None
            if lengths[state] + 1 != lengths[target]:
                target = self._split(state, token_id, target)
            links[new] = target
        self._last = new
        self.num_tokens += 1
        self._count(new)

    def _count(self, state: int) -> None:
        links, counts, owed = self._links, self._counts, self._owed
        counts[state] = carried = 1
        for _ in range(self._most_links):
            parent = links[state]
            if parent <= ROOT:
                return
            carried += owed[state]
            owed[state] = 0
            counts[parent] += carried
            state = parent
        owed[state] += carried

    def _split(self, state: int, token_id: int, target: int) -> int:
        """Give the shorter strings of `target`, which now end at a further place, a state of their own."""
        links = self._links
        shorter = self._add_state(self._lengths[state] + 1, links[target], self._counts[target])
        followers = self._next[target]
        self._next[shorter] = dict(followers) if isinstance(followers, dict) else followers
        self._owed[shorter], self._owed[target] = self._owed[target], 0
        links[target] = shorter
        while state >= 0 and self.step(state, token_id) == target:
            self._lead(state, token_id, shorter)
            state = links[state]
        return shorter

    def _lead(self, state: int, token_id: int, target: int) -> None:
        found = self._next[state]
        if isinstance(found, dict):
            found[token_id] = target
        elif not found or found >> _TARGET_BITS == token_id:
            self._next[state] = token_id << _TARGET_BITS | target
        else:
            self._next[state] = {found >> _TARGET_BITS: found & _TARGET, token_id: target}

    def _add_state(self, length: int, link: int, count: int) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(count)
        self._owed.append(0)
        self._next.append(0)
        return len(self._lengths) - 1


class Match:
    """The longest suffix of one text that occurs in the text of an automaton; both may go on."""

    __slots__ = ("automaton", "length", "state")

    def __init__(self, automaton: SuffixAutomaton) -> None:
        """Begin with nothing read."""
        self.automaton = automaton
        self.state = ROOT
        self.length = 0

    def read(self, token_id: int) -> None:
        """Let the text that is matched go on with a token: O(1) amortised."""
        self.settle()
        automaton = self.automaton
        while (target := automaton.step(self.state, token_id)) is None:
            self.state = automaton.link(self.state)
            if self.state < 0:
                self.state, self.length = ROOT, 0
                return
            self.length = automaton.length(self.state)
        self.state, self.length = target, self.length + 1

    def settle(self) -> None:
        """Find the matched string where it is now: its state may have been split."""
        automaton = self.automaton
        while self.state != ROOT and self.length <= automaton.length(link := automaton.link(self.state)):
            self.state = link
