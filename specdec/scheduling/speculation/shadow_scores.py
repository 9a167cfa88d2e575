"""What would have become of a proposal that nobody verified, by the tokens that came."""

from __future__ import annotations

from collections.abc import Sequence


def would_stand(token_ids: Sequence[int], parents: Sequence[int] | None, came: Sequence[int]) -> int | None:
    """Return how many tokens of a chain, or of a tree's best path, are what came behind its prefix.

    That is what verification by `sample_and_match` would have accepted, because it commits the tokens of the
    target whatever is proposed. None: too little came to say.

    Args:
        token_ids: the proposal, one token at least.
        parents: as `Proposal.parents`.
        came: tokens committed behind its prefix.
    """
    parents = range(-1, len(token_ids) - 1) if parents is None else parents
    node = -1
    for num_standing, token_id in enumerate(came):
        children = [child for child, parent in enumerate(parents) if parent == node]
        found = [child for child in children if token_ids[child] == token_id]
        if not found:
            return num_standing
        node = found[0]
    return None if node in parents or node == -1 else len(came)
