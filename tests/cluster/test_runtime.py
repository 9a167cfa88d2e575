from __future__ import annotations

import pytest
import ray

from cluster.config import BundleConfig
from cluster.runtime import worker_options
from specdec.transport.base import PeerId

pytestmark = [pytest.mark.ray]


class Worker:
    def resources(self) -> dict[str, float]:
        return dict(ray.get_runtime_context().get_assigned_resources())


@pytest.mark.parametrize(("bundle", "num_cpus"), [(None, 0.0), (BundleConfig(num_cpus=0.5), 0.5)])
def test_a_worker_takes_what_its_bundle_has(
    ray_cluster: None, bundle: BundleConfig | None, num_cpus: float
) -> None:
    """Without a bundle nothing: a trainer works beside the draft worker that the bundle is for."""
    name = PeerId(f"worker-{num_cpus}")
    actor = ray.remote(Worker).options(**worker_options(bundle, name, "drafthouse-runtime")).remote()
    try:
        assert ray.get(actor.resources.remote(), timeout=60).get("CPU", 0.0) == num_cpus
        assert ray.get_actor(name, namespace="drafthouse-runtime") == actor
    finally:
        ray.kill(actor)
