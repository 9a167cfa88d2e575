"""A draft model that goes on learning: acceptance over traffic of another kind than it was distilled on.

    python -m benchmarks.online_learning --json benchmarks/results/online-learning.json   # some minutes
    python -m benchmarks.online_learning --quick

The demo pair was trained on Python code. Prompts are excerpts of this project's own documentation, at a
temperature, in batches that never repeat a prompt. The same requests are served twice: by the draft model as
it is, and by one that learns, whose trainer works off between two batches all that it can. With
`sample_and_match` both write the same tokens, which is checked. Acceptance is that of draft tokens in the
engine; the trainer's own numbers are those of its trials on held-back texts.

Exchanging weights is timed: staging, which happens beside the drafting, and taking, for which drafting waits.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_process import batch_requests, run_batch
from benchmarks.plain_tool import PlainTool
from benchmarks.report import progress_bar
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.model.config import ModelConfig
from specdec.model.tokenizer import load_tokenizer
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.online_config import OnlineConfig
from specdec.scheduling.config import SchedulerConfig
from training.online.in_process import LearningProposer
from training.online.load import load_trainer

TEXTS = Path(__file__).parents[1] / "docs"
_TIMED_EXCHANGES = 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    num_batches: int
    batch: int = 16
    prompt_tokens: int = 48
    num_tokens: int = 96
    temperature: float = 0.7
    k: int = 4
    num_threads: int = 1
    online: OnlineConfig = field(
        default_factory=lambda: OnlineConfig(
            allow_shared=True,
            learning_rate=5e-4,
            min_new_tokens=1024,
            min_held_back_tokens=512,
            cpu_share=1.0,
        )
    )


FULL = Plan(num_batches=24)
QUICK = Plan(num_batches=3)


def excerpts(texts: Sequence[Sequence[int]], plan: Plan, seed: int = 0) -> list[list[tuple[int, ...]]]:
    """Return prompts for every batch, none of which overlaps another."""
    pieces = [
        tuple(text[start : start + plan.prompt_tokens])
        for text in texts
        for start in range(0, len(text) - plan.prompt_tokens + 1, plan.prompt_tokens)
    ]
    random.Random(seed).shuffle(pieces)
    wanted = plan.num_batches * plan.batch
    assert len(pieces) >= wanted, f"{len(pieces)} excerpts, not {wanted}"
    return [pieces[first : first + plan.batch] for first in range(0, wanted, plan.batch)]


def engine_config(plan: Plan, models: Path, *, learns: bool) -> EngineConfig:
    """Return the demo pair with a fixed k, all drafts of one kind."""
    return EngineConfig(
        target=ModelConfig(model=str(models / "target"), dtype="float32", num_threads=plan.num_threads),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(models / "draft"),
            num_speculative_tokens=plan.k,
            controller="fixed",
            num_threads=plan.num_threads,
            online=plan.online if learns else None,
        ),
        scheduler=SchedulerConfig(max_num_seqs=plan.batch),
    )


class Side:
    """One engine, and what it makes of the batches."""

    def __init__(self, plan: Plan, models: Path) -> None:
        """Open an engine whose draft model stays as it is."""
        self._plan = plan
        self.engine = self._open(models)
        self.engine.warm_up()
        self.cells: list[dict[str, float]] = []

    def _open(self, models: Path) -> Engine:
        return Engine(engine_config(self._plan, models, learns=False))

    def serve(self, prompts: Sequence[tuple[int, ...]], name: str) -> tuple[tuple[int, ...], ...]:
        """Serve one batch; return its tokens."""
        plan = self._plan
        params = SamplingParams(temperature=plan.temperature, max_tokens=plan.num_tokens, ignore_eos=True)
        before = self._counts()
        record = run_batch(self.engine, batch_requests(prompts, params, plan.k, name))
        drafts, drafted, accepted = (end - start for start, end in zip(before, self._counts(), strict=True))
        self.cells.append({"acceptance": accepted / drafted, "tokens_per_pass": 1 + accepted / drafts})
        return record.token_ids

    def _counts(self) -> tuple[int, int, int]:
        metrics = self.engine.metrics()
        return metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens


class LearningSide(Side):
    """One whose draft model learns between two batches."""

    drafter: DraftModelProposer
    proposer: LearningProposer

    def _open(self, models: Path) -> Engine:
        config = engine_config(self._plan, models, learns=True)
        self.trainer = load_trainer(config)

        def learning(drafter: Proposer) -> Proposer:
            assert isinstance(drafter, DraftModelProposer)
            self.drafter = drafter
            self.proposer = LearningProposer(drafter, self.trainer, self._plan.online)
            return self.proposer

        return Engine(config, around_drafter=learning)

    def learn(self) -> None:
        """Learn from what has been served, and note how that went."""
        started_s = time.perf_counter()
        self.proposer.catch_up()
        status = self.trainer.status
        self.cells[-1] |= {
            "learn_s": time.perf_counter() - started_s,
            "version": status.version,
            "num_tried": status.num_tried,
            "held_back_before": status.acceptance_before or 0.0,
            "held_back_after": status.acceptance_after or 0.0,
        }

    def exchange_times(self) -> dict[str, float]:
        """Return the median seconds of staging the present weights once more, and of taking them."""
        version = self.trainer.served
        staging, taking = [], []
        for _ in range(_TIMED_EXCHANGES):
            started_s = time.perf_counter()
            staged = self.drafter.stage_weights(version.weights)
            staged_s = time.perf_counter()
            assert self.drafter.take_weights(staged)
            staging.append(staged_s - started_s)
            taking.append(time.perf_counter() - staged_s)
        return {"staging_s": statistics.median(staging), "taking_s": statistics.median(taking)}


def run(plan: Plan, models: Path) -> dict[str, Any]:
    """Serve all batches on both sides."""
    torch.set_num_threads(plan.num_threads)
    tokenizer: Any = load_tokenizer(str(models / "target"))
    texts = [tokenizer.encode(path.read_text()) for path in sorted(TEXTS.rglob("*.md"))]
    fixed, learning = Side(plan, models), LearningSide(plan, models)
    with fixed.engine, learning.engine, progress_bar() as progress:
        for index, prompts in enumerate(progress.track(excerpts(texts, plan), description="batches")):
            said = [side.serve(prompts, f"batch{index}") for side in (fixed, learning)]
            assert said[0] == said[1], "the drafter has changed the output"
            learning.learn()
        times = learning.exchange_times()
    return {
        "plan": {**asdict(plan), "online": plan.online.model_dump()},
        "fixed": fixed.cells,
        "learning": learning.cells,
        "exchange": times,
    }


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """Acceptance of the first and of the last quarter of the batches, and what an exchange costs."""
    numbers: dict[str, float] = {}
    for side in ("fixed", "learning"):
        cells = results[side]
        quarter = max(1, len(cells) // 4)
        for part, its in (("first", cells[:quarter]), ("last", cells[-quarter:])):
            for what in ("acceptance", "tokens_per_pass"):
                numbers[f"{what}_{side}_{part}_quarter"] = statistics.mean(cell[what] for cell in its)
    numbers["staging_ms"] = 1e3 * results["exchange"]["staging_s"]
    numbers["taking_ms"] = 1e3 * results["exchange"]["taking_s"]
    return numbers


TOOL = PlainTool(
    module="online_learning",
    summary="Measure what a draft model learns from traffic.",
    full=FULL,
    quick=QUICK,
    run=run,
    headlines=headlines,
)


if __name__ == "__main__":
    TOOL.main()
