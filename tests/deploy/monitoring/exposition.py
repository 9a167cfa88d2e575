"""A metrics endpoint without a cluster: every series of the catalogue, with values that grow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.series import CLUSTER_SERIES
from deploy.openai.metrics import CONTENT_TYPE, DoorMetrics, render
from tests.deploy.openai.live import live_server

GAUGES: Mapping[str, float] = {
    "coordinators": 2,
    "coordinators_with_target": 2,
    "directory_silent_seconds": 0.4,
    "draft_workers": 3,
    "draft_pool_usage_perc": 0.5,
    "kv_cache_usage_perc": 0.4,
    "num_requests_running": 5,
    "num_requests_waiting": 1,
    "num_requests_without_group": 0,
    "num_workers": 0,
    "scales_to_zero": 0,
    "target_groups_wanted": 2,
    "draft_workers_wanted": 3,
    "speculation_pool_worth": 1.6,
    "speculation_on": 1,
}
"""Of a cluster that is well; others are 1."""
NONE_WHEN_WELL = frozenset(
    {
        "channel_messages_dropped",
        "draft_deadline_misses",
        "draft_grammar_failures",
        "draft_sequences_refused",
        "failovers",
        "ingress_losses",
        "invalid_drafts_dropped",
        "lost_streams",
        "num_recomputed_tokens",
        "request_timeouts",
        "requests_refused",
        "spec_decode_num_lossy_tokens",
        "target_losses",
        "worker_messages_dropped",
    }
)
"""Counters that stay at 0."""
_LABEL_VALUES = {
    "part": "target",
    "compile": "failed",
    "k": "3",
    "position": "0",
    "mode": "ping_pong",
    "le": "0.05",
    "epoch": "1",
}


def keys() -> dict[str, str]:
    """Return, by metric name, one key of a service's snapshot for each series of the catalogue."""
    return {
        name: name + "".join(f"{{{_labels(series.labels)}}}" for _ in series.labels[:1])
        for name, series in CLUSTER_SERIES.items()
    }


def _samples(name: str, key: str) -> tuple[str, ...]:
    """Return a key, or, where it is a bucket's, those of the one that holds everything, too."""
    is_bucket = CLUSTER_SERIES[name].labels == ("le",)
    return (key, key.replace(_LABEL_VALUES["le"], "+Inf")) if is_bucket else (key,)


def _labels(names: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{_LABEL_VALUES.get(name, "any")}"' for name in names)


def busy_door(num_requests: int) -> DoorMetrics:
    """Return a door that has answered so many requests."""
    door = DoorMetrics()
    door.set_models("tiny")
    door.set_certificate_expiry("/etc/drafthouse/tls/tls.crt", 4e9)
    for status in ("200", "429", "500"):
        door.http_requests.labels("/v1/completions", status).inc(num_requests)
    door.streams_failed.labels("coordinator_lost").inc(num_requests)
    door.streams_turned_away.inc(num_requests)
    door.client_timeouts.labels("504").inc(num_requests)
    door.api_key_refusals.labels("team", "tokens").inc(num_requests)
    door.aborted.inc(num_requests)
    for histogram in (
        door.time_to_first_token,
        door.inter_token_latency,
        door.time_per_output_token,
        door.e2e_latency,
        door.queue_time,
        door.prefill_time,
        door.decode_time,
        door.inference_time,
    ):
        for _ in range(num_requests):
            histogram.observe(0.05)
    return door


def exposition(num_steps: int) -> bytes:
    """Return what /metrics says after so many steps, in all of which everything has happened."""
    values = {
        sample: GAUGES.get(name, 1.0) if CLUSTER_SERIES[name].kind == "gauge" else float(num_steps)
        for name, key in keys().items()
        for sample in _samples(name, key)
    }
    return render(busy_door(num_steps), values)


def exported_labels() -> dict[str, frozenset[str]]:
    """Return the labels of every name that Prometheus can find at /metrics."""
    found: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(exposition(1).decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, frozenset()) | frozenset(sample.labels)
    return found


@contextmanager
def growing_endpoint() -> Iterator[str]:
    """Serve /metrics, ten steps further every second; yield HOST:PORT."""
    since_s = time.monotonic()

    async def metrics(_: Request) -> Response:
        return Response(exposition(round(10 * (time.monotonic() - since_s))), media_type=CONTENT_TYPE)

    with live_server(Starlette(routes=[Route("/metrics", metrics)])) as url:
        yield url.removeprefix("http://")
