"""A draft model with bounded memory: what it attends to, what it holds, and that it is otherwise the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, slot_value
from specdec.kv.selection import KvSelectionConfig
from specdec.proposers.base import AheadWish, Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.draft_window import ANY_LENGTH, DraftWindow, draft_window, small_pool_warning
from specdec.sampling.noise import MASK_64
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import Sampler
from specdec.tree.static import StaticTree
from tests.pairwise import mostly_full
from tests.specdec.proposers.ahead_contract import EOS, AheadContract, assumed_of
from tests.specdec.proposers.ahead_contract import VOCAB_SIZE as AHEAD_VOCAB_SIZE
from tests.specdec.proposers.contract import GREEDY, SAMPLED, FrozenView, ProposerContract, view

VOCAB_SIZE = 24
MODEL = ToyModel(VOCAB_SIZE, seed=3)
ENDLESS = SamplingParams(temperature=1.0, ignore_eos=True)


def window(budget: int, *, sink: int = 4, block_size: int = 4, piece: int = 8, most: int = 9) -> DraftWindow:
    config = KvSelectionConfig(policy="streaming", budget=budget, sink_tokens=sink)
    return DraftWindow(selection=config.make(block_size), num_piece_tokens=piece, num_draft_tokens=most)


def make(
    its_window: DraftWindow | None,
    runner: ToyRunner | None = None,
    *,
    max_read_tokens: int = 512,
    prefix_caching: bool = True,
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: Sequence[int] = (),
) -> DraftModelProposer:
    return DraftModelProposer(
        runner or ToyRunner(MODEL, max_model_len=1 << 20),
        DraftChoice(sampler=Sampler(), vocab_size=vocab_size, eos_token_ids=eos_token_ids),
        reading=DraftReading(
            window=its_window, max_read_tokens=max_read_tokens, prefix_caching=prefix_caching
        ),
    )


def drafted(proposer: Proposer, one: FrozenView, budget: int = 4) -> tuple[int, ...]:
    proposal = proposer.propose([one], {one.request_id: budget}).get(one.request_id)
    return () if proposal is None else proposal.token_ids


class TestWithAnAmpleBudget(ProposerContract):
    """Nothing is ever left out: all that a draft model promises holds, whichever pieces it reads in."""

    vocab_size = VOCAB_SIZE
    always_proposes = True

    def make_proposer(self) -> Proposer:
        return make(window(4096, piece=3))


class TestAheadWithAnAmpleBudget(AheadContract):
    def make(self) -> DraftModelProposer:
        runner = ToyRunner(ToyModel(AHEAD_VOCAB_SIZE, seed=3, sharpness=1.5), num_blocks=1024)
        return make(window(4096, most=11), runner, vocab_size=AHEAD_VOCAB_SIZE, eos_token_ids=(EOS,))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_budget_above_the_length_equals_full_drafting(params: SamplingParams) -> None:
    full, bounded = make(None), make(window(200, piece=5))
    generator = random.Random(1)
    tokens = {name: generator.choices(range(VOCAB_SIZE), k=generator.randint(1, 60)) for name in "abcd"}
    for _ in range(20):
        views = [view(name, its, params) for name, its in tokens.items()]
        budgets = {one.request_id: generator.randint(0, 5) for one in views}
        answers = full.propose(views, budgets)
        assert bounded.propose(views, budgets) == answers
        for name, its in tokens.items():
            chain = answers[RequestId(name)].token_ids if RequestId(name) in answers else ()
            its += [*chain[: generator.randint(0, len(chain))], generator.randrange(VOCAB_SIZE)]
    assert max(map(len, tokens.values())) < 200


def expected_draft(tokens: Sequence[int], its: DraftWindow, params: SamplingParams, budget: int) -> list[int]:
    """What a drafter says that reads a text from its beginning; written down without tables or blocks."""
    there: list[tuple[int, int]] = []  # position and value, in order

    def read(position: int) -> int:
        total = sum(value for _, value in there) & MASK_64
        there.append((position, slot_value(total, position, text[position])))
        return sum(value for _, value in there) & MASK_64

    def slide(num_read: int) -> None:
        selected = its.selection.select(num_read).blocks
        there[:] = [one for one in there if one[0] // 4 in selected]

    text, num_read = list(tokens), 0
    while len(text) - num_read > its.num_piece_tokens:
        slide(num_read)
        for _ in range(its.num_piece_tokens):
            read(num_read)
            num_read += 1
    slide(num_read)
    for position in range(num_read, len(text)):
        total = read(position)
    for _ in range(budget):
        logits = torch.from_numpy(MODEL.logits(text[-1], total)).float()[None]
        rows = SamplingRows.build([RowSpec(params, 7, len(text), 1)])
        text.append(int(Sampler().sample(logits, rows, "target").token_ids[0]))
        total = read(len(text) - 1)
    return text[len(tokens) :]


@pytest.mark.parametrize("params", [GREEDY, ENDLESS], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("budget", "sink", "piece"), [(12, 4, 8), (9, 0, 3), (24, 5, 16), (10, 1, 1)])
@pytest.mark.parametrize("length", [7, 30, 61, 120])
def test_attends_to_the_sink_and_the_window(
    params: SamplingParams, budget: int, sink: int, piece: int, length: int
) -> None:
    """At absolute positions, with noise of absolute positions."""
    its = window(budget, sink=sink, piece=piece)
    tokens = random.Random(length).choices(range(VOCAB_SIZE), k=length)
    proposer = make(its)
    got = list(drafted(proposer, view("a", tokens, params), 5))
    proposer.check_integrity()
    assert got == expected_draft(tokens, its, params, 5)


@pytest.mark.parametrize("params", [GREEDY, ENDLESS], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [12, 24, 400])
def test_likeliest_paths_of_trees_are_the_chains(params: SamplingParams, budget: int) -> None:
    """Whatever of them is committed: its K/V are moved to where those of a chain lie, behind the same gap."""
    shape = StaticTree.of_widths((3, 2, 1), (0.5, 0.3))
    trees = TreeDraftProposer(
        ToyRunner(MODEL, max_model_len=1 << 20),
        DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE),
        shape,
        reading=DraftReading(window=window(budget)),
    )
    chains = make(window(budget))
    generator = random.Random(budget)
    tokens = generator.choices(range(VOCAB_SIZE), k=50)
    for _ in range(25):
        one = view("a", tokens, params)
        chain = drafted(chains, one, 3)
        proposal = trees.propose([one], {one.request_id: shape.max_nodes})[one.request_id]
        assert proposal.parents is not None
        path, node = [], -1
        while node in proposal.parents:
            node = proposal.parents.index(node)
            path.append(proposal.token_ids[node])
        assert tuple(path) == chain
        trees.check_integrity()
        tokens = [*tokens, *chain[: generator.randint(0, 3)], generator.randrange(VOCAB_SIZE)]


def test_control_what_is_left_out_shows() -> None:
    its, differing = window(12), 0
    for seed in range(10):
        one = view("a", random.Random(seed).choices(range(VOCAB_SIZE), k=100), ENDLESS, seed)
        differing += drafted(make(its), one) != drafted(make(None), one)
    assert differing > 3


def test_a_long_text_is_not_attended_to_as_a_whole() -> None:
    """No slice ever has more before it than what is kept."""

    class Watched(ToyRunner):
        longest = 0

        def forward(self, slices):  # type: ignore[no-untyped-def]
            self.longest = max(self.longest, *(one.start + len(one.token_ids) for one in slices))
            return super().forward(slices)

    runner = Watched(MODEL, max_model_len=1 << 20)
    proposer = make(window(16, piece=8), runner, max_read_tokens=64)
    one = view("a", random.Random(2).choices(range(VOCAB_SIZE), k=1000))
    for _ in range(1000 // 64):
        assert drafted(proposer, one) == ()
    assert drafted(proposer, one)
    assert runner.num_tokens_read == 1000 + 3, "no token is read twice"
    assert runner.longest <= 16 + 2 * 4 + 8 + 4


class Streams:
    """Texts that grow by a part of what is drafted for them and other tokens."""

    def __init__(self, count: int, lengths: Sequence[int], seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.tokens = {
            RequestId(f"r{number}"): self.rng.choices(range(VOCAB_SIZE), k=self.rng.choice(lengths))
            for number in range(count)
        }
        self.pending: dict[RequestId, tuple[int, ...]] = {}

    def views(self) -> list[FrozenView]:
        return [
            FrozenView(name, tuple(tokens), (GREEDY, ENDLESS)[len(name) % 2], num_prompt_tokens=1)
            for name, tokens in self.tokens.items()
        ]

    def commit(self, name: RequestId, chain: Sequence[int]) -> None:
        kept = chain[: self.rng.randint(0, len(chain))]
        self.tokens[name] += [*kept, self.rng.randrange(VOCAB_SIZE)]


@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.full)])
def test_memory_of_many_long_texts_is_that_of_short_ones(prefix_caching: bool) -> None:
    """32 texts of some thousand tokens in a pool that holds 32 of 64 tokens."""
    its, k = window(32, piece=8, most=4), 4
    per_sequence = its.max_blocks(1 << 20, 4)
    assert per_sequence == its.max_blocks(200, 4) <= 64 // 4
    runner = ToyRunner(MODEL, num_blocks=1 + 32 * per_sequence, max_model_len=1 << 20)
    proposer = make(its, runner, max_read_tokens=4096, prefix_caching=prefix_caching)
    assert proposer.capabilities.max_context == 1 << 20
    streams = Streams(32, [100, 1500, 3000])
    most = 0
    for _ in range(40):
        views = streams.views()
        answers = proposer.propose(views, dict.fromkeys(streams.tokens, k))
        proposer.check_integrity()
        most = max(most, proposer.sequences.num_held_blocks)
        assert proposer.sequences.known == set(streams.tokens), "nobody had to give way"
        assert not proposer.crowded_out
        for one in views:
            proposal = answers.get(one.request_id)
            streams.commit(one.request_id, () if proposal is None else proposal.token_ids)
    assert set(answers) == set(streams.tokens)
    assert most <= 32 * per_sequence
    proposer.close()
    assert proposer.sequences.num_held_blocks == 0


def test_control_without_a_window_that_pool_is_too_small() -> None:
    runner = ToyRunner(MODEL, num_blocks=1 + 32 * 14, max_model_len=1 << 20)
    proposer = make(None, runner)
    assert proposer.capabilities.max_context == 32 * 14 * 4
    assert drafted(proposer, view("a", [1] * 3000)) == ()


@pytest.mark.parametrize("num_blocks", [24, 40, 400])
@pytest.mark.parametrize("seed", range(3))
def test_books_are_right_whatever_is_asked(num_blocks: int, seed: int) -> None:
    """Ordinary wishes and branches, rollback, requests that come and go, in pools of any size."""
    runner = ToyRunner(MODEL, num_blocks=num_blocks, max_model_len=1 << 20)
    proposer = make(window(16, piece=8, most=7), runner, max_read_tokens=64)
    streams = Streams(4, [3, 40, 200], seed)
    rng = streams.rng
    pending: dict[RequestId, tuple[int, ...]] = {}
    num_branches = 0
    for _ in range(60):
        views = [one for one in streams.views() if rng.random() < 0.8]
        if rng.random() < 0.5:
            answers = proposer.propose(views, {one.request_id: rng.randint(0, 4) for one in views})
            pending = {name: one.token_ids for name, one in answers.items()}
        else:
            wishes = []
            for one in views:
                its = pending.get(one.request_id, ())
                fan_out = tuple(rng.randint(0, 2) for _ in range(len(its) + 1)) if its else None
                wishes.append(AheadWish(view=one, pending=its, num_draft_tokens=3, fan_out=fan_out))
            num_branches += sum(map(len, proposer.propose_ahead(wishes).values()))
        proposer.check_integrity()
        for name in list(streams.tokens):
            action = rng.random()
            if action < 0.6:
                streams.commit(name, pending.pop(name, ()))
            elif action < 0.65:
                del streams.tokens[name][rng.randint(1, len(streams.tokens[name])) :]
                pending.pop(name, None)
            elif action < 0.7:
                proposer.release([name])
                pending.pop(name, None)
            proposer.check_integrity()
    assert num_branches > 0
    proposer.close()
    assert proposer.sequences.num_held_blocks == 0


def test_only_what_was_read_with_everything_is_found_by_others() -> None:
    runner = ToyRunner(MODEL, max_model_len=1 << 20)
    proposer = make(window(32, piece=8), runner)
    tokens = random.Random(5).choices(range(VOCAB_SIZE), k=200)
    before = drafted(proposer, view("a", tokens))
    proposer.release([RequestId("a")])
    read = runner.num_tokens_read
    assert drafted(proposer, view("b", tokens)) == before
    hits = proposer.counters["draft_prefix_cache_hits"]
    assert 32 <= hits <= 32 + 4 + 8
    assert runner.num_tokens_read - read == 200 - hits + 3
    full = make(None, ToyRunner(MODEL, max_model_len=1 << 20))
    for length in (20, 28):  # what they find is what is read with everything
        one = view("c", [*tokens[:length], 3], ENDLESS)
        assert drafted(proposer, one) == drafted(full, one)


def test_what_a_prompt_shares_is_not_freed_from_under_others() -> None:
    """The blocks that a window leaves behind may be another one's, and then make no room."""
    tokens = random.Random(6).choices(range(VOCAB_SIZE), k=40)
    runner = ToyRunner(MODEL, num_blocks=26, max_model_len=1 << 20)
    proposer = make(window(16, piece=8, most=4), runner)
    assert drafted(proposer, view("short", tokens[:18]))
    for number in range(4):
        generator = random.Random(number)
        one = view(f"long{number}", [*tokens[:18], *generator.choices(range(VOCAB_SIZE), k=100)])
        drafted(proposer, one)
        proposer.check_integrity()
    short = view("short", [*tokens[:18], 3], ENDLESS)
    assert drafted(proposer, short) == drafted(make(None), short)


