"""OpenTelemetry traces of requests (extra `tracing`): off unless configured.

    POST /v1/completions        from the request's arrival to the last byte of its answer
      generate                  each choice, at the engine that ended it
        queue                   until it was first scheduled
        prefill                 until its first token
        decode                  until its last one

Rounds are events of `prefill` (the one with the first token) and `decode`: propose, verify, commit. Of a
long text the first ones are told one by one, then ever fewer; sums over all are attributes of `generate`.
Spans are made when a choice has ended, from what the engine has measured (`RequestStats`): durations are
those of its clock, and its last moment is when the door heard of it. No span holds text of a request.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.paths import is_api
from specdec.core.config import StrictConfig
from specdec.core.errors import ConfigError
from specdec.core.extras import how_to_install
from specdec.core.outputs import RequestOutput, RequestStats, TracedRound
from workers.logs import add_log_context

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

    from deploy.openai.requests import PreparedRequest

TRACE_ID_HEADER = "x-trace-id"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_NS = 1e9


class TracingConfig(StrictConfig):
    """Where traces go."""

    endpoint: str = Field(pattern=r"^https?://")
    """URL of a collector that takes OTLP over HTTP, such as http://collector:4318/v1/traces. Headers for it
    (a token) are read from the environment: OTEL_EXPORTER_OTLP_HEADERS."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that are traced, of those whose `traceparent` does not say whether they are."""
    service_name: str = Field(default="drafthouse", min_length=1)
    """What the collector calls this server."""


def require_exporter() -> None:
    """Check that the extra is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = importlib.util.find_spec(_EXPORTER)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(f"http.tracing: needs more packages: {how_to_install('tracing')}")


class Tracing:
    """Begins a trace for every request to the API."""

    def __init__(self, provider: TracerProvider) -> None:
        """Give spans to `provider`, which `close` shuts down."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("drafthouse")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, config: TracingConfig) -> Self:
        """Send spans to a collector, in a thread of their own; what it does not take in time is lost.

        Raises:
            ConfigError: the extra is not installed.
        """
        require_exporter()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        provider = TracerProvider(
            resource=Resource.create({"service.name": config.service_name}),
            sampler=ParentBasedTraceIdRatio(config.sample_ratio),
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint)))
        return cls(provider)

    def close(self) -> None:
        """Send what there is, and end."""
        self._provider.shutdown()

    def begin(self, scope: Scope, *, is_known: bool) -> RequestTrace:
        """Begin the trace of a request, or go on with the one that its `traceparent` names.

        The latter for clients that are known alone: this header decides what is traced, and with it what a
        collector has to hold.
        """
        from opentelemetry.trace import SpanKind

        headers = Headers(scope=scope).items() if is_known else ()
        carrier = {name: value for name, value in headers if name.startswith("trace")}
        span = self._tracer.start_span(
            scope["method"],  # `end` adds the route: a path may hold anything
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"]},
        )
        return RequestTrace(self._tracer, span, scope["method"])


class RequestTrace:
    """The spans of one HTTP request."""

    def __init__(self, tracer: Tracer, span: Span, method: str) -> None:
        self._tracer = tracer
        self._span = span
        self._method = method
        self._failure: str | None = None
        self.trace_id = format(span.get_span_context().trace_id, "032x")

    @property
    def is_recorded(self) -> bool:
        """Whether anybody will see it."""
        return self._span.is_recording()

    def note_prepared(self, prepared: PreparedRequest) -> None:
        """Say what was asked for, in numbers."""
        self._span.set_attributes(
            {
                "drafthouse.request_id": prepared.response_id,
                "gen_ai.request.model": prepared.model,
                "gen_ai.usage.input_tokens": prepared.num_prompt_tokens,
                "drafthouse.num_choices": len(prepared.requests),
                "drafthouse.stream": prepared.body.stream,
            }
        )

    def note_choice(self, index: int, output: RequestOutput) -> None:
        """Make the spans of a choice, now that its last output is here."""
        stats = output.stats
        if stats is None or stats.finished_s is None or not self.is_recorded:
            return
        life = _Life(stats, stats.finished_s, time.time_ns())
        generate = self._start("generate", self._span, life.at_ns(stats.arrival_s))
        generate.set_attributes(
            {
                "drafthouse.choice": index,
                "drafthouse.epoch": int(output.epoch),
                "gen_ai.usage.output_tokens": output.num_generated_tokens,
                "gen_ai.response.finish_reasons": [str(output.finish_reason)],
                "drafthouse.num_cached_prompt_tokens": stats.num_cached_prompt_tokens,
                "drafthouse.num_preemptions": stats.num_preemptions,
                "drafthouse.num_draft_tokens": stats.speculation.num_draft_tokens,
                "drafthouse.num_accepted_draft_tokens": stats.speculation.num_accepted_tokens,
                **_sums(stats),
            }
        )
        rounds = stats.trace.rounds if stats.trace is not None else []
        for name, begun_s, ended_s in life.parts():
            part = self._start(name, generate, life.at_ns(begun_s))
            if name != "queue":
                for one in rounds:
                    if begun_s < one.verified_s <= ended_s:
                        _add_events(part, one, life)
            part.end(life.at_ns(ended_s))
        generate.end(life.at_ns(life.finished_s))

    def note_failure(self, code: str) -> None:
        """Say that the request has failed, whatever its status says: a stream may have begun with 200."""
        self._failure = code

    def end(self, status: int | None, route: str | None) -> None:
        """End it with the status that the client has got; None: it has left, or the connection was cut."""
        from opentelemetry.trace import StatusCode

        if route is not None:
            self._span.update_name(f"{self._method} {route}")
            self._span.set_attribute("http.route", route)
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if self._failure is not None:
            self._span.set_attribute("error.type", self._failure)
        if status is None or status >= 500 or self._failure is not None:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _start(self, name: str, parent: Span, start_ns: int) -> Span:
        from opentelemetry.trace import set_span_in_context

        return self._tracer.start_span(name, context=set_span_in_context(parent), start_time=start_ns)


