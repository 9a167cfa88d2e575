"""What a running service says about itself: coordinators tell it to doors, doors tell it to people.

Points in time are seconds since the epoch (Unix time), by the clock of whoever was there; durations are
seconds. Fields may be added; readers ignore those that they do not know.
"""

from __future__ import annotations

import msgspec

from specdec.core.idle_work import WorkState
from specdec.scheduling.speculation.explanation import Bound, Reason
from specdec.scheduling.speculation.modes import OverlapMode


class ChoiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the speculation controller has chosen last, and by which expectations."""

    mode: OverlapMode
    is_speculating: bool
    reason: Reason
    explanation: str
    """The reason in words."""
    mean_num_draft_tokens: float
    """Mean k over the requests of the last decision."""
    num_requests_by_k: dict[int, int]
    """How many of these requests were given k draft tokens."""
    expected_tokens_per_s: float | None
    """Of what was chosen; None: nobody expects anything (a fixed k)."""
    expected_tokens_per_s_by_mode: dict[str, float]
    """Of everything that could be chosen; `plain` is without drafts."""
    expected_draft_s: float | None
    """T_draft."""
    expected_verify_s: float | None
    """T_verify."""
    expected_round_s: float | None
    """In ping_pong, of both halves together."""
    expected_acceptance: tuple[float, ...]
    """By position: how likely a draft token is accepted where it is reached."""
    pool_worth: float | None
    """Tokens per second with speculation over those without, the mean of the last minutes; None: nobody
    compares."""
    mean_kv_budget: float | None = None
    """Mean of the tokens that drafts of running requests may attend to; None: everything, or none runs."""
    bounded_by: Bound = "none"
    """What keeps k from being larger."""


class RecentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the rounds of the last seconds have brought. Times are means per round."""

    num_rounds: int
    tokens_per_s: float
    """Tokens over the time of the rounds that brought them: idle time does not count."""
    acceptance: float | None
    """Draft tokens accepted over those verified; None: there were none."""
    acceptance_by_method: dict[str, float]
    """The same by who drafted: the drafter, its fallback, a grammar that forces tokens."""
    mean_acceptance_length: float | None
    """Tokens per verified proposal."""
    round_s: float
    draft_wait_s: float
    """Waiting for drafts."""
    draft_s: float | None
    """T_draft, as the draft workers measure it; None: nothing was drafted elsewhere."""
    verify_s: float
    """T_verify: from the submission of a step to its answer."""
    coordinator_s: float
    """Neither waiting for drafts nor for the target."""
    hidden_share: float | None
    """Of T_draft, the part in which the target had something to verify."""
    hit_rate: float | None
    """draft_ahead: verdicts that a continuation was there for."""
    late_rate: float | None
    """draft_ahead: verdicts whose continuation did not come in time."""


class DrafterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One of several drafters, or one that is not heard. Counts are since the target group's start."""

    name: str
    is_shadow: bool
    """Whether its drafts are only compared with what was generated."""
    num_running: int
    """Requests that have it now."""
    num_requests: int
    """Requests that it has drafted for; of a shadow, that it looks at."""
    num_drafted: int
    acceptance: float | None
    """Draft tokens accepted over those verified, or compared; None: there were none."""
    tokens_per_pass: float | None
    """Tokens of a round with a proposal of it."""


class DraftLinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A draft worker as one target group sees it."""

    worker: str
    num_requests: int
    """Of this target group."""
    is_waited_for: bool
    """Whether it has answered in time, when asked last."""
    utilization: float | None = None
    """0 to 1: of the last seconds, idle time included, the part in which it drafted for this target group.
    None: an older version, which does not say."""


class TargetGroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One target group: a copy of the target with its coordinator."""

    id: str = "engine"
    """The coordinator's name."""
    model: str | None = None
    """Its name, at a door with several of them."""
    is_answering: bool = True
    """Whether its coordinator has told all this now; else what follows is not known."""
    is_serving: bool = True
    """Whether its target is there."""
    is_draining: bool = False
    """Whether it takes no more requests."""
    since: float = 0.0
    """When the present target worker was ready."""
    incarnation: int = 1
    """Which target worker of this coordinator it is: 1 for the first."""
    compile_state: WorkState = "off"
    num_running: int = 0
    num_waiting: int = 0
    max_num_running: int = 0
    num_continued: int = 0
    """Of those that run or wait, how many another group had before: their epoch is above 0."""
    kv_cache_usage: float = 0.0
    """0 to 1."""
    utilization: float = 0.0
    """0 to 1: of the last seconds, idle time included, the part in which the target computed."""
    choice: ChoiceStatus | None = None
    recent: RecentStatus | None = None
    """None: there were no rounds in the last seconds."""
    draft_workers: tuple[DraftLinkStatus, ...] = ()
    drafters: tuple[DrafterStatus, ...] = ()
    """Where there are several."""


class OnlineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft model has learnt from traffic (`speculative_config.online`)."""

    version: int = 0
    """The newest that has been found better than the one before; 0: what the draft model came with."""
    num_tried: int = 0
    num_refused: int = 0
    num_buffered_tokens: int = 0
    """Of texts that are kept to learn from and to judge by."""
    acceptance_before: float | None = None
    """Of the version served at the last trial, on what was held back; None: there was none."""
    acceptance_after: float | None = None
    """Of the version tried then."""


class DraftWorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One draft worker of the pool."""

    id: str
    model: str | None = None
    """The target's name, at a door with several of them."""
    since: float
    """When it was ready."""
    incarnation: int
    """Which worker of its place in the pool it is: 1 for the first."""
    compile_state: WorkState
    is_waited_for: bool | None
    """Whether any target group got its last answers in time; None: none has asked it yet."""
    num_requests: int
    """Of all target groups that answer."""
    max_requests: int
    """How many it takes."""
    online: OnlineStatus | None = None
    """None: its draft model does not learn."""
    utilization: float | None = None
    """0 to 1: of the last seconds, idle time included, the part in which it drafted. A batch for several
    target groups counts for each. None: no target group says."""


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All of a service but its door."""

    target_groups: tuple[TargetGroupStatus, ...] = ()
    draft_workers: tuple[DraftWorkerStatus, ...] = ()
