"""The rows of a work: which tokens lead to each, and who comes behind whom.

Where nothing else is said, rows beside are not among them: they come behind all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from specdec.core.plan import TargetWork
from specdec.tree.topology import Topology, path_of_tokens, topology_of, tree


def with_drafted(
    work: TargetWork, token_ids: tuple[int, ...], parents: tuple[int, ...] | None = None
) -> TargetWork:
    """Return the work of verifying a draft behind committed tokens; `parents` as in `Proposal`."""
    num_committed = len(work.token_ids)
    return msgspec.structs.replace(
        work,
        token_ids=(*work.token_ids, *token_ids),
        num_sampled_rows=1 + len(token_ids),
        num_self_drafted=0,
        parents=None if parents is None else tuple(num_committed + parent for parent in parents),
    )


def num_drafted(work: TargetWork) -> int:
    """Return the number of draft tokens of a work."""
    return work.num_sampled_rows - 1 if work.parents is None else len(work.parents)


def row_parents(work: TargetWork) -> tuple[int, ...] | None:
    """Return the parent row of every row: those before the draft are a chain. None where all are."""
    if work.parents is None:
        return None
    num_chain = len(work.token_ids) - len(work.parents)
    return (*range(-1, num_chain - 1), *work.parents)


def all_rows(work: TargetWork) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return tokens and parent rows of all rows of a work, those beside included; None: all are a chain."""
    beside, parents = work.beside, row_parents(work)
    if beside is None:
        return work.token_ids, parents
    num_rows = len(work.token_ids)
    if parents is None:
        parents = tuple(range(-1, num_rows - 1))
    root = num_rows - num_drafted(work) - 1
    hung = (root if parent < 0 else num_rows + parent for parent in beside.parents)
    return (*work.token_ids, *beside.token_ids), (*parents, *hung)


def row_topology(work: TargetWork) -> Topology:
    """Return the topology of all rows of a work."""
    return topology_of(len(work.token_ids), row_parents(work))


def node_parents(work: TargetWork) -> tuple[int, ...] | None:
    """Return the parents of the draft's nodes, as `Proposal.parents`."""
    if work.parents is None:
        return None
    num_chain = len(work.token_ids) - len(work.parents)
    return tuple(row - num_chain for row in work.parents)


def paths(work: TargetWork) -> list[tuple[int, ...]]:
    """Return the drafted tokens that lead to each sampled row: none for the first."""
    num_committed = len(work.token_ids) - num_drafted(work)
    drafted = work.token_ids[num_committed:]
    if work.parents is None:
        return [drafted[:length] for length in range(work.num_sampled_rows)]
    leading: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(drafted, work.parents, strict=True):
        leading.append((*leading[max(0, parent - num_committed + 1)], token_id))
    return leading[-work.num_sampled_rows :]


def rows_of_answer(work: TargetWork, decided: Sequence[int]) -> Sequence[int]:
    """Return the sampled rows that tokens belong to by which a rule has answered: one each.

    The row of a token is that of the one before it.
    """
    parents = node_parents(work)
    if parents is None:
        return range(len(decided))
    drafted = work.token_ids[len(work.token_ids) - len(parents) :]
    nodes = path_of_tokens(tree(parents), drafted, decided[:-1])
    assert nodes is not None, "what a rule keeps is a path of the draft"
    return (0, *(node + 1 for node in nodes))
