"""No drafting."""

from __future__ import annotations

from specdec.proposers.base import Proposer
from specdec.proposers.none import NoProposer
from tests.specdec.proposers.contract import ProposerContract, view


class TestNoProposer(ProposerContract):
    def make_proposer(self) -> Proposer:
        return NoProposer()

    def test_never_proposes(self, proposer: Proposer) -> None:
        assert self.ask(proposer, [view("a", [1, 1, 1, 1])]) == {}
