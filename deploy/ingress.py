"""The Ingress deployment: the HTTP application over the cluster, one replica per door."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from cluster.autoscaling.waking import waker_of
from cluster.client import ClusterService
from cluster.config import ClusterConfig
from deploy.api_keys import follow_api_keys
from deploy.openai.app import create_app
from deploy.openai.keys import KeyRing
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.model.config import ModelConfig
from workers.process import prepare_logging

if TYPE_CHECKING:
    from starlette.types import ASGIApp


@serve.ingress()
class IngressReplica:
    """Speaks HTTP to clients and channels to coordinators.

    It is up before any coordinator is: until one can be reached, requests are answered with 503.
    """

    def __init__(
        self,
        target: ModelConfig,
        cluster: ClusterConfig,
        settings: DoorSettings,
        api_keys_file: str | None,
        coordinators: Any,
        generation: str = "",
    ) -> None:
        """`api_keys_file` is followed, if this node has it; `settings` have the keys it held at the start.

        `coordinators` makes Serve start them with this one, and wakes them where there may be none; tokens
        travel on channels. Only coordinators of `generation` are spoken to."""
        prepare_logging("ingress")
        tokenizer = HuggingFaceTokenizer.load(Path(target.model), trust_remote_code=target.trust_remote_code)
        wake = waker_of(coordinators) if cluster.target_groups.may_be_none else None
        self._service = ClusterService(cluster, generation, wake=wake)
        self._ring = KeyRing(settings.api_keys)
        self._api_keys_file = api_keys_file
        self._following: asyncio.Task[None] | None = None
        self._app = create_app(self._service, settings, tokenizer, self._ring)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Join the cluster and return the application; Serve calls it once, in the loop of the requests.

        In a rolling update the door before this one serves until this returns, which is when there is a
        coordinator to speak to.
        """
        await self._service.start()
        await self._service.wait_for_turn()
        if self._api_keys_file is not None:
            self._following = asyncio.create_task(follow_api_keys(self._api_keys_file, self._ring))
        return self._app

    async def __del__(self) -> None:
        """Called by Serve before the replica ends."""
        if self._following is not None:
            self._following.cancel()
        await self._service.close()
