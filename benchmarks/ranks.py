"""What a round costs when one model is held by two ranks: tensor parallel, or in stages, beside one process.

    python -m benchmarks.ranks --json benchmarks/results/ranks.json    # under ten minutes
    python -m benchmarks.ranks --quick                                 # about a minute

The model is that of `benchmarks.engine`: the demo target made as costly as 26 million parameters, in bf16.
Every rank has one thread; one process is measured with one thread (what a stage has) and with two (what two
ranks have together). 64-token prompts, greedy, all systems in turn (ABBA), another batch of prompts in every
round of the benchmark. A round's milliseconds are those of decoding, after every request has its first token.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from benchmarks.in_process import InProcess, RunRecord, engine_config, merge
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.report import Spread, progress_bar, report_headlines, run_paired, write_results
from benchmarks.workload import read_prompts, window
from specdec.engine.config import EngineConfig
from specdec.model.config import CompileConfig

_NUM_CORES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to hold the model."""

    tensor: int = 1
    stages: int = 1
    num_threads: int = 1
    """Of each rank."""
    compiled: bool = True


SYSTEMS = {
    "one_1_thread": System(),
    "one_2_threads": System(num_threads=2),
    "tp2": System(tensor=2),
    "pp2": System(stages=2),
    "pp2_eager": System(stages=2, compiled=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    batches: tuple[int, ...] = (1, 8)
    rounds: int
    num_tokens: int
    prompt_tokens: int = 64
    k: int = 4
    max_model_len: int = 256
    num_parameters: float = 26e6


FULL = Plan(rounds=7, num_tokens=128)
QUICK = Plan(rounds=2, num_tokens=32)


def system_config(system: System, plan: Plan, target: Path, draft: Path) -> EngineConfig:
    """The configuration of one system."""
    config = engine_config(
        target,
        draft,
        "bfloat16",
        max_num_seqs=max(plan.batches),
        num_draft_tokens=plan.k,
        num_threads=system.num_threads,
        max_model_len=plan.max_model_len,
    )
    changes = {
        "tensor_parallel_size": system.tensor,
        "pipeline_parallel_size": system.stages,
        "compile": CompileConfig(mode="auto" if system.compiled else "off"),
    }
    return config.model_copy(update={"target": config.target.model_copy(update=changes)})


class Bench:
    """All systems at once, of which one is at work."""

    def __init__(self, plan: Plan, family: Path, target: Path, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._engines: dict[str, InProcess] = {}
        task = progress.add_task("starting", total=len(SYSTEMS))
        for name, system in SYSTEMS.items():
            torch.set_num_threads(_NUM_CORES)
            self._engines[name] = InProcess(system_config(system, plan, target, family / "draft"))
            progress.advance(task)
        texts = read_prompts(family / "prompts.jsonl")
        tokenizer = self._engines["one_1_thread"].engine.tokenizer
        self._text = [token for text in texts for token in tokenizer.encode(text)]

    def close(self) -> None:
        """End all ranks."""
        for engine in self._engines.values():
            engine.close()

    def cell(self, batch: int, k: int) -> dict[str, Any]:
        """All systems at one batch size, plain (k 0) or with the draft model."""
        plan = self._plan
        records: dict[str, list[RunRecord]] = {name: [] for name in SYSTEMS}

        def run(name: str) -> None:
            torch.set_num_threads(SYSTEMS[name].num_threads)
            prompts = window(self._text, batch, plan.prompt_tokens, len(records[name]))
            records[name].append(self._engines[name].run(prompts, plan.num_tokens, k))

        variants: dict[str, Callable[[], object]] = {name: partial(run, name) for name in SYSTEMS}
        task = self._progress.add_task(f"batch {batch}, k {k}", total=len(SYSTEMS) * (plan.rounds + 1))
        run_paired(variants, plan.rounds, lambda: self._progress.advance(task))
        return {"batch": batch, "k": k, **summarise(records)}


def summarise(records: Mapping[str, list[RunRecord]]) -> dict[str, Any]:
    """Compare runs of the same prompts; the first of each system is not counted."""
    round_ms = {
        name: Spread(tuple(1e3 * run.decode_round_s for run in runs[1:])) for name, runs in records.items()
    }
    texts = {name: [run.token_ids for run in runs] for name, runs in records.items()}
    return {
        "round_ms": round_ms,
        "tokens_per_s": {
            name: Spread(tuple(_num_decoded(run) / run.decode_s for run in runs[1:]))
            for name, runs in records.items()
        },
        "mean_acceptance_length": {
            name: merge(runs[1:]).mean_acceptance_length for name, runs in records.items()
        },
        "verify_ms_per_round": {
            name: merge(runs[1:]).summary()["verify_ms_per_round"] for name, runs in records.items()
        },
        "pp2_vs_eager": _ratio(round_ms["pp2_eager"], round_ms["pp2"]),
        "pp2_vs_one": _ratio(round_ms["one_1_thread"], round_ms["pp2"]),
        "tp2_vs_one": _ratio(round_ms["one_2_threads"], round_ms["tp2"]),
        "pp2_added_ms": _difference(round_ms["pp2"], round_ms["one_1_thread"]),
        "tp2_added_ms": _difference(round_ms["tp2"], round_ms["one_2_threads"]),
        "same_text": {name: text == texts["one_1_thread"] for name, text in texts.items()},
    }


def _num_decoded(run: RunRecord) -> int:
    """Tokens after each request's first."""
    return sum(len(one) - 1 for one in run.token_ids)


def _ratio(slow: Spread, fast: Spread) -> Spread:
    return Spread(tuple(a / b for a, b in zip(slow.values, fast.values, strict=True)))


def _difference(more: Spread, less: Spread) -> Spread:
    return Spread(tuple(a - b for a, b in zip(more.values, less.values, strict=True)))


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers to watch: how many times as fast a round is, and what it takes more."""
    numbers: dict[str, float] = {}
    for cell in results["cells"]:
        suffix = f"b{cell['batch']}" + ("_draft" if cell["k"] else "")
        for name in ("pp2_vs_eager", "pp2_vs_one", "tp2_vs_one", "pp2_added_ms"):
            numbers[f"{name}_{suffix}"] = cell[name].median
    return numbers


def main(
    quick: Annotated[bool, typer.Option(help="Two short rounds, about a minute.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure rounds over two ranks beside those of one process.

    Example: python -m benchmarks.ranks --quick --json runs/ranks.json
    """
    plan = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as name, progress_bar() as progress:
        target = Path(name) / "target"
        num_layers = layers_for_parameters(models / "target", plan.num_parameters)
        with torch.inference_mode():
            inflate(models / "target", target, num_layers)
        results: dict[str, Any] = {"plan": plan, "systems": SYSTEMS, "num_layers": num_layers}
        with contextlib.closing(Bench(plan, models, target, progress)) as bench:
            results["cells"] = [bench.cell(*one) for one in product(plan.batches, (0, plan.k))]
    numbers = headlines(results)
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
