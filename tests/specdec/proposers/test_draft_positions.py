"""`kv.positions` as it is decided, model by model, and what coordinators make of it, who see no models."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specdec.core.errors import ConfigError
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_positions import DraftReach, warnings_about, with_positions

WINDOW = {"policy": "streaming", "budget": 100}


def config_of(kv: dict[str, Any], **more: Any) -> SpeculativeConfig:
    keys = {"method": "draft_model", "model": "m", "num_speculative_tokens": 4, "cache": {"block_size": 4}}
    return SpeculativeConfig.model_validate({**keys, "kv": kv, **more})


def reach_of(num_positions: int, target_len: int | None, of_one_kind: int | None = None) -> DraftReach:
    return DraftReach(
        name="small", num_positions=num_positions, target_len=target_len, num_of_one_kind=of_one_kind
    )


@pytest.mark.parametrize(
    ("kv", "reach", "decided"),
    [
        (WINDOW, reach_of(512, 4096), "in_cache"),
        (WINDOW, reach_of(4096, 4096), "absolute"),
        (WINDOW, reach_of(8192, 4096), "absolute"),
        (WINDOW, reach_of(512, None), "absolute"),
        ({}, reach_of(512, 4096), "absolute"),
        # 100 tokens, two blocks of 4 and 2 * 4 + 1 tokens behind them.
        (WINDOW, reach_of(117, 4096), "in_cache"),
        (WINDOW, reach_of(116, 4096), "absolute"),
        (WINDOW, reach_of(512, 4096, of_one_kind=116), "absolute"),
        ({**WINDOW, "positions": "in_cache"}, reach_of(4096, 4096), "in_cache"),
        ({**WINDOW, "positions": "absolute"}, reach_of(4096, 4096), "absolute"),
    ],
)
def test_it_is_decided_by_what_both_models_reach(kv: dict[str, Any], reach: DraftReach, decided: str) -> None:
    config = config_of(kv)
    assert with_positions(config, reach).kv.positions == decided
    assert config.kv.positions == kv.get("positions", "auto"), "what was read is left as it is"


@pytest.mark.parametrize(
    ("kv", "reach", "message"),
    [
        (
            {**WINDOW, "positions": "absolute"},
            reach_of(512, 4096),
            r"kv\.positions: absolute, with which small drafts .* up to 512 .* 4096: leave it out",
        ),
        ({"positions": "absolute"}, reach_of(512, 4096), r"kv\.positions: absolute"),
        (
            {**WINDOW, "positions": "in_cache"},
            reach_of(116, 4096),
            r"kv\.budget: 100 tokens do not fit into the 116 positions of small .* give at most 99",
        ),
    ],
)
def test_what_was_written_and_cannot_be_is_refused(
    kv: dict[str, Any], reach: DraftReach, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_positions(config_of(kv), reach)


@pytest.mark.parametrize(
    ("kv", "reach", "said"),
    [
        (WINDOW, reach_of(512, 4096), None),
        (WINDOW, reach_of(4096, 4096), None),
        ({}, reach_of(512, 4096), r"up to 512 tokens .* up to 4096: .*kv\.policy: streaming"),
        (WINDOW, reach_of(116, 4096), r"up to 116 tokens .* up to 4096: .* give at most 99"),
        (WINDOW, reach_of(199, 4096), r"100 is more than half of the 199 positions .* every 83 tokens"),
    ],
)
def test_what_it_means_for_texts_is_said(kv: dict[str, Any], reach: DraftReach, said: str | None) -> None:
    texts = list(warnings_about(with_positions(config_of(kv), reach), reach))
    assert len(texts) == (said is not None)
    assert said is None or re.search(said, texts[0]), texts


@pytest.mark.parametrize(
    ("kv", "limit"),
    [({}, 512), (WINDOW, None), ({**WINDOW, "positions": "absolute"}, 512)],
    ids=["everything", "window", "positions of the text"],
)
def test_a_coordinator_sets_no_limit_that_draft_workers_may_not_have(
    kv: dict[str, Any], limit: int | None
) -> None:
    """Workers tell theirs, once they have decided."""
    assert config_of(kv, max_model_len=512).max_prefix_len == limit
