"""Nodes of trees against chains of their paths, through a whole forward."""

from __future__ import annotations

import random

import torch

from specdec.model.batch import SequenceSlice
from specdec.model.runner import ModelRunner
from tests.architectures import VOCAB_SIZE

NUM_NODES = 14
STARTS = (3, 61, 130)


def check_nodes(runner: ModelRunner) -> None:
    """Compare bits of logits: of all nodes of a tree beside a chain, and of each at the end of its path."""
    rng = random.Random(5)
    for number, start in enumerate(STARTS):
        if start + NUM_NODES > runner.max_model_len:
            continue
        num_blocks = -(-(start + NUM_NODES) // runner.block_size)
        table, other = (list(range(1 + place * num_blocks, 1 + (place + 1) * num_blocks)) for place in (0, 1))
        rng.shuffle(table)
        prompt = rng.choices(range(2, VOCAB_SIZE), k=start)
        tokens = rng.choices(range(2, VOCAB_SIZE), k=NUM_NODES)
        parents = [-1, *(rng.randrange(-1, node) for node in range(1, NUM_NODES))]
        runner.forward([SequenceSlice(token_ids=prompt, start=0, block_table=table, num_logit_rows=1)])
        tree = SequenceSlice(
            token_ids=tokens, start=start, block_table=table, num_logit_rows=NUM_NODES, parents=parents
        )
        beside = SequenceSlice(token_ids=prompt[:5], start=0, block_table=other, num_logit_rows=1)
        pieces = [tree] if number == 0 else [beside, tree]
        of_nodes = runner.forward(pieces).clone()[-NUM_NODES:]
        for node in range(NUM_NODES):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            chain = SequenceSlice(
                token_ids=[tokens[one] for one in path], start=start, block_table=table, num_logit_rows=1
            )
            assert torch.equal(runner.forward([chain])[-1], of_nodes[node]), (start, path)
