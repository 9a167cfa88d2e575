from __future__ import annotations

import dataclasses
import math

import pytest

from cluster.desk_report import Situation
from specdec.core.ids import Epoch, RequestId
from specdec.transport.status import TargetGroupStatus

SERVING = Situation(
    has_target=True,
    is_draining=False,
    is_closing=False,
    num_streams=5,
    num_submitted=2,
    most_without_target=math.inf,
)
WITHOUT_TARGET = dataclasses.replace(SERVING, has_target=False)
ENGINE = {
    "rounds": 9.0,
    "num_requests_running": 3.0,
    "num_requests_waiting": 1.0,
    'drafter_num_requests_running{drafter="ngram"}': 3.0,
}


def test_who_waits_for_the_engine_waits() -> None:
    assert SERVING.metrics(ENGINE) == {**ENGINE, "num_requests_waiting": 3.0}
    assert SERVING.metrics({}) == {"num_requests_waiting": 2}


def test_without_a_target_nothing_runs_and_all_wait() -> None:
    assert WITHOUT_TARGET.metrics(ENGINE) == {
        "rounds": 9.0,
        "num_requests_running": 0.0,
        "num_requests_waiting": 5,
        'drafter_num_requests_running{drafter="ngram"}': 0.0,
    }


@pytest.mark.parametrize(("most", "told"), [(math.inf, 0), (7.0, 7)])
def test_a_ping_is_told_how_things_are(most: float, told: int) -> None:
    situation = dataclasses.replace(SERVING, is_draining=True, most_without_target=most)
    active = ((RequestId("a"), Epoch(1)),)
    pong = situation.pong(3, active, situation.metrics(ENGINE))
    assert (pong.nonce, pong.active, pong.num_running, pong.num_waiting) == (3, active, 3, 3)
    assert (pong.draining, pong.closing, pong.without_target, pong.max_streams) == (True, False, False, told)
    assert WITHOUT_TARGET.pong(4, (), {"num_requests_waiting": 5}).without_target


def test_a_status_says_of_a_target_what_still_holds() -> None:
    said = TargetGroupStatus(num_running=3, num_waiting=1, kv_cache_usage=0.25, utilization=0.75)
    now = SERVING.status(said, num_continued=2)
    assert (now.is_serving, now.num_running, now.num_waiting, now.num_continued) == (True, 3, 3, 2)
    assert (now.kv_cache_usage, now.utilization) == (0.25, 0.75)
    gone = WITHOUT_TARGET.status(said, num_continued=2)
    assert (gone.is_serving, gone.num_running, gone.num_waiting, gone.num_continued) == (False, 0, 5, 2)
    assert (gone.kv_cache_usage, gone.utilization) == (0.0, 0.0)
