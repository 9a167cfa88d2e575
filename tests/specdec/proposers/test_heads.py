"""Heads as proposers, over made-up hidden states: a row is drawn from the hash of the prefix that it ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Protocol

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.attention.sdpa import SdpaAttention
from specdec.core.ids import RequestId, owned_id
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.drafters.attention import CausalRows, RowAttention
from specdec.drafters.base import SequentialHeads, TargetParts
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.kv.config import CacheConfig
from specdec.proposers.base import Proposer, ReadsStates
from specdec.proposers.compiled_drafters import CompiledHeads, DrafterCompilation
from specdec.proposers.draft_sampling import SHARED_NOISE, DraftSampling
from specdec.proposers.draft_window import DraftWindow
from specdec.proposers.drafter_pool import DrafterPool
from specdec.proposers.head_rows import HeadRows, PrefixRows, Rows, StateRows
from specdec.proposers.head_trees import TreeHeadProposer
from specdec.proposers.heads import HeadProposer, Heads
from specdec.proposers.hidden import HiddenRows, HiddenSource, ReceivedRows
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import Sampler, noisy_scores
from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree
from specdec.verification.registry import capabilities_of
from tests.specdec.drafters.conftest import HIDDEN, randomize, tiny_config
from tests.specdec.proposers.contract import FrozenView, ProposerContract, view

VOCAB, NUM_HEADS = 24, 3
KINDS = [
    "medusa",
    "hydra++",
    pytest.param("hydra", marks=pytest.mark.full),
    pytest.param("parallel_heads", marks=pytest.mark.full),
]
PLAIN, SHAPED = SamplingParams(), SamplingParams(repetition_penalty=2.5, presence_penalty=1.0)
GREEDY = SamplingParams(temperature=0.0)
STATIC = StaticTree.of_widths((3, 2, 1, 1), (0.5, 0.3, 0.1))
DYNAMIC = DynamicTree(top_k=3, depth=5)


class MadeUpRows:
    first_row = 0

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.end_row = len(token_ids) - 1

    def since(self, row: int, end: int | None = None) -> torch.Tensor:
        places = range(row, self.end_row if end is None else end)
        rows = [made_up_row(self._token_ids[: at + 1]) for at in places]
        return torch.stack(rows) if rows else torch.empty(0, HIDDEN)

    def read_from(self, row: int) -> None:
        """Nothing is kept."""


def made_up_row(token_ids: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(extend_prefix_hash(EMPTY_PREFIX, token_ids) >> 1)
    return torch.randn(HIDDEN, generator=generator)


class MadeUpSource:
    def __init__(self, missing: Sequence[str] = ()) -> None:
        self._missing = missing

    def await_rows(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None = None
    ) -> Mapping[RequestId, HiddenRows]:
        return {
            one.request_id: MadeUpRows(one.token_ids)
            for one in sequences
            if one.request_id not in self._missing
        }

    def release(self, request_ids: Sequence[RequestId]) -> None:
        """Nothing is kept."""


class SentSource(MadeUpSource):
    """Keeps what has not been read, as what has come from another process; sends again what is missed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[RequestId, ReceivedRows] = {}

    def await_rows(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None = None
    ) -> Mapping[RequestId, HiddenRows]:
        for one in sequences:
            rows = self.kept.setdefault(one.request_id, ReceivedRows(0))
            if rows.end_row < one.committed_len - 1:
                rows.append(MadeUpRows(one.token_ids).since(rows.end_row))
        return {one.request_id: self.kept[one.request_id] for one in sequences}

    def send_again(self, request_id: RequestId) -> None:
        assert self.kept.pop(request_id).are_missed, "what nobody misses would be dropped"


class ReadingProposer(ReadsStates, Proposer, Protocol):
    """A proposer that reads hidden states."""


