"""How many tokens a target pass brings when the draft model drafts trees, by shape and ranking of children.

    python -m benchmarks.tree_acceptance --json benchmarks/results/tree-acceptance.json   # some minutes
    python -m benchmarks.tree_acceptance --quick                                          # about a minute

The target continues held-out prompts. Then the draft model goes through what it wrote, round by round: it
drafts a tree, and is told the verdict of `sample_and_match`: the path of the tree that the text goes along,
and the target's own token behind it. Tokens per pass are all tokens over all rounds. Children are ranked

    noise         by log q / T + g, with the target's own noise g
    probability   by q alone, as other engines do

`best` is the static tree that `best_tree` makes of how often the child of each rank stands, measured before.
Errors are standard errors over prompts. Nothing is timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from benchmarks.hit_rates import Plan, View, target_streams
from benchmarks.plain_tool import PlainTool
from benchmarks.report import progress_bar
from specdec.core.proposal import Proposal
from specdec.core.request import Request
from specdec.kv.config import CacheConfig
from specdec.model.acceleration import accelerate
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.sampling.sampler import Sampler
from specdec.tree.dynamic import DynamicTree
from specdec.tree.entropy import EntropyTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree, best_tree
from specdec.tree.topology import longest_path, topology_of

By = Literal["noise", "probability"]
SAMPLINGS: Mapping[By, DraftSampling] = {
    "noise": DraftSampling(),
    "probability": DraftSampling(noise_stream="draft", is_deterministic=True),
}
NUM_NODES = 16
NUM_RANKS = 8
_BATCH = 8
"""Streams that are gone through side by side."""
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 1024
FULL = Plan(num_prompts=16, num_tokens=48)
QUICK = Plan(num_prompts=8, num_tokens=32)


def chain(length: int) -> StaticTree:
    """Return a chain as a tree."""
    return StaticTree.of_paths([(0,) * (1 + index) for index in range(length)])


SHAPES: Mapping[str, TreeShape] = {
    "chain of 4": chain(4),
    "chain of 8": chain(8),
    "static 4, 2, 1": StaticTree.of_widths([4, 2, 1], (0.5, 0.2, 0.1)),
    "dynamic, top 4, depth 5": DynamicTree(top_k=4, depth=5),
    "entropy, top 4, depth 8": EntropyTree(top_k=4, depth=8, least_confidence=0.1),
}
"""Of `NUM_NODES` nodes at most, and beside them the best static tree for what is measured."""


@dataclass(slots=True)
class Tally:
    """Rounds on one stream."""

    num_tokens: int = 0
    num_rounds: int = 0
    num_nodes: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that one verification brings."""
        return self.num_tokens / self.num_rounds


