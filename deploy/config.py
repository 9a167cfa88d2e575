"""The one configuration file of a deployment: an engine, the cluster it runs on, and its HTTP door."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from cluster.config import ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from deploy.openai.delivery_budget import DEFAULT_MAX_DELIVERIES_PER_S
from deploy.openai.settings import (
    DEFAULT_BODY_TIMEOUT_S,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_CHOICES,
    DEFAULT_MAX_LOGPROBS,
    DEFAULT_MAX_UNREAD_OUTPUTS,
    DEFAULT_RESUME_WINDOW_S,
    DEFAULT_STREAM_KEEP_ALIVE_S,
    DEFAULT_WRITE_TIMEOUT_S,
    MAX_BODY_BYTES,
)
from deploy.openai.tracing import TracingConfig
from deploy.proxies import HAPROXY_PORTS, ProxyKind
from specdec.core.config import StrictConfig
from specdec.engine.config import EngineConfig
from specdec.scheduling.speculation.acceptance import MAX_CLASSES

_MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
"""Of further models: their deployments and namespaces are named after them."""

_ORIGIN = r"^(\*|[a-z][a-z0-9+.-]*://[^\s/*?#@A-Z]+)$"
"""As browsers write it, in small letters: scheme, host and, unless it is the scheme's own, port."""


class TlsConfig(StrictConfig):
    """The files that make the endpoint one for HTTPS."""

    certificate_file: str = Field(min_length=1)
    """PEM file: the server's certificate, then those between it and one that clients trust."""
    key_file: str = Field(min_length=1)
    """PEM file: the private key of the first certificate, without a passphrase."""