@pytest.mark.parametrize("asked", [None, 64], ids=["as configured", "a request's own k"])
@pytest.mark.parametrize("block_size", mostly_full([1, 3, 16], [3]))
def test_what_is_held_stays_within_the_plan(block_size: int, asked: int | None) -> None:
    for budget, sink, piece, k in itertools.product((8, 33), (0, 5), (4, 20), (1, 6)):
        its = window(budget, sink=sink, block_size=block_size, piece=piece, most=k)
        runner = ToyRunner(MODEL, num_blocks=4000 // block_size, block_size=block_size, max_model_len=1 << 20)
        proposer = make(its, runner, prefix_caching=False)
        tokens = [1, 2, 3]
        for step in range(60):
            one = view("a", tokens)
            chain = drafted(proposer, one, asked or k)
            assert len(chain) <= k
            held = proposer.sequences.num_held_blocks
            assert held <= its.max_blocks(len(tokens) + k, block_size), (step, len(tokens))
            tokens += [*chain[: step % (k + 1)], step % VOCAB_SIZE] if step % 9 else [5] * 50


def configured(**kv: object) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate(
        {
            "method": "draft_model",
            "model": "m",
            "num_speculative_tokens": 4,
            "cache": {"num_blocks": 4},
            "kv": {"policy": "streaming", **kv},
        }
    )


@pytest.mark.parametrize(
    ("budgets", "most"),
    [
        ([512, 0.05], 512),  # more than half of the positions, since it is configured
        ([64, 0.05], 300),
        ([0.05, 0.1], 300),
    ],
)
@pytest.mark.parametrize("is_turned", [False, True])
def test_the_order_of_budgets_does_not_matter_to_what_is_kept(
    budgets: list[int | float], most: int, is_turned: bool
) -> None:
    its = draft_window(configured(budget=budgets[::-1] if is_turned else budgets, floor=256), 600)
    assert its is not None
    kept = 100_000 - its.selection.select(100_000).num_dropped
    assert most <= kept < most + 32
    assert its.num_piece_tokens == min(*(b if isinstance(b, int) else 256 for b in budgets)) // 4
    assert most <= its.most_budget(ANY_LENGTH, 1000, 16) < most + 32


def test_a_floor_of_more_than_half_of_the_positions_stays() -> None:
    """As the first of the list, a smaller budget took the place of the floor."""
    for budgets in ([64, 0.05], [0.05, 64]):
        its = draft_window(configured(budget=budgets, floor=400), 600)
        assert its is not None
        assert 400 <= 100_000 - its.selection.select(100_000).num_dropped < 432


def test_a_pool_smaller_than_a_window_is_told() -> None:
    config = configured(budget=512)
    text = small_pool_warning(config, 4, 4096)
    assert text is not None
    assert text.startswith("speculative_config.cache.num_blocks: 4 makes a pool of 4 blocks of 16 tokens, ")
    assert "speculative_config.kv.budget: 512 takes up to 44: texts of more than 48 tokens" in text
    assert small_pool_warning(config, 43, 4096) is not None
    assert small_pool_warning(config, 44, 4096) is None
    assert small_pool_warning(config, 4, 48) is None, "no text is longer"
    assert small_pool_warning(configured(policy="full"), 4, 4096) is None
    its = draft_window(config)
    assert its is not None
    for num_blocks in (43, 44):
        runner = ToyRunner(MODEL, num_blocks=num_blocks, block_size=16, max_model_len=4096)
        proposer = make(its, runner)
        assert proposer.capabilities.max_context == (4096 if num_blocks == 44 else 42 * 16)


def test_branches_come_true_behind_a_gap() -> None:
    """What was prepared behind the right guess becomes the sequence's own, without being read again."""
    runner = ToyRunner(MODEL, max_model_len=1 << 20)
    proposer = make(window(16, piece=8), runner)
    rng = random.Random(3)
    tokens, pending, num_true = rng.choices(range(VOCAB_SIZE), k=90), (), 0
    for _ in range(25):
        one = view("a", tokens, ENDLESS)
        wish = AheadWish(view=one, pending=pending, num_draft_tokens=3, fan_out=(2,) * (len(pending) + 1))
        branches = proposer.propose_ahead([wish]).get(one.request_id, [])
        proposer.check_integrity()
        if branches:
            true = rng.choice(branches)
            tokens += assumed_of(true, one, pending, VOCAB_SIZE)
            pending, num_true = true.token_ids, num_true + 1
        else:  # it was reading
            tokens, pending = [*tokens, 1], ()
    assert num_true > 20
    assert proposer.counters["draft_ahead_branches_true"] >= num_true - 1
    assert len(tokens) > 120
