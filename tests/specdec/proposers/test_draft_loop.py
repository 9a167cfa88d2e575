"""Drafting in one native call against drafting step by step: always the same chains."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.kv.config import CacheConfig
from specdec.model.batch import NO_TOKEN, NativeChooser, SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import ChainStart, NativeDraftLoop, StepwiseDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sampling import SHARED_NOISE
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.tree_loop import RunnerNodes, TreeDraftLoop
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import Sampler
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.tree.dynamic import DynamicTree
from specdec.tree.entropy import EntropyTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree
from tests.architectures import VOCAB_SIZE, save_model
from tests.specdec.proposers.ahead_contract import EOS, AheadContract
from tests.specdec.proposers.contract import ProposerContract, view

BLOCK_SIZE = 4
NUM_BLOCKS = 200
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=20, min_p=0.01),
)
POISON = 77
"""Reading this token makes a sequence's logits NaN, in the poisoned model."""

RunnerOf = Callable[[str], ModelRunner]


def loaded_model(folder: Path, dtype: str, architecture: str = "llama") -> LoadedModel:
    save_model(folder, architecture)
    return load_model(ModelConfig.model_validate({"model": str(folder), "dtype": dtype}))


def compiled(loaded: LoadedModel) -> ModelRunner:
    cache_config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    runner = ModelRunner(loaded, cache_config, max_num_seqs=32)
    runner.graphs = graphs = CompiledForward(runner, CompileConfig())
    assert graphs.warm_up() == "ready"
    return runner


def sibling(runner: ModelRunner) -> ModelRunner:
    """A runner with a pool of its own and the same compiled forward."""
    other = ModelRunner(
        runner.loaded, CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), max_num_seqs=32
    )
    other.graphs = graphs = CompiledForward(other, CompileConfig(mode="off"))
    assert isinstance(runner.graphs, CompiledForward)
    assert runner.graphs._forward is not None
    graphs._forward = runner.graphs._forward
    graphs._num_position_ids = runner.graphs._num_position_ids
    graphs._caches = graphs._forward.bind_caches(other.pool)
    return other


@pytest.fixture(scope="module")
def runner_of(tmp_path_factory: pytest.TempPathFactory) -> RunnerOf:
    """Runners by "float32", "bfloat16", "poisoned" or "windowed"; skips where nothing can be compiled."""
    try:
        CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"no compiled forward here: {error}")

    @cache
    def make(kind: str) -> ModelRunner:
        dtype = kind if kind == "bfloat16" else "float32"
        architecture = "mistral" if kind == "windowed" else "llama"
        loaded = loaded_model(tmp_path_factory.mktemp(kind), dtype, architecture)
        if kind == "poisoned":
            with torch.no_grad():
                loaded.model.get_input_embeddings().weight[POISON] = torch.nan
        return compiled(loaded)

    return lambda kind: sibling(make(kind))


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    made = Sampler()
    made.warm_up()
    return made


