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
from specdec.kv.config import CacheConfig
from specdec.proposers.compiled_drafters import CompiledHeads, DrafterCompilation
from specdec.proposers.draft_sampling import SHARED_NOISE, DraftSampling
from specdec.proposers.draft_window import DraftWindow
from specdec.proposers.drafter_pool import DrafterPool
from specdec.proposers.head_rows import HeadRows, PrefixRows, Rows, StateRows
from specdec.proposers.head_trees import TreeHeadProposer
from specdec.proposers.heads import HeadProposer, Heads
from specdec.proposers.hidden import HiddenSource
from specdec.sampling.sampler import Sampler
from specdec.tree.growth import TreeShape
from tests.specdec.drafters.conftest import randomize, tiny_config
from tests.specdec.proposers.made_up_states import VOCAB, MadeUpSource, made_up_row

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


def make(
    kind: str,
    sampling: DraftSampling = SHARED_NOISE,
    *,
    shape: TreeShape | None = None,
    missing: Sequence[str] = (),
    source: HiddenSource | None = None,
    num_blocks: int = 100,
    max_model_len: int = 64,
    max_read_tokens: int = 512,
    window: DraftWindow | None = None,
    how: DrafterCompilation | None = None,
    sampler: Sampler | None = None,
) -> HeadProposer:
    """With `how` there is a native form of the heads, once its idle work is done."""
    heads, source = make_heads(kind), source or MadeUpSource(missing)
    rows: HeadRows = StateRows(heads, source)
    pool: DrafterPool | None = None
    if layers := heads.attention_layers:
        pool = DrafterPool(
            heads,
            layers,
            CacheConfig(block_size=4, num_blocks=num_blocks),
            max_num_seqs=8,
            max_model_len=max_model_len,
            backend=SdpaAttention(),
            max_held_tokens=None if window is None else window.max_held_tokens(max_model_len, 4),
        )
    compiled = None if how is None else CompiledHeads(heads, how, pool)
    if pool is not None:
        rows = Watched(heads, source, pool, max_read_tokens=max_read_tokens, window=window, compiled=compiled)
    make_proposer = HeadProposer if shape is None else partial(TreeHeadProposer, shape=shape)
    return make_proposer(
        heads,
        rows,
        sampler or Sampler(),
        name=kind,
        sampling=sampling,
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
