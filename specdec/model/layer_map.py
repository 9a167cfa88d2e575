"""Where the layers of an original model lie in a checkpoint with inserted do-nothing layers.

`benchmarks/inflate.py` makes such checkpoints: the same function at a higher cost. Whatever names a layer
of the original (an early exit, a hidden-state tap) must land where it costs the same share of the model,
or an early-exit drafter would win by artefact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.core.errors import ConfigError

CONFIG_KEY = "drafthouse_layer_positions"
"""Key of config.json that lists, for every original layer, its index among the inflated layers."""


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Maps layer counts of the original model to layer counts of this checkpoint."""

    num_layers: int
    positions: tuple[int, ...]
    """Index of every original layer, ascending. For an ordinary checkpoint: 0, 1, 2, ..."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LayerMap:
        """Read the map from a Hugging Face config as a mapping; identity when there is none.

        Raises:
            ConfigError: the recorded positions are not ascending indices of this model's layers.
        """
        num_layers = int(config["num_hidden_layers"])
        positions = tuple(config.get(CONFIG_KEY) or range(num_layers))
        in_range = all(0 <= position < num_layers for position in positions)
        if not positions or not in_range or list(positions) != sorted(set(positions)):
            raise ConfigError(
                f"{CONFIG_KEY} in config.json must be ascending layer indices below {num_layers}, "
                f"got {positions}"
            )
        return cls(num_layers=num_layers, positions=positions)

    @classmethod
    def of_model(cls, config: Any) -> LayerMap:
        """Read the map from transformers' configuration of a model.

        Raises:
            ConfigError: as `from_config`.
        """
        num_layers = config.get_text_config().num_hidden_layers
        return cls.from_config(
            {"num_hidden_layers": num_layers, CONFIG_KEY: getattr(config, CONFIG_KEY, None)}
        )

    @property
    def num_original_layers(self) -> int:
        """Layers that do something."""
        return len(self.positions)

    def layers_for(self, num_original_layers: int) -> int:
        """Number of leading layers here that stand for the first `num_original_layers` of the original.

        They hold exactly those original layers, and cost the same share of the model as there:
        layers_for(E) / num_layers is E / N up to rounding. The hidden state after them equals the
        original's after E layers, so early exits and taps both use this.

        Raises:
            ConfigError: E is not between 1 and N.
        """
        total = self.num_original_layers
        if not 1 <= num_original_layers <= total:
            raise ConfigError(f"a layer count must be between 1 and {total}, got {num_original_layers}")
        same_share = round(num_original_layers * self.num_layers / total)
        at_least = self.positions[num_original_layers - 1] + 1
        at_most = self.num_layers if num_original_layers == total else self.positions[num_original_layers]
        return min(max(same_share, at_least), at_most)

    def exit_layers_for(self, num_original_layers: int) -> int:
        """`layers_for`, for a view that stops early.

        Raises:
            ConfigError: nothing of the original is left out, so that the view would be the whole function
                at a lower price (or the same model twice).
        """
        if num_original_layers >= self.num_original_layers:
            raise ConfigError(
                f"an early exit must leave out at least one of the {self.num_original_layers} layers that do "
                f"something, got an exit after {num_original_layers}"
            )
        return self.layers_for(num_original_layers)

    def check_exit(self, num_layers: int) -> None:
        """Refuse an exit, counted in this checkpoint's layers, after the last layer that does something.

        Raises:
            ConfigError: the view would equal the full model.
        """
        if num_layers > self.positions[-1]:
            raise ConfigError(
                f"an exit after {num_layers} layers includes every layer that does something "
                f"(the last is layer {self.positions[-1]}): it would draft with the whole target"
            )
