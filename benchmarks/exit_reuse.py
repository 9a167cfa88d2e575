"""What it saves to verify drafts of a target's first layers from where these have stopped.

    python -m benchmarks.exit_reuse --json benchmarks/results/exit-reuse.json    # three minutes; --quick: one

Steps of a target, drafts and verification, that goes on from the drafts' hidden states or begins anew: in
turn (ABBA), on the same weights, K/V and tokens. It is one thread's CPU time: others on the machine disturb
that least. The targets are the demo target, and the same made as costly as 100 million parameters.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.report import PairedRatio, progress_bar, report_headlines, run_in_turn, write_results
from specdec.core.idle_work import IdleWork
from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetResult, TargetStep, TargetWork
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.local_target import LocalTarget
from specdec.kv.config import CacheConfig
from specdec.kv.pool import FIRST_BLOCK
from specdec.kv.selection import FullSelection
from specdec.model.acceleration import accelerate
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.exit_states import ExitStates
from specdec.model.loader import load_model
from specdec.model.resumed_forward import ResumedForward
from specdec.model.runner import ModelRunner
from specdec.model.views import early_exit, exit_tap
from specdec.sampling.sampler import Sampler

RESUMED, ANEW = "resumed", "anew"
_BLOCK_SIZE = 16
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured of each target."""

    exit_layer: int = 4
    num_draft_tokens: int = 4
    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 128
    """Tokens before each draft."""
    rounds: int = 8
    """Pairs."""
    seconds: float = 0.4
    """Of one measurement, about."""


FULL = Plan()
QUICK = Plan(batches=(1, 8), rounds=5, seconds=0.2)
_INFLATED_PARAMETERS = 100e6


class TimedTarget(LocalTarget):
    """Notes what verification takes."""

    verify_s = 0.0
    """Of the last step."""

    def _run(
        self,
        step: TargetStep,
        drafted_for: Set[RequestId] = frozenset(),
        exit_states: ExitStates | None = None,
    ) -> TargetResult:
        started_s = time.thread_time()
        result = super()._run(step, drafted_for, exit_states)
        self.verify_s = time.thread_time() - started_s
        return result


class Steps:
    """The same step over and over: a draft and its verification, for a batch of sequences."""

    def __init__(self, target: TimedTarget, plan: Plan, batch: int) -> None:
        self._target, self._seconds = target, plan.seconds
        self.verify_s: list[float] = []
        """Of each measurement, seconds of verification."""
        blocks_each = -(-(plan.context + plan.num_draft_tokens) // _BLOCK_SIZE)
        tokens = random.Random(batch).choices(range(2, target.description.vocab_size), k=plan.context)
        works: list[TargetWork] = []
        for number in range(batch):
            name, first = RequestId(f"{batch}-{number}"), FIRST_BLOCK + number * blocks_each
            read = TargetWork(
                *(name, tuple(tokens[:-1]), 0, 0, 0), block_ids=tuple(range(first, first + blocks_each))
            )
            target.run(TargetStep(0, (read,), (AdmittedSequence(name, number, _GREEDY),)))
            works.append(
                TargetWork(
                    *(name, (tokens[-1],), plan.context - 1, 1, blocks_each, ()),
                    num_self_drafted=plan.num_draft_tokens,
                )
            )
        self._step = TargetStep(1, tuple(works))

    def measure(self) -> float:
        """Return the median seconds of a step."""
        steps: list[float] = []
        verifying: list[float] = []
        while sum(steps) < self._seconds or len(steps) < 3:
            started_s = time.thread_time()
            self._target.run(self._step)
            steps.append(time.thread_time() - started_s)
            verifying.append(self._target.verify_s)
        self.verify_s.append(statistics.median(verifying))
        return statistics.median(steps)


def targets_of(folder: Path, plan: Plan) -> dict[str, TimedTarget]:
    """Return two targets of one folder, over the same compiled forwards."""
    torch.set_num_threads(1)
    loaded = load_model(ModelConfig(model=str(folder), dtype="bfloat16"))
    num_blocks = FIRST_BLOCK + max(plan.batches) * -(-(plan.context + plan.num_draft_tokens) // _BLOCK_SIZE)
    cache = CacheConfig(block_size=_BLOCK_SIZE, num_blocks=num_blocks)
    runner = ModelRunner(loaded, cache, max_num_seqs=max(plan.batches))
    view = runner.of_view(early_exit(loaded, plan.exit_layer), exit_tap(loaded, plan.exit_layer))
    whole = accelerate(runner, CompileConfig())
    of_view = accelerate(view, CompileConfig(), like=whole)
    resumed = ResumedForward(runner, view, CompileConfig())
    works: tuple[IdleWork, ...] = (whole, of_view, resumed)
    for work in works:
        while work.pending():
            work.run_next()
        assert work.state == "ready", "it is measured where forwards are compiled"
    resumed.fewest_rows = 0  # also where that is not worth it
    sampler = Sampler()
    sampler.warm_up()
    return {
        name: TimedTarget(
            runner, sampler, self_drafting=FullSelection(_BLOCK_SIZE), view=view, resumed=goes_on
        )
        for name, goes_on in ((ANEW, None), (RESUMED, resumed))
    }


def measure(folder: Path, plan: Plan, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Return, by batch, seconds of a step and of what of it is verification, and their ratios."""
    targets = targets_of(folder, plan)
    cells: list[dict[str, Any]] = []
    for batch in plan.batches:
        steps = {name: Steps(target, plan, batch) for name, target in targets.items()}
        paired = run_in_turn({name: one.measure for name, one in steps.items()}, plan.rounds, tick)
        verify_s = {name: one.verify_s[1:] for name, one in steps.items()}  # the first is to warm up
        cells.append(
            {
                "batch": batch,
                "step_s": paired.seconds,
                "verify_s": verify_s,
                "step_ratio": _ratio(paired.seconds),
                "verify_ratio": _ratio(verify_s),
            }
        )
    return cells


def _ratio(seconds: Mapping[str, Sequence[float]]) -> PairedRatio:
    pairs = zip(seconds[RESUMED], seconds[ANEW], strict=True)
    return PairedRatio(tuple(resumed / anew for resumed, anew in pairs))


def headlines_of(targets: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return time with reuse as a share of that without, by target: the middle of the pairs, and bounds."""
    numbers: dict[str, float] = {}
    for target, cells in targets.items():
        for cell in cells:
            for what in ("step", "verify"):
                ratio: PairedRatio = cell[f"{what}_ratio"]
                name = f"{target}_{what}_ratio_b{cell['batch']}"
                numbers |= {name: ratio.median, f"{name}_lower": ratio.lower, f"{name}_upper": ratio.upper}
    return numbers


def main(
    quick: Annotated[bool, typer.Option(help="Two batches, shorter.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/.")] = Path("models/demo"),
) -> None:
    """Measure what verification saves that goes on from where drafts have stopped.

    Example: python -m benchmarks.exit_reuse --quick
    """
    plan = QUICK if quick else FULL
    targets: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary, progress_bar() as progress:
        inflated = Path(temporary) / "target"
        num_layers = layers_for_parameters(models / "target", _INFLATED_PARAMETERS)
        inflate(models / "target", inflated, num_layers)
        for name, folder in (("demo", models / "target"), ("inflated", inflated)):
            task = progress.add_task(name, total=len(plan.batches) * 2 * (plan.rounds + 1))
            targets[name] = measure(folder, plan, partial(progress.advance, task))
    headlines = headlines_of(targets)
    write_results(json, {"plan": plan, "targets": targets, "headlines": headlines})
    report_headlines(headlines)


if __name__ == "__main__":
    typer.run(main)
