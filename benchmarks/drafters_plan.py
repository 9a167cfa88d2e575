"""What `benchmarks.drafters` measures, in which order, on how much, and how long the rest of it takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.drafter_families import Family
from benchmarks.steady import SPARE_TOKENS
from specdec.kv.block_table import num_blocks_for
from training.prompts import MAX_TOKENS

AS_IT_IS, INFLATED = "demo", "inflated"
BLOCK_SIZE = 16
_FEWEST_TOKENS = 8
"""Of each prompt, however long a cell takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One situation."""

    target: str
    family: str
    batch: int
    temperature: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.target}, {self.family}, batch {self.batch}, temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSpeed:
    """How long decoding takes."""

    tokens_per_s: float
    settling_s: float
    """Of each batch, before anything is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and on how much."""

    targets: tuple[str, ...]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    pairs: int
    num_prompts: int
    """Of each class."""
    prompts_per_turn: int
    """Of each class, at least: where batches are smaller, they come one after the other."""
    tokens_per_prompt: int
    """That are counted, on average; fewer where a cell would take longer than `cell_s`."""
    try_tokens: int
    """The same, where a draft length is tried."""
    try_turns: int
    """How often each length is tried."""
    cell_s: float
    """That all pairs of a cell may take, trials and starts apart."""
    text_tokens: int = 128
    """Longest text behind a prompt."""
    num_corpus_files: int | None = None
    """Of the corpus that retrieval looks up in; None: all that the target was trained on."""
    inflated_parameters: float = 100e6

    def cells(self, families: Sequence[Family]) -> list[Cell]:
        """Return the cells of some families in the order in which they are measured.

        What headlines are of comes first, of all families: a run that is cut then has a whole table of it.
        """
        return [
            Cell(target=target, family=family.name, batch=batch, temperature=temperature)
            for batch, target, family, temperature in itertools.product(
                self.batches, self.targets, families, self.temperatures
            )
        ]

    def num_prompts_per_turn(self, batch: int) -> int:
        """Return how many prompts of each class a turn decodes."""
        return max(batch, self.prompts_per_turn)

    def tokens_within(self, batch: int, num_classes: int, speeds: Sequence[DecodingSpeed]) -> int:
        """Return how many tokens of each prompt are counted so that the pairs of a cell take `cell_s`.

        `speeds` are those of the ways to decode that take turns.
        """
        num_prompts = self.num_prompts_per_turn(batch)
        settling_s = sum(speed.settling_s for speed in speeds) * -(-num_prompts // batch)
        token_s = sum(1.0 / speed.tokens_per_s for speed in speeds) * num_prompts
        left_s = self.cell_s / (self.pairs * num_classes) - settling_s
        return max(_FEWEST_TOKENS, min(self.tokens_per_prompt, int(left_s / token_s)))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, a draft behind it included."""
        return MAX_TOKENS + self.text_tokens + SPARE_TOKENS + 3 * BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """Blocks of every K/V cache."""
        return 2 + (1 + max(self.batches)) * num_blocks_for(self.longest, BLOCK_SIZE)


FULL = Plan(
    targets=(INFLATED, AS_IT_IS),
    batches=(1, 8, 32),
    temperatures=(0.0, 0.7),
    pairs=4,
    num_prompts=32,
    prompts_per_turn=4,
    tokens_per_prompt=48,
    try_tokens=16,
    try_turns=2,
    cell_s=40.0,
)
QUICK = Plan(
    targets=(INFLATED,),
    batches=(1,),
    temperatures=(0.0,),
    pairs=2,
    num_prompts=4,
    prompts_per_turn=2,
    tokens_per_prompt=24,
    try_tokens=8,
    try_turns=1,
    cell_s=3.0,
    num_corpus_files=60,
    inflated_parameters=16e6,
)


ON_GPU = dataclasses.replace(
    FULL,
    targets=(INFLATED,),
    batches=(1, 8),
    pairs=3,
    num_prompts=16,
    prompts_per_turn=2,
    tokens_per_prompt=32,
    try_tokens=8,
    try_turns=1,
    cell_s=6.0,
    num_corpus_files=600,
)
"""Of a machine that is lent for minutes. The target as it is would show nothing there: next to eight layers,
launches of a drafter cost as much as the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What of a run is left."""

    num_cells: int
    seconds: float
    """Of those of which something is known."""
    num_unknown: int
    """Cells of a target and a batch size of which none was measured yet."""

    def __str__(self) -> str:
        known = self.num_cells - self.num_unknown
        lines = [f"{known} of them take about {self.seconds / 60:.0f} min"] if known else []
        if self.num_unknown:
            lines.append(f"{self.num_unknown} are of situations of which none was measured yet")
        return "; ".join((f"{self.num_cells} cells are left", *lines))


def rest_of(left: Iterable[Cell], taken_s: Mapping[Cell, float]) -> Rest:
    """Say how long cells will take, by what others of the same target and batch size have taken."""
    alike: dict[tuple[str, int], list[float]] = {}
    for cell, seconds in taken_s.items():
        alike.setdefault((cell.target, cell.batch), []).append(seconds)
    found = [alike.get((cell.target, cell.batch)) for cell in left]
    known = [sum(one) / len(one) for one in found if one]
    return Rest(num_cells=len(found), seconds=sum(known), num_unknown=len(found) - len(known))
