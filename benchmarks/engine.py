"""The engine against transformers and against what the hardware allows, on one machine, with one small model.

    python -m benchmarks.engine --json benchmarks/results/engine.json    # about twenty minutes
    python -m benchmarks.engine --quick                                  # under five minutes

The model is the demo target made as costly as 26 million parameters (`benchmarks.inflate`), in bfloat16, so
that its draft is accepted as often as it really is. Decoding: 64-token prompts, 128 new tokens, greedy, all
systems in turn in one process (ABBA), another batch of prompts in every round. The floor is the time in which
a reduction of PyTorch reads what a step must read: weights once, and every sequence's cached K/V. Prefill:
long prompts, one new token. Ready: `drafthouse serve` until `/health` says 200. Growth: `benchmarks.soak`.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from benchmarks import soak
from benchmarks.floor import bytes_per_step, fastest_read, in_turn
from benchmarks.huggingface import HuggingFaceGenerator
from benchmarks.in_process import InProcess, RunRecord, engine_config, merge
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.report import Spread, progress_bar, report_headlines, run_paired, write_results
from benchmarks.startup import ready_seconds
from benchmarks.workload import read_prompts, window
from specdec.model.graphs import CompiledForward

_CONFIG = Path("configs/demo-bf16.yaml")
_FLOOR_TURNS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int
    prompt_tokens: int = 64
    num_tokens: int = 128
    k: int = 4
    prefill_shapes: tuple[tuple[int, int], ...]
    """Batch size and prompt length in tokens."""
    prefill_rounds: int
    warm_starts: int
    soak: soak.Plan
    num_parameters: float = 26e6
    num_threads: int = 2


FULL = Plan(
    rounds=7, prefill_shapes=((1, 512), (8, 512), (1, 2048)), prefill_rounds=7, warm_starts=3, soak=soak.FULL
)
QUICK = Plan(rounds=3, prefill_shapes=((8, 512),), prefill_rounds=3, warm_starts=1, soak=soak.QUICK)


class Bench:
    """Runs a plan."""

    def __init__(self, plan: Plan, family: Path, target: Path, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._pair = InProcess(
            engine_config(
                target,
                family / "draft",
                "bfloat16",
                max_num_seqs=max(plan.batches),
                num_draft_tokens=plan.k,
                num_threads=plan.num_threads,
                max_model_len=4096,
            )
        )
        self._peer = HuggingFaceGenerator(target, torch.bfloat16, family / "draft")
        texts = read_prompts(family / "prompts.jsonl")
        self._text = [token for text in texts for token in self._pair.engine.tokenizer.encode(text)]

    def close(self) -> None:
        """Free the engine."""
        self._pair.close()

    def decode(self, batch: int) -> dict[str, Any]:
        """Plain and speculative decoding beside transformers' at one batch size."""
        plan = self._plan
        batches = [window(self._text, batch, plan.prompt_tokens, number) for number in range(plan.rounds + 1)]
        records: dict[str, list[RunRecord]] = {"plain": [], "speculative": []}
        turns: dict[str, int] = {}

        def prompts(name: str) -> list[tuple[int, ...]]:
            turns[name] = turns.get(name, -1) + 1
            return batches[turns[name]]

        def ours(name: str, k: int) -> None:
            records[name].append(self._pair.run(prompts(name), plan.num_tokens, k))

        variants: dict[str, Callable[[], object]] = {
            "plain": partial(ours, "plain", 0),
            "speculative": partial(ours, "speculative", plan.k),
            "huggingface": lambda: self._peer.generate(prompts("huggingface"), plan.num_tokens),
        }
        if batch == 1:
            variants["assisted"] = lambda: self._peer.generate_assisted(
                prompts("assisted"), plan.num_tokens, plan.k
            )
        tick = self._ticker(f"decoding, batch {batch}", len(variants) * (plan.rounds + 1))
        paired = run_paired(variants, plan.rounds, tick)
        plain = merge(records["plain"][1:])
        step_ms = [1e3 * run.decode_s / (plan.num_tokens - 1) for run in records["plain"][1:]]
        floor_ms = self._floor_ms(batch, plan.prompt_tokens + plan.num_tokens // 2)
        return {
            "batch": batch,
            "tokens_per_s": {
                name: batch * plan.num_tokens / paired.spread(name).median for name in paired.seconds
            },
            "seconds": paired,
            "plain_vs_hf": paired.ratio("huggingface", "plain"),
            "draft_vs_plain": paired.ratio("plain", "speculative"),
            "draft_vs_hf": paired.ratio("huggingface", "speculative"),
            "draft_vs_hf_assisted": paired.ratio("assisted", "speculative") if batch == 1 else None,
            "mean_acceptance_length": merge(records["speculative"][1:]).mean_acceptance_length,
            "step_ms": Spread(tuple(step_ms)),
            "forward_and_sampling_ms": plain.summary()["verify_ms_per_round"],
            "floor_ms": floor_ms,
            "floor_share": floor_ms / statistics.median(step_ms),
        }

    def _floor_ms(self, batch: int, context: int) -> float:
        """Milliseconds that reading takes alone, with as many threads."""
        runner = self._pair.target_runner
        assert isinstance(runner.graphs, CompiledForward)
        num_weight_bytes = runner.graphs.num_packed_bytes
        num_bytes = bytes_per_step(runner.loaded, num_weight_bytes, batch=batch, context=context)
        (seconds,) = in_turn({"read": fastest_read(num_bytes)}, _FLOOR_TURNS).values()
        return 1e3 * statistics.median(seconds)

    def prefill(self, batch: int, length: int) -> dict[str, Any]:
        """Prompts of one length, one new token each."""
        plan = self._plan
        batches = [window(self._text, batch, length, number) for number in range(plan.prefill_rounds + 1)]
        turns = {"ours": iter(batches), "huggingface": iter(batches)}
        variants: dict[str, Callable[[], object]] = {
            "ours": lambda: self._pair.run(next(turns["ours"]), 1, 0),
            "huggingface": lambda: self._peer.generate(next(turns["huggingface"]), 1),
        }
        tick = self._ticker(f"prefill, {batch} x {length}", len(variants) * (plan.prefill_rounds + 1))
        paired = run_paired(variants, plan.prefill_rounds, tick)
        return {
            "batch": batch,
            "prompt_tokens": length,
            "tokens_per_s": {name: batch * length / paired.spread(name).median for name in paired.seconds},
            "seconds": paired,
            "prefill_vs_hf": paired.ratio("huggingface", "ours"),
        }

    def _ticker(self, name: str, total: int) -> Callable[[], None]:
        task = self._progress.add_task(name, total=total)
        return lambda: self._progress.advance(task)


def start_times(num_warm: int, folder: Path, progress: Progress) -> dict[str, list[float]]:
    """Seconds until the server is healthy: with no compiled kernels, and with those of the start before."""
    task = progress.add_task("starts of the server", total=1 + num_warm)
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for number in range(1 + num_warm):
        seconds["warm" if number else "cold"].append(ready_seconds(_CONFIG, folder / "kernels"))
        progress.advance(task)
    return seconds


def headlines(results: dict[str, Any]) -> dict[str, float]:
    """The numbers to watch."""
    decode = {cell["batch"]: cell for cell in results["decode"]}
    prefill: Sequence[dict[str, Any]] = results["prefill"]
    return {
        **{f"plain_vs_hf_b{batch}": cell["plain_vs_hf"].median for batch, cell in decode.items()},
        "draft_vs_hf_assisted_b1": decode[1]["draft_vs_hf_assisted"].median,
        "floor_share_b1": decode[1]["floor_share"],
        "prefill_vs_hf": statistics.median(cell["prefill_vs_hf"].median for cell in prefill),
        "ready_seconds_warm": statistics.median(results["ready_seconds"]["warm"]),
        "soak_growth_mb": soak.growth_mb(results["soak"]["readings"]),
    }


def main(
    quick: Annotated[bool, typer.Option(help="Fewer rounds, one prefill, one warm start.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure decoding, prefill, start-up and growth of the engine beside transformers.

    Example: python -m benchmarks.engine --quick --json runs/engine.json
    """
    plan = QUICK if quick else FULL
    torch.set_num_threads(plan.num_threads)
    with tempfile.TemporaryDirectory() as name, progress_bar() as progress:
        folder = Path(name)
        target = folder / "target"
        num_layers = layers_for_parameters(models / "target", plan.num_parameters)
        with torch.inference_mode():
            inflate(models / "target", target, num_layers)
        results: dict[str, Any] = {"plan": plan, "num_layers": num_layers}
        with contextlib.closing(Bench(plan, models, target, progress)) as bench:
            results["decode"] = [bench.decode(batch) for batch in plan.batches]
            results["prefill"] = [bench.prefill(*shape) for shape in plan.prefill_shapes]
        results["ready_seconds"] = start_times(plan.warm_starts, folder, progress)
        results["soak"] = soak.run_soak(plan.soak, models, progress)
    numbers = headlines(results)
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
