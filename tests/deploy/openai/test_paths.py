"""Which paths take an API key, whatever the application is mounted at."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette._utils import get_route_path

from deploy.openai.keys import ApiKey, digest_api_key
from deploy.openai.paths import route_path
from deploy.openai.settings import DoorSettings
from tests.deploy.openai.fakes import Door, error_of

KEY = "a key"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
PREFIXES = ("", "/llm", "/llm/v1", "/v1", "/health")


def ask(method: str, path: str, prefix: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """Send a request as Ray Serve's proxy hands it on under `route_prefix: PREFIX`."""
    door = Door(settings=DoorSettings(api_keys=(ApiKey(name="k", digest=digest_api_key(KEY)),)))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(door.app, root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            body = {"prompt": "abc"} if method == "POST" else None
            return await client.request(method, f"{prefix}{path}", json=body, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/completions/"),
        ("GET", "/v1/models"),
        ("HEAD", "/v1/models"),
        ("GET", "/v1/models/"),
        ("GET", "/v1/models/scripted"),
        ("GET", "/v1/models/scripted/"),
        ("GET", "/v1/status"),
    ],
)
def test_the_api_takes_a_key(prefix: str, method: str, path: str) -> None:
    refused = ask(method, path, prefix)
    assert refused.status_code == 401
    if method != "HEAD":
        error_of(refused)
    assert ask(method, path, prefix, WITH_KEY).status_code == 200


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json"])
def test_what_is_open_takes_none(prefix: str, path: str) -> None:
    assert ask("GET", path, prefix).status_code == 200
    assert ask("HEAD", path, prefix).status_code == 200
    assert ask("GET", f"{path}/", prefix).status_code == 200


@pytest.mark.parametrize("prefix", ["", "/llm"])
@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v2/models", "/healthy", "/metrics/x", "/health//x", "/health//", "/docs"]
)
def test_whatever_else_there_is_takes_one(prefix: str, path: str) -> None:
    assert ask("GET", path, prefix).status_code == 401
    unknown = ask("GET", path, prefix, WITH_KEY)
    assert unknown.status_code == 404
    assert error_of(unknown)["message"].startswith("Unknown request URL: GET /")


def test_a_route_that_is_added_takes_one() -> None:
    door = Door(settings=DoorSettings(api_keys=(ApiKey(name="k", digest=digest_api_key(KEY)),)))

    async def further() -> dict[str, bool]:
        return {"ok": True}

    door.app.add_api_route("/further", further)
    assert door.get("/further").status_code == 401
    assert door.get("/further", headers=WITH_KEY).status_code == 200


@given(
    path=st.lists(st.sampled_from(["/", "llm", "v1", "x", "health"]), max_size=6).map("".join),
    mounted_at=st.lists(st.sampled_from(["/", "llm", "v1", "x"]), max_size=3).map("".join),
)
def test_the_path_is_the_one_that_routes_are_found_by(path: str, mounted_at: str) -> None:
    scope = {"type": "http", "path": path, "root_path": mounted_at}
    assert route_path(scope) == get_route_path(scope)
    assert route_path({"type": "http", "path": path}) == path
