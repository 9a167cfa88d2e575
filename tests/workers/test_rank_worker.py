"""What rank 0 makes of its configuration, without Ray and without ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from specdec.engine.ranks.follower import Role
from specdec.model.parallel import group, heartbeat
from workers import rank_worker
from workers.rank_worker import lead_ranks


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How rank 0 watches others, which nobody starts here."""
    watched: list[dict[str, Any]] = []
    monkeypatch.setattr(rank_worker, "RankWorker", MagicMock())
    monkeypatch.setattr(rank_worker.threading, "Thread", MagicMock())
    monkeypatch.setattr(group, "serve_store", MagicMock())
    monkeypatch.setattr(group, "RankGroup", MagicMock())
    monkeypatch.setattr(heartbeat, "HeartbeatWatch", lambda *args, **options: watched.append(options))
    return watched


@pytest.mark.parametrize("role", ["target", "draft"])
def test_ranks_are_watched_for_as_long_as_it_is_configured(role: Role, watched: list[dict[str, Any]]) -> None:
    config = EngineConfig.model_validate({"target": {"model": "/m", "device": "cpu"}})
    assert lead_ranks(role, config, "127.0.0.1", [{}], 45.0) is not None
    assert watched == [{"max_silent_looks": 45}]
    assert lead_ranks(role, config, "127.0.0.1", [], 45.0) is None
    assert len(watched) == 1


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_rank_runs_where_its_model_is_configured_to(
    role: Role, watched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = EngineConfig.model_validate(
        {
            "target": {"model": "/m", "device": "cuda" if role == "target" else "cpu"},
            "speculative_config": {
                "method": "draft_model",
                "model": "/d",
                "device": "cuda" if role == "draft" else "cpu",
            },
        }
    )
    with pytest.raises(ResourceError, match="device cuda needs a GPU"):
        lead_ranks(role, config, "127.0.0.1", [{}], 20.0)
    other: Role = "draft" if role == "target" else "target"
    assert lead_ranks(other, config, "127.0.0.1", [{}], 20.0) is not None
    assert len(watched) == 1


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("killed by the memory monitor")])
def test_rank_0_ends_with_another_however_that_has_ended(
    error: RayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(rank_worker.ray, "wait", lambda calls, num_returns: (calls, []))
    monkeypatch.setattr(rank_worker.ray, "get", MagicMock(side_effect=error))
    monkeypatch.setattr(rank_worker.logging, "shutdown", lambda: None)
    monkeypatch.setattr(rank_worker.os, "_exit", ended.append)
    rank_worker._end_with([MagicMock()])
    assert ended == [1]
