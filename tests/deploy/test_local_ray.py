"""What Ray is told before it starts."""

from __future__ import annotations

import os

import pytest
import ray

from deploy.local_ray import RaySession


@pytest.mark.parametrize(("address", "is_set"), [(None, True), ("auto", False)])
def test_only_a_cluster_of_our_own_is_run_without_ray_s_memory_monitor(
    monkeypatch: pytest.MonkeyPatch, address: str | None, is_set: bool
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(ray, "init", lambda *_args, **_options: None)
    RaySession(address=address, num_cpus=1, show_logs=False).open()
    assert environment.get("RAY_memory_monitor_refresh_ms") == ("0" if is_set else None)
    assert environment["RAY_worker_niceness"] == "0"
