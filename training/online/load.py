"""A trainer of the draft model that a configuration names."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from specdec.core.errors import CheckpointError
from specdec.engine.build import draft_checkpoint
from specdec.engine.config import EngineConfig
from specdec.sampling.sampler import Sampler
from training.online.trainer import OnlineTrainer


def load_trainer(config: EngineConfig) -> OnlineTrainer:
    """Load the draft model once more, to be trained, on the CPU.

    Raises:
        CheckpointError: the folder is not as it should be.
    """
    speculative = config.speculative_config
    assert speculative.online is not None
    checkpoint = draft_checkpoint(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded to be trained: {error}") from error
    sampler = Sampler(speculative.compile.cache_dir)
    sampler.warm_up()
    return OnlineTrainer(
        speculative.online,
        model,
        sampler,
        vocab_size=checkpoint.vocab_size,
        served_dtype=getattr(torch, checkpoint.dtype),
    )
