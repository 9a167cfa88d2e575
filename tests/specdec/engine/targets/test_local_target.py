"""The in-process target: steps in, the target's own tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork, WorkResult
from specdec.core.rows_beside import RowsBeside
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.targets.target import Target
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.sampling.sampler import RowSpec, Sampler, SamplingRows
from tests.architectures import VOCAB_SIZE, save_model

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, LoadedModel]:
    folder: Path = tmp_path_factory.mktemp("llama")
    return save_model(folder), load_model(ModelConfig(model=str(folder)))


@pytest.fixture
def reference(pair: tuple[PreTrainedModel, LoadedModel]) -> PreTrainedModel:
    return pair[0]


@pytest.fixture(params=["eager", "compiled"])
def runner(request: pytest.FixtureRequest, pair: tuple[PreTrainedModel, LoadedModel]) -> ModelRunner:
    made = ModelRunner(pair[1], CacheConfig(num_blocks=64, block_size=BLOCK_SIZE), max_num_seqs=8)
    if request.param == "compiled":
        made.graphs = forward = CompiledForward(made, CompileConfig())
        if forward.warm_up() != "ready":
            pytest.skip("no compiled forward here")
    return made


@pytest.fixture
def target(runner: ModelRunner) -> LocalTarget:
    """Steps go through one native call where the forward is compiled, and step by step where it is not."""
    sampler = Sampler()
    if runner.graphs is not None:
        sampler.warm_up()
    return LocalTarget(runner, sampler)


class Desk:
    """Submits one step at a time."""

    def __init__(self, target: LocalTarget) -> None:
        self.target = target
        self._num_steps = 0
        self._admitted: list[AdmittedSequence] = []
        self._released: list[RequestId] = []

    def admit(self, name: str, params: SamplingParams = GREEDY, seed: int = 0) -> None:
        self._admitted.append(AdmittedSequence(RequestId(name), seed, params))

    def release(self, name: str) -> None:
        self._released.append(RequestId(name))

    def run(self, *works: TargetWork) -> tuple[WorkResult, ...]:
        self._num_steps += 1
        step = TargetStep(self._num_steps, works, tuple(self._admitted), tuple(self._released))
        self._admitted, self._released = [], []
        self.target.submit(step)
        result = self.target.collect()
        assert result.step_id == self._num_steps
        return result.results


def work(
    name: str,
    tokens: Sequence[int],
    start: int,
    rows: int,
    blocks: Sequence[int] = (),
    table_start: int = 0,
    parents: Sequence[int] | None = None,
) -> TargetWork:
    return TargetWork(
        RequestId(name),
        tuple(tokens),
        start,
        rows,
        table_start,
        tuple(blocks),
        None if parents is None else tuple(parents),
    )


def reference_row(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0, -1:]


def expected_token(model: PreTrainedModel, tokens: Sequence[int], params: SamplingParams, seed: int) -> int:
    """The token function at position len(tokens), from transformers' own logits."""
    rows = SamplingRows.build([RowSpec(params, seed, len(tokens), 1)])
    return int(Sampler().sample(reference_row(model, tokens), rows).token_ids)


PROMPT = [5, 17, 90, 33, 41, 8, 77]


def test_description(target: LocalTarget, runner: ModelRunner) -> None:
    as_contract: Target = target
    description = as_contract.description
    assert description.revision == runner.loaded.revision
    assert description.dtype == "float32"
    assert description.vocab_size == VOCAB_SIZE
    assert description.max_model_len == 63 * BLOCK_SIZE
    assert (description.num_blocks, description.block_size) == (64, BLOCK_SIZE)
    assert description.eos_token_ids == (0,)
    assert description.row_buckets == ()


def test_a_target_says_to_what_its_rows_are_padded(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are with CUDA graphs; the drafts' costs follow from it (`CostProfile.row_buckets`)."""

    class Padded:
        row_buckets = (1, 2, 4)

    monkeypatch.setattr(runner, "graphs", Padded())
    assert LocalTarget(runner, Sampler()).description.row_buckets == (1, 2, 4)


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=20, top_p=0.9)]
)
def test_the_row_of_position_s_gives_token_s_plus_1(
    target: LocalTarget, reference: PreTrainedModel, params: SamplingParams
) -> None:
    """Chunked prefill, decode, then verification rows: always the token function of the reference."""
    desk, seed = Desk(target), 1234567890123456789
    desk.admit("a", params, seed)
    tokens = list(PROMPT)
    assert desk.run(work("a", PROMPT[:4], 0, 0, [9]))[0].token_ids == ()
    (result,) = desk.run(work("a", PROMPT[4:], 4, 1, [3], table_start=1))
    for _ in range(4):
        assert result.token_ids == (expected_token(reference, tokens, params, seed),)
        tokens.append(result.token_ids[0])
        new_block = [20 + len(tokens)] if (len(tokens) - 1) % BLOCK_SIZE == 0 else []
        table_start = (len(tokens) - 1) // BLOCK_SIZE + (not new_block)
        (result,) = desk.run(work("a", tokens[-1:], len(tokens) - 1, 1, new_block, table_start))
    draft = [11, 12, 13]
    (result,) = desk.run(work("a", [tokens[-1], *draft], len(tokens) - 1, 4, [50], table_start=3))
    expected = [
        expected_token(reference, tokens + draft[:count], params, seed) for count in range(len(draft) + 1)
    ]
    assert list(result.token_ids) == expected


