"""Who decides how many tokens are drafted for each request, each round, and how the groups overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from specdec.core.decaying import moved
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome
from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.explanation import ControllerState
from specdec.scheduling.speculation.guesses import GuessRanks, share_guesses, share_guesses_behind_foreign
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.state import Schedulable


class DraftOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one proposal."""

    request_id: RequestId
    num_drafted: int
    num_accepted: int
    accepted_nodes: tuple[int, ...] | None = None
    """Of a tree: which of its tokens were accepted, by their place in the proposal; None: the first ones."""


class RoundObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What one round cost and brought, for a controller to learn from. Times are seconds."""

    num_rows: int
    """Rows of the target's forward, draft rows included."""
    num_sequences: int
    num_committed: int
    draft_s: float
    """How long the round waited for proposals."""
    verify_s: float
    """From the submission of the target's step to its answer."""
    outcomes: Sequence[DraftOutcome]
    """Of the drafter's own proposals."""
    mode: OverlapMode = "lockstep"
    """How this round was run. The first ones after a change may be of the former mode: where ping_pong begins
    or ends, one or two are."""
    round_s: float | None = None
    """From the end of the round before to the end of this one, where there was work all the time; None: not
    known, or the engine was idle between. In lockstep what the controller itself took is left out; in
    ping_pong every cohort's round counts, so it is about half the time between two rounds of one request."""
    num_decoding: int | None = None
    """Sequences that got new tokens; None: all."""
    num_prompt_rows: int = 0
    """Of the rows, those that read prompts."""
    context_tokens: int = 0
    """Committed tokens of all sequences of the round together."""
    budgets: Mapping[RequestId, int] = msgspec.field(default_factory=dict)
    """Draft tokens that were asked for, by request. With `outcomes` it tells how often there are drafts."""
    num_behind: int = 0
    """Committed tokens that drafters had yet to read of these requests, beyond what a round brings: nothing
    had been drafted for them for a while. 0 where that is not known."""
    draft_ready_s: float | None = None
    """From asking for proposals to the last answer, waited for or not: T_draft with its wire, and with what
    lay before it in the queue of a draft worker; None: not known, or nobody was asked."""
    draft_work_s: float | None = None
    """What the drafter itself reports of its work on them, the longest of several; None: it does not."""
    target_s: float | None = None
    """What the target itself reports of its step, without wire and queue; None: not known."""
    num_elsewhere: int = 0
    """Sequences in the other flight of ping_pong."""
    stand_ins: Sequence[DraftOutcome] = ()
    """Of proposals that stood in for missing ones: they tell nothing of the drafter."""
    drafters: Mapping[RequestId, int] = msgspec.field(default_factory=dict)
    """Which of several drafters was asked, by request; empty where there is one."""
    drafting_s: Mapping[int, float] = msgspec.field(default_factory=dict)
    """What each of several drafters took that was asked; of `draft_s`, their parts."""
    ahead: Sequence[AheadOutcome] = ()
    """What became of the continuations that this round could have had its drafts from: of the verdicts of
    the round before, where something was prepared for them."""

    @property
    def is_behind(self) -> bool:
        """Whether drafters had more to read than to draft."""
        return self.num_behind > sum(self.budgets.values())


class SpeculationController(Protocol):
    """Chooses k and the mode. It never affects which tokens come out, only how soon.

    Two bounds hold whatever it answers: a request's own k, where it gives one, and what is of use
    before max_tokens and the context limit. The scheduler may cut k further for want of rows or blocks.
    A request's own k has a bound in turn, which is the controller's to know: what is configured.
    """

    @property
    def mode(self) -> OverlapMode:
        """How rounds should be run from now on. It changes in `choose` only."""
        ...

    @property
    def state(self) -> ControllerState:
        """What was decided last, and why (any thread)."""
        ...

    @property
    def minds_targets(self) -> bool:
        """Whether latency targets of requests (`slo`) bound drafting."""
        ...

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> Sequence[int]:
        """Return the wanted number of draft tokens of each sequence, in the same order.

        For one with a k of its own that is the most that it may have: what is configured for whoever drafts
        for it, or less where more of its drafts would be at others' expense.

        Args:
            decoding: sequences that the round may draft for.
            elsewhere: sequences that decode in another flight meanwhile (the other cohort of ping_pong). Who
                and how many they are has a say in the choice.
        """
        ...

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """Share out continuations to prepare among the verdicts that `num_pending` draft tokens may get.

        Foreign ones are not the drafter's own: they stood in for a proposal that did not come.

        Returns:
            entry a, of 0 to `num_pending`: for how many tokens behind exactly a accepted ones. At most
            `max_branches` together; the controller may want fewer.
        """
        ...

    def observe(self, observation: RoundObservation) -> None:
        """Take in a finished round, to be learnt from before the next decision is made."""
        ...

    def think(self) -> None:
        """Do now what there is to think over: nobody waits for it."""
        ...


