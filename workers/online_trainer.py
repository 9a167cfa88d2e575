"""The Ray actor that trains a draft model on what draft workers hear."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import ray

from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerId
from specdec.transport.status import OnlineStatus
from workers.process import ServingThread, prepare_logging, prepare_threads, settle_memory

if TYPE_CHECKING:
    from specdec.engine.draft_pool.text_tap import LearnableText

logger = logging.getLogger(__name__)

_NICENESS = 10
"""More than that of who serves: what they leave is enough."""


class PackedVersion(NamedTuple):
    """A version of a draft model's weights, as it goes from process to process."""

    number: int
    weights: bytes
    """safetensors."""


class TrainerReport(NamedTuple):
    """What a trainer says when it is given texts."""

    version: PackedVersion | None
    """One that it has not told of yet, and found better than the one before."""
    counts: dict[str, int]
    """What it counted since it was asked last, by metric name without prefix."""
    status: OnlineStatus


class OnlineTrainerProcess:
    """Trains in a thread, with its share of a core, until its owner ends it or dies."""

    def __init__(self, config: EngineConfig, name: PeerId, served: PackedVersion | None) -> None:
        """Load the draft model; go on from what is `served`, if that is not what it came with."""
        prepare_logging(name)
        online = config.speculative_config.online
        if online is None:
            raise ConfigError("speculative_config.online: nothing says what to learn from")
        prepare_threads(1)
        os.nice(_NICENESS)
        # Only now, since OpenMP reads its settings when torch is loaded.
        from safetensors.torch import load

        from training.online.load import load_trainer
        from training.online.pace import PacedTrainer
        from training.online.trainer import Version

        self._trainer = trainer = load_trainer(config)
        if served is not None:
            trainer.begin_with(Version(served.number, load(served.weights)))
        self._told: Counter[str] = Counter()
        settle_memory()
        logger.info("learning from traffic, beginning with version %d", trainer.status.version)
        self._thread = ServingThread("learn", PacedTrainer(trainer, online.cpu_share).run_once, lambda: None)

    def exchange(self, texts: Sequence[LearnableText]) -> TrainerReport:
        """Take in texts; say what has come of earlier ones."""
        from safetensors.torch import save

        if not self._thread.is_alive:
            raise RuntimeError("the thread that trains has ended")
        self._trainer.hear(texts)
        version = self._trainer.take_version()
        present = Counter(self._trainer.counters)
        new, self._told = present - self._told, present
        packed = None if version is None else PackedVersion(version.number, save(dict(version.weights)))
        return TrainerReport(packed, dict(new), self._trainer.status)


OnlineTrainerWorker = ray.remote(OnlineTrainerProcess)
"""The actor class; the draft pool starts one beside each draft worker."""
