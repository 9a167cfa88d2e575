"""The whole Serve application: ingress, coordinators and draft pool."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ray import serve
from ray.serve.config import BackpressureConfig

from cluster.application import ModelPools, build_applications, resolve
from cluster.config import ClusterConfig
from cluster.generation import target_generation
from deploy.config import DrafthouseConfig, ServedModel
from deploy.door_settings import door_settings
from deploy.ingress import IngressReplica, ModelBehind
from deploy.openai.certificates import CertificateFiles
from deploy.openai.errors import NOT_READY_RETRY_AFTER_S

APPLICATION = "drafthouse"
INGRESS = "Ingress"
_MAX_ONGOING_REQUESTS = 10_000
"""HTTP requests that Serve lets into one ingress at once. Nearly all of them wait, at little cost; the
coordinators' queues, not this number, decide who is refused."""
_MAX_QUEUED_REQUESTS = 2_000
"""Further ones that wait in each of Serve's proxies for an ingress: it has as many as it may, or none is
there (one that died is replaced within seconds). Serve would keep any number, each with its body."""


def build_application(
    config: DrafthouseConfig,
    own: Collection[str] | None = None,
    certificate: CertificateFiles | None = None,
) -> serve.Application:
    """Return the application, ready for `serve.run`. Ray must be connected.

    Args:
        config: what it is to be.
        own: names that it may have on the cluster (`build_applications`).
        certificate: what clients are shown where it is not `config.http.tls` that says so.

    Raises:
        ResourceError: the workers do not fit the cluster, or another application has its namespace.
    """
    models = [_resolved(model) for model in config.served_models()]
    pools = [ModelPools(engine=model.engine, cluster=model.cluster, suffix=model.suffix) for model in models]
    coordinators = build_applications(pools, own)
    behind = tuple(
        ModelBehind(
            target=model.engine.target,
            cluster=model.cluster,
            settings=door_settings(config.http, model, certificate),
            generation=target_generation(model.engine),
        )
        for model in models
    )
    return _ingress(config.cluster, config.http.num_replicas).bind(
        behind, config.http.api_keys_file, *coordinators
    )


def _resolved(model: ServedModel) -> ServedModel:
    cluster = resolve(model.cluster)
    if not model.engine.cache.enable_prefix_caching:  # then no group has anything that another has not
        routing = cluster.routing.model_copy(update={"prefix_affinity": False})
        cluster = cluster.model_copy(update={"routing": routing})
    return replace(model, cluster=cluster)


def _ingress(cluster: ClusterConfig, num_replicas: int) -> serve.Deployment:
    return serve.deployment(
        name=INGRESS,
        num_replicas=num_replicas,
        # The next door opens before this one closes: it takes nothing of a node.
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        max_queued_requests=_MAX_QUEUED_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=NOT_READY_RETRY_AFTER_S),
        health_check_period_s=cluster.health_checks.period_s,
        health_check_timeout_s=cluster.health_checks.timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        # Longer than the coordinators serve on: it carries their last tokens.
        graceful_shutdown_timeout_s=cluster.drain_timeout_s + 5.0,
        max_constructor_retry_count=2,
    )(IngressReplica)
