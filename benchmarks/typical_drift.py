"""What the lossy rule `typical` changes, beside the rules that change nothing: total variation and loss.

    python -m benchmarks.typical_drift --json benchmarks/results/typical-drift.json    # quarter of an hour
    python -m benchmarks.typical_drift --quick                                         # about a minute

Every rule continues the same held-out prompts with the same seeds, in the running engine. Afterwards target
and draft model read what it wrote, in one forward each, and tell p and q at every position, at the run's
temperature. Per rule and temperature:

    loss              mean of -log p(token), nats
    loss_drift        that of the rule less that of `sample_and_match`, prompt by prompt
    loss_excess       mean of -log p(token) - H(p), H its entropy: 0 in the mean if drawn from p
    tokens_per_round  1 + accepted / drafts
    distinct_4_grams  different ones over all, per stream
    looping           share of streams that end in a loop

and for `typical`, from its definition at each position (no sampling error):

    total_variation   between what it emits there and p, mean over all generated tokens
    .._drafted        where a draft token was judged: it stands, or the most likely token replaces it
    .._bonus          behind a draft of which all stands: the most likely token follows, 1 - max p
    unreachable       mass of p on tokens that it cannot emit there

Errors are standard errors of the mean over prompts. Drift and excess of lossless rules must lie within a few
of them: they are the control of the measurement. Nothing is timed, one thread does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.progress import Progress
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.in_process import batch_requests
from benchmarks.report import progress_bar, report_headlines, write_results
from benchmarks.workload import read_prompts
from specdec.core.ids import RequestId
from specdec.core.loops import ends_in_loop
from specdec.core.outputs import SpeculationStats
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.verification.typical import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD, Typical

EXACT = "sample_and_match"
TYPICAL = f"typical {POSTERIOR_THRESHOLD} {POSTERIOR_ALPHA}"
RULES: dict[str, dict[str, Any]] = {
    EXACT: {"rejection_sample_method": EXACT},
    "rejection": {"rejection_sample_method": "rejection"},
    "block": {"rejection_sample_method": "block"},
    TYPICAL: {"rejection_sample_method": "typical", "allow_lossy": True},
    "typical 0.3 0.6": {
        "rejection_sample_method": "typical",
        "allow_lossy": True,
        "posterior_threshold": 0.3,
        "posterior_alpha": 0.6,
    },
}
Kind = Literal["sampled", "drafted", "bonus"]
_DIGITS = 6
"""Of the raw numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    rules: tuple[str, ...]
    temperatures: tuple[float, ...]
    num_prompts: int
    seeds_per_prompt: int
    num_tokens: int
    k: int = 4
    num_threads: int = 1


