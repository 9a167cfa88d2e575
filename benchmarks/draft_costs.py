"""What drafting with weights beside the target costs in a round: eager, native, and what reading them takes.

The part of `benchmarks.drafters` that needs no trained heads (`--costs`). Drafting is timed by the engine's
clock while it decodes: reading what the last round has committed, drafting, and all Python around it. The
floor is the fastest of PyTorch's reductions over as many bytes of weights as the drafts read, those of each
forward anew.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.table import Table

from benchmarks.drafter_families import Family, Places
from benchmarks.floor import fastest_read, in_turn
from benchmarks.kv_costs import Step, forward_seconds
from benchmarks.measured_engine import MeasuredEngine
from benchmarks.random_heads import save_random_heads
from benchmarks.steady import Batch
from specdec.engine.config import EngineConfig
from specdec.proposers.compiled_drafters import CompiledDrafter
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.tree_config import tree_shape
from specdec.scheduling.speculation.controller import FixedController

_REPEATS = 5
"""Decodings of which the median counts."""
_ROUNDS = 12
"""Of each, about."""
_PROMPT_TOKENS = 150
_FLOOR_TURNS = 3
MODES = {"eager": "off", "native": "auto"}
"""`speculative_config.compile.mode` by the name of the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """Of one family at one batch size."""

    family: str
    batch: int
    num_draft_tokens: int
    eager_s: float
    native_s: float
    plain_s: float
    """A bare step of the target of one row for each sequence."""
    weight_bytes: int
    """That the drafts read."""
    floor_s: float

    @property
    def over_plain(self) -> float:
        """What drafting costs in steps of the target."""
        return self.native_s / self.plain_s

    @property
    def over_floor(self) -> float:
        """How many times as long as reading its weights it takes."""
        return self.native_s / self.floor_s


@contextlib.contextmanager
def all_heads(families: Sequence[Family], target: Path, places: Places) -> Iterator[Places]:
    """Make the heads that are not there, at random, beside links to those that are."""
    with TemporaryDirectory() as name:
        made = Places(draft=places.draft, heads=Path(name), corpus=places.corpus, index=places.index)
        for family in families:
            there, folder = family.folder(places), family.folder(made)
            if there is None or folder is None or folder.exists():
                continue
            if (there / "config.json").is_file():
                folder.symlink_to(there.resolve())
            else:
                save_random_heads(folder.name, target, folder)
        yield made


def costs_of(
    family: Family,
    places: Places,
    batches: Sequence[int],
    config_of: Callable[[Mapping[str, object]], EngineConfig],
) -> list[DraftCost]:
    """Measure a family, its largest number of draft tokens, by an engine for each way."""
    num_tokens = max(family.lengths)
    draft_s: dict[str, list[float]] = {}
    weight_bytes, plain_s = 0, []
    for name, mode in MODES.items():
        config = config_of({**family.config(places), "compile": {"mode": mode}})
        with contextlib.closing(MeasuredEngine(config)) as engine:
            draft_s[name] = [_draft_seconds(engine, batch, num_tokens) for batch in batches]
            if name != "native":
                continue
            work = next(one for one in engine.engine.idle_work if isinstance(one, CompiledDrafter))
            assert work.is_ready, work.failure
            weight_bytes = work.weight_bytes(_num_forwards(config.speculative_config, num_tokens))
            plain_s = [forward_seconds(engine.target.runner, _step(batch), _REPEATS) for batch in batches]
    reading = {"read": fastest_read(weight_bytes)}
    floor_s = statistics.median(in_turn(reading, _FLOOR_TURNS)["read"])
    return [
        DraftCost(
            family=family.name,
            batch=batch,
            num_draft_tokens=num_tokens,
            eager_s=draft_s["eager"][index],
            native_s=draft_s["native"][index],
            plain_s=plain_s[index],
            weight_bytes=weight_bytes,
            floor_s=floor_s,
        )
        for index, batch in enumerate(batches)
    ]


def _num_forwards(config: SpeculativeConfig, num_tokens: int) -> int:
    """Return how many tokens are drafted one behind the other."""
    shape = tree_shape(config.tree)
    return num_tokens if shape is None else min(shape.max_depth, num_tokens)


def _step(batch: int) -> Step:
    return Step(batch=batch, rows=1, context=_PROMPT_TOKENS)


def _draft_seconds(engine: MeasuredEngine, batch: int, num_tokens: int) -> float:
    """Return what drafting takes in a round, in the median of several decodings."""
    generator = torch.Generator().manual_seed(batch)
    prompts = [
        tuple(torch.randint(5, 1000, (_PROMPT_TOKENS,), generator=generator).tolist()) for _ in range(batch)
    ]
    decoded = Batch(prompts=prompts, num_tokens=128)
    found: list[float] = []
    for _ in range(1 + _REPEATS):
        counted = engine.decode_tokens(decoded, FixedController(num_tokens), _ROUNDS * batch)
        found.append(counted.drafts.draft_s / counted.num_rounds)
    return statistics.median(found[1:])


def cost_table(costs: Sequence[DraftCost]) -> Table:
    """Lay them out."""
    of_cell = ("family", "batch", "k")
    table = Table(*of_cell, "eager ms", "native ms", "plain steps", "MB read", "floor ms", "x floor")
    for one in costs:
        table.add_row(
            *(one.family, str(one.batch), str(one.num_draft_tokens)),
            *(f"{1e3 * one.eager_s:.2f}", f"{1e3 * one.native_s:.2f}", f"{one.over_plain:.2f}"),
            *(f"{one.weight_bytes / 1e6:.1f}", f"{1e3 * one.floor_s:.2f}", f"{one.over_floor:.1f}"),
        )
    return table


def cost_headlines(costs: Sequence[DraftCost]) -> dict[str, float]:
    """Return what the last lines say, of the smallest batch above 1."""
    batch = min((one.batch for one in costs if one.batch > 1), default=1)
    shown = [one for one in costs if one.batch == batch]
    return {
        **{f"draft_cost_b{batch}_{one.family}": one.over_plain for one in shown},
        f"worst_over_floor_b{batch}": max(one.over_floor for one in shown),
    }
