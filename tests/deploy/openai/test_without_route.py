"""A proxy without a route: for a moment, and no answer to what was asked."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from ray.serve._private.http_util import convert_object_to_asgi_messages
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from deploy.batch.answers import is_without_route
from deploy.openai.without_route import WithoutRoute
from tests.deploy.openai.fakes import error_of


async def without_route(scope: Scope, receive: Receive, send: Send) -> None:
    """As Serve's proxy answers."""
    text = f"Path '{scope['path']}' not found. Ping http://.../-/routes for available routes."
    for message in convert_object_to_asgi_messages(text, status_code=404):
        await send(message)


async def without_model(scope: Scope, receive: Receive, send: Send) -> None:
    """As a door answers."""
    await JSONResponse({"error": {"code": "model_not_found"}}, 404)(scope, receive, send)


def post(app: WithoutRoute, path: str) -> httpx.Response:
    async def sent() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            return await client.post(path, json={})

    return asyncio.run(sent())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/completions/"])
def test_who_asks_a_proxy_that_has_not_heard_of_doors_is_to_ask_again(path: str) -> None:
    answer = post(WithoutRoute(without_route), path)
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "not_ready"
    assert int(answer.headers["retry-after"]) >= 1


def test_what_serve_says_of_other_paths_and_doors_say_themselves_stays() -> None:
    other = post(WithoutRoute(without_route), "/other")
    assert other.status_code == 404
    assert is_without_route(other)
    answer = post(WithoutRoute(without_model), "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
