"""EAGLE, EAGLE-3 and MTP by recorded steps and chains, with a recorder that works on a CPU.

Real graphs are recorded in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.proposers.draft_graph import GraphedDraftLoop
from specdec.proposers.draft_loop import ChainStart
from specdec.tree.growth import TreeShape
from tests.specdec.model.replaying_recorder import ReplayingRecorder
from tests.specdec.proposers import feature_proposers
from tests.specdec.proposers.graphed_drafters import make_graphed, recorded
from tests.specdec.proposers.proposer_setup import ProposerSetup
from tests.specdec.proposers.proposing_rounds import drafted
from tests.triton_interpreter import needs_interpreter

KINDS = ["eagle3", *(pytest.param(one, marks=pytest.mark.full) for one in ("eagle", "eagle3.1", "mtp"))]


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_the_eager_drafter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged batches, several tokens to catch up on, mixed budgets and parameters."""
    expected = drafted(feature_proposers.make(kind), seed=1)
    proposer = make_graphed(kind, ReplayingRecorder(monkeypatch))
    answers: list[bool] = []
    own = GraphedDraftLoop.try_draft

    def watched(self: GraphedDraftLoop, starts: Sequence[ChainStart]) -> list[list[int]] | None:
        chains = own(self, starts)
        answers.append(chains is not None)
        return chains

    monkeypatch.setattr(GraphedDraftLoop, "try_draft", watched)
    assert drafted(recorded(proposer), seed=1) == expected
    assert True in answers, "what has few tokens to catch up on is one recorded chain"
    assert False in answers, "prompts are not"


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [feature_proposers.STATIC, feature_proposers.DYNAMIC], ids=["static", "dynamic"]
)
def test_trees_are_those_of_the_eager_drafter(
    kind: str, shape: TreeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drafted(feature_proposers.make(kind, ProposerSetup(shape=shape)), seed=2)
    proposer = make_graphed(kind, ReplayingRecorder(monkeypatch), shape)
    assert drafted(recorded(proposer), seed=2) == expected


@needs_interpreter
def test_until_it_is_recorded_all_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafted(feature_proposers.make("eagle3"), seed=3)
    proposer = make_graphed("eagle3", ReplayingRecorder(monkeypatch))
    assert drafted(proposer, seed=3) == expected
