"""The Ingress deployment: the HTTP application over the cluster, one replica per door."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from cluster.autoscaling.waking import waker_of
from cluster.autoscaling.wanted import tell_woken
from cluster.client import ClusterService
from cluster.config import ClusterConfig
from deploy.api_keys import ApiKeysFile, follow_api_keys, take_api_keys
from deploy.niceness import give_way
from deploy.openai.app import DoorModel, create_app
from deploy.openai.certificates import CertificateFiles, FollowedCertificate, expiry_timestamp_s
from deploy.openai.early_refusals import refuse_early
from deploy.openai.errors import ApiError
from deploy.openai.keys import KeyRing
from deploy.openai.metrics import DoorMetrics
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from deploy.openai.tracing import Tracing
from deploy.ray_metrics import RaySink
from specdec.model.config import ModelConfig
from workers.process import prepare_logging, settle_memory
from workers.start_limit import START_MARGIN_S, StartLimit, ends_unless_started

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

_PUBLISH_S = 5.0
"""Ray exports every ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBehind:
    """What a door has to know of one of the models behind it."""

    target: ModelConfig
    cluster: ClusterConfig
    settings: DoorSettings
    generation: str
    """Only coordinators of it are spoken to."""

    def open(self, coordinators: Any) -> DoorModel[ClusterService]:
        """Return the model as the HTTP application wants it, with the tokenizer of this node's folder."""
        folder, is_trusted = Path(self.target.model), self.target.trust_remote_code
        tokenizer = HuggingFaceTokenizer.load(folder, trust_remote_code=is_trusted)
        tell = partial(tell_woken, self.cluster.namespace, "target")
        wake = waker_of(coordinators, tell) if self.cluster.target_groups.may_be_none else None
        service = ClusterService(self.cluster, self.generation, wake=wake)
        return DoorModel(service, self.settings, tokenizer)


def _start_limit_s(models: tuple[ModelBehind, ...], *_: object) -> float:
    return max(model.cluster.target_groups.load_timeout_s for model in models) + START_MARGIN_S


@serve.ingress()
class IngressReplica:
    """Speaks HTTP to clients and channels to coordinators.

    It is up before any coordinator is: until one can be reached, requests are answered with 503.
    """

    @ends_unless_started("ingress", _start_limit_s)
    def __init__(
        self, models: tuple[ModelBehind, ...], api_keys_file: str | None, *coordinators: Any
    ) -> None:
        """`api_keys_file` is read by this door itself, and followed; until it could be read nobody is let in.

        Keys that were good when the application was built may have been revoked since.
        `coordinators`, one for each model, make Serve start them with this one, and are woken where there may
        be none; tokens travel on channels."""
        prepare_logging("ingress")
        self._start_limit_s = _start_limit_s(models)
        give_way(models[0].settings.niceness)
        doors = [model.open(handle) for model, handle in zip(models, coordinators, strict=True)]
        self._services = [door.service for door in doors]
        first, *further = doors
        self._keys_file = None if api_keys_file is None else ApiKeysFile(api_keys_file)
        self._ring = KeyRing(
            first.settings.api_keys if api_keys_file is None else None,
            num_doors=lambda: first.service.num_doors,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._publishes = first.settings.ray_metrics
        tracing = first.settings.tracing
        self._tracing = None if tracing is None else Tracing.to_collector(tracing)
        self._certificate = first.settings.certificate
        self._metrics = DoorMetrics()
        first.service.share(self._metrics.report)
        self._app = create_app(
            first.service,
            first.settings,
            first.tokenizer,
            self._ring,
            further,
            metrics=self._metrics,
            tracing=self._tracing,
        )
        settings = first.settings
        sees_all = settings.access_log or settings.allowed_origins or tracing is not None
        refuse_early(None if sees_all else self._app.state.refusals)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Join the cluster and return the application; Serve calls it once, in the loop of the requests.

        In a rolling update the door before this one serves until this returns, which is when there is a
        coordinator to speak to.
        """
        with StartLimit("ingress", self._start_limit_s):
            if self._keys_file is not None:
                await take_api_keys(self._keys_file, self._ring)
                self._tasks.append(asyncio.create_task(follow_api_keys(self._keys_file, self._ring)))
            await asyncio.gather(*(service.start() for service in self._services))
        await asyncio.gather(*(service.wait_for_turn() for service in self._services))
        settle_memory()
        if self._publishes:
            self._tasks.append(asyncio.create_task(self._publish()))
        if self._certificate is not None:
            self._tasks.append(asyncio.create_task(tell_expiry(self._certificate, self._metrics)))
        return self._app

    def check_health(self) -> None:
        """Raise when this replica can serve no more and must be replaced."""
        for service in self._services:
            service.check_health()

    async def _publish(self) -> None:
        """Give Ray what /metrics says, of several ingresses by the one that adds it up."""
        sink = RaySink()
        has_failed = False
        while True:
            await asyncio.sleep(_PUBLISH_S)
            try:
                if not self._services[0].adds_up:
                    sink.withdraw()
                    continue
                sink.publish(await self._app.state.snapshot())
            except ApiError as error:
                logger.info("nothing to publish through Ray at present: %s", error)
            except Exception:  # the border to Ray's exporter, without which everything else goes on
                if not has_failed:
                    logger.exception("metrics could not be published through Ray")
                has_failed = True
            else:
                has_failed = False

    async def __del__(self) -> None:
        """Called by Serve before the replica ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(service.close() for service in self._services))
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


async def tell_expiry(files: CertificateFiles, metrics: DoorMetrics) -> None:
    """Say when the certificate ends that clients are shown, until cancelled.

    Nothing is said where this node has not the files, which are read where proxies are.
    """
    followed = FollowedCertificate(files, expiry_timestamp_s)
    has_failed = False
    while True:
        try:
            timestamp_s = await asyncio.to_thread(followed.current)
        except Exception:  # the border to threads and files, beside which everything goes on
            if not has_failed:
                logger.exception(
                    "the end of the TLS certificate could not be looked up, which is tried again"
                )
            has_failed = True
        else:
            has_failed = False
            if timestamp_s is not None:
                metrics.set_certificate_expiry(files.certificate_file, timestamp_s)
        await asyncio.sleep(followed.look_s)
