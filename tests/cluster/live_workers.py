"""The workers of a cluster that runs, and their end."""

from __future__ import annotations

from cluster.config import ClusterConfig


def workers(config: ClusterConfig, role: str) -> list[object]:
    """The actors of the live workers of a kind."""
    import ray

    return [
        ray.get_actor(entry["name"], namespace=config.namespace)
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == config.namespace and entry["name"].startswith(f"{role}-")
    ]


def worker(config: ClusterConfig, role: str) -> object:
    """The actor of the one live worker of a kind."""
    (actor,) = workers(config, role)
    return actor


def kill(config: ClusterConfig, role: str) -> None:
    import ray

    ray.kill(worker(config, role), no_restart=True)