def path_along(proposal: Proposal, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of a tree that a text goes along."""
    return longest_path(topology_of(proposal.num_tokens, proposal.parents), proposal.token_ids, tokens)


class Reader:
    """The draft model, going through what the target wrote."""

    def __init__(self, plan: Plan, loaded: LoadedModel, shape: TreeShape, by: By) -> None:
        runner = ModelRunner(
            loaded,
            CacheConfig(num_blocks=1 + _BATCH * (_MAX_MODEL_LEN // _BLOCK_SIZE), block_size=_BLOCK_SIZE),
            max_num_seqs=_BATCH,
        )
        graphs = accelerate(runner, CompileConfig())
        if isinstance(graphs, CompiledForward):
            graphs.warm_up()
        sampler = Sampler()
        sampler.warm_up()
        self._num_nodes = min(NUM_NODES, shape.max_nodes)
        self._proposer = TreeDraftProposer(
            runner,
            DraftChoice(
                sampler=sampler,
                vocab_size=loaded.vocab_size,
                eos_token_ids=loaded.eos_token_ids,
                sampling=SAMPLINGS[by],
            ),
            shape,
            reading=DraftReading(max_read_tokens=1 << 20),
        )

    def read(self, requests: Sequence[Request], streams: Sequence[Sequence[int]]) -> list[Tally]:
        """Return the rounds on each stream."""
        tallies = [Tally() for _ in requests]
        for first in range(0, len(requests), _BATCH):
            batch = slice(first, first + _BATCH)
            self._read_batch(requests[batch], streams[batch], tallies[batch])
        self._proposer.close()
        return tallies

    def ranks(self, requests: Sequence[Request], streams: Sequence[Sequence[int]]) -> list[float]:
        """Return how often each of the first children, by rank, is what the target chose."""
        hits, num_tokens = [0] * self._num_nodes, 0
        for request, stream in zip(requests, streams, strict=True):
            view = View(request)
            for token_id in stream:
                made = self._proposer.propose([view], {view.request_id: self._num_nodes})
                for node in path_along(made[view.request_id], [token_id]):
                    hits[node] += 1
                num_tokens += 1
                view.commit([token_id])
        self._proposer.close()
        return [count / num_tokens for count in hits]

    def _read_batch(
        self, requests: Sequence[Request], streams: Sequence[Sequence[int]], tallies: Sequence[Tally]
    ) -> None:
        views = [View(request) for request in requests]
        left = [list(stream) for stream in streams]
        while active := [index for index, tokens in enumerate(left) if tokens]:
            asked = [views[index] for index in active]
            made = self._proposer.propose(asked, {one.request_id: self._num_nodes for one in asked})
            for index, view in zip(active, asked, strict=True):
                nodes = path_along(made[view.request_id], left[index])
                if len(nodes) + 1 <= len(left[index]):  # else the measurement ends, not the path
                    tallies[index].num_tokens += len(nodes) + 1
                    tallies[index].num_rounds += 1
                    tallies[index].num_nodes += made[view.request_id].num_tokens
                committed = left[index][: len(nodes) + 1]
                if len(left[index]) > len(committed):
                    view.commit(committed)
                del left[index][: len(committed)]


def summarise(tallies: Sequence[Tally]) -> dict[str, float]:
    """Return tokens and nodes per pass over all streams, with the former's standard error over streams."""
    num_rounds = sum(one.num_rounds for one in tallies)
    each = [one.tokens_per_pass for one in tallies if one.num_rounds]
    return {
        "tokens_per_pass": sum(one.num_tokens for one in tallies) / num_rounds,
        "nodes_per_pass": sum(one.num_nodes for one in tallies) / num_rounds,
        "error": statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf,
        "num_rounds": num_rounds,
    }


def run(plan: Plan, models: Path) -> dict[str, Any]:
    """Measure every temperature, shape and ranking."""
    torch.set_num_threads(plan.num_threads)
    cells: list[dict[str, Any]] = []
    with progress_bar() as progress:
        requests, streams = target_streams(plan, models, progress)
        loaded = load_model(
            ModelConfig.model_validate(
                {"model": str(models / "draft"), "dtype": "float32", "max_model_len": _MAX_MODEL_LEN}
            )
        )
        num_cells = len(get_args(By)) * len(plan.temperatures) * (len(SHAPES) + 1)
        task = progress.add_task("draft", total=num_cells)
        for by in get_args(By):
            for temperature in plan.temperatures:
                asked, said = requests[temperature], streams[temperature]
                few = slice(0, len(asked), 4)
                rates = Reader(plan, loaded, StaticTree.of_widths([NUM_RANKS], (1.0,)), by).ranks(
                    asked[few], said[few]
                )
                shapes = {**SHAPES, "best": best_tree(rates, NUM_NODES)}
                for name, shape in shapes.items():
                    tallies = Reader(plan, loaded, shape, by).read(asked, said)
                    cells.append(
                        {
                            "temperature": temperature,
                            "by": by,
                            "shape": name,
                            "acceptance_by_rank": rates,
                            **summarise(tallies),
                        }
                    )
                    progress.advance(task)
    return {"plan": plan, "num_nodes": NUM_NODES, "cells": cells}


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per pass by temperature, ranking and shape."""
    numbers: dict[str, float] = {}
    for cell in results["cells"]:
        name = f"t{cell['temperature']:g}_{cell['by']}"
        shape = cell["shape"].split(",")[0].replace(" ", "_")
        numbers[f"tokens_per_pass_{shape}_{name}"] = cell["tokens_per_pass"]
    return numbers


TOOL = PlainTool(
    module="tree_acceptance",
    summary="Measure how many tokens a target pass brings with trees.",
    full=FULL,
    quick=QUICK,
    run=run,
    headlines=headlines,
)


if __name__ == "__main__":
    TOOL.main()