class _Life:
    """The times of a choice, by the engine's clock and by the wall's."""

    def __init__(self, stats: RequestStats, finished_s: float, finished_ns: int) -> None:
        self._stats = stats
        self.finished_s = finished_s
        self._finished_ns = finished_ns

    def at_ns(self, engine_s: float) -> int:
        return self._finished_ns - int((self.finished_s - engine_s) * _NS)

    def parts(self) -> list[tuple[str, float, float]]:
        """Name, begin and end of each part that there was."""
        stats = self._stats
        scheduled_s = self.finished_s if stats.first_scheduled_s is None else stats.first_scheduled_s
        first_s = self.finished_s if stats.first_token_s is None else stats.first_token_s
        parts = [("queue", stats.arrival_s, scheduled_s)]
        if stats.first_scheduled_s is not None:
            parts.append(("prefill", scheduled_s, first_s))
        if stats.first_token_s is not None:
            parts.append(("decode", first_s, self.finished_s))
        return parts


def _sums(stats: RequestStats) -> dict[str, float]:
    trace = stats.trace
    if trace is None:
        return {}
    return {
        "drafthouse.num_rounds": trace.num_rounds,
        "drafthouse.propose_seconds": trace.propose_s,
        "drafthouse.verify_seconds": trace.verify_s,
        "drafthouse.commit_seconds": trace.commit_s,
    }


def _add_events(span: Span, one: TracedRound, life: _Life) -> None:
    propose = {"num_draft_tokens": one.num_drafted, "seconds": one.proposed_s - one.propose_s}
    verify = {"seconds": one.verified_s - one.verify_s}
    commit = {"num_tokens": one.num_committed, "seconds": one.committed_s - one.verified_s}
    moments = (("propose", one.propose_s, propose), ("verify", one.verify_s, verify))
    for name, begun_s, measured in (*moments, ("commit", one.verified_s, commit)):
        attributes: dict[str, Any] = {"round": one.index, **measured}
        span.add_event(name, attributes, timestamp=life.at_ns(begun_s))


CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("drafthouse_trace", default=None)
"""The trace of the request that the present task serves."""


class TraceRequests:
    """ASGI middleware: a span around every request to the API, whose trace id the answer tells."""

    def __init__(self, app: ASGIApp, tracing: Tracing, lets_in: Callable[[str | None], bool]) -> None:
        """`lets_in`: whether a client with such an Authorization header is one of ours."""
        self._app = app
        self._tracing = tracing
        self._lets_in = lets_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not is_api(scope):
            await self._app(scope, receive, send)
            return
        is_known = self._lets_in(Headers(scope=scope).get("authorization"))
        trace = self._tracing.begin(scope, is_known=is_known)
        status: int | None = None

        async def send_with_trace_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[TRACE_ID_HEADER] = trace.trace_id
            await send(message)

        CURRENT_TRACE.set(trace)
        add_log_context(trace_id=trace.trace_id)
        try:
            await self._app(scope, receive, send_with_trace_id)
        except BaseException:
            status = None
            raise
        finally:
            trace.end(status, getattr(scope.get("route"), "path", None))
