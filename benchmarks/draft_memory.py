"""How much memory a draft model takes for 32 texts, short and long: with a window, and with everything kept.

    python -m benchmarks.draft_memory --json benchmarks/results/draft-memory.json    # a few minutes
    python -m benchmarks.draft_memory --quick

The demo draft reads the texts and drafts behind them, each case in a process of its own. Beside the pool of
blocks, and what of it was held at most, stands by how much the process has grown meanwhile, after each step:
the part of the pool that is written to, what forwards keep, and token ids.
"""

from __future__ import annotations

import json as json_module
import multiprocessing
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer

from benchmarks.report import progress_bar, report_headlines, write_results
from specdec.core.ids import RequestId
from specdec.engine.profiling.drafts import MadeUpSequence
from specdec.model.runner import ModelRunner
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_model_factory import load_draft_model
from specdec.proposers.target_facts import TargetFacts

_NUM_TEXTS = 32
_K = 4
_BUDGET = 512
_NUM_DRAFTS = 4
"""Of each text at least, once it has been read."""

Policy = Literal["streaming", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Texts of one length, and what is kept of them."""

    policy: Policy
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one case takes; all sizes in bytes."""

    case: Case
    pool_bytes: int
    held_bytes: int
    """Of the pool, at most."""
    grown_bytes: int
    """By which the process has grown at most, once the model was loaded and compiled."""
    read_s: float
    """Reading all texts and drafting behind them."""


FULL = (
    *(Case(policy="streaming", length=length) for length in (512, 4096, 32768)),
    *(Case(policy="full", length=length) for length in (512, 4096)),
)
QUICK = tuple(Case(policy="streaming", length=length) for length in (512, 4096))


def measure(draft: Path, case: Case, num_threads: int = 2) -> Taken:
    """Load the draft model of a folder and have it draft behind all texts of a case."""
    torch.set_num_threads(num_threads)
    generator = np.random.default_rng(0)
    views = [
        MadeUpSequence(f"t{number}", case.length, cache_salt="x", vocab_size=4096, generator=generator)
        for number in range(_NUM_TEXTS)
    ]
    window = {"policy": "streaming", "budget": _BUDGET} if case.policy == "streaming" else {}
    config = SpeculativeConfig.model_validate(
        {"method": "draft_model", "model": str(draft), "num_speculative_tokens": _K, "kv": window}
    )
    wanted = dict.fromkeys((RequestId(f"t{number}") for number in range(_NUM_TEXTS)), _K)
    facts = TargetFacts(vocab_size=4096, dtype="bfloat16", max_num_seqs=_NUM_TEXTS)
    proposer = load_draft_model(config, facts)
    runner = proposer.runner
    assert isinstance(runner, ModelRunner)
    for work in proposer.idle_work:
        while work.pending():
            work.run_next()
    before_bytes, most_bytes = own_bytes(), 0
    started_s, most = time.perf_counter(), 0
    num_drafted = dict.fromkeys(wanted, 0)
    while min(num_drafted.values()) < _NUM_DRAFTS:
        drafted = proposer.propose(views, wanted)
        most = max(most, proposer.sequences.num_held_blocks)
        most_bytes = max(most_bytes, own_bytes())
        for one in views:
            if one.request_id in drafted:
                num_drafted[one.request_id] += 1
                one.grow(_K)
    read_s = time.perf_counter() - started_s
    assert not proposer.crowded_out, "the pool has no room for all texts"
    pool_bytes = runner.pool.num_bytes
    return Taken(
        case=case,
        pool_bytes=pool_bytes,
        held_bytes=most * pool_bytes // runner.num_blocks,
        grown_bytes=most_bytes - before_bytes,
        read_s=read_s,
    )


def own_bytes() -> int:
    """Return what this process has written to, in memory or swapped out: not files, which may come and go."""
    lines = Path("/proc/self/status").read_text().splitlines()
    amounts = dict(line.split(":", 1) for line in lines)
    return sum(int(amounts[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem", "VmSwap"))


def headlines_of(taken: list[Taken]) -> dict[str, float]:
    """Return what the longest texts take with a window, over what the shortest do."""
    windowed = [one for one in taken if one.case.policy == "streaming"]
    short, long = windowed[0], windowed[-1]
    return {
        "draft_pool_bytes_longest_vs_shortest": long.pool_bytes / short.pool_bytes,
        "draft_held_bytes_longest_vs_shortest": long.held_bytes / short.held_bytes,
        "draft_peak_bytes_longest_vs_shortest": long.grown_bytes / short.grown_bytes,
    }


def draft_for_long_texts(draft: Path, folder: Path, length: int) -> Path:
    """Copy a draft model into a folder, for texts of up to `length` tokens and the drafts behind them."""
    shutil.copytree(draft, folder)
    file = folder / "config.json"
    config = json_module.loads(file.read_text()) | {"max_position_embeddings": 2 * length}
    file.write_text(json_module.dumps(config))
    return folder


def main(
    quick: Annotated[bool, typer.Option(help="Shorter texts, and the window alone.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with draft/.")] = Path("models/demo"),
) -> None:
    """Measure the memory of a draft model with a window over short and long texts.

    Example: python -m benchmarks.draft_memory --quick --json runs/draft-memory.json
    """
    cases = QUICK if quick else FULL
    taken: list[Taken] = []
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        task = progress.add_task("texts are read", total=len(cases))
        draft = draft_for_long_texts(
            models / "draft", Path(folder) / "draft", max(case.length for case in cases)
        )
        for case in cases:
            with ProcessPoolExecutor(1, mp_context=fresh) as process:
                taken.append(process.submit(measure, draft, case).result())
            progress.advance(task)
            one = taken[-1]
            progress.console.print(
                f"{case.policy}, {_NUM_TEXTS} x {case.length}: pool {_mib(one.pool_bytes)}, of it held "
                f"{_mib(one.held_bytes)}; the process grew by {_mib(one.grown_bytes)}; {one.read_s:.1f} s"
            )
    headlines = headlines_of(taken)
    write_results(json, {"taken": taken, "headlines": headlines})
    report_headlines(headlines)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    typer.run(main)