class HttpConfig(StrictConfig):
    """The OpenAI-compatible endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `api_keys_file`, or `drafthouse serve --insecure`."""
    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port to listen on."""
    tls: TlsConfig | None = None
    """Serve HTTPS with these files, read again when they have been renewed; None: HTTP, for loopback or
    behind something that ends TLS itself."""
    num_replicas: int = Field(default=1, ge=1)
    """Ingress replicas. With several, clients of one that dies find another at once; each grants an equal
    part of the limits of API keys."""
    served_model_name: str | None = Field(default=None, min_length=1)
    """Name that clients call the model by; None: the name of the target's folder."""
    api_keys_file: str | None = None
    """File with the API keys that are accepted, one per line as `drafthouse keys new` writes them: hashed,
    with a name and limits. Each ingress replica reads it on its own node, again whenever it changes. None: no
    key is asked for."""
    share_prefixes_between_keys: bool = False
    """Let requests of one API key find prompts of others in the prefix cache. Saves work where all send the
    same system prompt; but by the time until the first token one can tell what others have sent."""
    allowed_origins: tuple[Annotated[str, Field(pattern=_ORIGIN)], ...] = ()
    """Web sites whose pages may send requests from a browser, as it writes them: https://chat.example.com,
    without a path. ["*"]: all. What they send needs an API key like everything else."""
    generation_config: Literal["auto", "none"] = "auto"
    """What a request is sampled with that does not say so: with auto as the checkpoint's
    generation_config.json has it (`temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`); with none,
    or where that says nothing, as in OpenAI's API (temperature 1, nothing cut or penalised)."""
    request_classes: tuple[str, ...] = Field(default=(), max_length=MAX_CLASSES - 1)
    """Values of `metadata.class` in bodies that are told apart; all others count as one. How far drafts are
    accepted is learnt per class."""
    max_body_bytes: int = Field(default=DEFAULT_MAX_BODY_BYTES, ge=1024, le=MAX_BODY_BYTES)
    """Longest request body in bytes; longer ones are answered with 413."""
    body_timeout_s: float = Field(default=DEFAULT_BODY_TIMEOUT_S, gt=0)
    """Seconds that a request's body may take to arrive; slower ones are answered with 408."""
    write_timeout_s: float = Field(default=DEFAULT_WRITE_TIMEOUT_S, gt=0)
    """Seconds for which a client may be behind, that is, have more to take than its connection holds; every
    16 KiB that it takes meanwhile give it another second. Then its requests are aborted and the connection is
    closed."""
    max_unread_outputs: int = Field(default=DEFAULT_MAX_UNREAD_OUTPUTS, ge=16)
    """Most deliveries (one per round) of one choice that wait in the door; with more the request is aborted,
    and its stream ends in an error, `slow_reader`. Ray Serve takes from a door whatever there is, so behind
    it `write_timeout_s` is what bounds slow clients."""
    max_deliveries_per_s: float = Field(default=DEFAULT_MAX_DELIVERIES_PER_S, gt=0)
    """Most deliveries per second that an ingress replica writes, of all streams together: with many streams
    each gets several rounds at a time (after a quarter of a second at the latest). Each costs the replica and
    the proxy CPU time, however little it holds: fewer leave more to workers on the same cores."""
    niceness: int = Field(default=0, ge=0, le=19)
    """How far the ingress replicas give way to other processes of their nodes, as `nice` counts it (Linux).
    Where workers compute on the same cores, rounds wait for requests that are read or refused; with 5 these
    wait instead, for milliseconds. 0: they do not."""
    max_choices: int = Field(default=DEFAULT_MAX_CHOICES, ge=1)
    """Most choices of one request: number of prompts times `n`."""
    max_logprobs: int = Field(default=DEFAULT_MAX_LOGPROBS, ge=1024)
    """Most log-probabilities of one request: those of its prompts (tokens, times alternatives and one) and,
    unless it is streamed, those of what is generated. A million are some 50 MB of JSON and a few seconds of
    a door's time."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time for one request in seconds, queueing included; None: no limit."""
    resume_window_s: float = Field(default=DEFAULT_RESUME_WINDOW_S, ge=0)
    """Seconds for which a client that lost its connection may go on with its stream, by sending the same
    request with the header Last-Event-ID; for so long what was generated is kept. Where it was lost with a
    coordinator it is generated again, if the last event is not older than this and
    `cluster.failover_timeout_s` together. 0: nothing is kept, no stream can be resumed, and events have no
    ids."""
    stream_keep_alive_s: float | None = Field(default=DEFAULT_STREAM_KEEP_ALIVE_S, ge=0, le=3600)
    """Seconds without a delivery after which a stream gets a comment, which clients skip: what is in front
    cuts connections that bring nothing for a while (load balancers often after 60 seconds). A stream that
    still waits for its first token then has status 200, and is refused by an error event. 0 or None: never;
    else at least 1. Where it is not given and `resume_window_s` is 0, never: streams are then of nothing but
    `data:` lines."""
    access_log: bool = False
    """Write a log line for each request to the API: route, status, seconds and ids, no text of it."""
    ray_metrics: bool = True
    """Publish what /metrics says through Ray's metrics API as well, every few seconds: it is then at the port
    at which nodes export Ray's own metrics (8080 in Kubernetes), of the node whose door adds up, under the
    same names."""
    tracing: TracingConfig | None = None
    """OpenTelemetry traces of requests (extra `tracing`); None: off, at no cost."""
    keep_alive_timeout_s: int = Field(default=75, ge=1)
    """Seconds that an idle connection is kept open."""
    proxy: ProxyKind = "python"
    """Which of Ray Serve's proxies clients speak to. haproxy speaks HTTP to the doors itself, and does not
    end TLS."""

    @model_validator(mode="after")
    def _check_origins(self) -> Self:
        if "*" in self.allowed_origins and len(self.allowed_origins) > 1:
            raise ValueError('allowed_origins: "*" allows all origins; name no others beside it')
        return self

    @model_validator(mode="after")
    def _check_keep_alive(self) -> Self:
        if self.stream_keep_alive_s and self.stream_keep_alive_s < 1:
            raise ValueError(
                f"stream_keep_alive_s: {self.stream_keep_alive_s:g} s is too short, since every stream that "
                "waits is written to that often; give at least 1, or 0 for never"
            )
        return self

    @model_validator(mode="after")
    def _check_proxy(self) -> Self:
        if self.proxy == "haproxy" and self.tls is not None:
            raise ValueError(
                "proxy: haproxy cannot be combined with tls, which Ray Serve's HAProxy does not end; end it "
                "in front, or write python"
            )
        if self.proxy == "haproxy" and self.port in HAPROXY_PORTS.values():
            raise ValueError(f"port: {self.port} is taken by HAProxy itself; give another one")
        return self


class ModelPoolsConfig(StrictConfig):
    """Where the workers of one further model run; everything else about the cluster is the application's."""

    target_groups: TargetGroupsConfig = TargetGroupsConfig()
    """Copies of its target."""
    draft_pool: DraftPoolConfig = DraftPoolConfig()
    """Its draft workers."""