@pytest.fixture(autouse=True, params=[1, 3], ids=["one thread", "three threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Sequences:
    """Some sequences with scattered blocks that advance by what is drafted for them and by other tokens."""

    def __init__(self, seed: int, tokens_below: int = VOCAB_SIZE) -> None:
        self.rng = random.Random(seed)
        self._below = tokens_below
        blocks = list(range(1, NUM_BLOCKS))
        self.rng.shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(20)] for _ in range(6)]
        self.tokens = [self.random_tokens(self.rng.randint(1, 20)) for _ in self.tables]
        self.num_read = [0] * len(self.tables)
        self.params = [self.rng.choice(PARAMS) for _ in self.tables]

    def random_tokens(self, count: int) -> list[int]:
        return self.rng.choices([token for token in range(self._below) if token != POISON], k=count)

    def starts(self) -> tuple[list[int], list[ChainStart]]:
        """Some of the sequences, each with all it has to catch up on."""
        chosen = self.rng.sample(range(len(self.tables)), self.rng.randint(1, len(self.tables)))
        return chosen, [
            ChainStart(
                token_ids=self.tokens[number][self.num_read[number] :],
                start=self.num_read[number],
                block_table=self.tables[number],
                budget=self.rng.randint(0, 6),
                params=self.params[number],
                seed=number + (1 << 63),
            )
            for number in chosen
        ]

    def advance(self, chosen: Sequence[int], chains: Sequence[Sequence[int]]) -> None:
        """Commit a part of each chain and some tokens that were not in it."""
        for number, chain in zip(chosen, chains, strict=True):
            num_kept = self.rng.randint(0, len(chain))
            kept = [token for token in chain[:num_kept] if token != POISON]
            read = len(self.tokens[number]) + min(len(kept), max(0, len(chain) - 1))
            self.num_read[number] = read
            self.tokens[number] += [*kept, *self.random_tokens(self.rng.randint(1, 3))]
            if len(self.tokens[number]) > 60:
                self.tokens[number], self.num_read[number] = self.random_tokens(3), 0


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "poisoned"])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 90, 10 * VOCAB_SIZE])
def test_chains_are_those_of_the_stepwise_loop(
    runner_of: RunnerOf, sampler: Sampler, kind: str, vocab_size: int
) -> None:
    """Ragged batches, mixed budgets and parameters, several tokens to catch up on, blocks of four."""
    native = NativeDraftLoop(runner_of(kind), sampler, vocab_size)
    stepwise = StepwiseDraftLoop(runner_of(kind), sampler, vocab_size)
    sequences = Sequences(seed=vocab_size)
    num_tokens = num_short = 0
    for _ in range(40):
        chosen, starts = sequences.starts()
        chains = native.try_draft(starts)
        assert chains is not None
        assert chains == stepwise.draft(starts)
        assert all(token < vocab_size for chain in chains for token in chain)
        num_tokens += sum(map(len, chains))
        num_short += sum(len(chain) < start.budget for chain, start in zip(chains, starts, strict=True))
        sequences.advance(chosen, chains)
    assert num_tokens > 200
    assert (num_short > 0) == (kind == "poisoned")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_chains_behind_a_gap_are_those_of_the_stepwise_loop(
    runner_of: RunnerOf, sampler: Sampler, kind: str
) -> None:
    """Places in the block table are not positions: the model and the noise are given positions."""
    native = NativeDraftLoop(runner_of(kind), sampler, VOCAB_SIZE)
    stepwise = StepwiseDraftLoop(runner_of(kind), sampler, VOCAB_SIZE)
    sequences = Sequences(seed=11)
    differing = 0
    for _ in range(20):
        chosen, starts = sequences.starts()
        behind = [
            start._replace(start=start.start + gap, num_dropped=gap)
            for start in starts
            for gap in (BLOCK_SIZE * sequences.rng.randrange(20),)
        ]
        chains = native.try_draft(behind)
        assert chains is not None
        assert chains == stepwise.draft(behind)
        sequences.advance(chosen, native.try_draft(starts) or [])
        differing += chains != stepwise.draft(starts)
    assert differing > 10, "positions matter"


def test_behind_all_positions_that_there_are_tables_for(runner_of: RunnerOf, sampler: Sampler) -> None:
    runner = runner_of("float32")
    loop = NativeDraftLoop(runner, sampler, VOCAB_SIZE)
    gap = runner.max_model_len - 8
    start = ChainStart((5,), 4 + gap, range(1, 9), 4, PARAMS[0], 1, num_dropped=gap)
    assert loop.try_draft([start]) is not None
    assert loop.try_draft([start._replace(start=start.start + 1)]) is None


@pytest.mark.parametrize("spoil", ["seed", "position", "parameters", "order"])
def test_negative_control(runner_of: RunnerOf, sampler: Sampler, spoil: str) -> None:
    """What decides a token decides it here too."""
    sequences = Sequences(seed=7)
    sequences.params = [SamplingParams(temperature=2.0)] * len(sequences.tables)
    _, starts = sequences.starts()
    starts = [start._replace(budget=6) for start in starts]
    assert len(starts) > 2
    expected = StepwiseDraftLoop(runner_of("float32"), sampler, VOCAB_SIZE).draft(starts)
    if spoil == "seed":
        starts = [start._replace(seed=start.seed + 1) for start in starts]
    elif spoil == "position":
        starts = [start._replace(start=start.start + 1) for start in starts]
    elif spoil == "parameters":
        starts = [start._replace(params=SamplingParams(temperature=0.5)) for start in starts]
    else:
        seeds = [start.seed for start in starts]
        starts = [start._replace(seed=seed) for start, seed in zip(starts, reversed(seeds), strict=True)]
    assert NativeDraftLoop(runner_of("float32"), sampler, VOCAB_SIZE).try_draft(starts) != expected