FULL = Plan(
    rules=tuple(RULES), temperatures=(0.5, 0.7, 1.0), num_prompts=96, seeds_per_prompt=1, num_tokens=96
)
QUICK = Plan(
    rules=(EXACT, "block", TYPICAL), temperatures=(1.0,), num_prompts=16, seeds_per_prompt=1, num_tokens=64
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One continuation."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    speculation: SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    error: float
    """Standard error."""

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """Return the mean of one value per prompt."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        return Estimate(mean=statistics.fmean(values), error=error)


def kinds_of(num_tokens: int, speculation: SpeculationStats) -> list[Kind]:
    """Return how each token of a stream came about: the first and those without a draft are sampled."""
    kinds: list[Kind] = ["sampled"]
    for drafted, accepted in zip(speculation.per_step_drafted, speculation.per_step_accepted, strict=True):
        kinds += ["drafted"] * accepted
        kinds.append("bonus" if accepted == drafted else "drafted")
    kinds += ["sampled"] * (num_tokens - len(kinds))
    return kinds[:num_tokens]


def typical_outcome(rule: Typical, p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """Return the distribution [R, V] of what `typical` emits where a token drawn from q is judged by p."""
    limits = torch.tensor(rule.limits(p_RV), dtype=p_RV.dtype)
    standing_RV = q_RV * (p_RV > limits[:, None])
    rejected_R1 = 1.0 - standing_RV.sum(-1, keepdim=True)
    return standing_RV.scatter_add(1, p_RV.argmax(-1, keepdim=True), rejected_R1)


def unreachable_mass(rule: Typical, p_RV: torch.Tensor) -> torch.Tensor:
    """Return what of p [R, V] is on tokens that neither stand when drafted nor are the most likely."""
    limits = torch.tensor(rule.limits(p_RV), dtype=p_RV.dtype)
    reachable_RV = p_RV > limits[:, None]
    reachable_RV.scatter_(1, p_RV.argmax(-1, keepdim=True), True)
    return (p_RV * ~reachable_RV).sum(-1)


class Reader:
    """Target and draft model as `transformers` runs them: what p and q were along a stream."""

    def __init__(self, models: Path) -> None:
        self._target = _load(models / "target")
        self._draft = _load(models / "draft")

    def rows(self, stream: Stream, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return p and q, float64 [number of generated tokens, vocabulary]."""
        token_ids = torch.tensor([[*stream.prompt, *stream.token_ids]])
        first = len(stream.prompt) - 1
        p_RV, q_RV = (
            (model(token_ids).logits[0, first:-1].double() / temperature).softmax(-1)
            for model in (self._target, self._draft)
        )
        return p_RV, q_RV


def _load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def typical_of(rule: str) -> Typical | None:
    """Return the lossy rule of this name in `RULES`, None for a lossless one."""
    keys = RULES[rule]
    if keys["rejection_sample_method"] != "typical":
        return None
    return Typical(
        keys.get("posterior_threshold", POSTERIOR_THRESHOLD), keys.get("posterior_alpha", POSTERIOR_ALPHA)
    )


def measure(
    stream: Stream, p_RV: torch.Tensor, q_RV: torch.Tensor, typical: Typical | None
) -> dict[str, float]:
    """Return what there is to say about one stream; a mean over no position is absent."""
    token_ids = torch.tensor(stream.token_ids)
    grams = [stream.token_ids[index : index + 4] for index in range(len(stream.token_ids) - 3)]
    loss = float(-p_RV.gather(1, token_ids[:, None]).log().mean())
    found = {
        "loss": loss,
        "loss_excess": loss + float(p_RV.xlogy(p_RV).sum(-1).mean()),
        "tokens_per_round": stream.speculation.mean_acceptance_length,
        "distinct_4_grams": len(set(grams)) / len(grams),
        "looping": float(ends_in_loop(stream.token_ids)),
    }
    if typical is None:
        return found
    kinds = kinds_of(len(stream.token_ids), stream.speculation)
    drafted = torch.tensor([kind == "drafted" for kind in kinds])
    bonus = torch.tensor([kind == "bonus" for kind in kinds])
    variation_R = torch.zeros(len(kinds), dtype=torch.float64)  # sampled tokens are exact
    emitted_RV = typical_outcome(typical, p_RV[drafted], q_RV[drafted])
    variation_R[drafted] = (emitted_RV - p_RV[drafted]).abs().sum(-1) / 2
    variation_R[bonus] = 1.0 - p_RV[bonus].amax(-1)
    found["total_variation"] = float(variation_R.mean())
    for name, where in (("drafted", drafted), ("bonus", bonus)):
        if bool(where.any()):
            found[f"total_variation_{name}"] = float(variation_R[where].mean())
    if bool(drafted.any()):
        found["unreachable"] = float(unreachable_mass(typical, p_RV[drafted]).mean())
    return found


class Bench:
    """Runs a plan."""

    def __init__(self, plan: Plan, models: Path, progress: Progress) -> None:
        self._plan = plan
        self._models = models
        self._progress = progress
        self._reader = Reader(models)
        torch.set_num_threads(plan.num_threads)

    def run(self) -> dict[str, Any]:
        """Measure every rule at every temperature."""
        plan = self._plan
        task = self._progress.add_task("cells", total=len(plan.rules) * len(plan.temperatures))
        cells: list[dict[str, Any]] = []
        for rule in plan.rules:
            with Engine(self._config(rule)) as engine:
                prompts = self._prompts(engine)
                for temperature in plan.temperatures:
                    found = list(self._measured(engine, rule, temperature, prompts))
                    cells.append({"rule": rule, "temperature": temperature, "per_prompt": found})
                    self._progress.advance(task)
        summarise(cells)
        return {"plan": plan, "cells": cells}

    def _config(self, rule: str) -> EngineConfig:
        plan = self._plan
        return EngineConfig.model_validate(
            {
                "target": {
                    "model": str(self._models / "target"),
                    "dtype": "float32",
                    "max_model_len": 1024,
                    "num_threads": plan.num_threads,
                },
                "speculative_config": {
                    "method": "draft_model",
                    "controller": "fixed",
                    "model": str(self._models / "draft"),
                    "num_speculative_tokens": plan.k,
                    "num_threads": plan.num_threads,
                    **RULES[rule],
                },
                "cache": {"memory_bytes": 512 << 20},
                "scheduler": {"max_num_seqs": 16},
            }
        )

    def _prompts(self, engine: Engine) -> list[tuple[int, ...]]:
        texts = read_prompts(self._models / "prompts.jsonl")
        step = max(1, len(texts) // self._plan.num_prompts)  # of every class of text
        return [tuple(engine.tokenizer.encode(text)) for text in texts[::step][: self._plan.num_prompts]]

    def _measured(
        self, engine: Engine, rule: str, temperature: float, prompts: list[tuple[int, ...]]
    ) -> Iterator[dict[str, float]]:
        """Yield the means over the streams of one prompt after the other."""
        typical, num_seeds = typical_of(rule), self._plan.seeds_per_prompt
        streams = self._generate(engine, temperature, prompts)
        for first in range(0, len(streams), num_seeds):
            measured = []
            for stream in streams[first : first + num_seeds]:
                with torch.inference_mode():
                    p_RV, q_RV = self._reader.rows(stream, temperature)
                    measured.append(measure(stream, p_RV, q_RV, typical))
            names = dict.fromkeys(name for one in measured for name in one)
            yield {
                name: round(statistics.fmean(one[name] for one in measured if name in one), _DIGITS)
                for name in names
            }

    def _generate(self, engine: Engine, temperature: float, prompts: list[tuple[int, ...]]) -> list[Stream]:
        """Return the streams of all prompts, those of one prompt side by side; seeds never change."""
        params = SamplingParams(temperature=temperature, max_tokens=self._plan.num_tokens, ignore_eos=True)
        repeated = [prompt for prompt in prompts for _ in range(self._plan.seeds_per_prompt)]
        requests = batch_requests(repeated, params, self._plan.k, f"t{temperature}")
        tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
        speculation: dict[RequestId, SpeculationStats] = {}
        for request in requests:
            engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
                if output.stats is not None:
                    speculation[output.request_id] = output.stats.speculation
        return [
            Stream(
                prompt=request.prompt_token_ids,
                token_ids=tuple(tokens[request.request_id]),
                speculation=speculation[request.request_id],
            )
            for request in requests
        ]


def summarise(cells: list[dict[str, Any]]) -> None:
    """Add estimates to every cell, and its drift from the exact rule at the same temperature."""
    exact = {cell["temperature"]: cell["per_prompt"] for cell in cells if cell["rule"] == EXACT}
    for cell in cells:
        found: list[dict[str, float]] = cell["per_prompt"]
        names = dict.fromkeys(name for one in found for name in one)
        cell["summary"] = {name: Estimate.of([one[name] for one in found if name in one]) for name in names}
        pairs = zip(found, exact[cell["temperature"]], strict=True)
        cell["summary"]["loss_drift"] = Estimate.of([one["loss"] - its["loss"] for one, its in pairs])


def headlines(results: dict[str, Any]) -> dict[str, float]:
    """The numbers to watch, all at temperature 1."""
    cells = {cell["rule"]: cell["summary"] for cell in results["cells"] if cell["temperature"] == 1.0}
    numbers = {
        "typical_total_variation": cells[TYPICAL]["total_variation"].mean,
        "typical_loss_drift": cells[TYPICAL]["loss_drift"].mean,
        "typical_loss_excess": cells[TYPICAL]["loss_excess"].mean,
        "block_loss_excess": cells["block"]["loss_excess"].mean,
        "block_loss_excess_errors": cells["block"]["loss_excess"].mean / cells["block"]["loss_excess"].error,
    }
    for name, rule in (("sample_and_match", EXACT), ("block", "block"), ("typical", TYPICAL)):
        numbers[f"{name}_tokens_per_round"] = cells[rule]["tokens_per_round"].mean
    return numbers


def main(
    quick: Annotated[bool, typer.Option(help="One temperature, few prompts: about a minute.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure what `typical` does to the output, and that lossless rules do nothing to it.

    Example: python -m benchmarks.typical_drift --quick --json runs/typical-drift.json
    """
    with progress_bar() as progress:
        results = Bench(QUICK if quick else FULL, models, progress).run()
    numbers = headlines(results)
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
