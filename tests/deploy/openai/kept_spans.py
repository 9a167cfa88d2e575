"""A door whose spans are kept in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from deploy.openai.app import create_app
from deploy.openai.keys import ApiKey
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from deploy.openai.tracing import Tracing
from tests.architectures import make_tokenizer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """An application whose spans are kept."""

    def __init__(self, service: Any, ratio: float = 1.0, keys: tuple[ApiKey, ...] = ()) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(ratio))
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)
        self.app = create_app(
            service,
            DoorSettings(access_log=True, api_keys=keys),
            HuggingFaceTokenizer(make_tokenizer()),
            tracing=self.tracing,
        )

    def post(
        self, body: Any, path: str = "/v1/completions", mounted_at: str = "", **headers: str
    ) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, root_path=mounted_at)
            async with httpx.AsyncClient(transport=transport, base_url="http://door", timeout=60) as client:
                return await client.post(path, json=body, headers=headers)

        return asyncio.run(send())

    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans() if span.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