def test_company_of_a_poisoned_sequence_is_not_disturbed(runner_of: RunnerOf, sampler: Sampler) -> None:
    def start(name: int, tokens: Sequence[int], budget: int) -> ChainStart:
        table = range(1 + 10 * name, 11 + 10 * name)
        return ChainStart(tokens, 0, table, budget, PARAMS[1], name)

    loop = NativeDraftLoop(runner_of("poisoned"), sampler, VOCAB_SIZE)
    poisoned, healthy = start(0, [1, POISON], 4), start(1, [3, 4, 5], 4)
    chains = loop.try_draft([poisoned, healthy])
    assert chains is not None
    assert chains[0] == []
    assert [chains[1]] == NativeDraftLoop(runner_of("poisoned"), sampler, VOCAB_SIZE).try_draft([healthy])
    assert len(chains[1]) == 4


def test_what_is_not_compiled_is_left_to_others(runner_of: RunnerOf, sampler: Sampler) -> None:
    starts = [ChainStart([1, 2], 0, [1, 2], 2, PARAMS[0], 0)]
    runner = runner_of("float32")
    assert NativeDraftLoop(runner, Sampler(), VOCAB_SIZE).try_draft(starts) is None
    runner.graphs = None
    assert NativeDraftLoop(runner, sampler, VOCAB_SIZE).try_draft(starts) is None


