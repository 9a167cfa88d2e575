"""The Prometheus text: kinds, meanings, and that operators can look every name up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.series import CLUSTER_SERIES
from deploy.openai.metrics import PREFIX, ChoiceTimer, DoorMetrics, render, without_doors
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.errors import NotReadyError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import FinishReason, RequestOutput, RequestStats
from tests.deploy.openai.fakes import Door, ScriptedService, error_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operations" / "watching.md").read_text()


def text_of(snapshot: dict[str, float]) -> str:
    return render(DoorMetrics(), snapshot).decode()


def test_gauges_are_gauges_and_counters_are_counters_with_a_meaning() -> None:
    text = text_of(
        {
            "speculation_pool_worth": 1.3,
            'speculation_state{mode="ping_pong",reason="gain"}': 2.0,
            "draft_workers": 3.0,
            "drafting_time_seconds": 4.5,
        }
    )
    assert "# TYPE ray_drafthouse_speculation_pool_worth gauge" in text
    assert "ray_drafthouse_speculation_pool_worth 1.3" in text
    assert 'ray_drafthouse_speculation_state{mode="ping_pong",reason="gain"} 2.0' in text
    assert "ray_drafthouse_draft_workers 3.0" in text
    assert "ray_drafthouse_drafting_time_seconds_total 4.5" in text
    for name in ("speculation_pool_worth", "speculation_state", "draft_workers"):
        assert f"# HELP {PREFIX}{name} {CLUSTER_SERIES[name].help}" in text


def test_what_a_newer_worker_counts_is_shown_without_a_kind() -> None:
    text = text_of({'of_tomorrow{kind="x"}': 2.0})
    assert 'ray_drafthouse_of_tomorrow{kind="x"} 2.0' in text
    assert "# TYPE ray_drafthouse_of_tomorrow untyped" in text


@pytest.mark.parametrize("name", sorted(CLUSTER_SERIES))
def test_operators_can_look_it_up(name: str) -> None:
    assert re.search(rf"`{name}(\{{[^`]*\}})?`", PAGE), f"docs/operations/watching.md does not explain {name}"


def test_operators_can_look_up_what_the_door_counts() -> None:
    names = {metric.name.removeprefix(PREFIX) for metric in DoorMetrics().registry.collect()}
    missing = {name for name in names if f"`{name}" not in PAGE}
    assert not missing


def ended(finish_reason: FinishReason, **times: float) -> RequestOutput:
    return RequestOutput(
        request_id=RequestId("r"),
        epoch=Epoch(0),
        first_index=0,
        token_ids=(),
        text="",
        finish_reason=finish_reason,
        stats=RequestStats(**times),
    )


def test_the_time_of_a_request_is_told_in_parts() -> None:
    door = DoorMetrics()
    whole = {"arrival_s": 1.0, "first_scheduled_s": 3.0, "first_token_s": 3.5, "finished_s": 7.5}
    ChoiceTimer(door).observe(ended("stop", **whole))
    ChoiceTimer(door).observe(ended("length", arrival_s=1.0, first_scheduled_s=1.0, finished_s=2.0))
    ChoiceTimer(door).observe(ended("error", **whole))
    ChoiceTimer(door).observe(ended("stop", arrival_s=1.0, finished_s=2.0))
    text = render(door, {}).decode()
    for name, total, count in (("queue", 2, 2), ("prefill", 0.5, 1), ("decode", 4, 1), ("inference", 5.5, 2)):
        assert f"{PREFIX}request_{name}_time_seconds_sum {float(total)}\n" in text
        assert f"{PREFIX}request_{name}_time_seconds_count {float(count)}\n" in text


def test_what_all_doors_have_counted_is_told_in_place_of_this_ones() -> None:
    here, there = DoorMetrics(), DoorMetrics()
    for door, seconds in ((here, 0.05), (there, 0.3), (there, 3.0)):
        door.set_models("m")
        door.set_certificate_expiry("/tls.crt", 1.8e9 if door is here else 1.9e9)
        door.http_requests.labels("/v1/completions", "200").inc()
        door.time_to_first_token.observe(seconds)
        door.in_progress.inc()
    there.http_requests.labels("/v1/completions", "503").inc()
    reports = [here.report(), there.report()]
    values = [report.counters | report.gauges for report in reports]
    told = {name: sum(one.get(name, 0.0) for one in values) for one in values for name in one}
    assert not any("created" in name or "model_info" in name or "expiry" in name for name in told)
    text = render(here, {**told, "rounds": 7.0}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families[f"{PREFIX}rounds"].samples[0].value == 7
    counted = [one for one in families[f"{PREFIX}http_requests"].samples if one.value]
    answers = {one.labels["status"]: one.value for one in counted}
    assert answers == {"200": 3, "503": 1}
    assert families[f"{PREFIX}http_requests_in_progress"].samples[0].value == 3
    first_tokens = families[f"{PREFIX}time_to_first_token_seconds"]
    assert first_tokens.type == "histogram"
    buckets = {
        one.labels.get("le"): one.value for one in first_tokens.samples if one.name.endswith("_bucket")
    }
    assert (buckets["0.06"], buckets["0.5"], buckets["+Inf"]) == (1, 2, 3)
    assert families[f"{PREFIX}model_info"].samples[0].labels == {"model_name": "m"}
    (end,) = families[f"{PREFIX}tls_certificate_expiry_timestamp_seconds"].samples
    assert (end.labels, end.value) == ({"certificate_file": "/tls.crt"}, 1.8e9), "days do not add up"
    assert without_doors(here, {**told, "rounds": 7.0}) == {"rounds": 7.0}


def test_answers_that_alerts_look_at_are_counted_from_zero() -> None:
    """A hundred that fail between two scrapes would else begin at a hundred, and never have grown."""
    text = render(DoorMetrics(), {}).decode()
    for route in ("/v1/completions", "/v1/chat/completions"):
        for status in (429, 500, 503, 504):
            assert f'{PREFIX}http_requests_total{{route="{route}",status="{status}"}} 0.0\n' in text


def test_a_door_alone_tells_what_it_has_counted() -> None:
    door = DoorMetrics()
    door.aborted.inc(2)
    text = render(door, {}).decode()
    assert f"# TYPE {PREFIX}http_aborted_choices_total counter" in text
    assert f"{PREFIX}http_aborted_choices_total 2.0" in text
    assert f'{PREFIX}time_to_first_token_seconds_bucket{{le="+Inf"}} 0.0' in text


class Unheard(ScriptedService):
    """Of a door that has not heard what others have counted."""

    async def metrics(self) -> Mapping[str, float]:
        raise NotReadyError("not all ingresses have said yet what they have counted")


def test_no_numbers_are_better_than_those_of_one_door_of_several() -> None:
    answer = Door(Unheard()).get("/metrics")
    assert answer.status_code == 503
    assert "not all ingresses" in error_of(answer)["message"]


class Hanging(ScriptedService):
    """Of a door whose target groups take their time."""

    async def metrics(self) -> Mapping[str, float]:
        await asyncio.Event().wait()
        return {}


def test_nor_does_a_scrape_that_takes_too_long_bring_the_numbers_of_one_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploy.openai.app._METRICS_TIMEOUT_S", 0.05)
    answer = Door(Hanging()).get("/metrics")
    assert answer.status_code == 503
    assert "within 0.05 s" in error_of(answer)["message"]


def test_the_time_to_the_first_token_begins_when_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts wait for the tokenizer."""
    door = Door()
    encode = HuggingFaceTokenizer.encode

    async def late(self: HuggingFaceTokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        await asyncio.sleep(0.3)
        return await encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(HuggingFaceTokenizer, "encode", late)
    slo = {"ttft_ms": 5000, "itl_ms": 50}
    for stream in (False, True):
        assert door.complete(stream=stream, slo=slo).status_code == 200
    text = door.get("/metrics").text
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        (value,) = re.findall(rf"^{PREFIX}{name}_sum (\S+)$", text, re.MULTILINE)
        assert float(value) >= 0.6
    for request in door.service.requests:
        assert request.slo is not None
        assert request.slo.ttft_ms is not None
        assert request.slo.ttft_ms <= 4700
        assert request.slo.itl_ms == 50
