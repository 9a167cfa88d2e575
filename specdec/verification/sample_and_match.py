"""The default rule: the target samples, and a draft is kept as far as it holds the very same tokens.

The target's token y at a row is the token function (docs/architecture.md), which does not look at the
proposal: whatever was proposed, the tokens emitted are the ones the target alone would have emitted. Greedy
decoding is this rule at temperature 0. It is exact for every drafter, chains and trees alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.proposal import Verdict
from specdec.tree.topology import Topology
from specdec.verification.base import Chance, Draft, RuleCapabilities, TargetRows


def match(
    proposal_token_ids: Sequence[int], topology: Topology | None, target_token_ids: Sequence[int]
) -> Verdict:
    """Walk from the root to the child that holds the target's token, as long as there is one.

    Args:
        proposal_token_ids: token of each node.
        topology: shape of the proposal; None for a chain.
        target_token_ids: the target's own token at each row: [0] after the last committed token,
            [1 + i] after node i.

    Raises:
        ValueError: the numbers of tokens, nodes and rows do not fit together.
    """
    num_nodes = len(proposal_token_ids)
    if len(target_token_ids) != num_nodes + 1:
        raise ValueError(
            f"{num_nodes} proposed tokens need {num_nodes + 1} target rows, got {len(target_token_ids)}"
        )
    if topology is None:
        return _match_chain(proposal_token_ids, target_token_ids)
    if topology.num_nodes != num_nodes:
        raise ValueError(f"{num_nodes} proposed tokens in a topology of {topology.num_nodes} nodes")
    if topology.is_chain:
        return _match_chain(proposal_token_ids, target_token_ids)
    return _match_tree(proposal_token_ids, topology, target_token_ids)


def _match_chain(proposal_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> Verdict:
    num_accepted = 0
    for proposed, wanted in zip(
        proposal_token_ids, target_token_ids, strict=False
    ):  # one more row than nodes
        if proposed != wanted:
            break
        num_accepted += 1
    return Verdict(
        accepted_nodes=tuple(range(num_accepted)), token_ids=tuple(target_token_ids[: num_accepted + 1])
    )


def _match_tree(
    proposal_token_ids: Sequence[int], topology: Topology, target_token_ids: Sequence[int]
) -> Verdict:
    row = 0
    accepted: list[int] = []
    emitted = [target_token_ids[0]]
    while True:
        # Of equal siblings the first is as good as any: both would continue the same text.
        node = next((n for n in topology.children[row] if proposal_token_ids[n] == emitted[-1]), None)
        if node is None:
            return Verdict(accepted_nodes=tuple(accepted), token_ids=tuple(emitted))
        accepted.append(node)
        row = node + 1
        emitted.append(target_token_ids[row])


class SampleAndMatch:
    """`match` as a rule."""

    capabilities = RuleCapabilities(name="sample_and_match", draft_stream="target")

    def verify(self, draft: Draft, target: TargetRows, chance: Chance) -> Verdict:
        """Match the draft with the target's tokens; nothing here is left to chance.

        Raises:
            ValueError: the target's tokens are missing, or of another number.
        """
        del chance
        if target.token_ids is None:
            raise ValueError("sample_and_match needs the target's tokens")
        topology = None if draft.parents is None else Topology.from_parents(draft.parents)
        return match(draft.token_ids, topology, target.token_ids)
