"""The HTTP application: OpenAI's routes over any `GenerationService`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.openai.access_log import AccessLog
from deploy.openai.bodies import ModelCard, ModelList
from deploy.openai.delivery_budget import DeliveryBudget
from deploy.openai.document import OPENAPI_PATH, openapi_document
from deploy.openai.errors import (
    RETRY_AFTER_HEADER,
    SHOULD_RETRY_HEADER,
    ApiError,
    keys_unread,
    not_ready,
    too_many_logprobs,
    took_too_long,
)
from deploy.openai.failures import RequestFailures
from deploy.openai.keys import ApiKey, KeyRing, Usage
from deploy.openai.known_refusals import KnownRefusals, demand_of
from deploy.openai.logprobs import INLINE_LOGPROBS, num_logprobs_of
from deploy.openai.metrics import CONTENT_TYPE, DoorMetrics, render, told_apart, without_doors
from deploy.openai.middleware import CLIENT_CLOSED_REQUEST, ApiKeys, BodyLimit, Border
from deploy.openai.outputs import GRACE_S, ChoiceOutputs
from deploy.openai.paths import HEALTH_PATH, METRICS_PATH, TrailingSlashes
from deploy.openai.protocol import ChatBody, CompletionBody
from deploy.openai.requests import (
    ENCODING_HEADER,
    TIMEOUT_HEADER,
    BodyT,
    PreparedRequest,
    ResponseIdentity,
    check_encoding,
    limited,
    model_not_found,
    owned,
    param_of_choices,
    parse_body,
    prepare_chat,
    prepare_completion,
    time_limit,
    traced,
)
from deploy.openai.responses import ChoiceResult, complete_body
from deploy.openai.resumption import HEADER as LAST_EVENT_ID
from deploy.openai.resumption import Comeback, EventId, FailedForGood, proved
from deploy.openai.serve_headers import REQUEST_ID
from deploy.openai.settings import DoorSettings
from deploy.openai.slow_readers import SlowReaders
from deploy.openai.streaming import (
    ClientLeft,
    EventStream,
    EventStreamResponse,
    KeepAlive,
    resumed_deliveries,
    until_client_leaves,
)
from deploy.openai.tokenization import DoorTokenizer
from deploy.openai.tracing import CURRENT_TRACE, TRACE_ID_HEADER, TraceRequests, Tracing
from deploy.openai.work_beside import WorkBeside
from deploy.status import STATUS_PATH, ApplicationStatus, Status
from specdec.core.description import TargetDescription
from specdec.core.errors import CapacityError, DrafthouseError, NotReadyError, RequestFailed
from specdec.core.request import Request
from specdec.engine.service import GenerationService
from specdec.transport.status import ServiceStatus
from workers.logs import add_log_context

_METRICS_TIMEOUT_S = 5.0
_READING = ["GET", "HEAD"]
"""Methods of routes that change nothing. Monitors and load balancers send HEAD."""
ServiceT_co = TypeVar("ServiceT_co", bound=GenerationService, covariant=True)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DoorModel(Generic[ServiceT_co]):
    """One model behind the door."""

    service: ServiceT_co
    settings: DoorSettings
    tokenizer: DoorTokenizer

    def name(self) -> str | None:
        """What clients call it; None while nobody knows."""
        description = self.service.description()
        if description is None:
            return self.settings.served_model_name
        return self.settings.model_name(description)

    def require_description(self) -> TargetDescription:
        """Return facts about the target.

        Raises:
            ApiError: it is not ready.
        """
        description = self.service.description()
        if description is None:
            raise not_ready()
        return description


AnyModel = DoorModel[GenerationService]


def create_app(
    service: GenerationService,
    settings: DoorSettings,
    tokenizer: DoorTokenizer,
    ring: KeyRing | None = None,
    further: Sequence[AnyModel] = (),
    *,
    metrics: DoorMetrics | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Return the ASGI application that serves `service`, and further models beside it.

    The caller owns the services; their event loop must be the one the application runs in. `ring` has the
    keys, which can be replaced later (None: those of `settings`, for good). What is not of one model (limits
    of bodies, keys) goes by `settings`; further models have to have names in theirs. `metrics` counts what
    happens here; what the service says of metrics of these names is told instead. `tracing`, the caller's as
    well, gets the traces (`settings.tracing` says where they are to go). `app.state.snapshot()` gives the
    numbers of /metrics, but for those of this door where the service does not have them; `app.state.refusals`
    is what it has refused lately.
    """
    ring = KeyRing(settings.api_keys) if ring is None else ring
    metrics = DoorMetrics() if metrics is None else metrics
    door = _Door((DoorModel(service, settings, tokenizer), *further), ring, metrics)
    app = FastAPI(
        title="Drafthouse",
        openapi_url=None,  # FastAPI's has neither bodies nor answers: routes read and write them themselves
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(TrailingSlashes),
            # Outside of all that counts, logs and asks for keys: browsers ask first, and without a key.
            *([Middleware(CORSMiddleware, **_cross_origin(settings))] if settings.allowed_origins else []),
            *([] if tracing is None else [Middleware(TraceRequests, tracing=tracing, lets_in=ring.lets_in)]),
            *([Middleware(AccessLog)] if settings.access_log else []),
            Middleware(SlowReaders, timeout_s=settings.write_timeout_s),
            Middleware(Border, metrics=door.metrics),
            Middleware(ApiKeys, ring=ring, allowed_origins=settings.allowed_origins),
            Middleware(BodyLimit, max_body_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s),
        ],
    )
    app.add_api_route("/v1/completions", door.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", door.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", door.models, methods=_READING, response_model=None)
    app.add_api_route("/v1/models/{model:path}", door.model, methods=_READING, response_model=None)
    app.add_api_route(STATUS_PATH, door.status, methods=_READING, response_model=None)
    app.add_api_route(HEALTH_PATH, door.health, methods=_READING, response_model=None)
    app.add_api_route(METRICS_PATH, door.prometheus, methods=_READING, response_model=None)
    app.add_api_route(OPENAPI_PATH, door.document, methods=_READING, response_model=None)
    app.add_exception_handler(HTTPException, _http_failure)
    app.state.snapshot = door.snapshot
    app.state.refusals = door.refusals
    return app


