"""What Ray is told before it starts."""

from __future__ import annotations

import os
from pathlib import Path

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


@pytest.mark.parametrize("is_home_usable", [True, False])
def test_without_a_home_folder_the_token_is_made_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_home_usable: bool
) -> None:
    environment = {"HOME": str(tmp_path if is_home_usable else tmp_path / "nowhere")}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(ray, "init", lambda *_args, **_options: None)
    RaySession(address=None, num_cpus=1, show_logs=False).open()
    assert len(environment.get("RAY_AUTH_TOKEN", "")) == (0 if is_home_usable else 64)
