"""A draft model that gives tokens positions among what it keeps: texts may be longer than it was made for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, slot_value
from specdec.kv.selection import KvSelectionConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.loader import load_model
from specdec.proposers.base import AheadWish, Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_model_factory import make_draft_model_proposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_window import ANY_LENGTH, DraftWindow
from specdec.proposers.target_facts import TargetFacts
from specdec.sampling.noise import MASK_64
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import Sampler
from tests.architectures import ARCHITECTURES, save_model
from tests.architectures import VOCAB_SIZE as MODEL_VOCAB_SIZE
from tests.specdec.proposers.ahead_contract import EOS, AheadContract
from tests.specdec.proposers.ahead_contract import VOCAB_SIZE as AHEAD_VOCAB_SIZE
from tests.specdec.proposers.contract import GREEDY, SAMPLED, FrozenView, ProposerContract, view
from tests.specdec.proposers.short_runner import BLOCK_SIZE, ShortRunner

pytestmark = pytest.mark.usefixtures("one_thread_each")
VOCAB_SIZE = 24
MODEL = ToyModel(VOCAB_SIZE, seed=3)
ENDLESS = SamplingParams(temperature=1.0, ignore_eos=True)


def window(
    budget: int, num_positions: int | None, *, sink: int = 4, piece: int = 8, most: int = 9
) -> DraftWindow:
    config = KvSelectionConfig(policy="streaming", budget=budget, sink_tokens=sink)
    return DraftWindow(
        selection=config.make(BLOCK_SIZE),
        num_piece_tokens=piece,
        num_draft_tokens=most,
        num_positions=num_positions,
    )


def make(
    its_window: DraftWindow | None,
    runner: ToyRunner | None = None,
    *,
    max_read_tokens: int = 1 << 20,
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: Sequence[int] = (),
) -> DraftModelProposer:
    return DraftModelProposer(
        runner or ShortRunner(MODEL, max_model_len=64),
        DraftChoice(sampler=Sampler(), vocab_size=vocab_size, eos_token_ids=eos_token_ids),
        reading=DraftReading(window=its_window, max_read_tokens=max_read_tokens),
    )


def drafted(proposer: Proposer, one: FrozenView, budget: int = 4) -> tuple[int, ...]:
    proposal = proposer.propose([one], {one.request_id: budget}).get(one.request_id)
    return () if proposal is None else proposal.token_ids


def random_text(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(VOCAB_SIZE), k=length)


class TestWithPositionsForAll(ProposerContract):
    vocab_size = VOCAB_SIZE
    always_proposes = True

    def make_proposer(self) -> Proposer:
        return make(window(200, 4096), ShortRunner(MODEL, max_model_len=4096))


class TestAheadWithPositionsForAll(AheadContract):
    def make(self) -> DraftModelProposer:
        runner = ToyRunner(ToyModel(AHEAD_VOCAB_SIZE, seed=3, sharpness=1.5), num_blocks=1024)
        return make(window(4096, 8192, most=40), runner, vocab_size=AHEAD_VOCAB_SIZE, eos_token_ids=(EOS,))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_while_positions_last_they_are_those_of_the_text(params: SamplingParams) -> None:
    absolute, in_cache = make(window(20, None)), make(window(20, 64))
    for length in range(5, 64 - 9):
        one = view(f"r{length}", random_text(length), params)
        assert drafted(in_cache, one) == drafted(absolute, one)
    assert in_cache.counters["draft_windows_reread"] == 0


def short_text(tokens: Sequence[int], its: DraftWindow) -> tuple[list[int], int]:
    """Return the beginning and the window of a text as one, and how many tokens are not in it."""
    selected = its.selection.select(len(tokens))
    places = [block * BLOCK_SIZE + offset for block in selected.blocks for offset in range(BLOCK_SIZE)]
    return [tokens[place] for place in places if place < len(tokens)], selected.num_dropped


def expected_draft(tokens: Sequence[int], its: DraftWindow, params: SamplingParams, budget: int) -> list[int]:
    """What a model that only knows the short text says, at the noise of the long one."""
    text, num_left_out = short_text(tokens, its)
    total, chain = 0, []
    for position, token_id in enumerate(text):
        total = (total + slot_value(total, position, token_id)) & MASK_64
    for _ in range(budget):
        logits = torch.from_numpy(MODEL.logits(text[-1], total)).float()[None]
        rows = SamplingRows.build([RowSpec(params, 7, num_left_out + len(text), 1)])
        chain.append(int(Sampler().sample(logits, rows, "target").token_ids[0]))
        text.append(chain[-1])
        total = (total + slot_value(total, len(text) - 1, text[-1])) & MASK_64
    return chain


@pytest.mark.parametrize("params", [GREEDY, ENDLESS], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("budget", "sink", "piece"), [(12, 4, 8), (9, 0, 3), (24, 5, 16), (10, 1, 1), (20, 9, 3)]
)
@pytest.mark.parametrize("length", [60, 120, 1001])
def test_a_long_prompt_is_drafted_behind_as_a_short_one(
    params: SamplingParams, budget: int, sink: int, piece: int, length: int
) -> None:
    its, tokens = window(budget, 64, sink=sink, piece=piece), random_text(length)
    runner = ShortRunner(MODEL, max_model_len=64)
    proposer = make(its, runner)
    one = view("a", tokens, params)
    assert proposer.num_unread(one) < budget + 2 * BLOCK_SIZE
    assert list(drafted(proposer, one, 5)) == expected_draft(tokens, its, params, 5)
    proposer.check_integrity()
    assert runner.num_tokens_read < budget + 2 * BLOCK_SIZE + 5, "nothing else is read"
    assert proposer.num_unread(one) == 0


def test_control_positions_show() -> None:
    """With those of the text, the same window says other things."""
    its, differing = window(16, 64), 0
    for seed in range(10):
        one = view("a", random_text(100, seed), ENDLESS)
        absolute = make(window(16, None), ToyRunner(MODEL, max_model_len=1 << 20))
        differing += drafted(make(its), one) != drafted(absolute, one)
    assert differing > 3


@pytest.mark.parametrize("budget", [16, 24])
def test_texts_grow_without_end(budget: int) -> None:
    """Every position is one that the model has; the window is read again only when there are no more."""
    runner = ShortRunner(MODEL, num_blocks=200, max_model_len=96)
    its = window(budget, 96, most=9)
    proposer = make(its, runner)
    most_held = 3 * its.max_blocks(ANY_LENGTH, BLOCK_SIZE)
    texts = {RequestId(name): random_text(length) for name, length in {"a": 3, "b": 90, "c": 500}.items()}
    for step in range(150):
        views = [
            FrozenView(name, tuple(tokens), ENDLESS, num_prompt_tokens=1) for name, tokens in texts.items()
        ]
        answers = proposer.propose(views, dict.fromkeys(texts, 4))
        proposer.check_integrity()
        assert set(answers) == set(texts)
        assert proposer.sequences.num_held_blocks <= most_held
        for name, tokens in texts.items():
            tokens += [*answers[name].token_ids[: step % 5], step % VOCAB_SIZE]
    assert runner.most_attended <= budget + 2 * BLOCK_SIZE + 8 + 9
    num_tokens = sum(map(len, texts.values()))
    num_renewed = proposer.counters["draft_windows_reread"]
    most_renewed = 3 + num_tokens / (96 - 9 - budget - 2 * BLOCK_SIZE)
    assert 3 <= num_renewed <= most_renewed
    assert runner.num_tokens_read <= num_tokens + 150 * 3 * 4 + num_renewed * (budget + 2 * BLOCK_SIZE)
    proposer.close()
    assert proposer.sequences.num_held_blocks == 0


def test_what_was_renewed_goes_on_as_if_it_had_begun_there() -> None:
    """A worker that takes a sequence over in the middle drafts as one that has just read its window again."""
    its = window(16, 64)
    old, text = make(its), random_text(40)
    for _ in range(200):
        before = old.counters["draft_windows_reread"]
        chain = drafted(old, view("a", text, ENDLESS))
        if old.counters["draft_windows_reread"] > before:
            assert chain == drafted(make(its), view("a", text, ENDLESS))
        text += [*chain[:2], len(text) % VOCAB_SIZE]
    assert old.counters["draft_windows_reread"] > 5


@pytest.mark.cover(1)
@pytest.mark.parametrize("num_blocks", [24, 40, 400])
@pytest.mark.parametrize("seed", range(3))
def test_books_are_right_whatever_is_asked(num_blocks: int, seed: int) -> None:
    """Ordinary wishes and branches, rollback, requests that come and go, in pools of any size."""
    rng = random.Random(seed)
    runner = ShortRunner(MODEL, num_blocks=num_blocks, max_model_len=56)
    proposer = make(window(16, 56, most=7), runner, max_read_tokens=64)
    texts = {RequestId(f"r{n}"): random_text(rng.choice([3, 45, 200]), n) for n in range(4)}
    pending: dict[RequestId, tuple[int, ...]] = {}
    num_branches = 0
    for _ in range(80):
        views = [
            FrozenView(name, tuple(tokens), ENDLESS, num_prompt_tokens=1)
            for name, tokens in texts.items()
            if rng.random() < 0.8
        ]
        if rng.random() < 0.5:
            answers = proposer.propose(views, {one.request_id: rng.randint(0, 12) for one in views})
            pending = {name: one.token_ids for name, one in answers.items()}
        else:
            wishes = []
            for one in views:
                its = pending.get(one.request_id, ())
                fan_out = tuple(rng.randint(0, 2) for _ in range(len(its) + 1)) if its else None
                wish = AheadWish(view=one, pending=its, num_draft_tokens=rng.randint(1, 9), fan_out=fan_out)
                wishes.append(wish)
            num_branches += sum(map(len, proposer.propose_ahead(wishes).values()))
        proposer.check_integrity()
        for name in list(texts):
            action, chain = rng.random(), pending.pop(name, ())
            if action < 0.6:
                texts[name] += [*chain[: rng.randint(0, len(chain))], rng.randrange(VOCAB_SIZE)]
            elif action < 0.65:
                del texts[name][rng.randint(1, len(texts[name])) :]
            elif action < 0.7:
                proposer.release([name])
        proposer.check_integrity()
    assert num_branches > 0
    assert proposer.counters["draft_windows_reread"] > 0
    proposer.close()
    assert proposer.sequences.num_held_blocks == 0


def test_what_is_renewed_is_nobody_elses() -> None:
    """Not what others find in the prefix cache, nor taken from it."""
    proposer = make(window(16, 64))
    tokens = random_text(100)
    before = drafted(proposer, view("a", tokens))
    proposer.release([RequestId("a")])
    assert drafted(proposer, view("b", tokens)) == before
    assert proposer.counters["draft_prefix_cache_hits"] == 0
    short = view("c", [*tokens[:40], 3], ENDLESS)
    assert drafted(proposer, short) == drafted(make(window(16, 64)), short)


KINDS_OF_POSITION = (
    "llama",
    "llama3_rope",
    "llama_linear_rope",
    "llama_yarn",
    "llama_dynamic_ntk",
    "phi3_longrope",
    "gpt2",
    "gpt_neox",
    "mistral",
    "gemma3",
)
"""Rotary of every kind, one that turns a part of the head alone, learned positions, windows of their own."""


@pytest.mark.cover(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("architecture", KINDS_OF_POSITION)
def test_every_kind_of_position(architecture: str, compiled: bool, tmp_path: Path) -> None:
    """Behind a text of 700 tokens a model of 256 positions, or fewer, says what it says to the short one."""
    assert architecture in ARCHITECTURES
    reference = save_model(tmp_path, architecture)
    config = SpeculativeConfig.model_validate(
        {
            "method": "draft_model",
            "model": str(tmp_path),
            "num_speculative_tokens": 3,
            "cache": {"num_blocks": 64, "block_size": BLOCK_SIZE},
            "kv": {"policy": "streaming", "budget": 16, "positions": "in_cache"},
            "compile": {"mode": "auto" if compiled else "off"},
        }
    )
    loaded = load_model(ModelConfig(model=str(tmp_path), dtype="float32", compile=CompileConfig(mode="off")))
    facts = TargetFacts(vocab_size=MODEL_VOCAB_SIZE, dtype="float32", max_num_seqs=4, max_model_len=4096)
    proposer = make_draft_model_proposer(loaded, config, facts)
    assert proposer.capabilities.max_context is None
    text = random.Random(4).choices(range(2, MODEL_VOCAB_SIZE), k=700)
    its = window(16, None)
    for _ in range(3):
        one = view("a", text, SamplingParams(temperature=0.0, ignore_eos=True))
        chain = drafted(proposer, one, 3)
        assert len(chain) == 3
        if proposer.counters["draft_windows_reread"] == 1 and len(text) == 700:
            short, _ = short_text(text, its)
            generated = reference.generate(
                torch.tensor([short]),
                attention_mask=torch.ones(1, len(short), dtype=torch.long),
                max_new_tokens=3,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=MODEL_VOCAB_SIZE + 1,
            )
            assert list(chain) == generated[0, len(short) :].tolist()
        text += random.Random(5).choices(range(2, MODEL_VOCAB_SIZE), k=300)
    assert proposer.counters["draft_windows_reread"] == 3
    proposer.close()
