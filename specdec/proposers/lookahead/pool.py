"""The n-grams of one request, by their first token: what Lookahead decoding proposes from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specdec.tree.topology import ROOT

Ngram = tuple[int, ...]


class NgramPool:
    """The latest n-grams behind each first token, a bounded number behind one and in all."""

    __slots__ = ("_by_first", "_most", "_most_behind_one", "num_ngrams")

    def __init__(self, most_behind_one: int, most: int) -> None:
        """Keep at most so many behind one token, and so many in all."""
        self._by_first: OrderedDict[int, OrderedDict[Ngram, None]] = OrderedDict()
        """Rests of n-grams by first token; of both, what was added last comes last."""
        self._most_behind_one = most_behind_one
        self._most = most
        self.num_ngrams = 0

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or make it the latest. What was added longest ago gives way."""
        first, rest = ngram[0], tuple(ngram[1:])
        rests = self._by_first.setdefault(first, OrderedDict())
        self._by_first.move_to_end(first)
        if rest in rests:
            rests.move_to_end(rest)
            return
        rests[rest] = None
        self.num_ngrams += 1
        if len(rests) > self._most_behind_one:
            rests.popitem(last=False)
            self.num_ngrams -= 1
        elif self.num_ngrams > self._most:
            self._forget_one()

    def behind(self, token_id: int) -> list[Ngram]:
        """Return what may follow a token, the latest first."""
        return list(reversed(self._by_first.get(token_id, ())))

    def _forget_one(self) -> None:
        """Forget an n-gram of the token that was longest not added to."""
        first, rests = next(iter(self._by_first.items()))
        rests.popitem(last=False)
        self.num_ngrams -= 1
        if not rests:
            del self._by_first[first]

    def check_integrity(self) -> None:
        """Assert that counts and bounds hold."""
        sizes = [len(rests) for rests in self._by_first.values()]
        assert sum(sizes) == self.num_ngrams <= self._most
        assert all(1 <= size <= self._most_behind_one for size in sizes)


def tree_of(chains: Sequence[Ngram], num_nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return tokens and parents of the tree that has these chains as paths, cut to so many nodes.

    What chains begin with in common is there once. Nodes are in the order of the chains.
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = ROOT
        for token_id in chain:
            found = nodes.get((node, token_id))
            if found is None:
                if len(tokens) == num_nodes:
                    return tuple(tokens), tuple(parents)
                found = nodes[node, token_id] = len(tokens)
                tokens.append(token_id)
                parents.append(node)
            node = found
    return tuple(tokens), tuple(parents)
