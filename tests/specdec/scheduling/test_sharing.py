"""Scheduling over shared blocks: what a cached beginning saves, whom it makes wait, what preemption frees."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from specdec.core.ids import RequestId
from specdec.scheduling.preemption import choose_victim
from specdec.scheduling.scheduler import plan_round
from specdec.scheduling.speculation.controller import FixedController
from specdec.scheduling.state import CachedPrefix, RoundLimits, RoundPlan
from tests.specdec.scheduling.simulation import FakeRequest, fake_request

BLOCK_SIZE = 4


@dataclass
class FakeSharing:
    """Says what the test has told it."""

    cached: dict[str, CachedPrefix] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)
    freed: dict[frozenset[str], int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def cached_prefix(self, request_id: RequestId) -> CachedPrefix:
        return self.cached.get(request_id, CachedPrefix())

    def unread_blocks(self, request_id: RequestId) -> Iterable[Hashable]:
        return self.unread.get(request_id, [])

    def num_freed(self, request_ids: Collection[RequestId]) -> int:
        return self.freed[frozenset(request_ids)]

    def num_lost(self, request_id: RequestId) -> int:
        return self.lost[request_id]


def plan(
    sharing: FakeSharing,
    running: Iterable[FakeRequest] = (),
    waiting: Iterable[FakeRequest] = (),
    *,
    num_free_blocks: int = 8,
    num_rows: int = 16,
) -> RoundPlan:
    limits = RoundLimits(
        max_num_seqs=4,
        max_num_batched_tokens=num_rows,
        block_size=BLOCK_SIZE,
        num_free_blocks=num_free_blocks,
        num_usable_blocks=16,
    )
    return plan_round(tuple(running), waiting, limits, FixedController(0), sharing)


def decoding(name: str, length: int, *, blocks: int, arrival: int = 0, priority: int = 0) -> FakeRequest:
    request = fake_request(name, length, computed=length - 1, arrival=arrival, priority=priority)
    request.num_blocks = blocks
    return request


def test_cached_tokens_take_no_rows() -> None:
    sharing = FakeSharing(cached={"a": CachedPrefix(16, 0, None)})
    decided = plan(sharing, waiting=[fake_request("a", 20)])
    assert decided.num_tokens == {"a": 4}
    assert decided.num_cached == {"a": 16}


def test_blocks_that_others_hold_need_not_be_free() -> None:
    """Five blocks, of which four are cached; two are free and one of those is spared."""
    running = [decoding("r", 4, blocks=1)]
    for num_held, is_admitted in ((4, True), (3, False)):
        sharing = FakeSharing(cached={"a": CachedPrefix(16, num_held, None)})
        decided = plan(sharing, running, [fake_request("a", 20, arrival=1)], num_free_blocks=2)
        assert (decided.admitted == ("a",)) is is_admitted


def test_whoever_needs_a_block_that_is_being_computed_waits_for_it() -> None:
    """b begins as a does; c begins otherwise and passes; d begins as c does."""
    sharing = FakeSharing(
        cached={name: CachedPrefix(0, 0, block) for name, block in zip("abcd", "xxyy", strict=True)},
        unread={"a": ["x", "x2"], "c": ["y"]},
    )
    waiting = [fake_request(name, 5, arrival=number) for number, name in enumerate("abcd")]
    assert plan(sharing, waiting=waiting).admitted == ("a", "c")


def test_a_request_waits_for_blocks_of_a_running_prompt_too() -> None:
    reading = fake_request("reading", 40)
    reading.num_blocks = 10
    sharing = FakeSharing(cached={"b": CachedPrefix(4, 1, "x")}, unread={"reading": ["x", "y"]})
    assert plan(sharing, [reading], [fake_request("b", 20, arrival=1)]).admitted == ()
    sharing.unread["reading"] = ["y"]
    decided = plan(sharing, [reading], [fake_request("b", 20, arrival=1)], num_rows=64)
    assert decided.admitted == ("b",)


def test_nobody_waits_for_someone_behind() -> None:
    reading = fake_request("reading", 40, arrival=0, priority=1)
    reading.num_blocks = 10
    sharing = FakeSharing(cached={"b": CachedPrefix(0, 0, "x")}, unread={"reading": ["x"]})
    decided = plan(sharing, [reading], [fake_request("b", 8, arrival=1)], num_rows=64)
    assert decided.admitted == ("b",)


def test_preemption_counts_blocks_that_really_become_free() -> None:
    """Both victims hold the same two blocks: one of them alone frees nothing."""
    running = [
        decoding("needy", 9, blocks=2, arrival=0),
        decoding("b", 9, blocks=2, arrival=1),
        decoding("c", 9, blocks=2, arrival=2),
    ]
    sharing = FakeSharing(
        freed={frozenset("c"): 0, frozenset("bc"): 2},
        lost={"b": 5, "c": 3},
    )
    decided = plan(sharing, running, num_free_blocks=0)
    assert decided.preempted == ("c", "b")
    assert decided.num_tokens == {"needy": 1}


def test_the_victim_is_the_least_urgent_and_there_the_one_that_loses_least() -> None:
    needy = decoding("needy", 40, blocks=10, arrival=0)
    running = [
        decoding("urgent", 5, blocks=2, arrival=1, priority=0),
        decoding("much", 30, blocks=8, arrival=2, priority=1),
        decoding("shared", 31, blocks=8, arrival=3, priority=1),
        decoding("even", 6, blocks=2, arrival=4, priority=1),
    ]
    lost = {"urgent": 1, "much": 29, "shared": 2, "even": 5}
    assert choose_victim(needy, running, lambda one: lost[one.request_id]).request_id == "shared"
    lost["even"] = 2
    assert choose_victim(needy, running, lambda one: lost[one.request_id]).request_id == "even"
    assert choose_victim(needy, [needy], lambda one: 0) is needy


def test_blocks_shared_with_someone_who_may_have_to_go_are_not_counted_twice() -> None:
    """Of eight blocks `r` holds five, four of which hold the beginning of `a` too; `b` begins otherwise.

    If `a` counted on those four as held, and `b` then on all five as given up, nine would be handed out.
    """
    running = [decoding("r", 18, blocks=5, priority=1)]
    sharing = FakeSharing(cached={"a": CachedPrefix(16, 4, None)}, freed={frozenset("r"): 5}, lost={"r": 1})
    waiting = [fake_request("a", 20, arrival=1), fake_request("b", 16, arrival=2)]
    decided = plan(sharing, running, waiting, num_free_blocks=3)
    assert (decided.preempted, decided.admitted) == (("r",), ("a",))
    assert decided.num_cached == {"a": 16}
    assert decided.num_tokens == {"a": 4}
