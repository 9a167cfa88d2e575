"""How config.json describes decoder layers, for readers of any age.

transformers 5 has in `rope_parameters` how positions turn; before it, and in the code of heads' authors, that
was `rope_theta` and `rope_scaling`. Both are written, and say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

_OF_ROPE = "rope_parameters"
_NOT_OF_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_TOLD_BY_TYPE = {"linear", "dynamic"}
"""These are older than the key `rope_type`, and the authors of EAGLE read them under `type` alone."""


def described(config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of config.json.

    Where kinds of layers turn in different ways there is no older form, and none is written.
    """
    content: dict[str, Any] = config.to_dict()
    rope = content.get(_OF_ROPE) or {}
    return content | _before_transformers_5(rope) if "rope_type" in rope else content


def without_older_form(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of config.json less the `rope_scaling` that only says again what `rope_parameters` does.

    transformers 5 would take that for the whole of it, and keep a key `type` that it has no use for.
    """
    is_told = bool(content.get(_OF_ROPE))
    return {name: value for name, value in content.items() if not (is_told and name == "rope_scaling")}


def _before_transformers_5(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope["rope_type"]
    scaling = {
        name: value for name, value in rope.items() if name not in _NOT_OF_SCALING and value is not None
    }
    older: dict[str, Any] = {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if kind != "default":
        older["rope_scaling"] = {"type" if kind in _TOLD_BY_TYPE else "rope_type": kind, **scaling}
    if rope.get("partial_rotary_factor") is not None:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return older
