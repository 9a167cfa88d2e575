"""Every replica that Serve starts has so long to start, and no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.coordinator import CoordinatorReplica
from cluster.draft_pool import DraftPoolReplica
from deploy.config import DrafthouseConfig
from deploy.door_settings import door_settings
from deploy.ingress import IngressReplica, ModelBehind
from workers.start_limit import START_MARGIN_S

CONFIG = DrafthouseConfig.model_validate(
    {
        "target": {"model": "x"},
        "speculative_config": {"method": "ngram", "profile_seconds": 5},
        "cluster": {"target_groups": {"load_timeout_s": 100}, "draft_pool": {"load_timeout_s": 20}},
    }
)
BEHIND = ModelBehind(
    target=CONFIG.target,
    cluster=CONFIG.cluster,
    settings=door_settings(CONFIG.http, CONFIG.served_models()[0]),
    generation="",
)


@pytest.mark.parametrize(
    ("constructor", "arguments", "limit"),
    [
        (CoordinatorReplica.__init__, (CONFIG.engine(), CONFIG.cluster), ("coordinator", 105)),
        (DraftPoolReplica.__init__, (CONFIG.engine(), CONFIG.cluster), ("draft pool replica", 20)),
        (IngressReplica.__mro__[1].__init__, ((BEHIND,), None), ("ingress", 100)),
    ],
    ids=["coordinator", "draft pool", "ingress"],
)
def test_a_start_is_limited(
    constructor: Any, arguments: tuple[Any, ...], limit: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Limited(Exception):
        pass

    def note(what: str, limit_s: float) -> None:
        raise Limited(what, limit_s)

    monkeypatch.setattr("workers.start_limit.StartLimit", note)
    with pytest.raises(Limited) as limited:
        constructor(SimpleNamespace(), *arguments)
    assert limited.value.args == (limit[0], limit[1] + START_MARGIN_S)
