"""Drafters of trees for tests, around drafters of chains."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import Proposer


class Bushy:
    """Puts the chains of another drafter into random trees of other tokens, whose nodes lie in between.

    Siblings have different tokens, those that a grammar allows where there is one. `is_malformed` makes trees
    that no topology has.
    """

    def __init__(self, drafter: Proposer, *, vocab_size: int, is_malformed: bool = False) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._is_malformed = is_malformed
        self.capabilities = replace(drafter.capabilities, shape="tree", looks_ahead=False)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        halves = {name: -(-budget // 2) for name, budget in num_draft_tokens.items()}
        made = self._drafter.propose(sequences, halves)
        views = {view.request_id: view for view in sequences}
        return {name: self._bush(one, num_draft_tokens[name], views[name]) for name, one in made.items()}

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self._drafter.release(request_ids)

    def close(self) -> None:
        self._drafter.close()

    def _bush(self, chain: Proposal, budget: int, view: SequenceView) -> Proposal:
        rng = random.Random(chain.prefix_hash)
        tokens: list[int] = []
        parents: list[int] = []
        end, left = -1, list(chain.token_ids)
        for _ in range(8 * budget):
            if not left and len(tokens) >= budget:
                break
            has_room = len(tokens) + len(left) < budget
            if left and not (has_room and rng.random() < 0.6):
                taken = {token for token, parent in zip(tokens, parents, strict=True) if parent == end}
                if left[0] in taken:
                    break
                tokens.append(left.pop(0))
                parents.append(end)
                end = len(tokens) - 1
                continue
            parent = rng.randrange(-1, len(tokens))
            taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
            token = rng.choice(self._tokens_behind(view, path_to(parent, tokens, parents)))
            if token not in taken and not (parent == end and left and token == left[0]):
                tokens.append(token)
                parents.append(parent)
        if self._is_malformed:
            parents[0] = 1
        return msgspec.structs.replace(chain, token_ids=tuple(tokens), parents=tuple(parents), method="bushy")

    def _tokens_behind(self, view: SequenceView, path: Sequence[int]) -> Sequence[int]:
        """Any token, or any that the request's grammar allows."""
        mask = None if view.constraint is None else view.constraint.allowed_after(path)
        if mask is None or not any(mask):
            return range(self._vocab_size)
        return [token for token in range(self._vocab_size) if mask[token >> 3] >> (token & 7) & 1]


def path_to(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens from the root's child to a node."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
