"""What is on loopback, and that no proxy of the environment is asked for it."""

from __future__ import annotations

import httpx
import pytest

from deploy.loopback import direct_mounts, is_loopback
from tests.deploy.openai.fakes import Door
from tests.deploy.openai.live import live_server

DEAD = "http://127.0.0.1:9"
"""Nothing listens there."""


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.0.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.7", False),
        ("models.example", False),
        ("localhost.example", False),
    ],
)
def test_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
    url = f"http://[{host}]:8000" if ":" in host else f"http://{host}:8000"
    assert bool(direct_mounts(url)) == expected


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_no_proxy_is_asked_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server(Door().app) as url:
        monkeypatch.setenv(name, DEAD)
        with httpx.Client() as client, pytest.raises(httpx.ConnectError):
            client.get(f"{url}/health")
        with httpx.Client(mounts=direct_mounts(url)) as client:
            assert client.get(f"{url}/health").status_code == 200
            with pytest.raises(httpx.ConnectError):
                client.get("http://models.invalid/health")


@pytest.mark.parametrize("url", ["http://[::1]:8000", "https://localhost", "http://127.0.0.1:8000"])
def test_the_way_there_is_direct(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, DEAD)
    with httpx.Client(mounts=direct_mounts(url)) as client:
        assert client._transport_for_url(httpx.URL(url)) is client._transport
