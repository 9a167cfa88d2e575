"""Random heads as proposers over made-up hidden states, and what they say over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial

import torch
from transformers import AutoModelForCausalLM

from specdec.attention.sdpa import SdpaAttention
from specdec.core.ids import RequestId
from specdec.core.sequence import SequenceView
from specdec.drafters.attention import CausalRows, RowAttention
from specdec.drafters.base import SequentialHeads, TargetParts
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.proposers.compiled_drafters import CompiledHeads
from specdec.proposers.drafter_pool import DrafterPool
from specdec.proposers.head_rows import HeadRows, PrefixRows, Rows, StateRows
from specdec.proposers.head_trees import TreeHeadProposer
from specdec.proposers.heads import HeadProposer, Heads
from specdec.sampling.sampler import Sampler
from tests.specdec.drafters.conftest import randomize, tiny_config
from tests.specdec.proposers.made_up_states import VOCAB, made_up_row
from tests.specdec.proposers.proposer_setup import USUAL, ProposerSetup

NUM_HEADS = 3


@cache
def make_heads(kind: str) -> Heads:
    model = AutoModelForCausalLM.from_config(tiny_config(vocab_size=VOCAB))
    randomize(model, seed=1)
    target = TargetParts.of(model)
    heads: Heads
    if kind == "medusa":
        heads = Medusa(target, num_heads=NUM_HEADS)
    elif kind == "parallel_heads":
        heads = ParallelHeads(target, num_heads=NUM_HEADS)
    else:
        heads = Hydra(target, num_heads=NUM_HEADS, has_prefix_layer=kind == "hydra++")
    randomize(heads, seed=5)
    return heads.eval()


def make(kind: str, setup: ProposerSetup = USUAL) -> HeadProposer:
    heads, source = make_heads(kind), setup.source
    rows: HeadRows = StateRows(heads, source)
    pool: DrafterPool | None = None
    if layers := heads.attention_layers:
        pool = DrafterPool(
            heads,
            layers,
            setup.cache,
            max_num_seqs=8,
            max_model_len=setup.max_model_len,
            backend=SdpaAttention(),
            max_held_tokens=setup.max_held_tokens,
        )
    compiled = None if setup.how is None else CompiledHeads(heads, setup.how, pool)
    if pool is not None:
        rows = Watched(
            heads,
            source,
            pool,
            max_read_tokens=setup.max_read_tokens,
            window=setup.window,
            compiled=compiled,
        )
    make_proposer = HeadProposer if setup.shape is None else partial(TreeHeadProposer, shape=setup.shape)
    return make_proposer(
        heads,
        rows,
        setup.sampler or Sampler(),
        name=kind,
        sampling=setup.sampling,
        vocab_size=VOCAB,
        compiled=compiled,
    )


class Watched(PrefixRows):
    """Looks at its blocks after every call."""

    def read(self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]) -> Rows:
        rows = super().read(sequences, num_draft_tokens)
        self.check_integrity()
        return rows


@torch.no_grad()
def logits_behind(
    kind: str, token_ids: Sequence[int], path: Sequence[int], attention: RowAttention | None = None
) -> torch.Tensor:
    """What the head of that depth says, [V]: whole rows, no cache."""
    heads = make_heads(kind)
    states = torch.stack([made_up_row(token_ids[: at + 1]) for at in range(len(token_ids) - 1)])
    positions = torch.arange(len(states))[None]
    row = heads.prepare(states[None], positions, attention or CausalRows())[0, -1]
    if isinstance(heads, SequentialHeads):
        return heads.logits(len(path), row, torch.tensor([token_ids[-1], *path]))
    return heads.logits(row)[len(path)]
