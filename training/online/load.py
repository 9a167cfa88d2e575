"""A trainer of the draft model that a configuration names."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.engine.build_drafter import draft_checkpoint
from specdec.engine.config import EngineConfig
from specdec.sampling.sampler import Sampler
from training.online.trainer import OnlineTrainer
from training.whole_models import load_whole_model


def load_trainer(config: EngineConfig) -> OnlineTrainer:
    """Load the draft model once more, to be trained, on the CPU.

    Raises:
        CheckpointError: it cannot be read, or lacks weights.
    """
    speculative = config.speculative_config
    assert speculative.online is not None
    checkpoint = draft_checkpoint(config)
    model = load_whole_model(Path(checkpoint.folder), torch.float32)
    sampler = Sampler(speculative.compile.cache_dir)
    sampler.warm_up()
    return OnlineTrainer(
        speculative.online,
        model,
        sampler,
        vocab_size=checkpoint.vocab_size,
        served_dtype=getattr(torch, checkpoint.dtype),
        num_positions=speculative.max_model_len,
    )
