"""A draft model with bounded memory drafts other tokens; what requests get is what the target says alone."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import msgspec
import pytest

from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, ToyTarget
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.kv.config import CacheConfig
from specdec.kv.selection import KvSelectionConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import NativeDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.draft_window import DraftWindow
from specdec.proposers.none import NoProposer
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree
from tests.architectures import VOCAB_SIZE as MODEL_VOCAB_SIZE
from tests.architectures import make_tokenizer, save_model
from tests.specdec.engine.toy_engines import MODEL, VOCAB_SIZE, request, toy_engine

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, ignore_eos=True)
LENGTHS = {"short": (1, 3, 7), "long": (90, 120), "mixed": (2, 100, 9, 60)}
TIGHT = {"short": 40, "long": 60, "mixed": 48}
"""Blocks of the target: fewer than what runs at once comes to need."""


def window(
    budget: int, k: int, num_positions: int | None = None, shape: TreeShape | None = None
) -> DraftWindow:
    config = KvSelectionConfig(policy="streaming", budget=budget, sink_tokens=4)
    return DraftWindow(
        selection=config.make(4),
        num_piece_tokens=8,
        num_draft_tokens=2 * k + 1 if shape is None else max(k, shape.num_looked_behind(k)),
        num_positions=num_positions,
    )


def toy_drafter(
    budget: int, k: int, num_blocks: int, num_positions: int | None = None, prefix_caching: bool = True
) -> DraftModelProposer:
    similar = ToyModel(VOCAB_SIZE, seed=1, perturbation=0.0)
    runner = ToyRunner(similar, num_blocks=num_blocks)
    return DraftModelProposer(
        runner,
        DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE),
        reading=DraftReading(window=window(budget, k, num_positions), prefix_caching=prefix_caching),
    )


FEW = 80
"""Positions; the longest texts have 150 tokens."""
COVER = [
    # budget, k, lengths, params, preempts, positions in cache, prefix cache of the draft model
    (12, 1, "long", GREEDY, True, False, True),
    (12, 4, "mixed", SAMPLED, False, True, False),
    (12, 8, "short", SAMPLED, True, True, True),
    (20, 8, "long", SAMPLED, True, False, False),
    (20, 1, "mixed", GREEDY, False, True, True),
    (20, 4, "long", GREEDY, True, True, True),
    (40, 4, "mixed", GREEDY, True, False, True),
    (40, 1, "short", SAMPLED, True, False, False),
    (40, 8, "long", SAMPLED, False, True, True),
    (400, 8, "mixed", SAMPLED, True, False, True),
]
"""Every pair of values, but for those that cannot be or say nothing."""
ALL = [
    one
    for one in product(
        (12, 20, 40, 400), (1, 4, 8), LENGTHS, (GREEDY, SAMPLED), *((False, True) for _ in range(3))
    )
    if not (one[5] and one[0] + 2 * 4 + 2 * one[1] + 1 > FEW)
]


@pytest.mark.parametrize(
    ("budget", "k", "mix", "params", "preempts", "in_cache", "prefix_caching"),
    [
        *COVER,
        *(pytest.param(*one, marks=pytest.mark.full) for one in ALL if one not in COVER),
    ],
)
def test_committed_is_what_the_target_says(
    budget: int,
    k: int,
    mix: str,
    params: SamplingParams,
    preempts: bool,
    in_cache: bool,
    prefix_caching: bool,
) -> None:
    generator = random.Random(k)
    lengths = LENGTHS[mix]
    prompts = [generator.choices(range(VOCAB_SIZE), k=lengths[index % len(lengths)]) for index in range(6)]
    params = msgspec.structs.replace(params, max_tokens=30)
    drafter = toy_drafter(budget, k, 120, FEW if in_cache else None, prefix_caching)
    target = ToyTarget(MODEL, num_blocks=TIGHT[mix] if preempts else 256)
    engine = toy_engine(drafter, target=target, num_draft_tokens=k)
    for index, prompt in enumerate(prompts):
        engine.add_request(request(f"r{index}", prompt, params, seed=index))
    got: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
        drafter.check_integrity()
        engine.check_integrity()
    for index, prompt in enumerate(prompts):
        assert got[f"r{index}"] == MODEL.continuation(prompt, params, index, 30)
    metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0
    if preempts and mix != "short":
        assert metrics.num_preemptions > 0
    if in_cache:
        assert (drafter.counters["draft_windows_reread"] > 0) == (mix != "short")


SHAPES: dict[str, TreeShape] = {
    "static": StaticTree.of_widths((3, 2, 1), (0.5, 0.3)),
    "dynamic": DynamicTree(top_k=3, depth=4),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("budget", "mix", "in_cache", "num_blocks"),
    [
        (20, "mixed", False, 120),
        (20, "long", True, 60),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in ((14, "long", False, 60), (40, "mixed", True, 120), (400, "mixed", False, 240))
        ),
    ],
)
def test_trees_too(
    shape: str, params: SamplingParams, budget: int, mix: str, in_cache: bool, num_blocks: int
) -> None:
    """K/V of the path that stands are moved to behind the committed ones, wherever the window is by then."""
    its_shape, lengths = SHAPES[shape], LENGTHS[mix]
    its_window = window(budget, its_shape.max_nodes, FEW if in_cache else None, its_shape)
    similar = ToyModel(VOCAB_SIZE, seed=1, perturbation=0.0)
    drafter = TreeDraftProposer(
        ToyRunner(similar, num_blocks=num_blocks),
        DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE),
        its_shape,
        reading=DraftReading(window=its_window),
    )
    generator = random.Random(budget)
    prompts = [generator.choices(range(VOCAB_SIZE), k=lengths[index % len(lengths)]) for index in range(6)]
    params = msgspec.structs.replace(params, max_tokens=30)
    target = ToyTarget(MODEL, num_blocks=TIGHT[mix])
    engine = toy_engine(drafter, target=target, num_draft_tokens=its_shape.max_nodes)
    for index, prompt in enumerate(prompts):
        engine.add_request(request(f"r{index}", prompt, params, seed=index))
    got: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
        drafter.check_integrity()
        engine.check_integrity()
        most = len(drafter.sequences.known) * its_window.max_blocks(1 << 20, 4)
        assert drafter.sequences.num_held_blocks <= most
    for index, prompt in enumerate(prompts):
        assert got[f"r{index}"] == MODEL.continuation(prompt, params, index, 30)
    metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0
    assert metrics.num_preemptions > 0 or mix == "mixed"
    assert (drafter.counters["draft_windows_reread"] > 0) == in_cache


@pytest.mark.parametrize("num_positions", [None, FEW])
def test_in_one_process_a_prompt_is_read_beside_the_targets_chunks(num_positions: int | None) -> None:
    """A part of it in each round, so that its first token waits for no more than that; nothing is left to be
    read when drafts are wanted.
    """
    most = 16
    similar = ToyModel(VOCAB_SIZE, seed=1, perturbation=0.0)
    runner = ToyRunner(similar, num_blocks=120)
    drafter = DraftModelProposer(
        runner,
        DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE),
        reading=DraftReading(max_read_tokens=most, window=window(20, 4, num_positions)),
    )
    engine = toy_engine(drafter, num_draft_tokens=4, max_num_batched_tokens=16)
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=200)
    params = msgspec.structs.replace(SAMPLED, max_tokens=20)
    engine.add_request(request("a", prompt, params))
    got: list[int] = []
    num_rounds = 0
    while not got:
        before = runner.num_tokens_read
        got += [token for output in engine.step() for token in output.token_ids]
        num_rounds += 1
        assert runner.num_tokens_read - before <= most
    assert num_rounds >= 200 / 16
    assert runner.num_tokens_read >= (19 if num_positions else 199)
    if num_positions:
        assert runner.num_tokens_read < 20 + 2 * 4 + 4
    assert engine.metrics().num_draft_tokens == 0
    engine.step()
    assert engine.metrics().num_draft_tokens == 4


@pytest.mark.parametrize("num_positions", [None, FEW])
@pytest.mark.parametrize("num_blocks", [12, 120])
def test_given_up_while_its_prompt_is_read(num_positions: int | None, num_blocks: int) -> None:
    """Again and again, beside one that goes on, in a pool that hardly holds the two."""
    drafter = toy_drafter(20, 4, num_blocks, num_positions)
    engine = toy_engine(drafter, num_draft_tokens=4, max_num_batched_tokens=16)
    params = msgspec.structs.replace(SAMPLED, max_tokens=60)
    prompts = [random.Random(index).choices(range(VOCAB_SIZE), k=150) for index in range(9)]
    engine.add_request(request("stays", prompts[0], params, seed=1))
    got: list[int] = []
    for index, prompt in enumerate(prompts[1:]):
        name = RequestId(f"leaves{index}")
        engine.add_request(request(name, prompt, params))
        for _ in range(1 + index % 4):
            got += [token for one in engine.step() if one.request_id == "stays" for token in one.token_ids]
            drafter.check_integrity()
        engine.abort(name)
    while engine.has_work:
        got += [token for one in engine.step() if one.request_id == "stays" for token in one.token_ids]
        drafter.check_integrity()
        engine.check_integrity()
    assert got == MODEL.continuation(prompts[0], params, 1, 60)
    assert engine.metrics().num_accepted_tokens > 0
    assert not drafter.sequences.known
    assert drafter.sequences.num_held_blocks == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    made = {}
    for number, name in enumerate(("target", "draft")):
        folder: Path = tmp_path_factory.mktemp(name)
        save_model(folder, "llama", number)
        made[name] = load_model(ModelConfig(model=str(folder), dtype="float32"))
    return made


def model_engine(pair: dict[str, LoadedModel], drafter: str, k: int, num_blocks: int) -> Engine:
    """With a pool for the draft model that no two of the texts fit into as a whole; compiled."""

    def compiled(
        loaded: LoadedModel, num_blocks: int, held: int | None = None
    ) -> tuple[ModelRunner, Sampler]:
        cache = CacheConfig(block_size=4, num_blocks=num_blocks)
        runner = ModelRunner(loaded, cache, max_num_seqs=8, max_held_tokens=held)
        runner.graphs = forward = CompiledForward(runner, CompileConfig())
        if forward.warm_up() != "ready":
            pytest.skip("no compiled forward here")
        sampler = Sampler()
        sampler.warm_up()
        return runner, sampler

    proposer: Proposer = NoProposer()
    if drafter != "none":
        loaded, its = pair[drafter], window(16, k)
        held = 4 * its.max_blocks(loaded.max_model_len, 4)
        runner, sampler = compiled(loaded, 60, held)
        assert runner.max_model_len == loaded.max_model_len
        loop = NativeDraftLoop(runner, sampler, MODEL_VOCAB_SIZE)
        proposer = DraftModelProposer(
            runner,
            DraftChoice(sampler=sampler, vocab_size=MODEL_VOCAB_SIZE),
            reading=DraftReading(window=its),
            fused_loop=loop,
        )
    return Engine.from_parts(
        target=LocalTarget(*compiled(pair["target"], num_blocks)),
        proposer=proposer,
        tokenizer=HuggingFaceTokenizer(make_tokenizer()),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
        controller=FixedController(k),
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("drafter", "k", "num_blocks"), [("target", 4, 400), ("draft", 3, 70)])
def test_models_say_what_they_say_alone(
    pair: dict[str, LoadedModel], params: SamplingParams, drafter: str, k: int, num_blocks: int
) -> None:
    params = msgspec.structs.replace(params, max_tokens=24, seed=3)
    generator = random.Random(1)
    prompts = [
        tuple(generator.choices(range(2, MODEL_VOCAB_SIZE), k=length)) for length in (150, 3, 120, 60, 9)
    ]
    with model_engine(pair, "none", k, 400) as engine:
        expected = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    with model_engine(pair, drafter, k, num_blocks) as engine:
        results = engine.generate(prompts, params)
        engine.check_integrity()
        metrics = engine.metrics()
    assert [result.token_ids for result in results] == expected
    assert metrics.num_draft_tokens > 0
    if drafter == "target":
        assert metrics.num_accepted_tokens > 0
