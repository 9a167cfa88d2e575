"""What a target's answer to a draft means: which nodes stand, and what follows them.

A target that only samples answers with its token at every row (row 0 behind the last committed token, row
1 + i behind node i). One that decides by a rule answers with the tokens of the path that stands and the one
behind it. A tree that is not a chain has no path of all its nodes, so the number of tokens tells which of the
two it is; of a chain both mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.errors import ProtocolError
from specdec.core.proposal import Verdict
from specdec.tree.topology import path_of_tokens, tree
from specdec.verification.sample_and_match import match


def verdict_of(drafted: Sequence[int], parents: tuple[int, ...] | None, token_ids: Sequence[int]) -> Verdict:
    """Return what the target says to a draft by its answer `token_ids`.

    Args:
        drafted: token of each node.
        parents: as `Proposal.parents`; None, or of no chain.
        token_ids: the answer; of a chain it may end early, behind the last row that had a token.

    Raises:
        ProtocolError: it is no answer to this draft.
    """
    if parents is None:
        return match(drafted[: len(token_ids) - 1], None, token_ids)
    if len(token_ids) == len(drafted) + 1:
        return match(drafted, tree(parents), token_ids)
    nodes = path_of_tokens(tree(parents), drafted, token_ids[:-1])
    if nodes is None:
        raise ProtocolError(f"the target says that {list(token_ids[:-1])} stand, which was not drafted")
    return Verdict(accepted_nodes=nodes, token_ids=tuple(token_ids))


def rows_of_verdict(
    verdict: Verdict, parents: tuple[int, ...] | None, num_drafted: int, num_answered: int
) -> Sequence[int]:
    """Return which entries of an answer belong to the verdict's tokens."""
    if parents is None or num_answered != num_drafted + 1:
        return range(len(verdict.token_ids))
    return (0, *(node + 1 for node in verdict.accepted_nodes))