@runtime_checkable
class PicksKvBudgets(Protocol):
    """A controller that chooses what drafts of a request attend to, too."""

    @property
    def pick_kv_budget(self) -> Callable[[RequestId, str], KvBudget] | None:
        """Tells the KV budget of a request of a class (any time, for requests that it has not seen, too).

        Of several drafters, for the one that has budgets, whichever the request has at the moment. None:
        there are not several to choose from.
        """
        ...


@runtime_checkable
class PicksDrafters(Protocol):
    """A controller that chooses who drafts for a request, too."""

    @property
    def pick_drafter(self) -> Callable[[RequestId, str], int] | None:
        """Tells which drafter a request of a class has (any time, for requests that it has not seen, too).

        It changes in `choose` only. None: there are not several to choose from.
        """
        ...


class FixedController:
    """The same k for everyone, always."""

    minds_targets = False

    def __init__(
        self, num_draft_tokens: int, mode: OverlapMode = "lockstep", *, drafter_caps: Sequence[int] = ()
    ) -> None:
        """Draft `num_draft_tokens` (0 switches speculation off), always in one mode.

        Of several drafters, each has a bound of its own, too: `drafter_caps`. A request that has none gets
        the first.
        """
        if num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must not be negative, got {num_draft_tokens}")
        self._drafter_caps = tuple(drafter_caps)
        self._num_draft_tokens = num_draft_tokens
        self._mode = mode
        self._num_decoding = 0
        self._ranks = GuessRanks()
        self._accepted, self._foreign_accepted = _USUAL_ACCEPTANCE, _USUAL_FOREIGN_ACCEPTANCE

    @property
    def mode(self) -> OverlapMode:
        """The mode that it was made for."""
        return self._mode

    @property
    def state(self) -> ControllerState:
        """What was configured."""
        num_draft_tokens = self._num_draft_tokens
        return ControllerState(
            mode=self._mode,
            is_speculating=num_draft_tokens > 0,
            reason="configured",
            mean_num_draft_tokens=float(num_draft_tokens),
            num_requests_by_k=(*((0,) * num_draft_tokens), self._num_decoding),
        )

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> Sequence[int]:
        """Return k for each."""
        self._num_decoding = len(decoding) + len(elsewhere)
        most, caps = self._num_draft_tokens, self._drafter_caps
        return [min(most, caps[one.own_drafter or 0]) if caps else most for one in decoding]

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """Share out by how often tokens have been accepted lately, and which guesses were right."""
        if is_foreign:
            foreign = (self._foreign_accepted,) * num_pending
            return share_guesses_behind_foreign(foreign, self._accepted, self._ranks.rates, max_branches)
        return share_guesses((self._accepted,) * (num_pending + 1), self._ranks.rates, max_branches)

    def observe(self, observation: RoundObservation) -> None:
        """Learn what continuations are shared out by: all else stays as it is."""
        if self._mode != "draft_ahead":
            return
        for one in observation.outcomes:
            self._accepted = _moved(self._accepted, one)
        for one in observation.stand_ins:
            self._foreign_accepted = _moved(self._foreign_accepted, one)
        for ahead in observation.ahead:
            self._ranks.hear(ahead)

    def think(self) -> None:
        """Nothing to learn."""


_USUAL_ACCEPTANCE, _USUAL_FOREIGN_ACCEPTANCE = 0.67, 0.4
"""Two of three tokens, or of foreign ones two of five."""
_DECAY = 1.0 / 256.0


def _moved(accepted: float, outcome: DraftOutcome) -> float:
    """Return how likely a token is accepted when it is reached, one proposal later."""
    num_reached = min(outcome.num_drafted, outcome.num_accepted + 1)
    if num_reached == 0:
        return accepted
    kept = (1.0 - _DECAY) ** num_reached
    return moved(accepted, outcome.num_accepted / num_reached, 1.0 - kept)


def bounded_choice(
    controller: SpeculationController,
    decoding: Sequence[Schedulable],
    elsewhere: Sequence[Schedulable] = (),
) -> list[int]:
    """Return the controller's choice within the bounds that hold for every controller."""
    wanted = []
    for sequence, chosen in zip(decoding, controller.choose(decoding, elsewhere), strict=True):
        own = sequence.requested_draft_tokens
        wanted.append(min(chosen if own is None else min(own, chosen), sequence.max_draft_tokens))
    return wanted
