from __future__ import annotations

from cluster.ingress_leases import IngressLeases
from specdec.transport.base import PeerId

FIRST, SECOND = PeerId("first"), PeerId("second")
LEASE_S = 6.0


def test_who_is_silent_for_too_long_is_gone_once() -> None:
    leases = IngressLeases(LEASE_S)
    leases.hear(FIRST, 0.0)
    gone: list[tuple[float, PeerId]] = []
    for step in range(20):
        now_s = 0.5 * step
        leases.hear(SECOND, now_s)
        gone += [(now_s, one) for one in leases.take_silent(now_s)]
    assert gone == [(6.5, FIRST)]
    assert list(leases) == [SECOND]
    leases.hear(FIRST, 10.0)
    assert set(leases) == {FIRST, SECOND}, "it is heard again"


def test_nobody_is_blamed_for_a_standstill_here() -> None:
    leases = IngressLeases(LEASE_S)
    for one in (FIRST, SECOND):
        leases.hear(one, 0.0)
    assert leases.take_silent(0.0) == []
    leases.hear(FIRST, 60.0)
    assert leases.take_silent(60.0) == []
    assert set(leases) == {FIRST, SECOND}


def test_what_was_taken_in_meanwhile_shows_that_nothing_stood_still() -> None:
    leases = IngressLeases(LEASE_S)
    for one in (FIRST, SECOND):
        leases.hear(one, 0.0)
    assert leases.take_silent(0.0) == []
    for step in range(14):
        leases.hear(SECOND, 0.5 * step)
    assert leases.take_silent(7.0) == [FIRST]
