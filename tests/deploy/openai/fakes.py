"""A service that answers from a script, and the door around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from deploy.openai.app import DoorModel, create_app
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.description import TargetDescription
from specdec.core.ids import RequestId
from specdec.core.outputs import (
    FinishReason,
    RequestOutput,
    RequestStats,
    SpeculationStats,
    TokenLogprobs,
)
from specdec.core.request import Request
from specdec.transport.status import ServiceStatus
from tests.architectures import make_tokenizer

DESCRIPTION = TargetDescription(
    model_id="scripted",
    revision="0123456789abcdef",
    dtype="float32",
    vocab_size=128,
    max_model_len=256,
    eos_token_ids=(0,),
    num_blocks=64,
    block_size=16,
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PIECES = ("def ", "f(", "x", "):", " pass")


@dataclass
class ScriptedService:
    """Answers every request with the same pieces, one token each, and remembers what it was asked."""

    pieces: tuple[str, ...] = PIECES
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None
    is_ready: bool = True
    described: TargetDescription = DESCRIPTION
    refuse_with: Exception | None = None
    """Raised instead of the first output."""
    fail_after: int | None = None
    """Number of pieces after which `failure` happens."""
    failure: Exception | None = None
    """None: an output with finish reason "error"."""
    hold_at: int | None = None
    """Number of pieces after which the stream waits for `release`."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Request] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    closed: list[RequestId] = field(default_factory=list)
    recalls: list[tuple[tuple[str, ...], bytes]] = field(default_factory=list)
    remembered: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """What is told of streams whose client comes back."""
    snapshot: Mapping[str, float] = field(default_factory=dict)
    service_status: ServiceStatus = field(default_factory=ServiceStatus)

    def description(self) -> TargetDescription | None:
        return self.described if self.is_ready else None

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        self.requests.append(request)
        try:
            if self.refuse_with is not None:
                raise self.refuse_with
            for index, text in enumerate(self.pieces):
                if index == self.hold_at:
                    await self.release.wait()
                if index == self.fail_after:
                    if self.failure is not None:
                        raise self.failure
                    yield self._output(request, index, "", "error")
                    return
                is_last = index == len(self.pieces) - 1
                yield self._output(request, index, text, self.finish_reason if is_last else None)
                await asyncio.sleep(0)
        finally:
            self.closed.append(request.request_id)

    async def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    async def recall(self, names: Sequence[str], proof: bytes) -> Sequence[tuple[str, tuple[int, ...]]]:
        self.recalls.append((tuple(names), proof))
        return self.remembered

    async def metrics(self) -> Mapping[str, float]:
        return self.snapshot

    async def status(self) -> ServiceStatus:
        return self.service_status

    def _output(
        self, request: Request, index: int, text: str, finish_reason: FinishReason | None
    ) -> RequestOutput:
        logprobs = None
        if request.params.logprobs is not None:
            top = tuple((index + 5 + rank, -0.5 - rank) for rank in range(request.params.logprobs))
            logprobs = (TokenLogprobs(index + 5, -0.5, top),)
        stats = None
        if finish_reason is not None:
            speculation = SpeculationStats(
                num_drafts=2,
                num_draft_tokens=6,
                num_accepted_tokens=3,
                per_step_drafted=[4, 2],
                per_step_accepted=[1, 2],
            )
            stats = RequestStats(arrival_s=0.0, num_cached_prompt_tokens=2, speculation=speculation)
        is_error = finish_reason == "error"
        return RequestOutput(
            request_id=request.request_id,
            epoch=request.epoch,
            first_index=index,
            token_ids=() if is_error else (index + 5,),
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=self.stop_reason if finish_reason else None,
            error="logits are not finite" if is_error else None,
            error_code="non_finite_logits" if is_error else None,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_generated_tokens=index + (not is_error),
            stats=stats,
        )


@dataclass
class Door:
    """The application over a scripted service, and a client that talks to it in process."""

    service: ScriptedService = field(default_factory=ScriptedService)
    settings: DoorSettings = field(default_factory=DoorSettings)
    further: Mapping[str, ScriptedService] = field(default_factory=dict)
    """Further models by name."""

    def __post_init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer = HuggingFaceTokenizer(self.tokenizer)
        others = [
            DoorModel(service, DoorSettings(served_model_name=name), tokenizer)
            for name, service in self.further.items()
        ]
        self.app: FastAPI = create_app(self.service, self.settings, tokenizer, further=others)

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            return await client.request(method, path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self.send("GET", path, **options))

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Send a JSON body, or what `options` say (`content=` for raw bytes)."""
        content = {} if body is None else {"json": body}
        return asyncio.run(self.send("POST", path, **content, **options))

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "abc", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], **fields})


def events_of(response: httpx.Response) -> list[tuple[str | None, Any]]:
    """Split an SSE body into (id, decoded data); `[DONE]` stays a string."""
    events = []
    for block in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Check that a response has OpenAI's error shape, and return its inside."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error
