"""The ingress replica without Serve: what travels to it, and that it follows the file of API keys."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import ClusterConfig
from deploy import ingress
from deploy.api_keys import line_of, new_api_key
from deploy.config import DrafthouseConfig, HttpConfig
from deploy.door_settings import door_settings
from deploy.openai.metrics import DoorMetrics
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.errors import CapacityError
from specdec.model.config import ModelConfig
from specdec.transport.messages import DoorReport
from tests.architectures import make_tokenizer
from tests.deploy.certificates import make_certificate
from tests.deploy.openai.fakes import ScriptedService


class ScriptedCluster(ScriptedService):
    num_doors = 2

    def __init__(self, cluster: ClusterConfig, generation: str, **_: object) -> None:
        super().__init__()
        self.is_open = False
        self.is_healthy = True

    def check_health(self) -> None:
        if not self.is_healthy:
            raise RuntimeError("the channel's thread has ended")

    def share(self, own: Callable[[], DoorReport]) -> None:
        assert own().counters is not None

    async def start(self) -> None:
        self.is_open = True

    async def wait_for_turn(self) -> None:
        assert self.is_open

    async def close(self) -> None:
        self.is_open = False


class OnThisNode(HuggingFaceTokenizer):
    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool = False) -> HuggingFaceTokenizer:
        return HuggingFaceTokenizer(make_tokenizer())


def replica_class() -> Any:
    """Return the class as it is written, without what Serve puts around it."""
    (own,) = [kind for kind in ingress.IngressReplica.__mro__ if "__serve_build_asgi_app__" in vars(kind)]
    return own


def replica_of(config: DrafthouseConfig, settings: DoorSettings) -> Any:
    """Return a door's replica; its end is awaited where there is one, and not called when it is collected."""
    behind = ingress.ModelBehind(
        target=config.target, cluster=config.cluster, settings=settings, generation=""
    )
    kind = type("Replica", (replica_class(),), {"__del__": lambda self: None})
    return kind((behind,), config.http.api_keys_file, object())


def test_a_door_reads_its_keys_itself_and_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "ClusterService", ScriptedCluster)
    monkeypatch.setattr(ingress, "HuggingFaceTokenizer", OnThisNode)
    monkeypatch.setattr(ingress, "prepare_logging", lambda part: None)
    file = tmp_path / "keys"
    text, key = new_api_key("first", max_concurrency=2, tokens_per_minute=None)
    file.write_text(f"{line_of(key)}\n")
    config = DrafthouseConfig(target=ModelConfig(model="x"), http=HttpConfig(api_keys_file=str(file)))
    settings: DoorSettings = pickle.loads(pickle.dumps(door_settings(config.http, config.served_models()[0])))
    assert not settings.api_keys

    async def run() -> None:
        replica = replica_of(config, settings)
        app = await replica.__serve_build_asgi_app__()
        usages = [
            replica._ring.usage(key, num_choices=1, param="n", num_prompt_tokens=1, metrics=DoorMetrics())
            for _ in range(2)
        ]
        with usages[0], pytest.raises(CapacityError, match=r"2 choices .* 1 by this one of 2 doors"):
            usages[1].__enter__()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:

            async def status(key: str) -> int:
                return (
                    await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
                ).status_code

            assert await status(text) == 200
            assert await status("other") == 401
            other, second = new_api_key("second", max_concurrency=None, tokens_per_minute=None)
            new = tmp_path / "new"
            new.write_text(f"{line_of(second)}\n")
            os.replace(new, file)
            async with asyncio.timeout(20):
                while await status(other) != 200:
                    await asyncio.sleep(0.01)
            assert await status(text) == 401
        assert all(service.is_open for service in replica._services)
        replica.check_health()
        replica._services[0].is_healthy = False
        with pytest.raises(RuntimeError, match="channel's thread"):
            replica.check_health()
        await replica_class().__del__(replica)
        assert not any(service.is_open for service in replica._services)
        await asyncio.sleep(0)
        assert replica._tasks
        assert all(task.cancelled() for task in replica._tasks)

    asyncio.run(run())


@pytest.mark.parametrize("broken", ["gone", "wrong", "empty"])
def test_a_door_that_cannot_read_its_keys_accepts_none_until_it_can(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one that is started anew, long after the application was built with a key since revoked."""
    monkeypatch.setattr(ingress, "ClusterService", ScriptedCluster)
    monkeypatch.setattr(ingress, "HuggingFaceTokenizer", OnThisNode)
    monkeypatch.setattr(ingress, "prepare_logging", lambda part: None)
    file = tmp_path / "keys"
    revoked, old = new_api_key("old", max_concurrency=None, tokens_per_minute=None)
    text, key = new_api_key("new", max_concurrency=None, tokens_per_minute=None)
    config = DrafthouseConfig(target=ModelConfig(model="x"), http=HttpConfig(api_keys_file=str(file)))
    file.write_text(f"{line_of(old)}\n")
    settings = door_settings(config.http, config.served_models()[0])
    reasons = {"gone": "cannot be read", "wrong": f"{file}:1: ", "empty": "holds no key"}
    if broken == "gone":
        file.unlink()
    else:
        file.write_text("old sk-somebodys\n" if broken == "wrong" else "")

    async def run() -> None:
        replica = replica_of(config, settings)
        app = await replica.__serve_build_asgi_app__()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:

            async def ask(key: str) -> httpx.Response:
                return await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})

            for answer in (await ask(revoked), await ask("none"), await client.get("/v1/models")):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "api_keys_unread"
                assert "Retry-After" in answer.headers
                assert str(file) not in answer.text, "that is for operators"
            health = await client.get("/health")
            assert health.status_code == 503
            message = health.json()["error"]["message"]
            assert str(file) in message
            assert reasons[broken] in message
            assert "somebodys" not in message
            file.write_text(f"{line_of(key)}\n")
            async with asyncio.timeout(20):
                while (await ask(text)).status_code != 200:
                    await asyncio.sleep(0.01)
            assert (await ask(revoked)).status_code == 401
            assert (await client.get("/health")).status_code == 200
        await replica_class().__del__(replica)

    asyncio.run(run())


def test_a_door_says_when_the_certificate_ends_that_clients_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "ClusterService", ScriptedCluster)
    monkeypatch.setattr(ingress, "HuggingFaceTokenizer", OnThisNode)
    monkeypatch.setattr(ingress, "prepare_logging", lambda part: None)
    tls = make_certificate(tmp_path, days=30)
    config = DrafthouseConfig(target=ModelConfig(model="x"), http=HttpConfig(tls=tls))
    settings: DoorSettings = pickle.loads(pickle.dumps(door_settings(config.http, config.served_models()[0])))
    line = re.compile(
        r'^ray_drafthouse_tls_certificate_expiry_timestamp_seconds{certificate_file="(.*)"} (\S+)$',
        re.MULTILINE,
    )

    async def run() -> None:
        replica = replica_of(config, settings)
        app = await replica.__serve_build_asgi_app__()
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client,
            asyncio.timeout(20),
        ):
            while (told := line.search((await client.get("/metrics")).text)) is None:
                await asyncio.sleep(0.01)
        assert told[1] == tls.certificate_file
        assert float(told[2]) == pytest.approx(time.time() + 30 * 86400, abs=120)
        await replica_class().__del__(replica)

    asyncio.run(run())
