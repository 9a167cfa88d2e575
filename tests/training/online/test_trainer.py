"""What a draft model learns from traffic, and what it is not let to."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.text_tap import LearnableText
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import Sampler
from tests.architectures import VOCAB_SIZE
from tests.training.online.domains import FORMER, LATTER, QUICK, heard, model_of, trainer_of, work_off
from training.online.buffer import KeptText
from training.online.guard import Trial, is_better
from training.online.pace import PacedTrainer, rest_s
from training.online.trainer import OnlineTrainer, Version, _part


@pytest.fixture(scope="module")
def of_the_former() -> LlamaForCausalLM:
    """A draft model that knows one domain."""
    return model_of([FORMER])


@pytest.fixture
def trainer(of_the_former: LlamaForCausalLM) -> OnlineTrainer:
    return trainer_of(copy.deepcopy(of_the_former))


def same(first: Version, second: Version) -> bool:
    return all(torch.equal(one, second.weights[name]) for name, one in first.weights.items())


def test_acceptance_rises_after_a_shift_of_domain(trainer: OnlineTrainer) -> None:
    trainer.hear(heard(FORMER, 20))
    work_off(trainer)
    status = trainer.status
    assert status.num_tried == 1
    assert status.acceptance_before is not None
    assert status.acceptance_before > 0.9  # of what it knows
    trainer.hear(heard(LATTER, 40, seed=1))
    trainer.buffer.begin_version()  # the first judge of the new domain: nothing has been learnt yet
    trainer.hear(heard(LATTER, 20, seed=2))
    work_off(trainer)
    status = trainer.status
    assert (status.version, status.num_tried) == (1, 2)
    assert status.acceptance_before is not None
    assert status.acceptance_after is not None
    assert status.acceptance_before < 0.6
    assert status.acceptance_after > status.acceptance_before + 0.2
    version = trainer.take_version()
    assert version is not None
    assert version.number == 1
    assert trainer.take_version() is None


def test_a_version_of_garbage_is_refused_and_leaves_no_trace(of_the_former: LlamaForCausalLM) -> None:
    """Steps so large that they destroy what was known: the guard sees it on what was held back."""
    wild = QUICK.model_copy(update={"learning_rate": 1.0, "steps_per_version": 3})
    trainer = trainer_of(copy.deepcopy(of_the_former), wild)
    before = trainer.served
    came_with = {name: one.clone() for name, one in before.weights.items()}
    trainer.hear(heard(FORMER, 30))
    work_off(trainer)
    status = trainer.status
    assert (status.version, status.num_tried, status.num_refused) == (0, 1, 1)
    assert status.acceptance_before is not None
    assert status.acceptance_after is not None
    assert status.acceptance_after < status.acceptance_before - 0.5
    assert trainer.take_version() is None
    assert same(Version(0, came_with), trainer.served)
    now = Version(0, {name: one.detach() for name, one in trainer._model.named_parameters()})
    assert same(before, now)  # the next version begins where the served one is


def test_small_gains_add_up(of_the_former: LlamaForCausalLM) -> None:
    """A version may gain too little to be served; negative control: begun anew each time, none ever is."""
    slow = QUICK.model_copy(update={"steps_per_version": 4, "min_gain": 0.2})

    def served_after(most: int, *, begins_anew: bool = False) -> int | None:
        trainer = trainer_of(copy.deepcopy(of_the_former), slow)
        for number in range(1, most + 1):
            trainer.hear(heard(LATTER, 40, seed=number))
            work_off(trainer)
            assert trainer.status.num_tried == number
            if trainer.status.version:
                return number
            if begins_anew:
                trainer._go_back()
        return None

    served = served_after(10)
    assert served is not None
    assert served > 1
    assert served_after(served, begins_anew=True) is None


@pytest.mark.full
def test_what_nobody_can_learn_is_not_served(trainer: OnlineTrainer) -> None:
    trainer.hear(heard(FORMER, 30, is_rubbish=True))
    work_off(trainer)
    assert (trainer.status.num_tried, trainer.status.num_refused) == (1, 1)


@pytest.mark.full
def test_weights_that_are_no_numbers_are_refused(of_the_former: LlamaForCausalLM) -> None:
    trainer = trainer_of(copy.deepcopy(of_the_former))
    trainer.hear(heard(FORMER, 30))
    while trainer.run_next():
        with torch.no_grad():
            next(trainer._model.parameters()).fill_(math.nan)
    assert (trainer.status.version, trainer.status.num_refused) == (0, 1)


@pytest.mark.full
def test_versions_are_judged_in_the_numbers_that_they_are_served_in(of_the_former: LlamaForCausalLM) -> None:
    trainer = trainer_of(copy.deepcopy(of_the_former), dtype=torch.bfloat16)
    trainer.hear(heard(LATTER, 60))
    work_off(trainer)
    version = trainer.take_version()
    assert version is not None
    assert {one.dtype for one in version.weights.values()} == {torch.bfloat16}


@pytest.mark.full
def test_another_trainer_goes_on_where_one_has_died(
    trainer: OnlineTrainer, of_the_former: LlamaForCausalLM
) -> None:
    trainer.hear(heard(LATTER, 60))
    work_off(trainer)
    version = trainer.take_version()
    assert version is not None
    heir = trainer_of(copy.deepcopy(of_the_former))
    heir.begin_with(version)
    assert heir.status.version == 1
    heir.hear(heard(LATTER, 60))
    work_off(heir)
    assert heir.status.acceptance_before == trainer.status.acceptance_after


def test_nearly_greedy_texts_do_not_drown_others(of_the_former: LlamaForCausalLM) -> None:
    """The same text moves the weights about as far, whatever the temperature at which it was written."""
    trainer = trainer_of(copy.deepcopy(of_the_former))
    (text,) = heard(LATTER, 1)

    def norm(temperature: float) -> float:
        params = SamplingParams(temperature=temperature)
        told = LearnableText(text.owner, text.token_ids, text.num_prompt_tokens, params, text.seed)
        trainer._model.zero_grad()
        trainer._loss(_part(KeptText.of(told, 512), 512, None)).backward()
        gradients = [one.grad for one in trainer._model.parameters() if one.grad is not None]
        return math.sqrt(sum(float(one.square().sum()) for one in gradients))

    at_one = norm(1.0)
    assert 0.1 < norm(0.001) / at_one < 10.0
    assert norm(0.0) == pytest.approx(at_one), "greedy texts are learnt from as at temperature 1"


@pytest.mark.parametrize("num_positions", [None, 20])
def test_texts_may_be_longer_than_the_draft_model_has_positions(
    num_positions: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is served with are the last of its own; noise is that of the place in the text."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes))
    settings = QUICK.model_copy(update={"steps_per_version": 1, "max_text_tokens": 64})
    trainer = OnlineTrainer(
        settings,
        model,
        Sampler(),
        vocab_size=VOCAB_SIZE,
        served_dtype=torch.float32,
        num_positions=num_positions,
    )
    given: list[tuple[int, int]] = []
    noise: list[tuple[int, int]] = []

    def note_positions(module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        given.append((int(kwargs["position_ids"].min()), int(kwargs["position_ids"].max())))

    def noted(specs: list[RowSpec]) -> SamplingRows:
        noise.extend((spec.first_position, spec.num_rows) for spec in specs)
        return build(specs)

    build = SamplingRows.build
    monkeypatch.setattr(SamplingRows, "build", noted)
    model.register_forward_pre_hook(note_positions, with_kwargs=True)
    tokens = tuple(range(2, 102))
    texts = [LearnableText(None, (first, *tokens), 70, SamplingParams(), 0) for first in range(2, 42)]
    trainer.hear(texts)
    work_off(trainer)
    assert trainer.status.num_tried == 1
    most = num_positions or 32
    assert set(given) == {(0, most - 1)}
    num_scored = min(31, most - 1)
    assert set(noise) == {(101 - num_scored, num_scored)}


def test_nothing_is_begun_without_anything_to_judge_by(of_the_former: LlamaForCausalLM) -> None:
    demanding = QUICK.model_copy(update={"min_held_back_tokens": 10_000})
    trainer = trainer_of(copy.deepcopy(of_the_former), demanding)
    trainer.hear(heard(LATTER, 60))
    assert not trainer.run_next()
    assert trainer.status.num_tried == 0


@pytest.mark.full
def test_two_trainers_of_one_seed_learn_the_same(of_the_former: LlamaForCausalLM) -> None:
    versions = []
    for _ in range(2):
        trainer = trainer_of(copy.deepcopy(of_the_former))
        trainer.hear(heard(LATTER, 60))
        work_off(trainer)
        versions.append(trainer.take_version())
    first, second = versions
    assert first is not None
    assert second is not None
    assert same(first, second)


@pytest.mark.parametrize(
    ("trial", "better"),
    [
        (Trial(1000, 400, 450, 80), True),  # 30 lost
        (Trial(1000, 400, 405, 5), False),  # less than the margin
        (Trial(100, 40, 44, 12), False),  # 12 won, 8 lost: chance
        (Trial(1000, 400, 380, 100), False),
        (Trial(0, 0, 0, 0), False),
    ],
    ids=["better", "too little", "chance", "worse", "nothing to judge by"],
)
def test_what_is_better(trial: Trial, better: bool) -> None:
    assert is_better(trial, min_gain=0.01) is better


def test_a_trainer_rests_for_its_share_of_a_core(trainer: OnlineTrainer) -> None:
    assert rest_s(1.0, 0.25) == 3.0
    assert rest_s(1.0, 1.0) == 0.0
    rests: list[float] = []
    paced = PacedTrainer(trainer, 0.5, wait=rests.append)
    paced.run_once()  # nothing heard yet
    trainer.hear(heard(LATTER, 60))
    paced.run_once()
    assert rests[0] > 0.0
    assert rests[1] > 0.0
