"""What rank 0 makes of its configuration, without Ray and without ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from specdec.engine.config import EngineConfig
from specdec.model.parallel import group, heartbeat
from workers import rank_worker
from workers.rank_worker import lead_ranks


@pytest.mark.parametrize(("silence_s", "looks"), [((), 20), ((45.0,), 45)])
def test_ranks_are_watched_for_as_long_as_it_is_configured(
    silence_s: tuple[float, ...], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[dict[str, Any]] = []
    monkeypatch.setattr(rank_worker, "RankWorker", MagicMock())
    monkeypatch.setattr(rank_worker.threading, "Thread", MagicMock())
    monkeypatch.setattr(group, "serve_store", MagicMock())
    monkeypatch.setattr(group, "RankGroup", MagicMock())
    monkeypatch.setattr(heartbeat, "HeartbeatWatch", lambda *args, **options: watched.append(options))
    config = EngineConfig.model_validate({"target": {"model": "/m", "device": "cpu"}})
    assert lead_ranks("target", config, "127.0.0.1", [{}], *silence_s) is not None
    assert watched == [{"max_silent_looks": looks}]
    assert lead_ranks("target", config, "127.0.0.1", []) is None
    assert len(watched) == 1