class TestGenerating:
    """The runner's side, where a proposer would not notice."""

    @staticmethod
    def chooser(sampler: Sampler, count: int) -> NativeChooser:
        made = sampler.chooser([SequenceSampling(PARAMS[0], 0)] * count, VOCAB_SIZE)
        assert made is not None
        return made

    def test_several_logit_rows_and_more_behind_the_last(self, runner_of: RunnerOf, sampler: Sampler) -> None:
        runner, stepwise = runner_of("float32"), runner_of("float32")
        slices = [
            SequenceSlice(token_ids=[5, 6, 7, 8], start=0, block_table=[3, 9], num_logit_rows=3),
            SequenceSlice(token_ids=[9, 8], start=0, block_table=[4], num_logit_rows=0),
        ]
        generated = runner.try_generate(slices, [2, 0], self.chooser(sampler, 2))
        assert generated is not None
        tokens = [int(row.argmax()) for row in stepwise.forward(slices)]
        for position in (4, 5):
            more = SequenceSlice(token_ids=tokens[-1:], start=position, block_table=[3, 9], num_logit_rows=1)
            tokens.append(int(stepwise.forward([more])[0].argmax()))
        assert generated.token_ids == tokens
        assert generated.forward_s > 0
        assert generated.choose_s > 0

    def test_nothing_behind_a_spoilt_row(self, runner_of: RunnerOf, sampler: Sampler) -> None:
        piece = SequenceSlice(token_ids=[5, POISON], start=0, block_table=[3, 9], num_logit_rows=2)
        generated = runner_of("poisoned").try_generate([piece], [3], self.chooser(sampler, 1))
        assert generated is not None
        assert generated.token_ids[1:] == [NO_TOKEN] * 4

    @pytest.mark.parametrize("num_dropped", [0, 40])
    def test_tokens_of_trees_and_chains_side_by_side(
        self, runner_of: RunnerOf, sampler: Sampler, num_dropped: int
    ) -> None:
        """A tree behind a part of the prompt, and siblings that stand at one position."""
        params = SamplingParams(temperature=1.3)
        prompt = SequenceSlice(token_ids=[9, 8], start=0, block_table=[3, 9, 12], num_logit_rows=0)
        slices = [
            SequenceSlice(token_ids=range(20, 31), start=0, block_table=[4, 5, 6], num_logit_rows=2),
            SequenceSlice(
                token_ids=[30, 5, 6, 7, 6, 8],
                start=2,
                block_table=[3, 9, 12],
                num_logit_rows=5,
                parents=[-1, 0, 1, 1, 0, 3],
                num_dropped=num_dropped,
            ),
        ]
        runner, stepwise = runner_of("float32"), runner_of("float32")
        runner.forward([prompt])
        stepwise.forward([prompt])
        chooser = sampler.chooser([SequenceSampling(params, 3), SequenceSampling(params, 4)], VOCAB_SIZE)
        assert chooser is not None
        generated = runner.try_generate(slices, [0, 0], chooser)
        assert generated is not None
        specs = [RowSpec(params, 3, 10, 2), RowSpec(params, 4, num_dropped + 3, 5, [1, 2, 2, 1, 3])]
        expected = sampler.sample(stepwise.forward(slices), SamplingRows.build(specs))
        assert generated.token_ids == expected.token_ids.tolist()
        as_chain = [slices[0], replace(slices[1], parents=None)]
        generated = runner.try_generate(as_chain, [0, 0], chooser)
        assert generated is not None
        assert generated.token_ids != expected.token_ids.tolist(), "negative control"

    def test_nothing_is_generated_behind_trees(self, runner_of: RunnerOf, sampler: Sampler) -> None:
        tree = SequenceSlice(
            token_ids=[5, 6, 7], start=0, block_table=[3], num_logit_rows=3, parents=[-1, 0, 0]
        )
        assert runner_of("float32").try_generate([tree], [1], self.chooser(sampler, 1)) is None

    def test_a_token_outside_the_vocabulary_is_an_error(self, runner_of: RunnerOf, sampler: Sampler) -> None:
        runner = runner_of("float32")
        for token_id in (VOCAB_SIZE, -1):
            piece = SequenceSlice(token_ids=[token_id], start=0, block_table=[3], num_logit_rows=1)
            with pytest.raises(IndexError):
                runner.try_generate([piece], [2], self.chooser(sampler, 1))

    def test_blocks_must_hold_what_is_generated(self, runner_of: RunnerOf, sampler: Sampler) -> None:
        piece = SequenceSlice(token_ids=[5, 6, 7], start=0, block_table=[3], num_logit_rows=1)
        runner = runner_of("float32")
        assert runner.try_generate([piece], [1], self.chooser(sampler, 1)) is not None
        with pytest.raises(AssertionError, match="block table"):
            runner.try_generate([piece], [2], self.chooser(sampler, 1))


TREES: dict[str, TreeShape] = {
    "static": StaticTree.of_widths([3, 2, 1], (0.5, 0.2, 0.1)),
    "dynamic": DynamicTree(top_k=3, depth=4),
    "entropy": EntropyTree(top_k=3, depth=4, least_confidence=0.01),
}


@pytest.mark.parametrize("kind", ["float32", "poisoned", "windowed"])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 90])
@pytest.mark.parametrize("shape", TREES)
def test_trees_are_those_of_the_stepwise_loop(
    runner_of: RunnerOf, sampler: Sampler, shape: str, vocab_size: int, kind: str
) -> None:
    """Ragged batches, mixed budgets and parameters, several tokens to catch up on.

    A level of the former reads its own nodes alone, and sees its paths in what was read before.
    """
    runner = runner_of(kind)
    fused, stepwise = (
        TreeDraftLoop(
            RunnerNodes(its, generating),
            sampler,
            vocab_size,
            SHARED_NOISE,
            uses_confidence=TREES[shape].uses_confidence,
        )
        for its, generating in ((runner, runner), (runner_of(kind), None))
    )
    sequences = Sequences(seed=vocab_size)
    num_tokens = num_branches = 0
    for _ in range(15):
        chosen, starts = sequences.starts()
        starts = [start._replace(budget=min(start.budget, 5)) for start in starts]
        growths = [
            [TREES[shape].begin(2 * start.budget) if start.budget else None for start in starts]
            for _ in range(2)
        ]
        trees = fused.draft(starts, growths[0])
        assert trees == stepwise.draft(starts, growths[1])
        for tree in trees:
            if tree is not None:
                num_tokens += len(tree.tree.token_ids)
                num_branches += len(set(tree.tree.parents)) < len(tree.tree.parents)
                assert all(token < vocab_size for token in tree.tree.token_ids)
        sequences.advance(chosen, [()] * len(chosen))
    assert num_tokens > 100
    assert num_branches > 10


