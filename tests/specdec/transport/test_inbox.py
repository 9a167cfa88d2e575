from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from specdec.transport.base import PeerId
from specdec.transport.inbox import TURN_BYTES, Inbox

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
MANY = 1 << 40


def inbox(*, max_items: int = MANY, max_bytes: int = MANY) -> Inbox[int]:
    return Inbox(max_items=max_items, max_bytes=max_bytes)


def all_of(box: Inbox[int]) -> list[tuple[PeerId, int]]:
    found = []
    while box:
        sender, item, _ = box.take()
        found.append((sender, item))
    return found


def test_ordinary_messages_are_read_in_the_order_in_which_they_came() -> None:
    box = inbox()
    senders = [A, B, B, C, A, C, B]
    for number, sender in enumerate(senders):
        box.put(sender, number, 200)
    assert all_of(box) == list(zip(senders, range(7), strict=True))


def test_who_brings_much_waits_for_those_who_bring_little() -> None:
    box = inbox()
    for number in range(5):
        box.put(A, number, 3 * TURN_BYTES)
    for number in range(10):
        box.put(B, number, 100)
    box.put(A, 5, 10)
    order = all_of(box)
    assert order[:11] == [(A, 0), *[(B, number) for number in range(10)]]
    assert order[11:] == [(A, number) for number in range(1, 6)]


def test_who_comes_while_much_is_read_is_next() -> None:
    box = inbox()
    for number in range(5):
        box.put(A, number, 10 * TURN_BYTES)
    assert [box.take()[:2] for _ in range(2)] == [(A, 0), (A, 1)]
    box.put(B, 0, 100)
    assert box.take()[:2] == (B, 0)


def test_debts_are_forgotten_once_nothing_waits() -> None:
    box = inbox()
    box.put(A, 0, 100 * TURN_BYTES)
    all_of(box)
    box.put(A, 1, 10)
    box.put(B, 0, 10)
    assert all_of(box) == [(A, 1), (B, 0)]


def test_bounds_are_each_senders_own_and_one_item_always_fits() -> None:
    box = inbox(max_items=3, max_bytes=1000)
    assert box.has_room(A, 5000)
    box.put(A, 0, 900)
    assert box.has_room(A, 100)
    assert not box.has_room(A, 101)
    assert box.has_room(B, 5000)
    for number in range(3):
        box.put(C, number, 0)
    assert not box.has_room(C, 0)
    box.take()
    assert box.has_room(A, 5000)


@given(
    st.lists(
        st.one_of(st.none(), st.tuples(st.sampled_from([A, B, C]), st.integers(0, 4 * TURN_BYTES))),
        max_size=60,
    )
)
def test_turns_are_fair_whatever_comes_when(events: list[tuple[PeerId, int] | None]) -> None:
    """None: one item is read."""
    box = inbox()
    waiting: dict[PeerId, list[tuple[int, int]]] = defaultdict(list)
    since: Counter[PeerId] = Counter()
    """Bytes of others that were read while a sender's next item waited."""
    for number, event in enumerate([*events, *[None] * len(events)]):
        if event is not None:
            sender, num_bytes = event
            box.put(sender, number, num_bytes)
            waiting[sender].append((number, num_bytes))
        elif box:
            sender, item, num_bytes = box.take()
            assert waiting[sender].pop(0) == (item, num_bytes), "each sender's in its order"
            since[sender] = 0
            for other, its in waiting.items():
                since[other] += num_bytes if other != sender else 0
                if not its:
                    since[other] = 0
                longest = 4 * TURN_BYTES
                # Its own turn may be as far away as what it has had before was long.
                assert since[other] <= 2 * (2 * TURN_BYTES + 2 * longest)
        assert len(box) == sum(map(len, waiting.values()))
