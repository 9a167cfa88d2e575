"""What weights of 8 and 4 bits do to speed and memory on one machine, beside bfloat16.

    python -m benchmarks.quantization run --json benchmarks/results/quantization.json    # about five minutes
    python -m benchmarks.quantization run --quick                                        # about two
    python -m benchmarks.quantization steps                                              # busy machines too

Two targets of 100 million parameters: `deep` is the demo target made as costly (`benchmarks.inflate`: 144
narrow layers, drafts accepted as they really are); `wide` has few broad layers, as models of this size have,
and random weights. Decoding: 64-token prompts, 64 new tokens, greedy, all weights in turn in one process, in
changing order; plain and, for `deep`, with the demo draft at k = 4. Memory: what a process of its own grows
by while it loads and compiles the target, without K/V, at the end and at most; and what it maps from files.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from benchmarks.in_process import InProcess, RunRecord, engine_config, merge
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.random_models import WIDE, write_random_model
from benchmarks.report import progress_bar, report_headlines, run_paired, write_results
from benchmarks.workload import read_prompts
from specdec.attention.native import resolve_cache_dir
from specdec.kv.config import CacheConfig
from specdec.kv.host_memory import give_back_freed
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import load_model
from specdec.model.native_forward import load_forward_library
from specdec.model.runner import ModelRunner

WEIGHTS = (None, "int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    batches: tuple[int, ...] = (1, 8)
    rounds: int
    prompt_tokens: int = 64
    num_tokens: int = 64
    k: int = 4
    num_parameters: float = 100e6
    num_threads: int = 2


FULL = Plan(rounds=7)
QUICK = Plan(rounds=2)


class Bench:
    """One target with all kinds of weights."""

    def __init__(self, plan: Plan, family: Path, target: Path, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._engines = {name: InProcess(self._config(family, target, name)) for name in WEIGHTS}
        texts = read_prompts(family / "prompts.jsonl")
        tokenizer = self._engines[None].engine.tokenizer
        self._text = [token for text in texts for token in tokenizer.encode(text)]

    def _config(self, family: Path, target: Path, name: str | None) -> Any:
        plan = self._plan
        config = engine_config(
            target,
            family / "draft",
            "bfloat16",
            max_num_seqs=max(plan.batches),
            num_draft_tokens=plan.k,
            num_threads=plan.num_threads,
        )
        quantized = config.target.model_copy(update={"quantization": name})
        cache = config.cache.model_copy(update={"memory_bytes": 512 << 20})
        return config.model_copy(update={"target": quantized, "cache": cache})

    def close(self) -> None:
        """Free the engines."""
        for engine in self._engines.values():
            engine.close()

    def _prompts(self, batch: int, number: int) -> list[tuple[int, ...]]:
        length = self._plan.prompt_tokens
        starts = [(number * batch + index) * 97 % (len(self._text) - length) for index in range(batch)]
        return [tuple(self._text[start : start + length]) for start in starts]

    def decode(self, batch: int, k: int) -> dict[str, Any]:
        """Decoding speed with every kind of weights."""
        plan = self._plan
        records: dict[str, list[RunRecord]] = {label(name): [] for name in WEIGHTS}

        def run(name: str | None) -> None:
            prompts = self._prompts(batch, len(records[label(name)]))
            records[label(name)].append(self._engines[name].run(prompts, plan.num_tokens, k))

        variants: dict[str, Callable[[], object]] = {label(name): partial(run, name) for name in WEIGHTS}
        task = self._progress.add_task(f"batch {batch}, k = {k}", total=len(variants) * (plan.rounds + 1))
        paired = run_paired(variants, plan.rounds, lambda: self._progress.advance(task))
        measured = {name: runs[1:] for name, runs in records.items()}
        return {
            "batch": batch,
            "k": k,
            "tokens_per_s": {name: _decode_speed(runs, batch) for name, runs in measured.items()},
            "seconds": paired,
            "faster": {name: paired.ratio("bf16", name) for name in measured},
            "mean_acceptance_length": {n: merge(runs).mean_acceptance_length for n, runs in measured.items()},
        }


def _decode_speed(runs: list[RunRecord], batch: int) -> float:
    """Tokens/s behind the first token of every request, median of the runs."""
    return statistics.median(batch * (len(run.token_ids[0]) - 1) / run.decode_s for run in runs)


def label(name: str | None) -> str:
    """What a kind of weights is called in the results."""
    return name or "bf16"


def memory_of(target: Path, name: str | None, num_threads: int) -> dict[str, int]:
    """Bytes by which a fresh process grows while it loads and compiles: kept, and at most."""
    command = [sys.executable, "-m", "benchmarks.quantization", "memory", str(target), label(name)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return found


class OwnMemory:
    """Samples the memory of this process, but for what it maps from files, which the system can take back."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before = status_bytes("RssAnon")
        self.most = 0
        """Bytes above what there was in the beginning, at most."""

    def __enter__(self) -> OwnMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def grown(self) -> int:
        """Bytes above what there was in the beginning, now."""
        return status_bytes("RssAnon") - self._before

    def _sample(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, self.grown())


