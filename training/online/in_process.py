"""Online learning beside an engine in this process: experiments, tests, and whoever embeds the engine.

    with learning_engine(config) as engine:
        engine.generate(prompts, params)

A trainer takes its share of a core in a thread. `drafthouse serve` learns in draft workers instead, with a
trainer in a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from specdec.core.errors import ConfigError
from specdec.core.idle_work import IdleWork
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.text_tap import TextTap
from specdec.model.renewal import StagedWeights
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.online_config import OnlineConfig
from training.online.load import load_trainer
from training.online.pace import PacedTrainer
from training.online.trainer import OnlineTrainer


class LearningProposer:
    """Implements `Proposer`: a draft model whose weights a trainer exchanges between two calls.

    `learn` may run in another thread than everything else.
    """

    def __init__(self, drafter: DraftModelProposer, trainer: OnlineTrainer, config: OnlineConfig) -> None:
        """Own the drafter."""
        self._drafter = drafter
        self._trainer = trainer
        self._tap = TextTap(config)
        self._seen: dict[RequestId, SequenceView] = {}
        self._staged: StagedWeights | None = None
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
        if self._staged is None and (version := self._trainer.take_version()) is not None:
            self._staged = self._drafter.stage_weights(version.weights)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Draft, by the newest weights that are staged; see the contract."""
        if self._staged is not None:
            self._num_taken += self._drafter.take_weights(self._staged)
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
        stopping = threading.Event()
        paced = PacedTrainer(trainer, online.cpu_share, wait=stopping.wait)

        def run() -> None:
            while not stopping.is_set():
                made[0].learn(paced)

        thread = threading.Thread(target=run, name="online-learning", daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            stopping.set()
            thread.join()
