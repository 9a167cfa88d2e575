"""How the parts of the application are deployed."""

from __future__ import annotations

from cluster.config import ClusterConfig
from deploy.application import _ingress


def test_the_ingress_is_there_until_the_coordinators_have_drained() -> None:
    deployment = _ingress(ClusterConfig(drain_timeout_s=90.0), 2)
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 90.0
    assert deployment.num_replicas == 2
