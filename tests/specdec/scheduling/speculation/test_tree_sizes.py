"""How many nodes of a tree the controller asks for: by what rows cost, and by how many levels it has.

The tree is static and given by true rates, so that what the first n nodes bring is known; a drafter takes a
forward for each of its levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from specdec.core.ids import RequestId
from specdec.engine.profiling.drafts import budgets_to_measure
from specdec.engine.profiling.plan import ProfilePlan
from specdec.proposers.base import ProposerCapabilities
from specdec.scheduling.speculation.acceptance import AcceptanceEstimate, Floats
from specdec.scheduling.speculation.controller import DraftOutcome, RoundObservation
from specdec.scheduling.speculation.cost import CostModel
from specdec.scheduling.speculation.cost_profile import CostProfile, DraftPoint, VerifyPoint
from specdec.scheduling.speculation.goodput import Batch, Evaluation
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.settings import ControllerSettings
from specdec.tree.growth import levels_of
from specdec.tree.static import best_tree
from tests.specdec.scheduling.simulation import FakeRequest, fake_request
from tests.specdec.scheduling.speculation.tree_verdicts import Trees

NUM_NODES = 24
RATES = (0.45, 0.2, 0.1, 0.06)
CHEAP_ROW_S, DEAR_ROW_S = 0.00002, 0.002
OVERHEAD_S = 0.0003
TREE = ProposerCapabilities(name="it", shape="tree", tree_levels=levels_of(best_tree(RATES, NUM_NODES)))
CHAIN = ProposerCapabilities(name="it")
SEQUENCES = (1, 4, 16)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """True seconds of both sides."""

    row_s: float
    level_s: float = 0.001

    def verify_s(self, num_rows: float) -> float:
        return 0.01 + self.row_s * num_rows

    def draft_s(self, num_nodes: int) -> float:
        return 0.0004 + self.level_s * TREE.tree_levels[num_nodes - 1] if num_nodes else 0.0

    def profile(self, taken_for: ProposerCapabilities) -> CostProfile:
        """What is measured of it at a start."""
        plan = ProfilePlan(
            key="", max_num_seqs=16, max_num_batched_tokens=512, max_draft_tokens=NUM_NODES, budget_s=1.0
        )
        verify = [
            VerifyPoint(num_sequences=1, context_tokens=32, num_rows=rows, seconds=self.verify_s(rows))
            for rows in (1, 4, 16, 64, 256, 512)
        ]
        draft = [
            DraftPoint(
                num_sequences=number,
                context_tokens=32 * number,
                num_steps=nodes,
                num_unseen=2,
                seconds=self.draft_s(nodes),
            )
            for number in SEQUENCES
            for nodes in budgets_to_measure(taken_for, plan, number)
        ]
        return CostProfile(key="", verify=tuple(verify), draft=tuple(draft))

    def rate(self, num_sequences: int, num_nodes: int, values: Floats) -> float:
        """Tokens per second of rounds with so many nodes for everybody."""
        tokens = num_sequences * (1.0 + float(values[:num_nodes].sum()))
        rows = num_sequences * (1 + num_nodes)
        return tokens / (self.draft_s(num_nodes) + self.verify_s(rows) + OVERHEAD_S)


VALUES = Trees(RATES, NUM_NODES).values


def chosen(costs: Costs, taken_for: ProposerCapabilities, num_sequences: int = 1) -> int:
    """How many nodes are best by what was measured, where acceptance is known; 0: drafts do not pay."""
    before = np.concatenate(([1.0], VALUES[:-1]))
    accepted = np.tile(VALUES / before, (num_sequences, 1))
    batch = Batch(
        estimate=AcceptanceEstimate(accepted, np.ones_like(accepted)),
        caps=np.full(num_sequences, NUM_NODES),
        requested=np.full(num_sequences, -1),
        context_tokens=32.0 * num_sequences,
    )
    model = CostModel(
        costs.profile(taken_for),
        max_rows=512,
        max_sequences=64,
        max_steps=NUM_NODES,
        tree_levels=[taken_for.tree_levels],
    )
    evaluation = Evaluation(batch, model, {"plain": OVERHEAD_S, "lockstep": OVERHEAD_S}, max_rows=512)
    found = evaluation.lockstep()
    if found is None or found.rate < evaluation.plain.rate:
        return 0
    return round(float(found.num_draft_tokens.mean()))


def best(costs: Costs, num_sequences: int = 1) -> tuple[int, float]:
    rates = [costs.rate(num_sequences, nodes, VALUES) for nodes in range(NUM_NODES + 1)]
    return int(np.argmax(rates)), max(rates)


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("row_s", [CHEAP_ROW_S, 0.0002, 0.0007, DEAR_ROW_S])
def test_trees_are_as_large_as_pays(row_s: float, num_sequences: int) -> None:
    costs = Costs(row_s=row_s)
    rate = costs.rate(num_sequences, chosen(costs, TREE, num_sequences), VALUES)
    assert rate >= 0.97 * best(costs, num_sequences)[1]


def test_where_rows_cost_nothing_trees_are_large_and_where_they_do_small() -> None:
    sizes = [chosen(Costs(row_s=row_s), TREE) for row_s in (CHEAP_ROW_S, 0.0007, DEAR_ROW_S)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0.8 * NUM_NODES
    assert sizes[-1] < 5


def test_where_a_level_costs_much_trees_have_few_levels() -> None:
    """Rows cost little, so that a level is filled where there is one."""
    sizes = [chosen(Costs(row_s=CHEAP_ROW_S, level_s=level_s), TREE) for level_s in (0.0005, 0.004)]
    assert 0 < sizes[1] < sizes[0]
    assert TREE.tree_levels[sizes[1] - 1] < TREE.tree_levels[sizes[0] - 1]


def test_control_a_tree_that_was_taken_for_a_chain_is_too_small() -> None:
    """Each node is thought to take a forward of its own."""
    costs = Costs(row_s=CHEAP_ROW_S)
    size = chosen(costs, CHAIN)
    assert size < 0.5 * best(costs)[0]
    assert costs.rate(1, size, VALUES) < 0.95 * best(costs)[1]


@dataclass
class TreeWorld:
    """Rounds of some requests for which trees are drafted, with true verdicts and noisy times."""

    costs: Costs
    num_sequences: int
    seed: int = 0
    sizes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._trees = Trees(RATES, NUM_NODES, self.seed)
        self._generator = np.random.default_rng(self.seed)
        self._requests = [
            fake_request(f"r{index}", 64, generate=1_000_000, computed=63)
            for index in range(self.num_sequences)
        ]

    def run(self, controller: GoodputController, num_rounds: int) -> float:
        """Return expected tokens per second of so many rounds, by true times."""
        tokens = seconds = 0.0
        self.sizes.clear()
        for _ in range(num_rounds):
            sizes = list(controller.choose(self._requests))
            draft_s, verify_s = self._times(sizes)
            tokens += sum(1.0 + float(VALUES[:size].sum()) for size in sizes)
            seconds += draft_s + verify_s + OVERHEAD_S
            self.sizes.append(float(np.mean(sizes)))
            controller.observe(self._observation(self._requests, sizes, draft_s, verify_s))
            controller.think()
        return tokens / seconds

    def _times(self, sizes: Sequence[int]) -> tuple[float, float]:
        return self.costs.draft_s(max(sizes)), self.costs.verify_s(len(sizes) + sum(sizes))

    def _observation(
        self, requests: Sequence[FakeRequest], sizes: Sequence[int], draft_s: float, verify_s: float
    ) -> RoundObservation:
        outcomes: list[DraftOutcome] = []
        for one, size in zip(requests, sizes, strict=True):
            outcome = self._trees.outcome(one.request_id, size)
            one.committed_len += 1 + outcome.num_accepted
            outcomes += [outcome] if size else []
        draft_s, verify_s = (
            each * float(np.exp(self._generator.normal(0.0, 0.03))) for each in (draft_s, verify_s)
        )
        budgets: dict[RequestId, int] = {
            one.request_id: size for one, size in zip(requests, sizes, strict=True) if size
        }
        return RoundObservation(
            num_rows=len(sizes) + sum(sizes),
            num_sequences=len(sizes),
            num_committed=len(sizes) + sum(one.num_accepted for one in outcomes),
            draft_s=draft_s,
            verify_s=verify_s,
            outcomes=outcomes,
            round_s=draft_s + verify_s + OVERHEAD_S,
            num_decoding=len(sizes),
            context_tokens=sum(one.committed_len for one in requests),
            budgets=budgets,
            draft_ready_s=draft_s if budgets else None,
        )


def controller_of(costs: Costs, taken_for: ProposerCapabilities) -> GoodputController:
    settings = ControllerSettings(
        max_draft_tokens=NUM_NODES, max_rows=512, max_sequences=16, tree_levels=(taken_for.tree_levels,)
    )
    return GoodputController(settings, costs.profile(taken_for))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("row_s", "num_sequences", "smallest", "largest"),
    [(CHEAP_ROW_S, 1, 10, NUM_NODES), (CHEAP_ROW_S, 8, 7, 14), (DEAR_ROW_S, 1, 0, 3), (DEAR_ROW_S, 8, 0, 1)],
)
def test_the_controller_finds_the_size(
    row_s: float, num_sequences: int, smallest: int, largest: int, seed: int
) -> None:
    """Of a drafter of which nothing is known but what it costs."""
    costs = Costs(row_s=row_s)
    world = TreeWorld(costs, num_sequences, seed)
    controller = controller_of(costs, TREE)
    world.run(controller, 200)
    assert world.run(controller, 300) >= 0.95 * best(costs, num_sequences)[1], controller.state
    assert smallest <= float(np.median(world.sizes)) <= largest


def test_control_taken_for_a_chain_trees_stay_small() -> None:
    """Of sizes that are never asked for rounds tell nothing."""
    costs = Costs(row_s=CHEAP_ROW_S)
    rates = []
    for taken_for in (TREE, CHAIN):
        world = TreeWorld(costs, 1)
        rates.append(world.run(controller_of(costs, taken_for), 400))
    assert rates[0] > 1.08 * rates[1]
