"""Values of a configuration that layers may have for themselves (Gemma 4's heads)."""

from __future__ import annotations

from typing import Any


def layer_values(text_config: Any, name: str) -> tuple[Any, ...]:
    """Return the different values of a key, in the order of the first layer with each; () where it has none.

    A configuration whose layers differ raises a RuntimeError when it is asked itself.
    """
    layers = text_config.per_layer_config if getattr(text_config, "is_heterogeneous", False) else ()
    stated = (getattr(one, name, None) for one in layers or (text_config,))
    return tuple(dict.fromkeys(value for value in stated if value is not None))
