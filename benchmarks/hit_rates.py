"""How often a verdict is among those that drafting ahead prepares for, by fan-out and ranking of the guesses.

    python -m benchmarks.hit_rates --json benchmarks/results/hit-rates.json    # a few minutes
    python -m benchmarks.hit_rates --quick                                     # under a minute

The target continues held-out prompts. Then the draft model goes through what it wrote, round by round: it
drafts a chain, is asked to look ahead behind that chain, and is told the verdict: exactly the first a tokens
stand, and the target's own token b follows them. What is counted is how many guesses of the draft model at b,
behind these a tokens, come before the right one:

    noise         guesses are ranked by log q / T + g, with the target's own noise g
    probability   by q alone
    miss          a < k: b is another token than the drafted one (which is never guessed)
    full          a = k: b follows a chain that stands as a whole

The hit rate of fan-out F is the share of verdicts whose b is among the first F guesses. Verdicts behind which
the text ends are not counted. Errors are standard errors over prompts. Nothing is timed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from rich.progress import Progress

from benchmarks.in_process import batch_requests
from benchmarks.plain_tool import PlainTool
from benchmarks.report import progress_bar
from benchmarks.workload import read_prompts
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import extend_prefix_hash
from specdec.core.proposal import Proposal
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import Sequence as Committed
from specdec.core.sequence import TokenConstraint
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.acceleration import accelerate
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.base import AheadWish
from specdec.proposers.bonus import BonusBy
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import NativeDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.sampling.sampler import Sampler

Kind = Literal["miss", "full"]
BEYOND = -1
"""Stands for the rank of a token that was not among the guesses."""
FAN_OUTS = (1, 3, 10)
_BATCH = 8
"""Streams that are gone through side by side."""
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    num_prompts: int
    num_tokens: int
    k: int = 4
    num_guesses: int = 10
    num_threads: int = 1


FULL = Plan(num_prompts=96, num_tokens=128)
QUICK = Plan(num_prompts=16, num_tokens=48)


class View(Committed):
    """A stream as the draft model is shown it."""

    constraint: TokenConstraint | None = None
    kv_budget: int = 0


@dataclass(slots=True)
class Tally:
    """The verdicts on one stream."""

    ranks: dict[Kind, Counter[int]] = field(default_factory=lambda: {"miss": Counter(), "full": Counter()})
    """How often the right token had so many guesses before it."""
    accepted: Counter[int] = field(default_factory=Counter)
    """How often so many drafted tokens stood."""

    def hit_rate(self, fan_out: int, kinds: Sequence[Kind] = ("miss", "full")) -> float | None:
        """Return the share of verdicts whose token is among the first guesses; None without any."""
        total = sum(self.ranks[kind].total() for kind in kinds)
        hits = sum(self.ranks[kind][rank] for kind in kinds for rank in range(fan_out))
        return hits / total if total else None

    def add(self, other: Tally) -> None:
        """Count those of another stream too."""
        for kind, ranks in other.ranks.items():
            self.ranks[kind].update(ranks)
        self.accepted.update(other.accepted)


def rank_of(proposals: Sequence[Proposal], committed_len: int, prefix_hash: int) -> int:
    """Return how many guesses behind the same tokens come before the right one, or `BEYOND`."""
    behind = [one.prefix_hash for one in proposals if one.committed_len == committed_len]
    return behind.index(prefix_hash) if prefix_hash in behind else BEYOND


def num_standing(chain: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens of a chain are what the target chose."""
    for index, (drafted, token_id) in enumerate(zip(chain, tokens, strict=False)):
        if drafted != token_id:
            return index
    return min(len(chain), len(tokens))


