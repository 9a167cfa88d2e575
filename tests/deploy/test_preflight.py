"""What is said before anything is started: of the machine, and of folders of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.config import DrafthouseConfig
from deploy.preflight import check_models, warning_about_gpus
from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig
from tests.specdec.drafters import published

_DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
_TAKES_ONE = {"target_groups": {"bundle": {"num_gpus": 1}}}
_FURTHER = {"models": {"other": {"target": {"model": "b"}}}}


@pytest.mark.parametrize(
    ("settings", "num_gpus", "named"),
    [
        ({}, 2, "cluster.target_groups.bundle.num_gpus"),
        ({"cluster": _TAKES_ONE, **_FURTHER}, 2, "models.other.cluster.target_groups.bundle.num_gpus"),
        ({}, 0, None),
        ({"cluster": _TAKES_ONE}, 2, None),
        ({"target": {"model": "a", "device": "cpu"}}, 2, None),
    ],
)
def test_who_has_gpus_and_takes_none_is_told(
    settings: dict[str, object], num_gpus: float, named: str | None
) -> None:
    config = DrafthouseConfig.model_validate({"target": {"model": "a"}, **settings})
    text = warning_about_gpus(config, num_gpus)
    assert text is None if named is None else text is not None and text.startswith(f"{named} is 0, and")


def _drafting(target: Path, **speculative: Any) -> EngineConfig:
    return EngineConfig.model_validate({"target": {"model": str(target)}, "speculative_config": speculative})


def test_modules_are_taken_wherever_the_loader_reads_them() -> None:
    """The demo target's are in a file beside its own."""
    target = _DEMO / "target"
    check_models(_drafting(target, method="mtp"))
    check_models(_drafting(target, method="mtp", model=str(target)))
    check_models(_drafting(_DEMO / "draft", method="mtp", model=str(target)))  # as of a fine-tune's base


def test_heads_of_another_method_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    published.write(tmp_path, *published.eagle3(), published.MODEL)
    with pytest.raises(ConfigError, match=r"method: eagle, but .* holds Eagle3: write method: eagle3"):
        check_models(_drafting(_DEMO / "target", method="eagle", model=str(tmp_path)))
    check_models(_drafting(_DEMO / "target", method="eagle3", model=str(tmp_path)))


def test_a_target_without_modules_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"method: mtp without `model` .* holds none"):
        check_models(_drafting(_DEMO / "draft", method="mtp"))
