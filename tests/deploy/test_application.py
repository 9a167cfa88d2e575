"""How the parts of the application are deployed."""

from __future__ import annotations

from cluster.config import ClusterConfig
from deploy.application import _ingress


def test_the_ingress_is_there_until_the_coordinators_have_drained() -> None:
    deployment = _ingress(ClusterConfig(drain_timeout_s=90.0), 2)
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 90.0
    assert deployment.num_replicas == 2


def test_serve_keeps_no_more_requests_than_it_is_told_to() -> None:
    config = _ingress(ClusterConfig(), 1)._deployment_config
    assert 0 < config.max_queued_requests < config.max_ongoing_requests
    assert config.backpressure_config.status_code == 503
    assert config.backpressure_config.retry_after_s == 2.0