def test_a_level_reads_its_own_nodes_alone(
    runner_of: RunnerOf, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, levels = runner_of("float32"), []
    generate = runner.try_generate

    def watched(slices: Sequence[SequenceSlice], *more: Any) -> Any:
        levels.append([(len(piece.token_ids), piece.num_known) for piece in slices])
        return generate(slices, *more)

    monkeypatch.setattr(runner, "try_generate", watched)
    loop = TreeDraftLoop(
        RunnerNodes(runner, runner), sampler, VOCAB_SIZE, SHARED_NOISE, uses_confidence=False
    )
    start = ChainStart(
        token_ids=[5, 9, 4], start=0, block_table=range(1, 9), budget=10, params=PARAMS[0], seed=0
    )
    (tree,) = loop.draft([start], [StaticTree.of_widths([2, 2, 1], (0.5, 0.2)).begin(10)])
    assert tree is not None
    assert levels == [[(3, 0)], [(2, 0)], [(4, 2)]], "tokens, and nodes read before"


class MustBeFused(NativeDraftLoop):
    def try_draft(self, starts: Sequence[ChainStart]) -> list[list[int]]:
        chains = super().try_draft(starts)
        assert chains is not None
        return chains


class TestFusedProposer(ProposerContract):
    """The contract suite, with a compiled model."""

    vocab_size = 24
    always_proposes = True

    @pytest.fixture(autouse=True)
    def _parts(self, runner_of: RunnerOf, sampler: Sampler) -> None:
        self._runner_of, self._sampler = runner_of, sampler

    def make_proposer(self) -> Proposer:
        return self.make()

    def make(self, *, fused: bool = True, max_context: int | None = None) -> DraftModelProposer:
        runner = self._runner_of("float32")
        loop = MustBeFused(runner, self._sampler, self.vocab_size) if fused else None
        return DraftModelProposer(
            runner,
            DraftChoice(sampler=self._sampler, vocab_size=self.vocab_size),
            reading=DraftReading(max_context=max_context),
            fused_loop=loop,
        )

    def test_context_limit(self) -> None:
        budgets = {RequestId(name): 5 for name in "abc"}
        views = [view("a", range(12)), view("b", range(7)), view("c", range(3))]
        fused, stepwise = (
            self.make(fused=fused, max_context=12).propose(views, budgets) for fused in (True, False)
        )
        assert {name: proposal.token_ids for name, proposal in fused.items()} == {
            name: proposal.token_ids for name, proposal in stepwise.items()
        }
        assert {name: proposal.num_tokens for name, proposal in fused.items()} == {"b": 5, "c": 5}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stepwise"])
class TestFusedAhead(AheadContract):
    """Branches of a compiled model, in one native call or step by step."""

    has_room = None

    @pytest.fixture(autouse=True)
    def _parts(self, runner_of: RunnerOf, sampler: Sampler, fused: bool) -> None:
        self._runner_of, self._sampler, self._fused = runner_of, sampler, fused

    def make(self) -> DraftModelProposer:
        runner = self._runner_of("float32")
        loop = MustBeFused(runner, self._sampler, 24) if self._fused else None
        return DraftModelProposer(
            runner, DraftChoice(sampler=self._sampler, vocab_size=24, eos_token_ids=(EOS,)), fused_loop=loop
        )

    def test_negative_control(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks that are not copied show with real K/V too."""
        fresh = AheadContract.fresh.__wrapped__(self)  # type: ignore[attr-defined]
        monkeypatch.setattr(ModelRunner, "copy_blocks", lambda *_: None)
        with pytest.raises(AssertionError):
            self.test_random_life(0, fresh)
