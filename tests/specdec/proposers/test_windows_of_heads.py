"""Heads that keep the beginning and a window of their K/V: what they attend to, and what they hold.

What they draft is compared with the same modules over whole rows that attend to what is kept. K/V of their
first layer do not depend on what its rows attend to, so that of one layer this is exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.attention.sdpa import SdpaAttention
from specdec.core.sampling_params import SamplingParams
from specdec.drafters.attention import RowAttention
from specdec.kv.config import CacheConfig
from specdec.kv.selection import KvSelectionConfig
from specdec.model.batch import PositionShift, SequenceSlice
from specdec.model.position_ids import shifted_positions
from specdec.proposers.base import Proposer
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_window import DraftWindow
from specdec.proposers.drafter_pool import DrafterPool
from specdec.tree.growth import TreeShape
from tests.specdec.proposers import feature_proposers, head_proposers
from tests.specdec.proposers.best_tokens import best_of
from tests.specdec.proposers.compiled_proposers import HOW, compiled, warm_sampler
from tests.specdec.proposers.contract import FrozenView, ProposerContract, view
from tests.specdec.proposers.feature_proposers import DYNAMIC, STATIC, make_drafter
from tests.specdec.proposers.head_proposers import NUM_HEADS
from tests.specdec.proposers.made_up_states import VOCAB
from tests.specdec.proposers.proposer_setup import ProposerSetup

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLED, GREEDY = SamplingParams(), SamplingParams(temperature=0.0)
HEADS = ("hydra++", "parallel_heads")
SINK, BLOCK = 4, 4
PIECE = 8


def window(budget: int, most: int = 8, sink: int = SINK) -> DraftWindow:
    config = KvSelectionConfig(policy="streaming", budget=budget, sink_tokens=sink)
    return DraftWindow(selection=config.make(BLOCK), num_piece_tokens=PIECE, num_draft_tokens=most)


def make(kind: str, its_window: DraftWindow | None, **more: Any) -> Proposer:
    made = head_proposers.make if kind in HEADS else feature_proposers.make
    return made(kind, ProposerSetup(window=its_window, **{"max_model_len": 400, **more}))


def nodes_behind(shape: TreeShape | None) -> int:
    return 15 if shape is None else max(shape.max_nodes, shape.num_looked_behind(shape.max_nodes))


class TestModulesWithAnAmpleBudget(ProposerContract):
    """Nothing is ever left out: all that heads promise holds, though they read in pieces."""

    def make_proposer(self) -> Proposer:
        return make("mtp of three", window(4096))


@pytest.mark.full
class TestTreesWithAnAmpleBudget(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("eagle3", window(4096, nodes_behind(DYNAMIC)), shape=DYNAMIC)


@pytest.mark.full
class TestPrefixLayerWithAnAmpleBudget(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("hydra++", window(4096))


class RowsAroundAGap(RowAttention):
    """A position sees itself, and those before it that are not in the gap."""

    def __init__(self, first: int, end: int) -> None:
        self._first, self._end = first, end

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        num = query.shape[2]
        seen = torch.ones(num, num, dtype=torch.bool).tril()
        seen[:, self._first : self._end] = False
        seen |= torch.eye(num, dtype=torch.bool)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )


def expected_chain(
    kind: str, one: FrozenView, params: SamplingParams, attention: RowAttention, num: int
) -> list[int]:
    chain: list[int] = []
    for depth in range(num):
        if kind in HEADS:
            logits = head_proposers.logits_behind(kind, one.token_ids, chain, attention)
        else:
            logits = feature_proposers.logits_behind(make_drafter(kind), one.token_ids, chain, attention)
        chain += best_of(logits, params, one.seed, one.committed_len + depth, 1)
    return chain


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "hydra++", "parallel_heads"])
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("budget", [12, 21])
def test_they_attend_to_the_sink_the_window_and_their_own_drafts(
    kind: str, params: SamplingParams, budget: int
) -> None:
    """At the positions of the text: first behind a prompt that is read in pieces, then token by token."""
    its_window, most = window(budget), min(4, NUM_HEADS)
    proposer = make(kind, its_window)
    tokens = random.Random(budget).choices(range(VOCAB), k=45)
    gaps: set[int] = set()
    differ = 0
    num_read = 40  # of the prompt, before its last piece is read
    for _ in range(12):
        one = view("a", tokens, params)
        proposal = proposer.propose([one], {one.request_id: most})[one.request_id]
        gap = its_window.selection.select(num_read).num_dropped
        gaps.add(gap)
        chain = expected_chain(kind, one, params, RowsAroundAGap(SINK, SINK + gap), most)
        assert proposal.token_ids == tuple(chain)
        differ += chain != expected_chain(kind, one, params, RowsAroundAGap(0, 0), most)
        num_read = len(tokens)
        tokens = [*tokens, chain[0]]
    assert len(gaps) > 2
    assert min(gaps) > 0
    assert differ > 0, "what is left out would not show"


@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_nodes_of_a_tree_attend_to_what_chains_attend_to(shape: TreeShape) -> None:
    its_window = window(12, nodes_behind(shape))
    proposer, drafter = make("eagle3", its_window, shape=shape), make_drafter("eagle3")
    tokens = random.Random(1).choices(range(VOCAB), k=45)
    num_read = 40
    for step in range(6):
        one = view("a", tokens, SAMPLED)
        proposal = proposer.propose([one], {one.request_id: shape.max_nodes})[one.request_id]
        assert proposal.parents is not None
        gap = its_window.selection.select(num_read).num_dropped
        attention = RowsAroundAGap(SINK, SINK + gap)
        paths: dict[int, list[int]] = {-1: []}
        children: dict[int, list[int]] = {}
        for node, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
            paths[node] = [*paths[parent], token]
            children.setdefault(parent, []).append(token)
        for parent, its in children.items():
            logits = feature_proposers.logits_behind(drafter, tokens, paths[parent], attention)
            position = len(tokens) + len(paths[parent])
            assert set(its) <= set(best_of(logits, SAMPLED, one.seed, position, 3))
        num_read = len(tokens)
        tokens = [*tokens, *paths[len(paths) - 2][:step], 7 + step]


def histories(seed: int, length: int) -> Iterator[list[FrozenView]]:
    """Three sequences of up to `length` tokens that grow by a few tokens each; now and then one rests."""
    generator = random.Random(seed)
    texts = [generator.choices(range(VOCAB), k=generator.randint(1, length)) for _ in range(3)]
    for number in range(8):
        yield [
            view(str(index), text, (SAMPLED, GREEDY)[index % 2], seed=index)
            for index, text in enumerate(texts)
            if index != number - 3
        ]
        for text in texts:
            text += generator.choices(range(VOCAB), k=generator.randrange(1, 5))


def drafted(proposer: Proposer, length: int, seed: int = 1) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for views in histories(seed, length):
            budgets = {one.request_id: generator.choice((0, 1, 3, 6, 15)) for one in views}
            found.append(dict(proposer.propose(views, budgets)))
            if isinstance(proposer, DraftModelProposer):
                proposer.check_integrity()
    assert sum(map(len, found)) > 10
    return found


KINDS: Sequence[tuple[str, TreeShape | None]] = [
    ("eagle", None),
    ("eagle3", STATIC),
    ("mtp of three", None),
    ("mtp of three", DYNAMIC),
    ("hydra++", None),
    ("parallel_heads", None),
]


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_behind_texts_shorter_than_the_budget_all_is_as_without(kind: str, shape: TreeShape | None) -> None:
    more = {} if shape is None else {"shape": shape}
    expected = drafted(make(kind, None, **more), 20)
    assert drafted(make(kind, window(64, nodes_behind(shape)), **more), 20) == expected
    assert drafted(make(kind, window(12, nodes_behind(shape)), **more), 20) != expected, "the control"


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_what_is_held_does_not_depend_on_the_length(kind: str, shape: TreeShape | None) -> None:
    """A pool that holds two windows is enough for two texts of whatever length; without one it is not."""
    more = {} if shape is None else {"shape": shape}
    its_window = window(12, nodes_behind(shape))
    num_blocks = 1 + 2 * its_window.max_blocks(1 << 20, BLOCK)
    generator = random.Random(0)
    proposer, control = (make(kind, one, num_blocks=num_blocks, **more) for one in (its_window, None))
    most: dict[int, int] = {}
    for length in (50, 250):
        views = [view(f"{length}-{n}", generator.choices(range(VOCAB), k=length)) for n in range(2)]
        for _ in range(4):
            found = proposer.propose(views, {one.request_id: 6 for one in views})
            assert set(found) == {one.request_id for one in views}
            if isinstance(proposer, DraftModelProposer):
                most[length] = max(most.get(length, 0), proposer.sequences.num_held_blocks)
            views = [view(one.request_id, [*one.token_ids, 3, 5], GREEDY) for one in views]
        proposer.release([one.request_id for one in views])
    assert len(set(most.values())) <= 1
    (long,) = views[:1]
    assert not control.propose([long], {long.request_id: 6})


@pytest.mark.parametrize("kind", ["eagle3", "mtp of three", "hydra++"])
def test_the_pool_does_not_depend_on_how_long_texts_may_become(kind: str) -> None:
    its_window = window(32)

    def num_bytes(length: int, held: DraftWindow | None) -> int:
        drafter = head_proposers.make_heads(kind) if kind in HEADS else make_drafter(kind)
        pool = DrafterPool(
            drafter,
            drafter.attention_layers,
            CacheConfig(block_size=BLOCK, memory_bytes=1 << 30),
            max_num_seqs=32,
            max_model_len=length,
            backend=SdpaAttention(),
            max_held_tokens=None if held is None else held.max_held_tokens(length, BLOCK),
        )
        assert pool.max_model_len == length
        return pool.kv.num_bytes

    assert num_bytes(512, its_window) == num_bytes(4096, its_window) < num_bytes(512, None)
    assert num_bytes(4096, None) > 7 * num_bytes(512, None), "the control"


@pytest.mark.parametrize("kind", ["mtp of three", "eagle3"])
@pytest.mark.parametrize(("budget", "sink"), [(5, 4), (6, 4), (1, 0), (2, 0)])
@pytest.mark.parametrize("shape", [None, DYNAMIC], ids=["chain", "tree"])
def test_the_smallest_budgets_do_no_harm(kind: str, budget: int, sink: int, shape: TreeShape | None) -> None:
    """A request may ask for drafts so short that its window is shorter than there are modules."""
    proposer = make(kind, window(budget, nodes_behind(shape), sink), shape=shape)
    for found in drafted(proposer, 40):
        assert all(one.num_tokens for one in found.values())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle3", None),
        ("eagle3", DYNAMIC),
        ("hydra++", None),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("mtp", None), ("eagle", STATIC))),
        pytest.param("parallel_heads", None, marks=pytest.mark.full),
    ],
)
def test_native_calls_draft_what_is_drafted_eagerly(
    kind: str, shape: TreeShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"nothing can be compiled here: {error}")
    more = {"sampler": warm_sampler(), **({} if shape is None else {"shape": shape})}
    expected = drafted(make(kind, window(12, nodes_behind(shape)), **more), 40)
    proposer = compiled(make(kind, window(12, nodes_behind(shape)), how=HOW, **more))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("run eagerly")

    module = head_proposers.make_heads(kind) if kind in HEADS else make_drafter(kind)
    for name in ("head", "prepare", "fuse", "step"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, refuse)
    assert drafted(proposer, 40) == expected


def test_positions_count_what_is_left_out() -> None:
    def piece(**more: Any) -> SequenceSlice:
        return SequenceSlice(token_ids=(1, 2), start=6, block_table=(1, 2), num_logit_rows=0, **more)

    places = torch.tensor([6, 7, 6, 7])
    assert shifted_positions(places, [piece(), piece()]) is None
    shifted = shifted_positions(places, [piece(num_dropped=8), piece(shift=PositionShift(-1, 7))])
    assert shifted is not None
    assert shifted.tolist() == [14, 15, 5, 7]
