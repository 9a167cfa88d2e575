"""The door's own metrics, and the Prometheus text of everything.

Names are those under which Ray's exporter publishes the cluster's series (`ray_drafthouse_...`), so that
one dashboard reads either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from cluster.series import CLUSTER_SERIES
from specdec.core.error_codes import (
    COORDINATOR_LOST,
    FAILED_REPEATEDLY,
    NON_FINITE_LOGITS,
    OUTPUT_TOO_LARGE,
    REPLAY_FAILED,
    SHUTTING_DOWN,
    TIMED_OUT,
)
from specdec.core.outputs import RequestOutput, RequestStats
from specdec.core.series import as_label, name_of
from specdec.transport.messages import DoorReport

PREFIX = "ray_drafthouse_"
CONTENT_TYPE = CONTENT_TYPE_LATEST
# Seconds; the boundaries that vLLM uses, so that its dashboards' queries fit.
TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
E2E_BUCKETS_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
DOOR_LABELS: Mapping[str, tuple[str, ...]] = {
    "http_requests": ("route", "status"),
    "streams_failed": ("code",),
    "http_client_timeouts": ("status",),
    "model_info": ("model_name",),
    "tls_certificate_expiry_timestamp_seconds": ("certificate_file",),
    "api_key_tokens": ("key",),
    "api_key_refusals": ("key", "limit"),
    "requests_refused_at_door": ("reason",),
}
"""Names of labels, of those metrics of the door that have any."""
STREAM_FAILURES = (
    COORDINATOR_LOST,
    "internal_error",
    NON_FINITE_LOGITS,
    REPLAY_FAILED,
    FAILED_REPEATEDLY,
    OUTPUT_TOO_LARGE,
    TIMED_OUT,
    SHUTTING_DOWN,
    "not_ready",
    "unavailable",
)
"""Codes by which failed streams are told apart; all others are `other`."""
REFUSALS_AT_DOOR = ("full", "late")
"""As `requests_refused` calls them."""
GENERATING_ROUTES = ("/v1/completions", "/v1/chat/completions")
_OUT_OF_TIME, _BEGUN = "504", "200"
"""Statuses of requests whose time is up: before their answer has begun, and behind that."""
_FROM_ZERO = ("429", "500", "503", _OUT_OF_TIME)
"""Statuses that alerts look at. They are there from the start, as codes of streams are: many fail at once,
and for Prometheus a counter that begins at fifty has not grown."""
MODEL_LABEL = "model_name"
_MODEL_INFO = "model_info"
_CERTIFICATE_EXPIRY = "tls_certificate_expiry_timestamp_seconds"
_OF_ONE_DOOR = (PREFIX + _MODEL_INFO, PREFIX + _CERTIFICATE_EXPIRY)
"""Gauges that mean nothing added up with those of other doors."""
_SERIES = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class DoorMetrics:
    """Counters and histograms of one door. Times are what its clients see."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = self._counter("http_requests", "HTTP requests answered, by route and status.")
        for route in GENERATING_ROUTES:
            for status in _FROM_ZERO:
                self.http_requests.labels(route, status)
        self.streams_failed = self._counter(
            "streams_failed",
            "Streams that ended in an error of ours after they had begun, with status 200, by code.",
        )
        for code in (*STREAM_FAILURES, "other"):
            self.streams_failed.labels(code)
        self.streams_turned_away = self._counter(
            "streams_turned_away",
            "Streams that were refused, as by status 429, after a comment had begun them with status 200.",
        )
        self.client_timeouts = self._counter(
            "http_client_timeouts",
            "Requests that ended because the time that their client gave, less than the server gives, was "
            "up, by status: 504, or 200 where a stream had begun.",
        )
        for status in (_BEGUN, _OUT_OF_TIME):
            self.client_timeouts.labels(status)
        self.in_progress = Gauge(
            f"{PREFIX}http_requests_in_progress", "HTTP requests being answered.", registry=self.registry
        )
        self._model_info = Gauge(
            PREFIX + _MODEL_INFO,
            "1 beside the loaded model's name.",
            ("model_name",),
            registry=self.registry,
        )
        self._certificate_expiry = Gauge(
            PREFIX + _CERTIFICATE_EXPIRY,
            "When the TLS certificate ends that clients of this door are shown, in Unix time.",
            DOOR_LABELS[_CERTIFICATE_EXPIRY],
            registry=self.registry,
        )
        self.aborted = self._counter("http_aborted_choices", "Choices whose client left before the end.")
        self.slow_readers = self._counter(
            "http_slow_readers", "Choices ended because their client left too much unread."
        )
        self.refused_at_door = self._counter(
            "requests_refused_at_door",
            "Requests that their door refused by itself: one that asked for no more had just been refused, "
            "for this reason.",
        )
        for reason in REFUSALS_AT_DOOR:
            self.refused_at_door.labels(reason)
        self.api_key_tokens = self._counter(
            "api_key_tokens", "Tokens of prompts and of what was generated, by API key."
        )
        self.api_key_refusals = self._counter(
            "api_key_refusals", "Requests refused because of a limit of their API key."
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", TTFT_BUCKETS_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Between two deliveries of tokens of one choice to its client.",
            ITL_BUCKETS_S,
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of one finished choice.",
            ITL_BUCKETS_S,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to its end.", E2E_BUCKETS_S
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From the arrival at the engine to the first round.", TTFT_BUCKETS_S
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the first round to the first token.", TTFT_BUCKETS_S
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the end.", E2E_BUCKETS_S
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "From the first round to the end.", E2E_BUCKETS_S
        )

    def set_models(self, *model_names: str) -> None:
        """Say which models are loaded, from now on."""
        self._model_info.clear()
        for model_name in model_names:
            self._model_info.labels(model_name).set(1)

    def set_certificate_expiry(self, certificate_file: str, timestamp_s: float) -> None:
        """Say when the certificate ends that clients are shown: seconds of Unix time."""
        self._certificate_expiry.labels(certificate_file).set(timestamp_s)

    def of_this_door(self) -> dict[str, float]:
        """Return, by its keys, what is not in `report`: the models' names and the certificate's end."""
        return {
            _key(sample): sample.value
            for gauge in (self._model_info, self._certificate_expiry)
            for family in gauge.collect()
            for sample in family.samples
        }

    def report(self) -> DoorReport:
        """Return all values by name without prefix: what can be added to those of other doors.

        What cannot be (`of_this_door`, when something was created) is left out.
        """
        counters: dict[str, float] = {}
        gauges: dict[str, float] = {}
        for family in self.registry.collect():
            if family.name in _OF_ONE_DOOR:
                continue
            values = gauges if family.type == "gauge" else counters
            values.update((_key(sample), sample.value) for sample in _lasting(family))
        return DoorReport(counters, gauges)

    def note_answer(self, route: str, status: int, *, has_own_limit: bool) -> None:
        """Count an answered request; `has_own_limit`: its client gave it less time than the server."""
        self.http_requests.labels(route, str(status)).inc()
        if has_own_limit and str(status) == _OUT_OF_TIME:
            self.client_timeouts.labels(_OUT_OF_TIME).inc()

    def note_failed_stream(self, code: str | None, *, has_own_limit: bool = False) -> None:
        """Count a stream that ended in an error after it had begun; `has_own_limit` as for an answer."""
        if has_own_limit and code == TIMED_OUT:
            self.client_timeouts.labels(_BEGUN).inc()
            return
        self.streams_failed.labels(code if code in STREAM_FAILURES else "other").inc()

    def observe_parts(self, stats: RequestStats) -> None:
        """Record how the time of a finished choice was divided, as the engine that ended it has measured."""
        started_s, first_s, end_s = stats.first_scheduled_s, stats.first_token_s, stats.finished_s
        if started_s is None or end_s is None:
            return
        self.queue_time.observe(started_s - stats.arrival_s)
        self.inference_time.observe(end_s - started_s)
        if first_s is not None:
            self.prefill_time.observe(first_s - started_s)
            self.decode_time.observe(end_s - first_s)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, DOOR_LABELS.get(name, ()), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)