class Reader:
    """The draft model, going through what the target wrote."""

    def __init__(self, plan: Plan, loaded: LoadedModel, by: BonusBy) -> None:
        self._plan = plan
        sequence_blocks = _BATCH * (_MAX_MODEL_LEN // _BLOCK_SIZE)
        branch_blocks = _BATCH * (plan.k + 1) * plan.num_guesses * 2  # at most a quarter is theirs
        runner = ModelRunner(
            loaded,
            CacheConfig(num_blocks=1 + sequence_blocks + 4 * branch_blocks, block_size=_BLOCK_SIZE),
            max_num_seqs=_BATCH,
        )
        graphs = accelerate(runner, CompileConfig())
        if isinstance(graphs, CompiledForward):
            graphs.warm_up()
        sampler = Sampler()
        sampler.warm_up()
        self._proposer = DraftModelProposer(
            runner,
            DraftChoice(
                sampler=sampler, vocab_size=loaded.vocab_size, eos_token_ids=loaded.eos_token_ids, bonus_by=by
            ),
            reading=DraftReading(max_read_tokens=1 << 20),
            fused_loop=NativeDraftLoop(runner, sampler, loaded.vocab_size),
        )

    def read(self, requests: Sequence[Request], streams: Sequence[Sequence[int]]) -> list[Tally]:
        """Return the verdicts on each stream."""
        tallies = [Tally() for _ in requests]
        views = [View(request) for request in requests]
        left = [list(stream) for stream in streams]
        while active := [index for index, tokens in enumerate(left) if tokens]:
            asked = [views[index] for index in active]
            chains = self._proposer.propose(asked, {one.request_id: self._plan.k for one in asked})
            wishes = [self._wish(one, chains[one.request_id].token_ids) for one in asked]
            answers = self._proposer.propose_ahead(wishes)
            for index, wish in zip(active, wishes, strict=True):
                proposals = answers.get(wish.view.request_id, [])
                num_tokens = self._judge(wish, proposals, left[index], tallies[index])
                if len(left[index]) > num_tokens:
                    views[index].commit(left[index][:num_tokens])
                del left[index][:num_tokens]
        left_out = self._proposer.counters["draft_ahead_branches_left_out"]
        assert left_out == 0, f"{left_out} branches found no room"
        self._proposer.close()
        return tallies

    def _wish(self, view: View, chain: tuple[int, ...]) -> AheadWish:
        fan_out = (self._plan.num_guesses,) * (len(chain) + 1)
        return AheadWish(view=view, pending=chain, num_draft_tokens=1, fan_out=fan_out)

    def _judge(self, wish: AheadWish, proposals: Sequence[Proposal], left: list[int], tally: Tally) -> int:
        """Count the verdict, if the text goes on behind it; return how many tokens it commits."""
        num_kept = num_standing(wish.pending, left)
        if num_kept + 1 < len(left):
            assumed = left[: num_kept + 1]
            committed_len = wish.view.committed_len + len(assumed)
            prefix_hash = extend_prefix_hash(wish.view.prefix_hash, assumed)
            kind: Kind = "full" if num_kept == len(wish.pending) else "miss"
            tally.ranks[kind][rank_of(proposals, committed_len, prefix_hash)] += 1
            tally.accepted[num_kept] += 1
        return num_kept + 1


def target_streams(
    plan: Plan, models: Path, progress: Progress
) -> tuple[dict[float, list[Request]], dict[float, list[list[int]]]]:
    """Return requests and what the target answers, by temperature, up to the end of the text."""
    config = EngineConfig.model_validate(
        {
            "target": {
                "model": str(models / "target"),
                "dtype": "float32",
                "max_model_len": _MAX_MODEL_LEN,
                "num_threads": plan.num_threads,
            },
            "speculative_config": {"method": "none"},
            "cache": {"memory_bytes": 512 << 20},
            "scheduler": {"max_num_seqs": 16},
        }
    )
    requests: dict[float, list[Request]] = {}
    streams: dict[float, list[list[int]]] = {}
    task = progress.add_task("target", total=len(plan.temperatures))
    with Engine(config) as engine:
        texts = read_prompts(models / "prompts.jsonl")
        step = max(1, len(texts) // plan.num_prompts)  # of every class of text
        prompts = [tuple(engine.tokenizer.encode(text)) for text in texts[::step][: plan.num_prompts]]
        for temperature in plan.temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=plan.num_tokens)
            asked = batch_requests(prompts, params, 0, f"t{temperature}")
            tokens: dict[RequestId, list[int]] = {one.request_id: [] for one in asked}
            for request in asked:
                engine.add_request(request)
            while engine.has_work:
                for output in engine.step():
                    tokens[output.request_id] += output.token_ids
            requests[temperature] = [without_limit(one) for one in asked]
            streams[temperature] = list(tokens.values())
            progress.advance(task)
    return requests, streams


def without_limit(request: Request) -> Request:
    """Return a request for any number of tokens: guesses are not to end where the measurement does."""
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, max_tokens=None))


def summarise(tallies: Sequence[Tally]) -> dict[str, Any]:
    """Return hit rates over all streams, with standard errors over streams."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    rates: dict[str, Any] = {}
    kinds: tuple[Kind, ...]
    for name, kinds in (("miss", ("miss",)), ("full", ("full",)), ("any", ("miss", "full"))):
        for fan_out in FAN_OUTS:
            each = [rate for one in tallies if (rate := one.hit_rate(fan_out, kinds)) is not None]
            error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf
            rates[f"{name}_{fan_out}"] = {"mean": total.hit_rate(fan_out, kinds), "error": error}
    return {
        "hit_rates": rates,
        "num_verdicts": {kind: ranks.total() for kind, ranks in total.ranks.items()},
        "ranks": {kind: dict(sorted(ranks.items())) for kind, ranks in total.ranks.items()},
        "num_standing": dict(sorted(total.accepted.items())),
    }


def run(plan: Plan, models: Path) -> dict[str, Any]:
    """Measure every temperature and ranking."""
    torch.set_num_threads(plan.num_threads)
    cells: list[dict[str, Any]] = []
    with progress_bar() as progress:
        requests, streams = target_streams(plan, models, progress)
        loaded = load_model(
            ModelConfig.model_validate(
                {"model": str(models / "draft"), "dtype": "float32", "max_model_len": _MAX_MODEL_LEN}
            )
        )
        task = progress.add_task("draft", total=2 * len(plan.temperatures) * plan.num_prompts)
        for by in get_args(BonusBy):
            reader = Reader(plan, loaded, by)
            for temperature in plan.temperatures:
                tallies: list[Tally] = []
                for first in range(0, len(requests[temperature]), _BATCH):
                    chosen = slice(first, first + _BATCH)
                    tallies += reader.read(requests[temperature][chosen], streams[temperature][chosen])
                    progress.advance(task, len(requests[temperature][chosen]))
                cells.append({"temperature": temperature, "by": by, **summarise(tallies)})
    return {"plan": plan, "cells": cells}


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """Hit rates of fan-out 3, both rankings, and what noise gives at temperature 1 by fan-out."""
    cells = {(cell["temperature"], cell["by"]): cell["hit_rates"] for cell in results["cells"]}
    numbers: dict[str, float] = {}
    for (temperature, by), rates in cells.items():
        for name in ("miss_1", "miss_3", "miss_10", "full_1", "full_3", "full_10", "any_3"):
            if by == "noise" or name.endswith("_3"):
                numbers[f"hit_{name}_t{temperature:g}_{by}"] = rates[name]["mean"]
    return numbers


TOOL = PlainTool(
    module="hit_rates",
    summary="Measure how often drafting ahead has prepared for the verdict.",
    full=FULL,
    quick=QUICK,
    run=run,
    headlines=headlines,
)


if __name__ == "__main__":
    TOOL.main()