def check_displaced(make_over: Callable[[HiddenSource], ReadingProposer]) -> None:
    """One of a call that gives way to another of it, and then finds room after all, is read anew later."""
    generator = random.Random(4)
    text = {name: generator.choices(range(VOCAB), k=40) for name in ("a", "b", "c")}
    names = {name: owned_id("one" if name == "a" else "two", name) for name in text}

    def ask_for(proposer: ReadingProposer, **lengths: int) -> dict[str, Proposal]:
        views = [view(names[name], text[name][:length]) for name, length in lengths.items()]
        found = proposer.propose(views, {one.request_id: 3 for one in views})
        return {name: found[names[name]] for name in lengths if names[name] in found}

    source = SentSource()
    proposer = make_over(source)
    assert sorted(ask_for(proposer, b=9, c=25)) == ["b", "c"]
    # a takes the room of b; c has then too little to grow, and leaves b what it had.
    found = ask_for(proposer, a=13, c=35, b=10)
    assert found == ask_for(make_over(SentSource()), a=13)
    assert proposer.missing_states == {names["b"]: 0}
    source.send_again(names["b"])
    assert ask_for(proposer, b=11) == ask_for(make_over(SentSource()), b=11) != {}
    assert proposer.missing_states == {}


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


class TestMedusa(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("medusa")


class TestHydra(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("hydra")


@pytest.mark.full
class TestPrefixLayer(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("hydra++")


@pytest.mark.full
class TestParallelHeads(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("parallel_heads")


class TestStaticTrees(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("medusa", shape=STATIC)


@pytest.mark.full
class TestDynamicTrees(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("hydra++", shape=DYNAMIC)


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


def best_of(logits: torch.Tensor, params: SamplingParams, seed: int, position: int, num: int) -> list[int]:
    rows = SamplingRows.build([RowSpec(params, seed, position, 1)])
    best: list[int] = noisy_scores(logits[None], rows)[0].topk(num).indices.tolist()
    return best


def ask(proposer: HeadProposer, one: FrozenView, budget: int) -> Proposal:
    """Until it has read all."""
    for _ in range(20):
        if one.request_id in (proposals := proposer.propose([one], {one.request_id: budget})):
            return proposals[one.request_id]
    raise AssertionError("it never proposes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [PLAIN, GREEDY], ids=["sampled", "greedy"])
def test_a_chain_is_what_the_token_function_chooses_on_the_heads(kind: str, params: SamplingParams) -> None:
    """Also when the prefix has grown, by what was drafted or by something else, and in pieces."""
    proposer, tokens = make(kind, max_read_tokens=4), [3, 9, 4, 11, 5, 2, 8]
    for kept in (0, 3, 2, 1, 0):
        one = view("a", tokens, params)
        proposal = ask(proposer, one, 9)
        expected: list[int] = []
        for depth in range(NUM_HEADS):
            logits = logits_behind(kind, tokens, expected)
            expected += best_of(logits, params, one.seed, len(tokens) + depth, 1)
        assert proposal.token_ids == tuple(expected), "no more than there are heads"
        assert (proposal.method, proposal.parents) == (kind, None)
        tokens = [*tokens, *expected[:kept], (expected[kept] + 5) % VOCAB if kept < NUM_HEADS else 7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [PLAIN, GREEDY], ids=["sampled", "greedy"])
def test_every_node_of_a_tree_is_among_the_best_behind_its_parent(kind: str, params: SamplingParams) -> None:
    """Deeper nodes than there are heads are left out."""
    proposer, tokens = make(kind, shape=STATIC), [3, 9, 4, 11]
    for step in range(3):
        one = view("a", tokens, params)
        proposal = ask(proposer, one, STATIC.max_nodes)
        assert proposal.parents is not None
        paths: dict[int, list[int]] = {-1: []}
        children: dict[int, list[int]] = {}
        for node, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
            paths[node] = [*paths[parent], token]
            children.setdefault(parent, []).append(token)
        assert sorted(map(len, children.values())) == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3]
        for parent, its in children.items():
            logits = logits_behind(kind, tokens, paths[parent])
            assert its == best_of(logits, params, one.seed, len(tokens) + len(paths[parent]), len(its))
        tokens = [*tokens, *paths[14][:step], 7 + step]


def test_a_tree_grows_where_the_heads_are_sure() -> None:
    """Its first nodes are those of highest probability along their paths, of all that the heads have."""
    one = view("a", [3, 9, 4, 11], GREEDY)
    proposal = ask(make("medusa", shape=DYNAMIC), one, 7)
    depths = [logits_behind("medusa", one.token_ids, [0] * depth).log_softmax(-1) for depth in range(2)]
    values: dict[tuple[int, ...], float] = {}
    for first in depths[0].topk(3).indices.tolist():
        values[first,] = float(depths[0][first])
        for second in depths[1].topk(3).indices.tolist():
            values[first, second] = values[first,] + float(depths[1][second])
    assert proposal.parents is not None
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
        paths[node] = (*paths[parent], token)
    shallow = [path for path in list(paths.values())[1:] if len(path) <= 2]
    assert len(shallow) >= 5
    assert set(shallow[:5]) <= set(sorted(values, key=values.__getitem__)[-7:])


@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_rules_that_ask_get_what_each_child_was_drawn_from(kind: str) -> None:
    sampling = DraftSampling.under(capabilities_of("multi_round"))
    one = view("a", [3, 9, 4, 11], PLAIN)
    proposal = ask(make(kind, sampling, shape=STATIC), one, STATIC.max_nodes)
    assert proposal.noise_stream == "draft"
    assert proposal.q_rows is not None
    assert proposal.parents is not None
    first = [node for node, parent in enumerate(proposal.parents) if parent == -1]
    left = logits_behind(kind, one.token_ids, ()).softmax(-1)
    for node in first:
        expected = torch.zeros(VOCAB)
        row = proposal.q_rows[node]
        token_ids = torch.from_numpy(np.frombuffer(row.token_ids, np.uint32).astype(np.int64))
        expected[token_ids] = torch.from_numpy(np.frombuffer(row.probabilities, np.float32).copy())
        torch.testing.assert_close(left / left.sum(), expected, atol=1e-5, rtol=1e-4)
        left[proposal.token_ids[node]] = 0.0
    greedy = ask(make(kind, sampling, shape=STATIC), view("a", [3, 9, 4, 11], GREEDY), 15)
    assert (greedy.noise_stream, greedy.q_rows) == (None, None)


def test_a_full_cache_costs_proposals_not_answers() -> None:
    """Whoever was not asked for for longest gives way, and is read again when its turn comes."""
    proposer = make("hydra++", num_blocks=7)
    views = [view(name, [3, 9, 4, 11, 5, 6, 7, 8, int(name)]) for name in "123"]
    for _ in range(3):
        for one in views:
            expected = make("hydra++").propose([one], {one.request_id: 3})
            assert expected
            assert proposer.propose([one], {one.request_id: 3}) == expected


def test_states_are_missed_by_who_was_displaced_in_its_own_call() -> None:
    check_displaced(lambda source: make("hydra++", source=source, num_blocks=13))


def test_what_a_request_does_to_logits_is_done_to_the_heads() -> None:
    """Also after a prefix that went another way."""
    proposer = make("medusa")
    for token_ids in ([3, 9, 4, 11], [3, 9, 4, 11, 5, 5], [3, 9, 8, 11, 5, 5, 2]):
        one = view("a", token_ids, SHAPED)
        budgets = {one.request_id: 3}
        assert proposer.propose([one], budgets) == make("medusa").propose([one], budgets)


def test_q_rows_are_those_that_tokens_were_drawn_from() -> None:
    sampling = DraftSampling.under(capabilities_of("rejection"))
    one = view("a", [3, 9, 4, 11], PLAIN)
    proposal = make("hydra", sampling).propose([one], {one.request_id: 3})[one.request_id]
    assert proposal.noise_stream == "draft"
    assert proposal.q_rows is not None
    assert len(proposal.q_rows) == 3
    greedy = view("a", [3, 9, 4, 11], GREEDY)
    proposal = make("hydra", sampling).propose([greedy], {greedy.request_id: 3})[greedy.request_id]
    assert (proposal.noise_stream, proposal.q_rows) == (None, None)


@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_who_has_no_hidden_states_has_no_proposal(kind: str) -> None:
    views = [view("a", [3, 9, 4]), view("b", [3, 9, 4]), view("c", [3])]
    proposer = make(kind, missing=["a"])
    assert list(proposer.propose(views, {one.request_id: 2 for one in views})) == ["b"]
