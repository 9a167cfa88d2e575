"""What is exported of each target group."""

from __future__ import annotations

from cluster.series import CLUSTER_SERIES, OF_EACH_GROUP, of_each_group
from specdec.core.series import combine, name_of
from specdec.engine.metrics import EngineMetrics
from specdec.transport.base import PeerId


def test_each_group_is_told_apart_and_all_of_it_is_in_the_catalogue() -> None:
    one, other = EngineMetrics(num_running=3), EngineMetrics(num_running=5)
    snapshots = {PeerId("coordinator-a"): one.snapshot(), PeerId("coordinator-b"): other.snapshot()}
    values = of_each_group(snapshots)
    assert values['target_group_num_requests_running{target_group="coordinator-a"}'] == 3
    assert values['target_group_num_requests_running{target_group="coordinator-b"}'] == 5
    assert len(values) == 2 * len(OF_EACH_GROUP)
    assert {name_of(series) for series in values} <= CLUSTER_SERIES.keys()
    assert combine(snapshots.values(), CLUSTER_SERIES)["num_requests_running"] == 8


def test_a_group_that_does_not_tell_is_left_out() -> None:
    assert of_each_group({}) == {}
    assert list(of_each_group({PeerId("a"): {"rounds": 2.0}})) == ['target_group_rounds{target_group="a"}']
