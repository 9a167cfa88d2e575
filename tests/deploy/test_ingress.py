"""The ingress replica without Serve: what travels to it, and that it follows the file of API keys."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import ClusterConfig
from deploy import ingress
from deploy.api_keys import line_of, new_api_key, read_api_keys
from deploy.application import door_settings
from deploy.config import DrafthouseConfig, HttpConfig
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.model.config import ModelConfig
from specdec.transport.messages import DoorReport
from tests.architectures import make_tokenizer
from tests.deploy.openai.fakes import ScriptedService


class ScriptedCluster(ScriptedService):
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


def test_keys_reach_the_ingress_and_are_followed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "ClusterService", ScriptedCluster)
    monkeypatch.setattr(ingress, "HuggingFaceTokenizer", OnThisNode)
    monkeypatch.setattr(ingress, "prepare_logging", lambda part: None)
    file = tmp_path / "keys"
    text, key = new_api_key("first", max_concurrency=2, tokens_per_minute=None)
    file.write_text(f"{line_of(key)}\n")
    config = DrafthouseConfig(target=ModelConfig(model="x"), http=HttpConfig(api_keys_file=str(file)))
    settings: DoorSettings = pickle.loads(pickle.dumps(door_settings(config, read_api_keys(file))))
    assert settings.api_keys == (key,)

    async def run() -> None:
        own = replica_class()
        behind = ingress.ModelBehind(
            target=config.target, cluster=config.cluster, settings=settings, generation=""
        )
        # Its end is awaited below, and not called when it is collected.
        kind = type("Replica", (own,), {"__del__": lambda self: None})
        replica = kind((behind,), config.http.api_keys_file, object())
        app = await replica.__serve_build_asgi_app__()
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
        await own.__del__(replica)
        assert not any(service.is_open for service in replica._services)
        await asyncio.sleep(0)
        assert replica._tasks
        assert all(task.cancelled() for task in replica._tasks)

    asyncio.run(run())
