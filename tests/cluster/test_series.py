"""What is exported of each target group."""

from __future__ import annotations

from cluster.series import CLUSTER_SERIES, OF_EACH_GROUP, counted_from_zero, of_each_group
from specdec.core.series import combine, name_of
from specdec.engine.metrics.engine_metrics import EngineMetrics
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


def test_what_has_not_happened_yet_is_zero() -> None:
    values = counted_from_zero({"rounds": 7.0, "num_requests_running": 2.0})
    assert values["rounds"] == 7
    assert values["invalid_drafts_dropped"] == values["lost_streams"] == 0
    assert "kv_cache_usage_perc" not in values
    assert "overlap_rounds" not in values
    assert "ingress_losses" not in values, "of a directory that may know of some"


def test_nothing_is_said_of_coordinators_that_do_not_answer() -> None:
    """A counter that falls to 0 for one scrape would have grown by all of itself in the next."""
    assert counted_from_zero({}).keys() == {
        "failovers",
        "lost_streams",
        "routed_prefix_tokens",
        "stale_frames_dropped",
        "unexpected_messages_dropped",
    }
