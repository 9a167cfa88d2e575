"""Reads keys of a drafter's config.json; errors name file, key, value and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from specdec.core.errors import CheckpointError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.described import without_older_form
from specdec.model.checkpoint import CONFIG_FILE

_AUTO_CONFIG: Any = AutoConfig
_BY_LAYER = ("layer_types", "mlp_layer_types")
"""Keys with an entry for each layer."""
_NULL_IS_DEFAULT = (
    "attention_bias",
    "attention_dropout",
    "hidden_act",
    "initializer_range",
    "max_position_embeddings",
    "mlp_bias",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "use_cache",
)
"""Keys that transformers takes no null for. Of others (`sliding_window`) null says something."""


@dataclass(frozen=True, slots=True)
class Keys:
    """An object of config.json."""

    path: Path
    """The folder."""
    content: Mapping[str, Any]
    prefix: str = ""
    """Where the object is in the file, with a dot at the end."""

    def wrong(self, name: str, should: str) -> CheckpointError:
        """Return the error of a key that is not what it should be."""
        found = repr(self.content[name]) if name in self.content else "nothing"
        return CheckpointError(f"{self.path / CONFIG_FILE}: {self.prefix}{name} is {found}; {should}")

    def positive(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; a missing key (or null) is `default`, if there is one."""
        value = self.content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "it must be a positive integer")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "it must be true or false")
        return value

    def integers(self, name: str, *, least: int = 0) -> tuple[int, ...] | None:
        """Return a list of integers, `least` and more; None for a missing key or null."""
        value = self.content.get(name)
        if value is None:
            return None
        is_list = isinstance(value, list) and all(type(one) is int and one >= least for one in value)
        if not is_list or not value:
            raise self.wrong(name, f"it must be a list of integers, {least} and more")
        return tuple(value)

    def object(self, name: str) -> Keys:
        """Return an object inside; empty where the key is missing."""
        value = self.content.get(name)
        if value is None:
            return Keys(self.path, {}, f"{self.prefix}{name}.")
        if not isinstance(value, dict):
            raise self.wrong(name, "it must be an object")
        return Keys(self.path, value, f"{self.prefix}{name}.")

    def layer_config(self, kind: str | None = None, num_layers: int | None = None) -> PretrainedConfig:
        """Return the decoder layers that this object describes.

        `kind` and `num_layers` are the type of model and the number of layers where those of the object say
        nothing of them; None: what it says.
        """
        stated = self.content.get("model_type", "llama")
        kind = kind or stated
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            self.positive(name)
        described = without_older_form(self.content)
        described.pop("model_type", None)
        for name in _NULL_IS_DEFAULT:
            if described.get(name, "") is None:
                del described[name]
        if num_layers is not None:
            described["num_hidden_layers"] = num_layers
        if kind == "llama" != stated:
            # Other models turn a part of a head: a Llama turns all of it.
            described.pop("partial_rotary_factor", None)
        if described.get("use_sliding_window") is False:
            # A Llama does not know this key, which others do: it would have the window.
            described.pop("sliding_window", None)
        for name in _BY_LAYER:
            # Heads were written with the kinds of all of their target's layers.
            if isinstance(kinds := described.get(name), list):
                described[name] = kinds[: num_layers or self.positive("num_hidden_layers", len(kinds))]
        try:
            config: PretrainedConfig = _AUTO_CONFIG.for_model(kind, **described)
        except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
            width, heads = self.content["hidden_size"], self.content["num_attention_heads"]
            if isinstance(error, StrictDataclassClassValidationError) and width % heads:
                raise self.wrong("num_attention_heads", f"it must divide hidden_size, {width}") from error
            # Those first say which check it was; what it found is their cause.
            cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
            what = self.prefix.removesuffix(".") or "it"
            raise CheckpointError(
                f"{self.path / CONFIG_FILE}: {what} describes no {kind} that can be made: "
                f"{str(cause or error).splitlines()[0]}"
            ) from error
        return config

    def check_target(self, target: TargetParts, hidden_size: int | None = None) -> None:
        """Check that widths are the target's; `hidden_size` is what the drafter says the target's is."""
        if self.positive("vocab_size", target.vocab_size) != target.vocab_size:
            raise self.wrong(
                "vocab_size", f"the target's is {target.vocab_size}: it was made for another target"
            )
        if hidden_size is not None and hidden_size != target.hidden_size:
            name = "target_hidden_size" if self.content.get("target_hidden_size") else "hidden_size"
            raise self.wrong(name, f"the target's is {target.hidden_size}: it was made for another target")
