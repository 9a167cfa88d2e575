"""How many positions a model has, as its configuration says: read without torch, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

_FIXED_BY_ALPHA = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})
"""Model types that call it `dynamic` that `alpha` stretches their frequencies, once for all lengths. Others
would not look at `alpha`, and are dynamic."""


class StatedPositions(NamedTuple):
    """Of a model, or of its text model, where it has several."""

    num_positions: int | None
    """Longest sequence that it is made for, in tokens; None: it does not say in plain words."""
    kind: Literal["longrope", "dynamic"] | None = None
    """How its rotary embedding depends on the length of a sequence (`model.rotary`); None: not at all."""
    original_len: int | None = None
    """With a kind: tokens of the longest sequence that has the ordinary K/V."""
    unheeded: str | None = None
    """A rotary factor that may have been meant to lengthen it, and does not; None: there is none."""

    @property
    def advice(self) -> str:
        """What to do where somebody wants more positions than these, as the end of a sentence."""
        if self.unheeded is None:
            return ""
        return (
            f"; its {self.unheeded} is not multiplied in: if it is to reach further for that, write the new "
            "length to max_position_embeddings"
        )


def stated_positions(settings: Mapping[str, Any]) -> StatedPositions:
    """Read the keys of a config.json, or those that transformers makes of them.

    Dynamic NTK goes beyond `max_position_embeddings` by its factor, and YaRN, where it says from what, to
    that length times its factor: many recipes leave the key as it was. Those of other kinds (linear, Llama 3,
    LongRoPE) write the new length there; of linear some do not, which cannot be told from those that do.
    """
    limit = settings.get("max_position_embeddings")
    limit = limit if isinstance(limit, int) else None
    # As transformers reads them: the older key counts where both are there.
    rope = settings.get("rope_scaling") or settings.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return StatedPositions(limit)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "dynamic" and rope.get("alpha") and settings.get("model_type") in _FIXED_BY_ALPHA:
        return StatedPositions(limit)
    if kind == "longrope":
        name = "original_max_position_embeddings"
        original_len = settings.get(name) or rope.get(name) or limit
        return StatedPositions(limit, kind, original_len)
    factor = rope.get("factor")
    if kind == "dynamic" and limit is not None and isinstance(factor, int | float):
        return StatedPositions(int(limit * factor), kind, limit)
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn" and limit is not None and isinstance(factor, int | float) and isinstance(original, int):
        return StatedPositions(max(limit, int(original * factor)))
    is_longer = kind == "linear" and isinstance(factor, int | float) and factor > 1
    return StatedPositions(limit, unheeded=f"rope_scaling (linear, factor {factor:g})" if is_longer else None)


def positions_of(config: Mapping[str, Any]) -> StatedPositions:
    """Read a whole config.json: a text model, or the decoder layer of heads (`speculators`), may be in it."""
    parts = (config.get(name) for name in ("text_config", "transformer_layer_config"))
    return stated_positions(next((part for part in parts if isinstance(part, Mapping)), config))