class _Door:
    """The routes."""

    def __init__(self, models: tuple[AnyModel, ...], ring: KeyRing, metrics: DoorMetrics) -> None:
        self._ring = ring
        self._models = models
        self._budget = DeliveryBudget(models[0].settings.max_deliveries_per_s)
        self._failed_for_good = FailedForGood()
        self._beside = WorkBeside()
        self._start_s = int(time.time())
        self._document = msgspec.json.encode(openapi_document())
        self.metrics = metrics
        self.refusals = KnownRefusals(metrics, time.monotonic)

    async def completions(self, http: HttpRequest) -> Response:
        """POST /v1/completions."""
        return await self._generate(http, CompletionBody, prepare_completion)

    async def chat_completions(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(http, ChatBody, prepare_chat)

    async def models(self) -> Response:
        """GET /v1/models: what is loaded, which may be nothing yet."""
        loaded = [model for model in self._models if model.service.description() is not None]
        return _json(ModelList(data=[self._card(model) for model in loaded]))

    async def model(self, model: str) -> Response:
        """GET /v1/models/{id}; without an id, as GET /v1/models."""
        if not model:
            return await self.models()
        self._require_any()
        return _json(self._card(self._chosen(model)))

    async def status(self) -> Response:
        """GET /v1/status: what runs, and what the controllers have chosen."""
        services = await asyncio.gather(*(self._service_status(model) for model in self._models))
        return _json(
            Status(
                now=time.time(),
                application=self._application(self._models[0]),
                target_groups=tuple(group for one in services for group in one.target_groups),
                draft_workers=tuple(worker for one in services for worker in one.draft_workers),
            )
        )

    async def _service_status(self, model: AnyModel) -> ServiceStatus:
        """Return what a service says, with the model's name in it where there are others."""
        status = await model.service.status()
        if len(self._models) == 1:
            return status
        name = model.name()
        return ServiceStatus(
            target_groups=tuple(replace(group, model=name) for group in status.target_groups),
            draft_workers=tuple(replace(worker, model=name) for worker in status.draft_workers),
        )

    async def health(self) -> Response:
        """GET /health: 200 exactly when a request, for one of the models at least, would be tried."""
        if self._ring.why_unread is not None:
            raise keys_unread(self._ring.why_unread)
        self._require_any()
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def document(self) -> Response:
        """GET /openapi.json."""
        return Response(self._document, media_type="application/json")

    async def prometheus(self) -> Response:
        """GET /metrics: the doors' series, and those of each service that answers in time."""
        return Response(render(self.metrics, await self.snapshot()), media_type=CONTENT_TYPE)

    async def snapshot(self) -> dict[str, float]:
        """Return what all services say, by the keys that `render` takes.

        Raises:
            ApiError: one cannot tell yet what others have counted.
        """
        snapshots = await asyncio.gather(*(self._snapshot(model) for model in self._models))
        names = [model.name() for model in self._models if model.service.description() is not None]
        if names:
            self.metrics.set_models(*filter(None, names))
        together = {series: value for snapshot in snapshots for series, value in snapshot.items()}
        return together | self.metrics.of_this_door()

    async def _snapshot(self, model: AnyModel) -> dict[str, float]:
        try:
            async with asyncio.timeout(_METRICS_TIMEOUT_S):
                snapshot = dict(await model.service.metrics())
        except NotReadyError as error:
            # Rather no numbers than those of one door of several.
            raise ApiError(503, str(error), type="server_error", code="not_ready") from error
        except TimeoutError:
            # The same: who asks again would take the others' numbers for counted anew.
            message = f"the service has not said within {_METRICS_TIMEOUT_S:g} s what it has counted"
            raise ApiError(503, message, type="server_error", code="not_ready") from None
        except DrafthouseError as error:
            logger.warning("no metrics from the service: %s", error)
            return {}
        if len(self._models) == 1:
            return snapshot
        of_model = without_doors(self.metrics, snapshot)
        of_doors = {series: value for series, value in snapshot.items() if series not in of_model}
        return {**told_apart(model.name() or "", of_model), **of_doors}

    def _require_any(self) -> None:
        """Raise ApiError when no model takes requests."""
        if all(model.service.description() is None for model in self._models):
            raise not_ready()

    def _chosen(self, name: str | None) -> AnyModel:
        """Return the model of a name; without one the first.

        Raises:
            ApiError: there is no such model.
        """
        if name is None:
            return self._models[0]
        names = [model.name() for model in self._models]
        if name in names:
            return self._models[names.index(name)]
        if None in names:  # the first, whose name is in its folder: it may be this one
            raise not_ready()
        raise model_not_found(name, *filter(None, names))

    def _card(self, model: AnyModel) -> ModelCard:
        description = model.require_description()
        return ModelCard(
            id=model.settings.model_name(description),
            created=self._start_s,
            max_model_len=description.max_model_len,
            revision=description.revision,
        )

    def _application(self, first: AnyModel) -> ApplicationStatus:
        version, since = metadata.version("drafthouse"), float(self._start_s)
        description = first.service.description()
        is_loaded = [model.service.description() is not None for model in self._models]
        names = [(model.name() or "", loaded) for model, loaded in zip(self._models, is_loaded, strict=True)]
        application = ApplicationStatus(
            version=version,
            since=since,
            is_ready=any(is_loaded),
            further_models=tuple(name for name, loaded in names[1:] if loaded),
            missing_models=tuple(name for name, loaded in names if not loaded) if names[1:] else (),
        )
        if description is None:
            return application
        return replace(
            application,
            model=first.settings.model_name(description),
            revision=description.revision,
            dtype=description.dtype,
            quantization=description.quantization,
            parallelism=first.settings.parallelism,
            rule=description.rule,
            max_model_len=description.max_model_len,
        )

    async def _generate(
        self,
        http: HttpRequest,
        body_type: type[BodyT],
        prepare: Callable[
            [BodyT, TargetDescription, DoorTokenizer, DoorSettings, ResponseIdentity | None],
            Awaitable[PreparedRequest],
        ],
    ) -> Response:
        """Read a request and answer it. Its time runs from here on, also where its text waits to be read."""
        self._require_any()
        now_s = asyncio.get_running_loop().time
        with self._ring.preparing(_key_of(http), self.metrics):
            data = await http.body()
            check_encoding(http.headers.getlist(ENCODING_HEADER))
            arrived_s = now_s()
            body = parse_body(data, body_type)
            model = self._chosen(body.model)
            description = model.require_description()
            event_id, identity = _event_id(http)
            longest_s = model.settings.request_timeout_s
            limit_s = time_limit(body, http.headers.get(TIMEOUT_HEADER), longest_s)
            http.state.has_own_limit = limit_s != longest_s
            demand = demand_of(
                http.scope["path"], data, http.headers.get("authorization"), http.headers.get(TIMEOUT_HEADER)
            )
            if event_id is None:  # who comes back is not refused
                self.refusals.check(demand)
            try:
                async with asyncio.timeout(limit_s):
                    prepared = await prepare(body, description, model.tokenizer, model.settings, identity)
            except TimeoutError:
                raise took_too_long(limit_s) from None
        prepared = limited(prepared, limit_s, now_s() - arrived_s)
        try:
            return await self._respond(model, prepared, http, event_id, description, arrived_s)
        except CapacityError as refusal:
            self.refusals.note(demand, refusal, num_choices=len(prepared.requests), age_s=now_s() - arrived_s)
            raise

    async def _respond(
        self,
        model: AnyModel,
        prepared: PreparedRequest,
        http: HttpRequest,
        event_id: EventId | None,
        description: TargetDescription,
        arrived_s: float,
    ) -> Response:
        receive, settings = http.receive, model.settings
        add_log_context(request_id=prepared.response_id)
        key = _key_of(http)
        if key is not None:
            shares_prefixes = settings.share_prefixes_between_keys
            prepared = owned(
                prepared, key.digest, shares_prefixes=shares_prefixes, min_priority=key.min_priority
            )
        replay_window_s = settings.replay_window_s
        prepared = proved(
            prepared,
            None if key is None else key.digest,
            settings.resume_window_s,
            replay_window_s=replay_window_s,
        )
        comeback = (
            None
            if event_id is None
            else Comeback(event_id, prepared, replay_window_s, description.max_model_len)
        )

        def note_failure(error: Exception) -> None:
            self._failed_for_good.note(prepared.response_id, error, replay_window_s)

        failures = RequestFailures(
            prepared.response_id,
            self.metrics,
            note_failure,
            has_own_limit=prepared.limit_s != settings.request_timeout_s,
            key_name=None if key is None else key.name,
            trace=CURRENT_TRACE.get(),
        )

        def stream_of(prepared: PreparedRequest, running: Sequence[Request]) -> EventStream:
            outputs = self._outputs(model, prepared, running, key, arrived_s)
            return EventStream(prepared, outputs, model.tokenizer, self._budget, failures, self._beside)

        async def find_stream(comeback: Comeback) -> EventStream:
            resumed = await self._resume(comeback, model.service, prepared, key, arrived_s)
            stream = stream_of(resumed, comeback.running(resumed))
            delivered = await self._beside.do(comeback.delivered, resumed, model.tokenizer, description)
            stream.skip(comeback.positions, delivered, is_ended=comeback.is_ended)
            return stream

        try:
            if prepared.body.stream:
                keep_alive = KeepAlive(prepared.body, settings.stream_keep_alive_s)
                if comeback is None:
                    deliveries = stream_of(prepared, prepared.requests).deliveries(keep_alive)
                else:
                    self._failed_for_good.check(prepared.response_id)
                    deliveries = resumed_deliveries(
                        partial(find_stream, comeback), keep_alive, failures, comeback.event_id
                    )
                try:
                    # The status waits for the first delivery: a refusal is a 4xx, not an event in a 200,
                    # unless it comes after a silence that is too long for whoever is in front.
                    first = await until_client_leaves(anext(deliveries), receive)
                except BaseException:
                    await deliveries.aclose()
                    raise
                return EventStreamResponse(first, deliveries)
            outputs = self._outputs(model, prepared, prepared.requests, key, arrived_s)
            body = await until_client_leaves(self._collect(model, prepared, outputs), receive)
            return Response(body, media_type="application/json")
        except ClientLeft:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except RequestFailed as error:
            failures.note(error)
            raise

    async def _resume(
        self,
        comeback: Comeback,
        service: GenerationService,
        prepared: PreparedRequest,
        key: ApiKey | None,
        arrived_s: float,
    ) -> PreparedRequest:
        """Return the request with the tokens that were delivered, and with what is left of its time."""
        left_s = None if prepared.timeout_s is None else prepared.timeout_s + GRACE_S
        try:
            async with asyncio.timeout(left_s):
                resumed = await comeback.resume(service, self._usage(key, prepared))
        except TimeoutError:
            raise took_too_long(prepared.limit_s) from None
        return limited(resumed, prepared.limit_s, asyncio.get_running_loop().time() - arrived_s)

    def _outputs(
        self,
        model: AnyModel,
        prepared: PreparedRequest,
        running: Sequence[Request],
        key: ApiKey | None,
        arrived_s: float,
    ) -> ChoiceOutputs:
        trace = CURRENT_TRACE.get()
        if trace is not None:
            trace.note_prepared(prepared)
            running = traced(running) if trace.is_recorded else running
        return ChoiceOutputs(
            model.service,
            running,
            self.metrics,
            self._usage(key, prepared),
            timeout_s=prepared.timeout_s,
            limit_s=prepared.limit_s,
            max_unread=model.settings.max_unread_outputs,
            trace=trace,
            arrived_s=arrived_s,
        )

    def _usage(self, key: ApiKey | None, prepared: PreparedRequest) -> Usage:
        return self._ring.usage(
            key,
            num_choices=len(prepared.requests),
            param=param_of_choices(prepared.body),
            num_prompt_tokens=prepared.num_prompt_tokens,
            metrics=self.metrics,
        )

    async def _collect(self, model: AnyModel, prepared: PreparedRequest, outputs: ChoiceOutputs) -> bytes:
        results = [ChoiceResult() for _ in prepared.requests]
        num_logprobs, most = 0, model.settings.max_logprobs
        are_told = prepared.body.num_logprobs is not None
        async with outputs:
            async for index, output in outputs:
                num_logprobs += num_logprobs_of(output, are_told=are_told)
                if num_logprobs > most:
                    raise too_many_logprobs(num_logprobs, most, "logprobs")
                results[index].add(output)
                outputs.note_delivery([(index, output)])  # as it comes: its client gets it all at the end
        if num_logprobs <= INLINE_LOGPROBS:
            return complete_body(prepared, results, model.tokenizer)
        return await self._beside.do(complete_body, prepared, results, model.tokenizer)


def _key_of(http: HttpRequest) -> ApiKey | None:
    return getattr(http.state, "api_key", None)


def _event_id(http: HttpRequest) -> tuple[EventId | None, ResponseIdentity | None]:
    """Return where the client comes back to, if it does, and in which response."""
    text = http.headers.get(LAST_EVENT_ID)
    if not text:
        return None, None
    event_id = EventId.parse(text)
    return event_id, ResponseIdentity.of(event_id.response_id)


def _cross_origin(settings: DoorSettings) -> dict[str, Any]:
    return {
        "allow_origins": settings.allowed_origins,
        "allow_methods": (*_READING, "POST"),
        "allow_headers": ("*",),  # those of OpenAI's library are many, and no page sends what it may not
        "expose_headers": (RETRY_AFTER_HEADER, SHOULD_RETRY_HEADER, TRACE_ID_HEADER, REQUEST_ID),
    }


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _http_failure(http: HttpRequest, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"Unknown request URL: {http.method} {http.url.path}."
    elif error.status_code == 405:
        message = f"Not allowed: {http.method} {http.url.path}."
    else:
        message = str(error.detail)
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()
