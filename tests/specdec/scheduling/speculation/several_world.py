"""A virtual world in which each request has one of several drafters at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.controller import RoundObservation, SpeculationController, bounded_choice
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.settings import ControllerSettings
from tests.specdec.scheduling.simulation import FakeRequest
from tests.specdec.scheduling.speculation.world import COSTS, Costs, World, _outcomes, profile_of

LOOKUP = replace(COSTS["cpu"], draft=lambda n, c: 2e-6 * n, draft_start_s=2e-5)
MODEL = COSTS["cpu"]
SLOW = COSTS["expensive"]
DRAFTERS = (LOOKUP, MODEL, SLOW)
K = 8

Chance = Callable[[FakeRequest, int], float]
"""(request, drafter) -> probability that a draft token is accepted, at every position."""


@dataclass
class SeveralWorld(World):
    """A world in which each request has one of several drafters at a time. What one drafts costs its own."""

    drafters: Sequence[Costs] = DRAFTERS
    chance: Chance = lambda _one, _drafter: 0.5
    budgeted: int | None = None
    """The drafter that attends to `kv_budget` tokens at most; the others attend to everything."""
    by_drafter: list[int] = field(default_factory=lambda: [0] * 8)
    """Rounds of requests that each drafter was asked in."""

    def _note_budgets(self, controller: GoodputController) -> None:
        """Let each attend to what was picked for it."""
        for one in self.requests:
            if not one.has_own_kv_budget:
                assert controller.pick_kv_budget is not None
                picked = controller.pick_kv_budget(one.request_id, one.class_name)
                one.kv_budget = picked.tokens(one.committed_len)

    def _run_all(self, controller: SpeculationController) -> None:
        assert isinstance(controller, GoodputController)
        pick = controller.pick_drafter
        requests = self.requests
        chosen = bounded_choice(controller, requests)
        self._note_budgets(controller)
        had = [
            pick(one.request_id, one.class_name) if one.own_drafter is None and pick else one.own_drafter or 0
            for one in requests
        ]
        chances = [self.chance(one, place) for one, place in zip(requests, had, strict=True)]
        accepted, expected = [], 0.0
        for chance, number in zip(chances, chosen, strict=True):
            stands = 0
            while stands < number and self.generator.random() < chance:
                stands += 1
            accepted.append(stands)
            expected += sum(chance**position for position in range(1, number + 1))
        times = {}
        for place, costs in enumerate(self.drafters):
            lengths = [number if its == place else 0 for number, its in zip(chosen, had, strict=True)]
            if any(lengths):
                attended = [
                    float(one.draft_context if place == self.budgeted else one.committed_len)
                    for one in requests
                ]
                times[place] = costs.drafting(lengths, attended)
                self.by_drafter[place] += sum(number > 0 for number in lengths)
        contexts = [float(one.committed_len) for one in requests]
        verify_s = self.costs.verifying(contexts, chosen)
        overhead_s = self.costs.overhead(len(requests))
        seen = {place: seconds * self._luck() for place, seconds in times.items()}
        seen_verify_s = verify_s * self._luck()
        self._commit(requests, accepted)
        self._book(len(requests) + expected, sum(times.values()) + verify_s + overhead_s, any(chosen))
        budgets = {one.request_id: number for one, number in zip(requests, chosen, strict=True) if number}
        controller.observe(
            RoundObservation(
                num_rows=len(requests) + sum(chosen),
                num_sequences=len(requests),
                num_committed=len(requests) + sum(accepted),
                draft_s=sum(seen.values()),
                verify_s=seen_verify_s,
                outcomes=_outcomes(requests, chosen, accepted),
                round_s=sum(seen.values()) + seen_verify_s + overhead_s,
                num_decoding=len(requests),
                context_tokens=int(sum(contexts)),
                budgets=budgets,
                draft_ready_s=sum(seen.values()) if seen else None,
                drafters={
                    one.request_id: its
                    for one, its in zip(requests, had, strict=True)
                    if one.request_id in budgets
                },
                drafting_s=seen,
            )
        )
        controller.think()


def controller_of(
    drafters: Sequence[Costs] = DRAFTERS,
    budgeted: int | None = None,
    budgets: Sequence[KvBudget] = (),
    *,
    is_kept: bool = False,
) -> GoodputController:
    """Return a controller with the costs of these drafters, of which one may have budgets."""
    settings = ControllerSettings(
        max_draft_tokens=K,
        max_rows=640,
        drafter_caps=(K,) * len(drafters) if len(drafters) > 1 else (),
        budgeted_drafter=budgeted,
        kv_budgets=tuple(budgets),
        keeps_kv_budgets=is_kept,
    )
    profile = profile_of(drafters[0], noise=0.01)
    others = tuple(profile_of(one, noise=0.01).draft for one in drafters[1:])
    return GoodputController(settings, msgspec.structs.replace(profile, other_drafts=others))


def world_of(
    number: int,
    chance: Chance,
    *,
    costs: Costs = MODEL,
    drafters: Sequence[Costs] = DRAFTERS,
    seed: int = 1,
    **more: object,
) -> SeveralWorld:
    """Return a world of so many requests at a time, with the `costs` of a target."""
    return SeveralWorld(
        costs=costs,
        acceptance=lambda _round, _one: 0.0,
        num_sequences=number,
        drafters=drafters,
        chance=chance,
        seed=seed,
        **more,  # type: ignore[arg-type]
    )
