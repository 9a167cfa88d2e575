"""What is said before anything is started, where it is about the machine and not about the models."""

from __future__ import annotations

import pytest

from deploy.config import DrafthouseConfig
from deploy.preflight import warning_about_gpus

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
