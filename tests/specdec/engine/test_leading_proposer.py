"""What rank 0 of a draft model does by itself when another rank is gone."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.core.errors import TransportError
from specdec.core.ids import RequestId
from specdec.engine.ranks.leader import LeadingProposer
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.sampling.sampler import Sampler
from tests.specdec.proposers.contract import FrozenView


class Group:
    """Of ranks, which may be gone."""

    is_broken = False

    def send_command(self, command: bytes) -> None:
        if self.is_broken:
            raise TransportError("rank 1 is gone")


def test_the_loss_of_a_rank_is_told_to_who_asks_for_drafts_alone() -> None:
    """Whoever ends a request is no asker: its output would be lost with the engine."""
    choice = DraftChoice(sampler=Sampler(), vocab_size=24)
    part = DraftModelProposer(ToyRunner(ToyModel(24, seed=3)), choice)
    group: Any = Group()
    proposer = LeadingProposer(part, group)
    one = FrozenView(RequestId("a"), (1, 2, 3, 4))
    assert proposer.num_unread(one) == 3
    assert proposer.propose([one], {one.request_id: 2})
    assert proposer.num_unread(one) == 0
    assert part.sequences.num_held_blocks > 0
    group.is_broken = True
    proposer.release([one.request_id])
    assert part.sequences.num_held_blocks == 0
    with pytest.raises(TransportError):
        proposer.propose([one], {one.request_id: 2})
    proposer.close()
