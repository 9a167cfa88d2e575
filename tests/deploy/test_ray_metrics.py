"""What Ray exports is what /metrics says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from deploy.openai.metrics import DoorMetrics, render
from deploy.ray_metrics import RaySink


class Recorded:
    """Stands for a metric of Ray's, which wants the same tags each time."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.values: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.labels
        self.values[tuple(sorted(tags.items()))] = value


def published(*snapshots: dict[str, float]) -> list[Recorded]:
    made: list[Recorded] = []

    def make(name: str, text: str, labels: tuple[str, ...]) -> Recorded:
        made.append(Recorded(name, text, labels))
        return made[-1]

    sink = RaySink(make)
    for snapshot in snapshots:
        sink.publish(snapshot)
    assert len({one.name for one in made}) == len(made)
    return made


def test_names_labels_and_values_are_those_of_the_text() -> None:
    door = DoorMetrics()
    door.set_models("m")
    door.http_requests.labels("/v1/completions", "200").inc(3)
    door.time_to_first_token.observe(0.3)
    of_groups = {
        "rounds": 7.0,
        "lost_streams": 0.0,
        "kv_cache_usage_perc": 0.25,
        'speculation_state{mode="ping_pong",reason="gain"}': 1.0,
    }
    report = door.report()
    snapshot = {**of_groups, **report.counters, **report.gauges, **door.models()}
    of_ray = {
        ("ray_" + one.name, tags): value for one in published(snapshot) for tags, value in one.values.items()
    }
    of_text = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(render(door, snapshot).decode())
        for sample in family.samples
    }
    assert of_ray == of_text
    assert ("ray_drafthouse_lost_streams_total", ()) in of_ray


def test_what_is_published_again_replaces_what_was() -> None:
    (rounds,) = published({"rounds": 7.0}, {"rounds": 9.0})
    assert rounds.name == "drafthouse_rounds_total"
    assert rounds.values == {(): 9.0}
    assert rounds.text == "Rounds: propose, verify, commit."


def test_of_several_models_each_has_its_label() -> None:
    (rounds,) = published({'rounds{model_name="a"}': 7.0, 'rounds{model_name="b"}': 2.0})
    assert rounds.labels == ("model_name",)
    assert sorted(rounds.values.values()) == [2, 7]