class FurtherModelConfig(EngineConfig):
    """One more model in the application: an engine of its own, with pools of its own."""

    cluster: ModelPoolsConfig = ModelPoolsConfig()
    """Where its workers run, and how many of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model of an application, with what its pools need to know."""

    name: str | None
    """What clients call it; None: the name of the target's folder."""
    engine: EngineConfig
    cluster: ClusterConfig
    suffix: str = ""
    """Behind the names of its deployments; the first model has none."""


class DrafthouseConfig(EngineConfig):
    """Everything that `drafthouse serve` needs to know."""

    models: dict[Annotated[str, Field(pattern=_MODEL_NAME, max_length=96)], FurtherModelConfig] = Field(
        default_factory=dict
    )
    """Further models in the same application, by the names that clients call them by. The first is `target`
    with what stands beside it; it answers requests that name no model."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the workers run, and how many of each."""
    http: HttpConfig = HttpConfig()
    """The endpoint."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [self.http.served_model_name or Path(self.target.model).name, *self.models]
        suffixes = [_suffix(name) for name in names]
        for index, suffix in enumerate(suffixes):
            if suffix in suffixes[:index]:
                raise ValueError(
                    f"models.{names[index]}: is the name of another model too "
                    f"({names[suffixes.index(suffix)]}); give each a name of its own, the first by "
                    "http.served_model_name"
                )
        return self

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        for name, model in self.models.items():
            try:
                self._cluster_of(name, model)
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]
                where = ".".join(str(key) for key in ("models", name, "cluster", *problem["loc"]))
                text = problem["msg"].removeprefix("Value error, ")
                raise ValueError(f"{where}: {text}" if problem["loc"] else f"{where}.{text}") from None
        return self

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        if self.cluster.channels.tensors != "nccl":
            return self
        placed: list[tuple[str, EngineConfig, ClusterConfig | ModelPoolsConfig]] = [("", self, self.cluster)]
        placed += [(f"models.{name}.", model, model.cluster) for name, model in self.models.items()]
        for where, engine, pools in placed:
            if not engine.speculative_config.has_remote_heads:
                continue
            bundles = {"target_groups": pools.target_groups.bundle, "draft_pool": pools.draft_pool.bundle}
            for pool, bundle in bundles.items():
                if bundle.num_gpus == 0:
                    raise ValueError(
                        f"cluster.channels.tensors: nccl needs GPUs at both ends, and workers of "
                        f"{where}cluster.{pool} have none: set {where}cluster.{pool}.bundle.num_gpus, or "
                        "write gloo or auto"
                    )
        return self

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        blocks = {"": self.speculative_config} | {
            f"models.{name}.": model.speculative_config for name, model in self.models.items()
        }
        for where, speculative in blocks.items():
            online = speculative.online
            if online is not None and online.tenants and self.http.api_keys_file is None:
                raise ValueError(
                    f"{where}speculative_config.online.tenants names API keys, and there are none without "
                    "http.api_keys_file: give the file, or write allow_shared: true instead of tenants"
                )
        return self

    def engine(self) -> EngineConfig:
        """Return the first model's engine alone."""
        return _engine_of(self)

    def served_models(self) -> tuple[ServedModel, ...]:
        """Return all models, the first one first. Each has its own namespace, and so its own directory."""
        first = ServedModel(name=self.http.served_model_name, engine=self.engine(), cluster=self.cluster)
        return (first, *(self._further(name, model) for name, model in self.models.items()))

    def _further(self, name: str, model: FurtherModelConfig) -> ServedModel:
        return ServedModel(
            name=name,
            engine=_engine_of(model),
            cluster=self._cluster_of(name, model),
            suffix=_suffix(name),
        )

    def _cluster_of(self, name: str, model: FurtherModelConfig) -> ClusterConfig:
        """Return the application's cluster with the pools of a further model, which have to go with the rest.

        What is given counts as given, and what is not does not: with autoscaling, a number may only be where
        it is within the bounds.

        Raises:
            ValidationError: they do not.
        """
        own = {
            "namespace": self.cluster.namespace + _suffix(name),
            "target_groups": model.cluster.target_groups,
            "draft_pool": model.cluster.draft_pool,
        }
        shared = {key: getattr(self.cluster, key) for key in self.cluster.model_fields_set}
        return ClusterConfig.model_validate({**shared, **own})


def _suffix(name: str) -> str:
    return "-" + name.replace("/", "--")


def _engine_of(config: EngineConfig) -> EngineConfig:
    return EngineConfig(
        target=config.target,
        speculative_config=config.speculative_config,
        cache=config.cache,
        scheduler=config.scheduler,
        grammar=config.grammar,
    )
