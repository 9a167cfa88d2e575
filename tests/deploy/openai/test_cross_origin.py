"""Pages of other web sites: which may ask, and what their scripts may read (CORS)."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from pydantic import ValidationError

from deploy.config import DrafthouseConfig, HttpConfig
from deploy.door_settings import door_settings
from deploy.openai.keys import ApiKey, digest_api_key
from deploy.openai.settings import DoorSettings
from specdec.core.errors import CapacityError
from tests.deploy.openai.fakes import Door, ScriptedService

SITE = "https://chat.example.com"
KEY = "a key"
KEYS = (ApiKey(name="k", digest=digest_api_key(KEY)),)


def door_of(*origins: str, service: ScriptedService | None = None) -> Door:
    return Door(service or ScriptedService(), DoorSettings(api_keys=KEYS, allowed_origins=origins))


def preflight(door: Door, origin: str, method: str = "POST") -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,last-event-id",
    }
    return asyncio.run(door.send("OPTIONS", "/v1/chat/completions", headers=headers))


def post(door: Door, origin: str, key: str = KEY) -> httpx.Response:
    headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
    return door.post("/v1/completions", {"prompt": "abc"}, headers=headers)


@pytest.mark.parametrize("origins", [(SITE,), ("http://other.example", SITE), ("*",)])
def test_an_allowed_site_asks_first_and_without_a_key(origins: tuple[str, ...]) -> None:
    door = door_of(*origins)
    answer = preflight(door, SITE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else SITE)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers, "keys are no cookies"
    assert not door.service.requests
    assert preflight(door, SITE, "DELETE").status_code == 400
    answer = post(door, SITE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else SITE)


def test_scripts_see_errors_and_how_long_to_wait() -> None:
    door = door_of(SITE, service=ScriptedService(refuse_with=CapacityError("full", retry_after_s=2)))
    for answer, status in ((post(door, SITE), 429), (post(door, SITE, "wrong"), 401)):
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == SITE
        exposed = answer.headers["access-control-expose-headers"].lower()
        assert {"retry-after", "x-should-retry", "x-trace-id", "x-request-id"} <= set(exposed.split(", "))


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example.com", f"{SITE}.evil.example", "null"]
)
def test_another_site_is_not_allowed(origin: str) -> None:
    door = door_of(SITE)
    answer = preflight(door, origin)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in post(door, origin).headers


def test_by_default_no_site_is() -> None:
    door = door_of()
    answer = preflight(door, SITE)
    assert answer.status_code == 401, "an OPTIONS like any other"
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert not [name for name in post(door, SITE).headers if name.startswith("access-control")]


def test_a_request_of_no_page_is_served_as_ever() -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert door_of(SITE).post("/v1/completions", {"prompt": "abc"}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:81", "http://127.0.0.2", "http://[::1"]
)
def test_without_keys_pages_of_other_sites_start_nothing(origin: str) -> None:
    """A browser sends text without asking first; that the page cannot read the answer helps nobody."""
    door = Door()
    headers = {"Origin": origin, "Content-Type": "text/plain", "Host": "127.0.0.1"}
    answer = door.post("/v1/completions", content=b'{"prompt": "abc"}', headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert origin in answer.json()["error"]["message"]
    assert not door.service.requests
    assert door.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("allowed", "headers"),
    [
        ((), {}),
        ((), {"Origin": "http://localhost:8000", "Host": "localhost:8000"}),
        ((), {"Origin": "http://127.0.0.1:8000", "Host": "127.0.0.1:8000"}),
        ((), {"Origin": "http://[::1]:8000", "Host": "[::1]:8000"}),
        ((), {"Origin": "https://10.0.0.7", "X-Forwarded-Host": "10.0.0.7"}),
        ((), {"Origin": "https://10.0.0.7", "X-Forwarded-Host": "10.0.0.7, inner.example"}),
        ((), {"Origin": "https://10.0.0.7", "Sec-Fetch-Site": "same-origin"}),
        ((SITE,), {"Origin": SITE}),
        ((SITE,), {"Origin": SITE, "Host": "chat.example.com", "Sec-Fetch-Site": "same-origin"}),
        (("*",), {"Origin": "null"}),
    ],
)
def test_without_keys_others_are_served(allowed: tuple[str, ...], headers: dict[str, str]) -> None:
    door = Door(settings=DoorSettings(allowed_origins=allowed))
    assert door.post("/v1/completions", {"prompt": "abc"}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "same-origin"}, {}, {"X-Forwarded-Host": "evil.example:8000"}]
)
def test_without_keys_a_name_that_leads_here_for_a_moment_starts_nothing(headers: dict[str, str]) -> None:
    """The page was read from another place of the same name: for its browser this server is its own."""
    door = Door()
    own = {"Origin": "http://evil.example:8000", "Host": "evil.example:8000"}
    answer = door.post("/v1/completions", {"prompt": "abc"}, headers={**own, **headers})
    assert answer.status_code == 403
    assert "http.allowed_origins" in answer.json()["error"]["message"]
    assert not door.service.requests


def test_the_configuration_reaches_the_door() -> None:
    origins = [SITE, "http://localhost:3000", "app://obsidian.md", "http://[::1]:80"]
    config = DrafthouseConfig.model_validate({"target": {"model": "m"}, "http": {"allowed_origins": origins}})
    assert door_settings(config.http, config.served_models()[0]).allowed_origins == tuple(origins)
    assert HttpConfig().allowed_origins == ()


@pytest.mark.parametrize(
    "origins",
    [
        [""],
        ["chat.example.com"],
        [f"{SITE}/"],
        [f"{SITE}/chat"],
        ["https://*.example.com"],
        ["HTTPS://chat.example.com"],
        ["null"],
        ["*", SITE],
    ],
)
def test_what_no_browser_writes_is_refused(origins: list[str]) -> None:
    with pytest.raises(ValidationError, match="allowed_origins"):
        HttpConfig.model_validate({"allowed_origins": origins})
