"""A stage of the target that has no logits: it keeps block tables, runs its layers, and answers nothing."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NoReturn

from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep
from specdec.engine.targets.local_target import LocalTarget
from specdec.model.exit_states import ExitStates
from specdec.model.runner import ModelRunner


class StageTarget(LocalTarget):
    """What a rank of a stage before the last follows with."""

    def __init__(self, runner: ModelRunner) -> None:
        """Run `runner` with the other stages."""
        super().__init__(runner, _NoLogits())

    def _run(
        self,
        step: TargetStep,
        drafted_for: AbstractSet[RequestId] = frozenset(),
        exit_states: ExitStates | None = None,
    ) -> TargetResult:
        self._runner.forward([self._slice(work) for work in step.works])
        return TargetResult(step_id=step.step_id, results=())


class _NoLogits:
    """Implements `sampler.TokenChooser` where nothing can be chosen."""

    first_token_id = 0

    def sample(self, *args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("logits come out of the last stage")

    def ranked(self, *args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("logits come out of the last stage")

    def distributions(self, *args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("logits come out of the last stage")

    def log_probabilities(self, *args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("logits come out of the last stage")

    def agreed(self, *args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("logits come out of the last stage")

    def logprobs(self, *args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("logits come out of the last stage")

    def chooser(self, sequences: Sequence[object], vocab_size: int, stream: str = "target") -> None:
        """Return None: see `TokenChooser`."""

    def ranker(self, *_: object, **__: object) -> None:
        """Return None: see `TokenChooser`."""
