"""Online learning beside an engine in this process: experiments, tests, and whoever embeds the engine.

    with learning_engine(config) as engine:
        engine.generate(prompts, params)

A trainer takes its share of a core in a thread. `drafthouse serve` learns in draft workers instead, with a
trainer in a process of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from specdec.core.errors import CheckpointError, ConfigError
from specdec.core.idle_work import IdleWork, state_of
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.config import EngineConfig
from specdec.engine.draft_pool.text_tap import TextTap
from specdec.engine.engine import Engine
from specdec.model.renewal import StagedWeights
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.online_config import OnlineConfig
from training.online.load import load_trainer
from training.online.pace import PacedTrainer
from training.online.trainer import OnlineTrainer, Version

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Staged:
    """Weights that the next call takes, if it can."""

    number: int
    """Of the version."""
    weights: StagedWeights


class LearningProposer:
    """Implements `Proposer`: a draft model whose weights a trainer exchanges between two calls.

    `learn` and `catch_up` may run in another thread than everything else. A version is kept until it, or a
    newer one, has been taken: the forward may be compiled between staging and taking, and while it is being
    compiled nothing is staged.
    """

    def __init__(self, drafter: DraftModelProposer, trainer: OnlineTrainer, config: OnlineConfig) -> None:
        """Own the drafter."""
        self._drafter = drafter
        self._trainer = trainer
        self._tap = TextTap(config)
        self._seen: dict[RequestId, SequenceView] = {}
        self._newest: Version | None = None
        """That the trainer has given; of the thread that learns."""
        self._staged: _Staged | None = None
        """Set by the thread that learns while it is None, cleared by the one that drafts."""
        self._taken = 0
        """Number of the version that is drafted with."""
        self._num_taken = 0

    @property
    def capabilities(self) -> ProposerCapabilities:
        """The drafter's."""
        return self._drafter.capabilities

    @property
    def counters(self) -> Mapping[str, float]:
        """The drafter's and the trainer's, and `online_versions_taken`."""
        return {
            **self._drafter.counters,
            **self._tap.counters,
            **self._trainer.counters,
            "online_versions_taken": self._num_taken,
        }

    @property
    def idle_work(self) -> Sequence[IdleWork]:
        """The drafter's."""
        return self._drafter.idle_work

    def learn(self, paced: PacedTrainer) -> None:
        """Do a piece of the trainer's work, and stage what has come of it."""
        self._trainer.hear(self._tap.take())
        paced.run_once()
        self._stage()

    def catch_up(self) -> None:
        """Do all of the trainer's work that there is, without rests, and stage what has come of it."""
        self._trainer.hear(self._tap.take())
        while self._trainer.run_next():
            pass
        self._stage()

    def _stage(self) -> None:
        if self._staged is not None or state_of(self._drafter.idle_work) == "pending":
            return
        self._newest = self._trainer.take_version() or self._newest
        if self._newest is not None and self._newest.number != self._taken:
            weights = self._drafter.stage_weights(self._newest.weights)
            self._staged = _Staged(self._newest.number, weights)

    def num_unread(self, view: SequenceView) -> int:
        """See `proposers.base.ReadsAlong`."""
        return self._drafter.num_unread(view)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Draft, by the newest weights that are staged; see the contract."""
        if (staged := self._staged) is not None:
            if self._drafter.take_weights(staged.weights):
                self._taken = staged.number
                self._num_taken += 1
            self._staged = None
        self._seen.update({sequence.request_id: sequence for sequence in sequences})
        return self._drafter.propose(sequences, num_draft_tokens)

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget sequences; what they have become may be learnt from."""
        released = tuple(request_ids)
        for request_id in released:
            if (view := self._seen.pop(request_id, None)) is not None:
                self._tap.note(view)
        self._drafter.release(released)

    def close(self) -> None:
        """Free the drafter."""
        self._seen.clear()
        self._drafter.close()


@contextmanager
def learning_engine(config: EngineConfig) -> Iterator[Engine]:
    """Open an engine whose draft model learns, by `speculative_config.online`, in a thread.

    It is warmed up first: no weights are exchanged while the forward that reads them is still to be compiled.

    Raises:
        ConfigError: there is no such block.
        UserError: as `Engine`.
    """
    online = config.speculative_config.online
    if online is None:
        raise ConfigError("speculative_config.online: nothing says what to learn from: give the block")
    trainer = load_trainer(config)
    made: list[LearningProposer] = []

    def learning(drafter: Proposer) -> Proposer:
        assert isinstance(drafter, DraftModelProposer), "checked by SpeculativeConfig"
        made.append(LearningProposer(drafter, trainer, online))
        return made[0]

    with Engine(config, around_drafter=learning) as engine:
        engine.warm_up()
        stopping = threading.Event()
        paced = PacedTrainer(trainer, online.cpu_share, wait=stopping.wait)

        def run() -> None:
            try:
                while not stopping.is_set():
                    made[0].learn(paced)
            except CheckpointError as error:
                logger.error("the draft model learns no more: it takes no other weights: %s", error)

        thread = threading.Thread(target=run, name="online-learning", daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            stopping.set()
            thread.join()
