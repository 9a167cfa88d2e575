"""The HTTP application: OpenAI's routes over any `GenerationService`."""

from __future__ import annotations

import asyncio
import logging
import time
from importlib import metadata

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.openai.access_log import AccessLog
from deploy.openai.bodies import ModelCard, ModelList
from deploy.openai.document import OPENAPI_PATH, openapi_document
from deploy.openai.errors import ApiError, not_ready
from deploy.openai.keys import ApiKey, KeyRing, Usage
from deploy.openai.metrics import CONTENT_TYPE, DoorMetrics, render
from deploy.openai.middleware import CLIENT_CLOSED_REQUEST, ApiKeys, BodyLimit, Border
from deploy.openai.outputs import ChoiceOutputs
from deploy.openai.protocol import ChatBody, CompletionBody
from deploy.openai.requests import (
    TIMEOUT_HEADER,
    PreparedRequest,
    ResponseIdentity,
    limited,
    model_not_found,
    owned,
    parse_body,
    prepare_chat,
    prepare_completion,
    traced,
)
from deploy.openai.responses import ChoiceResult, complete_body
from deploy.openai.resumption import HEADER as LAST_EVENT_ID
from deploy.openai.resumption import Comeback, EventId, proved
from deploy.openai.settings import DoorSettings
from deploy.openai.slow_readers import SlowReaders
from deploy.openai.streaming import ClientLeft, EventStream, EventStreamResponse, until_client_leaves
from deploy.openai.tokenization import DoorTokenizer
from deploy.openai.tracing import CURRENT_TRACE, TraceRequests, Tracing
from deploy.status import STATUS_PATH, ApplicationStatus, Status
from specdec.core.description import TargetDescription
from specdec.core.errors import DrafthouseError
from specdec.engine.service import GenerationService
from workers.logs import add_log_context

_METRICS_TIMEOUT_S = 5.0
logger = logging.getLogger(__name__)


