"""What Ray exports is what /metrics says."""

from __future__ import annotations

import math

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
    door.set_certificate_expiry("/etc/tls.crt", 1.8e9)
    door.http_requests.labels("/v1/completions", "200").inc(3)
    door.time_to_first_token.observe(0.3)
    of_groups = {
        "rounds": 7.0,
        "lost_streams": 0.0,
        "kv_cache_usage_perc": 0.25,
        'speculation_state{mode="ping_pong",reason="gain"}': 1.0,
    }
    report = door.report()
    snapshot = {**of_groups, **report.counters, **report.gauges, **door.of_this_door()}
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


STATE = 'speculation_state{mode="%s",reason="gain"}'
GROUP = 'target_group_%s{target_group="%s"}'


def last_values(*snapshots: dict[str, float]) -> dict[tuple[str, str], float]:
    """Return what is published in the end, by name and the values of labels."""
    return {
        (one.name.removeprefix("drafthouse_"), " ".join(value for _, value in labels)): number
        for one in published(*snapshots)
        for labels, number in one.values.items()
    }


def test_a_state_that_is_over_is_over_in_rays_exporter() -> None:
    """Of a gauge Ray keeps every set of labels: without a word both modes would be on for ever."""
    values = last_values({STATE % "lockstep": 2.0}, {STATE % "ping_pong": 2.0})
    assert values == {("speculation_state", "lockstep gain"): 0, ("speculation_state", "ping_pong gain"): 2}
    back = last_values({STATE % "lockstep": 2.0}, {STATE % "ping_pong": 2.0}, {STATE % "lockstep": 1.0})
    assert back == {("speculation_state", "lockstep gain"): 1, ("speculation_state", "ping_pong gain"): 0}


def test_a_group_that_is_gone_has_no_requests_and_no_other_numbers() -> None:
    """Its counters do not fall to 0: a group that is heard again would have generated everything at once."""
    names = ("num_requests_running", "kv_cache_usage_perc", "generation_tokens")
    both = {GROUP % (name, group): 0.5 for name in names for group in "ab"}
    values = last_values(both, {key: value for key, value in both.items() if '"b"' in key})
    assert values["target_group_num_requests_running", "a"] == 0.0
    assert math.isnan(values["target_group_kv_cache_usage_perc", "a"])
    assert math.isnan(values["target_group_generation_tokens_total", "a"])
    assert [value for (_, group), value in values.items() if group == "b"] == [0.5] * 3


def test_who_adds_up_no_more_says_nothing_of_its_own() -> None:
    made: dict[str, Recorded] = {}

    def make(name: str, text: str, labels: tuple[str, ...]) -> Recorded:
        return made.setdefault(name, Recorded(name, text, labels))

    sink = RaySink(make)
    sink.withdraw()
    assert not made
    sink.publish({"rounds": 7.0, "coordinators": 2.0})
    for _ in range(2):
        sink.withdraw()
        (rounds,) = made["drafthouse_rounds_total"].values.values()
        assert math.isnan(rounds)
        assert made["drafthouse_coordinators"].values == {(): 0.0}
    sink.publish({"rounds": 9.0, "coordinators": 1.0})
    assert made["drafthouse_rounds_total"].values == {(): 9.0}


def test_of_several_models_each_has_its_label() -> None:
    (rounds,) = published({'rounds{model_name="a"}': 7.0, 'rounds{model_name="b"}': 2.0})
    assert rounds.labels == ("model_name",)
    assert sorted(rounds.values.values()) == [2, 7]


def test_workers_of_another_version_may_name_fewer_labels_or_more() -> None:
    of_older = 'worker_messages_dropped{model_name="m",channel="draft",reason="full"}'
    of_newer = 'worker_messages_dropped{model_name="m",channel="draft",dropped_by="x",reason="full",more="y"}'
    (dropped,) = published({of_older: 7.0, of_newer: 2.0})
    assert sorted(dropped.labels) == ["channel", "dropped_by", "model_name", "reason"]
    assert sorted(dropped.values.values()) == [2, 7]