def status_bytes(key: str) -> int:
    """A number of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {key}: this needs Linux")


app = typer.Typer(add_completion=False)


@app.command(hidden=True)
def memory(target: Path, name: str) -> None:
    """Load and compile one target in this process, and print what that takes, in bytes."""
    quantization = None if name == label(None) else name
    config = ModelConfig.model_validate({"model": str(target), "quantization": quantization})
    if quantization is not None:
        importlib.import_module("torchao.quantization")  # not what is to be measured
    load_forward_library(resolve_cache_dir(None))
    mapped_before = status_bytes("RssFile")
    with OwnMemory() as sampled:
        loaded = load_model(config)
        most_while_loading = sampled.most
        runner = ModelRunner(loaded, CacheConfig(num_blocks=16), max_num_seqs=1)
        forward = CompiledForward(runner, CompileConfig())
        assert forward.warm_up() == "ready"
        gc.collect()
        give_back_freed()
        kept = sampled.grown()
    mapped = status_bytes("RssFile") - mapped_before
    grown = {"kept": kept, "most": sampled.most, "most_while_loading": most_while_loading, "mapped": mapped}
    print(json.dumps(grown))


@app.command()
def steps(
    num_threads: Annotated[int, typer.Option(help="Threads of a step.")] = 1,
    repeats: Annotated[int, typer.Option(help="Steps of each kind.")] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """The shortest of many bare decode steps of the wide target: what a busy machine still tells of kernels.

    Example: python -m benchmarks.quantization steps --json runs/steps.json
    """
    torch.set_num_threads(num_threads)
    shortest: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(models / "target", Path(folder), WIDE)
        runners = {label(name): compiled_runner(Path(folder), name) for name in WEIGHTS}
        for batch in (1, 2, 4, 8, 16, 32):
            seconds = dict.fromkeys(runners, math.inf)
            for number in range(repeats):
                for name, runner in runners.items():
                    started = time.perf_counter()
                    runner.forward(decode_slices(batch, 64 + number % 16))
                    seconds[name] = min(seconds[name], time.perf_counter() - started)
            shortest[str(batch)] = {name: 1e3 * one for name, one in seconds.items()}
    for batch_name, cell in shortest.items():
        print(f"batch {batch_name}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in cell.items()))
    write_results(json_file, {"num_threads": num_threads, "repeats": repeats, "shortest_step_ms": shortest})


def compiled_runner(target: Path, name: str | None) -> ModelRunner:
    """The target with one kind of weights."""
    loaded = load_model(ModelConfig.model_validate({"model": str(target), "quantization": name}))
    runner = ModelRunner(loaded, CacheConfig(num_blocks=256, block_size=16), max_num_seqs=32)
    forward = runner.graphs = CompiledForward(runner, CompileConfig())
    assert forward.warm_up() == "ready"
    return runner


def decode_slices(batch: int, length: int) -> list[SequenceSlice]:
    """One token each behind `length` others (whatever the cache holds)."""
    return [
        SequenceSlice(
            token_ids=[7 + sequence],
            start=length,
            block_table=range(1 + 5 * sequence, 6 + 5 * sequence),
            num_logit_rows=1,
        )
        for sequence in range(batch)
    ]


def headlines(results: dict[str, Any]) -> dict[str, float]:
    """The numbers to watch."""
    numbers: dict[str, float] = {}
    for shape in ("deep", "wide"):
        for cell in results[shape]["decode"]:
            kind = "plain" if cell["k"] == 0 else "draft"
            for name in ("int8", "int4"):
                numbers[f"{shape}_{name}_{kind}_b{cell['batch']}"] = cell["faster"][name].median
        for name, grown in results[shape]["memory"].items():
            numbers[f"{shape}_{name}_kept_mb"] = grown["kept"] / 1e6
    return numbers


@app.command()
def run(
    quick: Annotated[bool, typer.Option(help="Fewer rounds.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure decoding and memory with bfloat16, 8-bit and 4-bit weights.

    Example: python -m benchmarks.quantization run --quick
    """
    plan = QUICK if quick else FULL
    torch.set_num_threads(plan.num_threads)
    results: dict[str, Any] = {"plan": plan}
    with tempfile.TemporaryDirectory() as name, progress_bar() as progress:
        targets = {"deep": Path(name) / "deep", "wide": Path(name) / "wide"}
        num_layers = layers_for_parameters(models / "target", plan.num_parameters)
        with torch.inference_mode():
            inflate(models / "target", targets["deep"], num_layers)
        write_random_model(models / "target", targets["wide"], WIDE)
        for shape, target in targets.items():
            grown = {label(name): memory_of(target, name, plan.num_threads) for name in WEIGHTS}
            lengths = (0, plan.k) if shape == "deep" else (0,)
            with contextlib.closing(Bench(plan, models, target, progress)) as bench:
                decode = [bench.decode(batch, k) for batch in plan.batches for k in lengths]
            results[shape] = {"decode": decode, "memory": grown}
    numbers = headlines(results)
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    app()