def create_app(
    service: GenerationService,
    settings: DoorSettings,
    tokenizer: DoorTokenizer,
    ring: KeyRing | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Return the ASGI application that serves `service`.

    The caller owns `service`; its event loop must be the one the application runs in. Through `ring`, which
    begins with the keys of `settings`, keys can be replaced later. `tracing`, the caller's as well, gets the
    traces (`settings.tracing` says where they are to go).
    """
    ring = KeyRing(settings.api_keys) if ring is None else ring
    door = _Door(service, settings, tokenizer, ring)
    app = FastAPI(
        title="Drafthouse",
        openapi_url=None,  # FastAPI's has neither bodies nor answers: routes read and write them themselves
        docs_url=None,
        redoc_url=None,
        middleware=[
            *([] if tracing is None else [Middleware(TraceRequests, tracing=tracing)]),
            *([Middleware(AccessLog)] if settings.access_log else []),
            Middleware(SlowReaders, timeout_s=settings.write_timeout_s),
            Middleware(Border, metrics=door.metrics),
            Middleware(ApiKeys, ring=ring),
            Middleware(BodyLimit, max_body_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s),
        ],
    )
    app.add_api_route("/v1/completions", door.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", door.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", door.models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{model:path}", door.model, methods=["GET"], response_model=None)
    app.add_api_route(STATUS_PATH, door.status, methods=["GET"], response_model=None)
    app.add_api_route("/health", door.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", door.prometheus, methods=["GET"], response_model=None)
    app.add_api_route(OPENAPI_PATH, door.document, methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, _http_failure)
    return app


class _Door:
    """The routes."""

    def __init__(
        self, service: GenerationService, settings: DoorSettings, tokenizer: DoorTokenizer, ring: KeyRing
    ) -> None:
        self._ring = ring
        self._service = service
        self._settings = settings
        self._tokenizer = tokenizer
        self._start_s = int(time.time())
        self._document = msgspec.json.encode(openapi_document())
        self.metrics = DoorMetrics()

    async def completions(self, http: HttpRequest) -> Response:
        """POST /v1/completions."""
        description = self._description()
        body = parse_body(await http.body(), CompletionBody)
        event_id, identity = _event_id(http)
        prepared = await prepare_completion(body, description, self._tokenizer, self._settings, identity)
        return await self._respond(prepared, http, event_id, description)

    async def chat_completions(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        description = self._description()
        body = parse_body(await http.body(), ChatBody)
        event_id, identity = _event_id(http)
        prepared = await prepare_chat(body, description, self._tokenizer, self._settings, identity)
        return await self._respond(prepared, http, event_id, description)

    async def models(self) -> Response:
        """GET /v1/models: what is loaded, which may be nothing yet."""
        description = self._service.description()
        return _json(ModelList(data=[self._card(description)] if description else []))

    async def model(self, model: str) -> Response:
        """GET /v1/models/{id}."""
        description = self._description()
        if model != self._settings.model_name(description):
            raise model_not_found(model, self._settings.model_name(description))
        return _json(self._card(description))

    async def status(self) -> Response:
        """GET /v1/status: what runs, and what the controllers have chosen."""
        description = self._service.description()
        service = await self._service.status()
        return _json(
            Status(
                now=time.time(),
                application=self._application(description),
                target_groups=service.target_groups,
                draft_workers=service.draft_workers,
            )
        )

    async def health(self) -> Response:
        """GET /health: 200 exactly when a request would be tried."""
        self._description()
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def document(self) -> Response:
        """GET /openapi.json."""
        return Response(self._document, media_type="application/json")

    async def prometheus(self) -> Response:
        """GET /metrics: the door's series, and those of the service when it answers in time."""
        try:
            async with asyncio.timeout(_METRICS_TIMEOUT_S):
                snapshot = dict(await self._service.metrics())
        except (TimeoutError, DrafthouseError) as error:
            logger.warning("no metrics from the service: %s", str(error) or type(error).__name__)
            snapshot = {}
        if (description := self._service.description()) is not None:
            self.metrics.set_model(self._settings.model_name(description))
        return Response(render(self.metrics, snapshot), media_type=CONTENT_TYPE)

    def _description(self) -> TargetDescription:
        description = self._service.description()
        if description is None:
            raise not_ready()
        return description

    def _card(self, description: TargetDescription) -> ModelCard:
        return ModelCard(
            id=self._settings.model_name(description),
            created=self._start_s,
            max_model_len=description.max_model_len,
            revision=description.revision,
        )

    def _application(self, description: TargetDescription | None) -> ApplicationStatus:
        version, since = metadata.version("drafthouse"), float(self._start_s)
        if description is None:
            return ApplicationStatus(version=version, since=since, is_ready=False)
        return ApplicationStatus(
            version=version,
            since=since,
            is_ready=True,
            model=self._settings.model_name(description),
            revision=description.revision,
            dtype=description.dtype,
            quantization=description.quantization,
            parallelism=self._settings.parallelism,
            rule=description.rule,
            max_model_len=description.max_model_len,
        )

    async def _respond(
        self,
        prepared: PreparedRequest,
        http: HttpRequest,
        event_id: EventId | None,
        description: TargetDescription,
    ) -> Response:
        receive = http.receive
        add_log_context(request_id=prepared.response_id)
        key: ApiKey | None = getattr(http.state, "api_key", None)
        if key is not None:
            shares_prefixes = self._settings.share_prefixes_between_keys
            prepared = owned(prepared, key.digest, shares_prefixes=shares_prefixes)
        longest_s = self._settings.request_timeout_s
        prepared = limited(prepared, http.headers.get(TIMEOUT_HEADER), longest_s)
        window_s = self._settings.resume_window_s
        prepared = proved(prepared, None if key is None else key.digest, window_s)
        comeback = None if event_id is None else Comeback(event_id, prepared, window_s)
        try:
            if comeback is not None:
                usage = self._usage(key, prepared)
                prepared = await until_client_leaves(comeback.resume(self._service, usage), receive)
            running = prepared.requests if comeback is None else comeback.running(prepared)
            trace = CURRENT_TRACE.get()
            if trace is not None:
                trace.note_prepared(prepared)
                running = traced(running) if trace.is_recorded else running
            outputs = ChoiceOutputs(
                self._service,
                running,
                self.metrics,
                self._usage(key, prepared),
                timeout_s=prepared.timeout_s,
                max_unread=self._settings.max_unread_outputs,
                trace=trace,
            )
            if prepared.body.stream:
                stream = EventStream(prepared, outputs, self._tokenizer)
                if comeback is not None:
                    delivered = comeback.delivered(prepared, self._tokenizer, description)
                    stream.skip(comeback.positions, delivered, is_ended=comeback.is_ended)
                events = stream.events()
                try:
                    # The status waits for the first event: a refusal is a 4xx, not an event in a 200.
                    first = await until_client_leaves(anext(events), receive)
                except BaseException:
                    await events.aclose()
                    raise
                return EventStreamResponse(first, events)
            body = await until_client_leaves(self._collect(prepared, outputs), receive)
            return Response(body, media_type="application/json")
        except ClientLeft:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    def _usage(self, key: ApiKey | None, prepared: PreparedRequest) -> Usage:
        return self._ring.usage(
            key,
            num_choices=len(prepared.requests),
            num_prompt_tokens=prepared.num_prompt_tokens,
            metrics=self.metrics,
        )

    async def _collect(self, prepared: PreparedRequest, outputs: ChoiceOutputs) -> bytes:
        results = [ChoiceResult() for _ in prepared.requests]
        async with outputs:
            async for index, output in outputs:
                results[index].add(output)
        return complete_body(prepared, results, self._tokenizer)


def _event_id(http: HttpRequest) -> tuple[EventId | None, ResponseIdentity | None]:
    """Return where the client comes back to, if it does, and in which response."""
    text = http.headers.get(LAST_EVENT_ID)
    if not text:
        return None, None
    event_id = EventId.parse(text)
    return event_id, ResponseIdentity.of(event_id.response_id)


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
