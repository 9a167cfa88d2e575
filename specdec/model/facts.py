"""What a model folder states of its model: config.json, generation_config.json and the headers of weights."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from specdec.core.errors import CheckpointError, ConfigError
from specdec.model.checkpoint import (
    Checkpoint,
    ModelFolder,
    foreign_files,
    open_checkpoint,
)
from specdec.model.config import ModelConfig
from specdec.model.generation_file import GENERATION_FILE, read_generation_file
from specdec.model.layer_values import layer_values
from specdec.model.rotary import longest_sequence, positions_stated_in

logger = logging.getLogger(__name__)

# transformers annotates these factories too loosely to be of use.
_AUTO_CONFIG: Any = AutoConfig
_AUTO_MODEL: Any = AutoModelForCausalLM

_OUTPUTS_OF_TRAINING = ("output_router_logits", "output_hidden_states", "output_attentions")
"""What models return beside logits, at a cost, where their configuration was saved with it."""
_SHORTEST_CONTEXT = 2
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Read from the model folder's config.json and weight headers."""

    vocab_size: int
    dtype: str
    """Resolved: never `auto`."""
    eos_token_ids: tuple[int, ...]
    """Any of them ends a text."""
    max_model_len: int | None
    """Longest sequence in tokens; None where neither the folder nor the configuration says."""


def read_facts(config: ModelConfig) -> ModelFacts:
    """Return the facts of a model that `load_model` would load.

    Raises:
        CheckpointError: the folder or a file in it is missing, corrupt or of an unknown kind.
    """
    checkpoint = open_checkpoint(config.model)
    hf_config = load_config(checkpoint, trust_remote_code=config.trust_remote_code)
    vocab_size = getattr(hf_config.get_text_config(), "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise CheckpointError(f"{checkpoint.path / 'config.json'} states no vocab_size")
    dtype = resolve_dtype(config, checkpoint, hf_config)
    return ModelFacts(
        vocab_size=vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=eos_token_ids_of(checkpoint, hf_config),
        max_model_len=config.max_model_len or longest_sequence(hf_config),
    )


def load_config(folder: ModelFolder, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return the folder's configuration as transformers reads it.

    Raises:
        CheckpointError: it describes no model that transformers knows.
    """
    model_type = folder.config.get("model_type")
    with foreign_files(
        f"{folder.path / 'config.json'} describes no model that transformers knows "
        f"(model_type {model_type!r})"
    ):
        loaded: PretrainedConfig = _AUTO_CONFIG.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=trust_remote_code
        )
        for config in (loaded, getattr(loaded, "text_config", None)):
            for name in _OUTPUTS_OF_TRAINING:
                if getattr(config, name, False):
                    setattr(config, name, False)
    return loaded


def has_own_code(hf_config: PretrainedConfig, *, trust_remote_code: bool) -> bool:
    """Whether the folder brings the model's class, and may."""
    return trust_remote_code and "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})


def model_class_of(hf_config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that transformers has for a configuration that it knows."""
    model_class: Any = _AUTO_MODEL._model_mapping[type(hf_config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class  # type: ignore[no-any-return]


def head_dims_of(hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Head sizes that a configuration states; what they really are, the probe of the loaded model tells."""
    text_config: Any = hf_config.get_text_config()
    stated = layer_values(text_config, "head_dim")
    if stated:
        return tuple(map(int, stated))
    width, num_heads = (getattr(text_config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return (width // num_heads,) if width and num_heads else ()


def resolve_max_model_len(config: ModelConfig, hf_config: PretrainedConfig) -> int:
    """Return the longest sequence in tokens: as configured, else as stated.

    Raises:
        CheckpointError: the model has no positions for a prompt and a token.
        ConfigError: nobody says, or the configuration asks for more than there are.
    """
    stated = positions_stated_in(hf_config)
    limit = stated.num_positions
    if limit is None and config.max_model_len is None:
        raise ConfigError(f"{config.model} states no max_position_embeddings: set max_model_len")
    if limit is not None and limit < _SHORTEST_CONTEXT:
        raise CheckpointError(
            f"{config.model}: max_position_embeddings is {limit}; a prompt and its first token need "
            f"{_SHORTEST_CONTEXT} positions"
        )
    if config.max_model_len is None:
        assert limit is not None
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} exceeds the {limit} positions that {config.model} has"
            f"{stated.advice}"
        )
    return config.max_model_len


def resolve_dtype(config: ModelConfig, checkpoint: Checkpoint, hf_config: PretrainedConfig) -> torch.dtype:
    """Return the dtype that a model runs in: as configured, else as stated, else that of its weights.

    Raises:
        CheckpointError: the model's own is none that the engine runs.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    dtype: Any = hf_config.dtype or getattr(hf_config.get_text_config(), "dtype", None)
    if dtype is None:
        dtype = _dtype_of_weights(checkpoint)
    if dtype not in _DTYPES.values():
        advice = (
            f"set dtype to one of {', '.join(_DTYPES)}"
            if dtype in (None, torch.float64, "F64")
            else "weights that are stored quantised cannot be read"
        )
        raise CheckpointError(f"{checkpoint.path}: the checkpoint's dtype {dtype} is not supported; {advice}")
    return dtype  # type: ignore[no-any-return]


def _dtype_of_weights(checkpoint: Checkpoint) -> Any:
    """Dtype of the first floating-point tensor, or its safetensors name if we have none for it."""
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    for header in checkpoint.headers:
        for name, entry in json.loads(header).items():
            if name != "__metadata__" and "F" in entry["dtype"]:
                return names.get(entry["dtype"], entry["dtype"])
    return None


def eos_token_ids_of(
    checkpoint: Checkpoint, hf_config: PretrainedConfig, *, warns: bool = False
) -> tuple[int, ...]:
    """Sorted ids that end a text, from generation_config.json and config.json.

    One that the vocabulary does not have can never come, and is left aside: with `warns`, not silently.
    """
    found: set[int] = set()
    # A model of text and images may say at the top alone what ends a turn (Gemma 3).
    configs: tuple[Any, ...] = (hf_config, hf_config.get_text_config())
    sources = [("config.json", getattr(config, "eos_token_id", None)) for config in configs]
    sources.append((GENERATION_FILE, read_generation_file(checkpoint.path).get("eos_token_id")))
    for name, value in sources:
        token_ids = [] if value is None else [value] if isinstance(value, int) else value
        if not isinstance(token_ids, list) or not all(isinstance(one, int) for one in token_ids):
            raise CheckpointError(
                f"{checkpoint.path / name}: eos_token_id must be a token id or a list of them, got {value!r}"
            )
        found.update(token_ids)
    vocab_size = getattr(hf_config.get_text_config(), "vocab_size", None)
    if not isinstance(vocab_size, int):
        return tuple(sorted(found))
    kept = tuple(sorted(one for one in found if 0 <= one < vocab_size))
    if warns and len(kept) < len(found):
        logger.warning(
            "%s: eos_token_id names %s, which the vocabulary of %d tokens does not have: left aside",
            checkpoint.path,
            ", ".join(map(str, sorted(found.difference(kept)))),
            vocab_size,
        )
    return kept
