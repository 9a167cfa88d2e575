"""What other processes need to know of a model before, or without, loading its weights."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.core.errors import CheckpointError
from specdec.model.checkpoint import open_checkpoint
from specdec.model.config import ModelConfig
from specdec.model.loader import _eos_token_ids, _load_config, _resolve_dtype
from specdec.model.rotary import longest_sequence


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
    hf_config = _load_config(checkpoint, trust_remote_code=config.trust_remote_code)
    vocab_size = getattr(hf_config.get_text_config(), "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise CheckpointError(f"{checkpoint.path / 'config.json'} states no vocab_size")
    dtype = _resolve_dtype(config, checkpoint, hf_config)
    return ModelFacts(
        vocab_size=vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=_eos_token_ids(checkpoint, hf_config),
        max_model_len=config.max_model_len or longest_sequence(hf_config),
    )