def test_a_batch_answers_in_the_order_of_its_works(target: LocalTarget, reference: PreTrainedModel) -> None:
    desk = Desk(target)
    prompts = {"a": PROMPT, "b": PROMPT[::-1], "c": PROMPT[2:]}
    for name in prompts:
        desk.admit(name)
    results = desk.run(
        work("b", prompts["b"], 0, 2, [1, 2]),
        work("c", prompts["c"], 0, 0, [3, 4]),
        work("a", prompts["a"], 0, 1, [5, 6]),
    )
    assert results[0].token_ids == (
        expected_token(reference, prompts["b"][:-1], GREEDY, 0),
        expected_token(reference, prompts["b"], GREEDY, 0),
    )
    assert results[1].token_ids == ()
    assert results[2].token_ids == (expected_token(reference, prompts["a"], GREEDY, 0),)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)])
def test_tree_rows_are_sampled_at_the_position_of_their_depth(
    target: LocalTarget, reference: PreTrainedModel, params: SamplingParams
) -> None:
    desk, seed = Desk(target), 99
    desk.admit("a", params, seed)
    desk.run(work("a", PROMPT[:-1], 0, 0, [4, 7, 2, 1]))
    nodes, parents = [10, 20, 30, 40], [0, 0, 1, 3]  # parent rows; row 0 is the last committed token
    paths = [[], [10], [20], [10, 30], [10, 30, 40]]
    (result,) = desk.run(work("a", [PROMPT[-1], *nodes], len(PROMPT) - 1, 5, table_start=4, parents=parents))
    assert list(result.token_ids) == [
        expected_token(reference, PROMPT + path, params, seed) for path in paths
    ]


def test_a_preempted_sequence_is_released_and_admitted_anew_in_one_step(
    target: LocalTarget, reference: PreTrainedModel
) -> None:
    desk = Desk(target)
    desk.admit("a")
    desk.run(work("a", PROMPT, 0, 1, [9, 8]))
    desk.release("a")
    desk.admit("a")
    (result,) = desk.run(work("a", PROMPT, 0, 1, [1, 2]))
    assert result.token_ids == (expected_token(reference, PROMPT, GREEDY, 0),)


def test_releasing_alone_is_a_step_and_unknown_ids_are_ignored(target: LocalTarget) -> None:
    desk = Desk(target)
    desk.admit("a")
    desk.run(work("a", PROMPT, 0, 1, [1, 2]))
    desk.release("a")
    desk.release("never seen")
    assert desk.run() == ()


def test_steps_are_answered_in_the_order_submitted(target: LocalTarget) -> None:
    first = TargetStep(1, (work("a", PROMPT, 0, 1, [1, 2]),), (AdmittedSequence(RequestId("a"), 0, GREEDY),))
    second = TargetStep(2, (), (), (RequestId("a"),))
    target.submit(first)
    target.submit(second)
    answered = [target.collect(), target.collect()]
    assert [result.step_id for result in answered] == [1, 2]
    assert answered[0].forward_s > 0
    assert answered[0].sample_s > 0


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_on_request(target: LocalTarget, reference: PreTrainedModel, mode: Any) -> None:
    desk = Desk(target)
    params = SamplingParams(temperature=0.5, logprobs=3, logprobs_mode=mode)
    desk.admit("plain")
    desk.admit("a", params, seed=5)
    plain, wanted = desk.run(work("plain", PROMPT, 0, 2, [1, 2]), work("a", PROMPT, 0, 2, [3, 4]))
    assert plain.logprobs is None
    assert wanted.logprobs is not None
    assert [entry.token_id for entry in wanted.logprobs] == list(wanted.token_ids)
    scale = 1.0 if mode == "raw" else 0.5
    logprobs = (reference_row(reference, PROMPT)[0] / scale).log_softmax(-1)
    assert wanted.logprobs[1].logprob == pytest.approx(float(logprobs[wanted.token_ids[1]]), abs=1e-4)
    assert [token_id for token_id, _ in wanted.logprobs[1].top] == logprobs.topk(3).indices.tolist()


def test_non_finite_logits_end_their_request_and_no_other(
    target: LocalTarget, runner: ModelRunner, reference: PreTrainedModel
) -> None:
    desk = Desk(target)
    desk.admit("bad")
    desk.admit("good")
    desk.run(work("bad", PROMPT[:4], 0, 0, [5]), work("good", PROMPT[:4], 0, 0, [6]))
    runner.pool.values[1][5] = float("nan")
    bad, good = desk.run(
        work("bad", PROMPT[4:], 4, 2, [7], table_start=1), work("good", PROMPT[4:], 4, 1, [8], table_start=1)
    )
    assert bad.token_ids == ()
    assert bad.error == "non-finite logits after the token at position 5"
    assert good.error is None
    assert good.token_ids == (expected_token(reference, PROMPT, GREEDY, 0),)


