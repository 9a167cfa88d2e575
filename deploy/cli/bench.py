"""`drafthouse bench offline`: measure, show a table, write JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from deploy.bench_offline import Measurement, Workload, measure
from deploy.cli.output_file import check_output
from deploy.cli.progress import as_typed, shown
from specdec.core.errors import ConfigError
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.scheduling.config import SchedulerConfig


def run_offline(
    config: EngineConfig,
    prompts: Sequence[str],
    *,
    batch_sizes: Sequence[int],
    max_tokens: int,
    temperature: float,
    seed: int,
    repeats: int,
    is_plain_measured: bool,
    json_file: Path | None,
) -> None:
    """Measure every batch size, print a table, and write all numbers to `json_file`.

    Raises:
        UserError: a model folder or an option is wrong.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True).checked()
    config = _without_prefix_cache(_wide_enough(config, max(batch_sizes)))
    if json_file is not None and json_file != Path("-"):
        check_output("--json", json_file)
    console = Console(stderr=True)
    with shown(console, f"loading {as_typed(config.target.model)}") as show:
        engine = Engine(config, is_measuring=True)
        show("compiling the forward (the first time takes half a minute)")
        engine.warm_up()
    measurements = []
    with engine:
        token_ids = [tuple(engine.tokenizer.encode(prompt)) for prompt in prompts]
        for batch_size in batch_sizes:
            for num_draft_tokens in _modes(config, is_plain_measured):
                workload = Workload(
                    prompts=token_ids,
                    batch_size=batch_size,
                    params=params,
                    seed=seed,
                    num_draft_tokens=num_draft_tokens,
                )
                mode = "plain" if num_draft_tokens == 0 else "speculative"
                with shown(console, f"batch {batch_size}, {mode}"):
                    measurements.append(measure(engine, workload, repeats=repeats))
    if json_file != Path("-"):
        # A pipe or a file has no width of its own.
        width = None if sys.stdout.isatty() else 120
        Console(width=width).print(_table(measurements))
    if json_file is not None:
        _write(json_file, {"environment": _environment(config), "measurements": measurements})


def _modes(config: EngineConfig, is_plain_measured: bool) -> list[int | None]:
    """Draft tokens per request: 0 is plain, None what the configuration says."""
    if config.speculative_config.method == "none":
        return [0]
    return [0, None] if is_plain_measured else [None]


def _wide_enough(config: EngineConfig, batch_size: int) -> EngineConfig:
    """Let the whole batch run and wait at once."""
    scheduler = config.scheduler
    widened = {
        name: max(getattr(scheduler, name), batch_size)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_waiting")
    }
    try:
        scheduler = SchedulerConfig.model_validate(scheduler.model_dump() | widened)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"--batch-size: {batch_size} cannot run at once: {reason}") from None
    return config.model_copy(update={"scheduler": scheduler})


def _without_prefix_cache(config: EngineConfig) -> EngineConfig:
    """Repeats are to compute their prompts, not to find those of the run before."""
    off = {"enable_prefix_caching": False}
    drafter = config.speculative_config
    return config.model_copy(
        update={
            "cache": config.cache.model_copy(update=off),
            "speculative_config": drafter.model_copy(update={"cache": drafter.cache.model_copy(update=off)}),
        }
    )


def _environment(config: EngineConfig) -> dict[str, object]:
    import torch
    import transformers

    return {
        "cpu_affinity": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": config.model_dump(mode="json"),
    }


def _table(measurements: Sequence[Measurement]) -> Table:
    table = Table(title="offline generation", box=box.SIMPLE_HEAD)
    headers = ("batch", "mode", "tok/s", "speedup", "TTFT ms", "tok/prop", "draft ms", "verify ms", "loops")
    for header in headers:
        table.add_column(header, justify="left" if header == "mode" else "right", no_wrap=True)
    plain = {entry.batch_size: entry.tokens_per_s for entry in measurements if not entry.is_speculative}
    for entry in measurements:
        baseline = plain.get(entry.batch_size)
        table.add_row(
            str(entry.batch_size),
            "speculative" if entry.is_speculative else "plain",
            f"{entry.tokens_per_s:.1f}",
            f"{entry.tokens_per_s / baseline:.2f}x" if baseline else "-",
            f"{1e3 * entry.first_token_s:.0f}",
            f"{entry.mean_acceptance_length:.2f}" if entry.is_speculative else "-",
            f"{entry.draft_ms_per_round:.2f}" if entry.is_speculative else "-",
            f"{entry.verify_ms_per_round:.2f}",
            f"{entry.num_looping}/{entry.batch_size}",
        )
    return table


def _write(file: Path, results: dict[str, object]) -> None:
    text = json.dumps(results, indent=2, default=asdict)
    if file == Path("-"):
        typer.echo(text)
        return
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"--json: {file} cannot be written: {error.strerror}") from None
