"""Runs of training of a moment: recipe, options, and what they log."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from training.drafters.options import TrainOptions

TINY: dict[str, Any] = {
    "steps": 6,
    "row_length": 24,
    "batch_rows": 4,
    "depth": 3,
    "warmup_steps": 2,
    "muon_lr": 0.01,
    "adamw_lr": 0.01,
}


def options(target: Path, texts: Path, out: Path, **changes: Any) -> TrainOptions:
    made = TrainOptions(
        target=target,
        data=(texts,),
        out=out / "out",
        work=out / "work",
        dtype="float32",
        device="cpu",
        eval_texts=2,
        eval_tokens=12,
    )
    return dataclasses.replace(made, **changes)


def losses(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "work" / "log.jsonl").read_text().splitlines()]