class ChoiceTimer:
    """Times one choice, as its client sees it: what is delivered together counts once."""

    def __init__(self, metrics: DoorMetrics, waited_s: float = 0.0) -> None:
        """Begin now, so long after its request has arrived."""
        self._metrics = metrics
        self._start_s = perf_counter() - waited_s
        self._first_s: float | None = None
        self._last_s = self._start_s

    def observe(self, *outputs: RequestOutput) -> None:
        """Record one delivery, and the outputs in it."""
        now_s = perf_counter()
        output = outputs[-1]
        if any(one.token_ids for one in outputs):
            if self._first_s is None:
                self._first_s = now_s
                self._metrics.time_to_first_token.observe(now_s - self._start_s)
            else:
                self._metrics.inter_token_latency.observe(now_s - self._last_s)
            self._last_s = now_s
        if output.finish_reason in ("stop", "length"):
            self._metrics.e2e_latency.observe(now_s - self._start_s)
            if self._first_s is not None and output.num_generated_tokens > 1:
                decode_s = self._last_s - self._first_s
                self._metrics.time_per_output_token.observe(decode_s / (output.num_generated_tokens - 1))
            if output.stats is not None:
                self._metrics.observe_parts(output.stats)


def render(metrics: DoorMetrics, service_metrics: Mapping[str, float]) -> bytes:
    """Return the Prometheus text of the door's metrics and a service's snapshot.

    Keys of the snapshot are metric names without prefix, with labels where there are any:
    `spec_decode_num_accepted_tokens_per_pos{position="0"}`. Where it has values of the door's own metrics,
    under the keys of `DoorMetrics.report`, they are those of all doors, and told instead of this one's.
    """
    registry = CollectorRegistry()
    registry.register(_AllDoors(metrics, service_metrics))
    registry.register(_Snapshot(without_doors(metrics, service_metrics)))
    return bytes(generate_latest(registry))


