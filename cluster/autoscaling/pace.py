"""From what is wanted at the moment to what is done: neither at once, nor back and forth."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.autoscaling.config import PaceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How many there should be, as things are now."""

    number: int
    is_idle: bool = False
    """Nobody asks for anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many there are."""

    num_asked_for: int
    num_ready: int
    """Of these, those that serve already."""
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMemory:
    """What has to be remembered between two decisions. Times are seconds of the caller's clock."""

    up_since_s: float | None = None
    """Since when more have been wanted."""
    down_since_s: float | None = None
    """Since when fewer have been wanted than serve."""
    down_to: int | None = None
    """The most that have been wanted since then."""
    idle_since_s: float | None = None
    starting_since_s: float | None = None
    """Since when some that were asked for do not serve, and no other has come to."""
    num_ready: int | None = None
    """At the last decision."""
    changed_s: float | None = None

    def until(self, now_s: float) -> ScalingMemory:
        """Return it with no time later than now: a clock that was set back would have us wait for it."""
        return replace(
            self,
            up_since_s=_no_later(self.up_since_s, now_s),
            down_since_s=_no_later(self.down_since_s, now_s),
            idle_since_s=_no_later(self.idle_since_s, now_s),
            starting_since_s=_no_later(self.starting_since_s, now_s),
            changed_s=_no_later(self.changed_s, now_s),
        )


def decide(
    wish: Wish, fleet: Fleet, memory: ScalingMemory, config: PaceConfig, now_s: float
) -> tuple[int, ScalingMemory]:
    """Return how many to ask for, and what to remember.

    Up: after `up_after_s` of wanting more, and not while those asked for before are still starting (a model
    that loads for minutes would else be asked for again and again). Who has not come to serve for
    `start_patience_s` may never do so (a bad node, no place): others take their part. Down: after
    `down_after_s` in which fewer than those that serve were wanted, to the most that were then, and not
    within `cooldown_s` of a change. To zero: only from idleness of those that serve, for
    `scale_to_zero_after_s`; what is still starting then is given up first. From zero: at once.
    """
    number = fleet.num_asked_for
    memory = memory.until(now_s)
    # Zero is for idleness alone, and idleness alone for zero.
    wanted = min(max(wish.number, fleet.low, 0 if wish.is_idle and number == 0 else 1), fleet.high)
    num_starting = max(0, number - fleet.num_ready)
    has_one_come = memory.num_ready is not None and fleet.num_ready > memory.num_ready
    starting_since_s = _since(num_starting > 0, None if has_one_come else memory.starting_since_s, now_s)
    is_missed = not wish.is_idle or fleet.num_ready < fleet.low
    is_stuck = is_missed and _lasts(starting_since_s, config.start_patience_s, now_s)
    goal = min(wanted + num_starting, fleet.high) if is_stuck else wanted
    # A wish knows of those that serve alone: that they are enough is no reason to give up others that load.
    is_less_wanted = wanted < min(number, fleet.num_ready)
    memory = replace(
        memory,
        up_since_s=_since(goal > number, memory.up_since_s, now_s),
        down_since_s=_since(is_less_wanted, memory.down_since_s, now_s),
        down_to=max(memory.down_to or 0, wanted) if is_less_wanted else None,
        idle_since_s=_since(
            wish.is_idle and (fleet.num_ready > 0 or number == 0), memory.idle_since_s, now_s
        ),
        starting_since_s=starting_since_s,
        num_ready=fleet.num_ready,
    )
    decided = number
    if goal > number:
        may_ask = num_starting == 0 or is_stuck
        is_time = _lasts(memory.up_since_s, config.up_after_s, now_s) and may_ask
        if is_time or number < fleet.low or number == 0:
            decided = goal
    elif number > fleet.high:
        decided = fleet.high
    elif wanted < number:
        is_calm = memory.changed_s is None or now_s - memory.changed_s >= config.cooldown_s
        if _lasts(memory.down_since_s, config.down_after_s, now_s) and is_calm:
            decided = wanted if memory.down_to is None else memory.down_to
    if fleet.low == 0 and _lasts(memory.idle_since_s, config.scale_to_zero_after_s, now_s):
        if 0 < decided <= 1:
            decided = 0
        elif num_starting:
            decided = 1  # one that finds no place may be starting for good: it must not keep the others
    if decided == number:
        return number, memory
    return decided, ScalingMemory(idle_since_s=memory.idle_since_s, changed_s=now_s)


def _no_later(time_s: float | None, now_s: float) -> float | None:
    return None if time_s is None else min(time_s, now_s)


def _since(holds: bool, since_s: float | None, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _lasts(since_s: float | None, seconds: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= seconds