def test_non_finite_logits_behind_a_draft_token_leave_what_comes_before(
    target: LocalTarget, runner: ModelRunner, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(target)
    desk.admit("a", SamplingParams(temperature=0.0, logprobs=1), seed=5)
    desk.run(work("a", PROMPT[:4], 0, 0, [5]))
    forward = runner.forward

    def poisoned(slices: Sequence[SequenceSlice], observation: None) -> torch.Tensor:
        logits = forward(slices).clone()
        logits[1] = float("nan")
        return logits

    monkeypatch.setattr(runner, "forward", poisoned)
    (result,) = desk.run(work("a", PROMPT[4:6], 4, 2, [7], table_start=1))
    assert result.token_ids == (expected_token(reference, PROMPT[:5], GREEDY, 0),)
    assert result.logprobs is not None
    assert len(result.logprobs) == 1
    assert result.error == "non-finite logits after the token at position 5"


@pytest.fixture
def token_without_values(runner: ModelRunner) -> Iterator[int]:
    """A token whose embedding is NaN."""
    row = runner.loaded.model.get_input_embeddings().weight.data[99]
    before = row.clone()
    row.fill_(float("nan"))
    yield 99
    row.copy_(before)


@pytest.mark.parametrize("parents", [None, (0, 0, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("logprobs", [None, 1], ids=["tokens", "logprobs"])
def test_draft_token_whose_values_are_not_finite_spoils_no_row_before_it(
    target: LocalTarget,
    reference: PreTrainedModel,
    token_without_values: int,
    parents: tuple[int, ...] | None,
    logprobs: int | None,
) -> None:
    """Its weight in the attention of rows that do not see it is 0, and 0 times NaN is NaN."""
    desk = Desk(target)
    desk.admit("a", SamplingParams(temperature=0.0, logprobs=logprobs), seed=5)
    desk.admit("b")
    desk.run(work("a", PROMPT[:4], 0, 0, [5]), work("b", PROMPT[:6], 0, 0, [6, 8]))
    drafted = [*PROMPT[4:5], 3, token_without_values, 7]
    spoilt, good = desk.run(
        work("a", drafted, 4, 4, [7], table_start=1, parents=parents),
        work("b", PROMPT[6:7], 6, 1, table_start=2),
    )
    assert spoilt.token_ids == (expected_token(reference, PROMPT[:5], GREEDY, 0),)
    assert (spoilt.logprobs is not None) == (logprobs is not None)
    assert spoilt.logprobs is None or len(spoilt.logprobs) == 1
    assert spoilt.error is not None
    assert good.token_ids == (expected_token(reference, PROMPT, GREEDY, 0),)
    (after,) = desk.run(work("a", [PROMPT[5]], 5, 1, table_start=2))  # K/V of the row before are whole
    assert after.token_ids == (expected_token(reference, PROMPT[:6], GREEDY, 0),)


def test_row_beside_whose_values_are_not_finite_spoils_no_row_before_it(
    target: LocalTarget, reference: PreTrainedModel, token_without_values: int
) -> None:
    desk = Desk(target)
    desk.admit("a", GREEDY, seed=5)
    desk.run(work("a", PROMPT[:4], 0, 0, [5]))
    beside = RowsBeside((3, token_without_values), (-1, 0), 1)
    spoilt = msgspec.structs.replace(work("a", [PROMPT[4]], 4, 1, [7], table_start=1), beside=beside)
    (answer,) = desk.run(spoilt)
    assert answer.token_ids == (expected_token(reference, PROMPT[:5], GREEDY, 0),)
    assert answer.beside == ()


@pytest.mark.parametrize("logprobs", [None, 0], ids=["nobody", "somebody"])
def test_one_native_call_unless_somebody_wants_logits(
    pair: tuple[PreTrainedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    runner = ModelRunner(pair[1], CacheConfig(num_blocks=64, block_size=BLOCK_SIZE), max_num_seqs=8)
    runner.graphs = forward = CompiledForward(runner, CompileConfig())
    if forward.warm_up() != "ready":
        pytest.skip("no compiled forward here")
    forwards: list[int] = []
    stepwise = runner.forward

    def counted(slices: Sequence[SequenceSlice], observation: None) -> torch.Tensor:
        forwards.append(len(slices))
        return stepwise(slices)

    monkeypatch.setattr(runner, "forward", counted)
    sampler = Sampler()
    sampler.warm_up()
    desk = Desk(LocalTarget(runner, sampler))
    desk.admit("a")
    desk.admit("b", SamplingParams(logprobs=logprobs))
    desk.run(work("a", PROMPT, 0, 1, [1, 2]), work("b", PROMPT, 0, 1, [3, 4]))
    assert forwards == ([] if logprobs is None else [2])


def test_close_is_idempotent(target: LocalTarget) -> None:
    target.close()
    target.close()