def without_doors(metrics: DoorMetrics, snapshot: Mapping[str, float]) -> dict[str, float]:
    """Return a snapshot without what doors have counted."""
    of_doors = {_bare(sample) for family in metrics.registry.collect() for sample in _possible(family)}
    return {series: value for series, value in snapshot.items() if name_of(series) not in of_doors}


def told_apart(model_name: str, snapshot: Mapping[str, float]) -> dict[str, float]:
    """Return a snapshot with the model's name as a label of every series: a door may have several models."""
    label = f'{MODEL_LABEL}="{as_label(model_name)}"'
    return {_with_label(series, label): value for series, value in snapshot.items()}


def _with_label(series: str, label: str) -> str:
    name, _, labels = series.partition("{")
    return f"{name}{{{label},{labels}" if labels else f"{name}{{{label}}}"


def _possible(family: Metric) -> tuple[str, ...]:
    """Return the names of the samples that a metric may have."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
    return tuple(family.name + suffix for suffix in suffixes)


def _lasting(family: Metric) -> Iterator[Sample]:
    """Yield its samples but for when something was created."""
    names = _possible(family)
    yield from (sample for sample in family.samples if sample.name in names)


def _bare(name: str) -> str:
    return name.removeprefix(PREFIX)


def _key(sample: Sample) -> str:
    labels = ",".join(f'{name}="{as_label(value)}"' for name, value in sample.labels.items())
    return f"{_bare(sample.name)}{{{labels}}}" if labels else _bare(sample.name)


def parsed(series: str) -> tuple[str, dict[str, str]]:
    """Return name and labels of a key."""
    match = _SERIES.match(series)
    assert match is not None, f"not a series name: {series!r}"
    return match["name"], dict(_LABEL.findall(match["labels"] or ""))


class _AllDoors:
    """A prometheus_client collector over a door's metrics, with all doors' values where they are told."""

    def __init__(self, metrics: DoorMetrics, told: Mapping[str, float]) -> None:
        self._metrics = metrics
        self._told: dict[str, list[tuple[dict[str, str], float]]] = {}
        for series, value in told.items():
            name, labels = parsed(series)
            self._told.setdefault(name, []).append((labels, value))

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics.registry.collect():
            names = _possible(family)
            is_told = any(_bare(name) in self._told for name in names)
            together = Metric(family.name, family.documentation, family.type)
            together.samples = list(_lasting(family))
            if is_told:
                together.samples = [
                    Sample(name, labels, value)
                    for name in names
                    for labels, value in self._told.get(_bare(name), ())
                ]
            yield together


class _Snapshot:
    """A prometheus_client collector over a plain mapping."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for series, value in self._values.items():
            name, labels = parsed(series)
            family = _family(name)
            family = families.setdefault(family.name, family)
            suffix = "_total" if family.type == "counter" else ""
            family.add_sample(f"{PREFIX}{name}{suffix}", labels, value)
        yield from families.values()


def _family(name: str) -> Metric:
    """Return the empty family of a metric. One that is not known here (newer workers) has no type."""
    series = CLUSTER_SERIES.get(name)
    if series is None:
        return Metric(PREFIX + name, "Not known to this ingress.", "untyped")
    whole = name.rpartition("_")[0] if series.kind == "histogram" else name
    return Metric(PREFIX + whole, series.help, series.kind)
