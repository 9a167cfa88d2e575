"""Lookahead decoding and rows beside drafts: the same tokens as without, and each row says what it should.

What the target says at rows beside is compared with what it says to the text on their path alone: by the toy
model, and by transformers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from scipy import stats

from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetResult, TargetStep, TargetWork
from specdec.core.proposal import NoiseStream, Proposal
from specdec.core.rows_beside import RowsBeside
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.targets.remote_target import RemoteTarget
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.lookahead.config import LookaheadConfig
from specdec.proposers.lookahead.proposer import LookaheadProposer
from specdec.proposers.lookahead.window import rows_of
from specdec.sampling.sampler import RowSpec, Sampler, SamplingRows
from specdec.scheduling.speculation.controller import FixedController, RoundObservation
from specdec.transport.base import PeerId
from specdec.transport.memory import MemoryNetwork
from specdec.tree.topology import topology_of
from specdec.verification.registry import rule_named
from tests.architectures import ARCHITECTURES, VOCAB_SIZE, save_model
from tests.rank_pool import Pools
from tests.specdec.engine import ranked_engines
from tests.specdec.engine.identity_settings import Setting, check_greedy, check_sampled
from tests.specdec.engine.judged_engines import judge_of
from tests.specdec.engine.sampling_kinds import SAMPLING, SHAPING
from tests.specdec.engine.tiny_models import Models
from tests.specdec.engine.toy_engines import (
    GREEDY,
    MODEL,
    WatchedTarget,
    check_streams,
    expected_tokens,
    request,
    requests_of,
    run,
    toy_engine,
)
from tests.specdec.engine.toy_engines import VOCAB_SIZE as VOCABULARY

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = LookaheadConfig(window_size=3, ngram_size=3, verification_set_size=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class AnsweredTarget(WatchedTarget):
    """Remembers its answers too."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.answers: list[TargetResult] = []

    def collect(self) -> TargetResult:
        self.answers.append(super().collect())
        return self.answers[-1]


def mostly_full(values: Iterable[Any], quick: Any) -> list[Any]:
    """All values, of which one is for the short run too."""
    return [one if one == quick else pytest.param(one, marks=pytest.mark.full) for one in values]


def lookahead(**keys: Any) -> LookaheadProposer:
    return LookaheadProposer(SMALL.model_copy(update=keys))


# ------------------------------------------------------------------------------------ in the engine


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))])
@pytest.mark.parametrize(
    ("num_blocks", "num_rows", "prefix_caching"), [(256, 128, True), (30, 40, True), (34, 24, False)]
)
def test_tokens_are_those_without(seed: int, num_blocks: int, num_rows: int, prefix_caching: bool) -> None:
    """Also where blocks are few, so that requests are preempted, and where rows are."""
    target = AnsweredTarget(num_blocks=num_blocks)
    engine = toy_engine(
        lookahead(),
        target=target,
        num_draft_tokens=6,
        max_num_batched_tokens=num_rows,
        max_num_seqs=6,
        prefix_caching=prefix_caching,
    )
    check_streams(engine, requests_of(12, seed))
    engine.check_integrity()
    metrics = engine.metrics()
    assert metrics.proposals_dropped.total() == 0
    assert metrics.num_accepted_tokens > 0
    if num_blocks < 256 and seed == 0:  # elsewhere smaller drafts may do
        assert metrics.num_preemptions > 0
    works = [work for step in target.steps for work in step.works]
    assert sum(map(num_beside, works)) == metrics.num_rows_beside > 0
    assert all(sum(work.num_rows for work in step.works) <= num_rows for step in target.steps)
    assert any(work.beside is not None and work.num_sampled_rows == 1 for work in works)


def test_rows_beside_say_what_the_target_says_to_their_paths() -> None:
    target = AnsweredTarget()
    requests = {one.request_id: one for one in requests_of(8, 3)}
    run(toy_engine(lookahead(), target=target, num_draft_tokens=6), *requests.values())
    num_checked = 0
    for step, result in zip(target.steps, target.answers, strict=True):
        for work, answer in zip(step.works, result.results, strict=True):
            if work.beside is None:
                assert answer.beside == ()
                continue
            one = requests[work.request_id]
            text = [*one.prompt_token_ids, *expected_tokens(one)][: work.start + 1]
            assert list(answer.beside) == [
                MODEL.continuation([*text, *path], one.params, one.seed, 1)[0]
                for path in answered_paths(work.beside)
            ]
            num_checked += 1
    assert num_checked > 20


def answered_paths(beside: RowsBeside) -> list[list[int]]:
    topology = topology_of(beside.num_rows, beside.parents)
    return [
        [beside.token_ids[node] for node in topology.path(row)]
        for row in range(beside.num_rows - beside.num_answered, beside.num_rows)
    ]


def test_the_window_makes_more_than_a_token_of_a_pass() -> None:
    """Of a text that comes back to what it said, without a look at the text."""
    target = WatchedTarget()
    engine = toy_engine(lookahead(reads_text=False), target=target, num_draft_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=96)
    one = request("r", [1, 2, 3], params)
    check_streams(engine, [one])
    num_passes = sum(work.num_sampled_rows > 0 for step in target.steps for work in step.works)
    assert 96 / num_passes > 1.3


def test_controllers_hear_of_all_rows() -> None:
    class Hearing(FixedController):
        num_rows = 0

        def observe(self, observation: RoundObservation) -> None:
            self.num_rows += observation.num_rows

    target, controller = WatchedTarget(), Hearing(6)
    engine = Engine.from_parts(
        target=target,
        proposer=lookahead(),
        tokenizer=ToyTokenizer.of_letters(VOCABULARY),
        controller=controller,
    )
    check_streams(engine, requests_of(4))
    rows = [len(work.token_ids) + num_beside(work) for step in target.steps for work in step.works]
    assert controller.num_rows == sum(rows)
    assert any(num_beside(work) for step in target.steps for work in step.works)


def num_beside(work: TargetWork) -> int:
    return 0 if work.beside is None else len(work.beside.token_ids)


def test_the_end_of_the_context_is_never_passed() -> None:
    target = WatchedTarget(max_model_len=40)
    engine = toy_engine(lookahead(), target=target, num_draft_tokens=8)
    outputs = run(engine, request("r", [1, 2, 3, 1, 2], SamplingParams(temperature=0.0, max_tokens=64)))
    assert sum(len(one.token_ids) for one in outputs["r"]) == 35
    works = [work for step in target.steps for work in step.works]
    assert max(work.start + work.num_rows for work in works) <= 40
    assert [work.beside is not None for work in works][1:5] == [True] * 4
    assert works[-1].beside is None


class Beside:
    """A drafter of nothing, with some rows beside."""

    def __init__(self, beside: RowsBeside, most: int = 4) -> None:
        self.capabilities = ProposerCapabilities(name="beside", shape="tree", num_rows_beside=most)
        self._beside = beside
        self.heard: list[tuple[int, ...]] = []

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        return {
            one.request_id: Proposal(
                request_id=one.request_id,
                committed_len=one.committed_len,
                prefix_hash=one.prefix_hash,
                token_ids=(),
                beside=self._beside,
            )
            for one in sequences
            if num_draft_tokens.get(one.request_id)
        }

    def hear_beside(self, proposal: Proposal, token_ids: Sequence[int]) -> None:
        self.heard.append(tuple(token_ids))

    def release(self, request_ids: Iterable[RequestId]) -> None:
        pass

    def close(self) -> None:
        pass


RIGHT = RowsBeside((1, 2, 3), (-1, 0, -1), 2)


@pytest.mark.parametrize(
    ("beside", "is_right"),
    [
        (RIGHT, True),
        (RowsBeside((1, 2, 3), (-1, 0, -1), 0), True),
        (RowsBeside((1, 2, 99), (-1, 0, -1), 2), False),
        (RowsBeside((1, -2, 3), (-1, 0, -1), 2), False),
        (RowsBeside((1, 2, 3), (-1, 2, -1), 2), False),
        (RowsBeside((1, 2, 3), (-1, 0), 2), False),
        (RowsBeside((1, 2, 3), (-1, 0, -1), 4), False),
        (RowsBeside((1, 2, 3), (-1, 0, -1), -1), False),
        (RowsBeside((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3), 1), False),
    ],
)
def test_malformed_rows_beside_are_dropped(beside: RowsBeside, is_right: bool) -> None:
    proposer = Beside(beside)
    engine = toy_engine(proposer)
    check_streams(engine, requests_of(3))
    metrics = engine.metrics()
    assert (metrics.proposals_dropped["malformed"] == 0) == is_right == (metrics.num_rows_beside > 0)
    assert {len(one) for one in proposer.heard} == ({2} if is_right and beside.num_answered else set())


def test_answers_that_were_not_asked_for_end_the_target() -> None:
    class Chatty(ToyTarget):
        def collect(self) -> TargetResult:
            result = super().collect()
            results = tuple(msgspec.structs.replace(one, beside=(1, 2, 3)) for one in result.results)
            return msgspec.structs.replace(result, results=results)

    engine = toy_engine(Beside(RIGHT), target=Chatty(MODEL))
    outputs = run(engine, request("r", [1, 2, 3], GREEDY))
    assert outputs["r"][-1].error_code == "target_lost"
    assert "tokens for 0 rows beside" in str(outputs["r"][-1].error)


def test_another_rule_looks_at_the_draft_alone() -> None:
    """Greedy requests, for those of a rule with chances of its own are not those of the target alone."""
    engine = toy_engine(
        lookahead(), target=ToyTarget(MODEL, judge=judge_of("multi_round")), num_draft_tokens=6
    )
    requests = requests_of(8)
    outputs = run(engine, *requests)
    for one in requests:
        tokens = [token for output in outputs[one.request_id] for token in output.token_ids]
        assert len(tokens) == one.params.max_tokens
        if one.params.is_greedy:
            assert tokens == expected_tokens(one)
    assert engine.metrics().num_rows_beside > 0


class Bonuses(ToyTarget):
    """Notes what followed drafts that stood to the end of a path of two."""

    def __init__(self, model: ToyModel, stream: NoiseStream | None = None) -> None:
        super().__init__(model, judge=judge_of("multi_round"))
        if stream is not None:
            self._draft_stream = stream
        self.counts = np.zeros((model.vocab_size, model.vocab_size))
        """By the last token that stood, and the one that followed."""

    def collect(self) -> TargetResult:
        result = super().collect()
        for answer in result.results:
            if len(answer.token_ids) == 3:
                self.counts[answer.token_ids[1:]] += 1
        return result


def p_value_behind_drafts(stream: NoiseStream | None) -> float:
    """Chi-square of tokens behind accepted drafts, which the rule draws, against p.

    What has been drafted and accepted before them must not tell anything of their noise.
    """
    model = ToyModel(3, seed=3, sharpness=0.3, perturbation=0.0)
    target = Bonuses(model, stream)
    config = LookaheadConfig(window_size=5, ngram_size=4, verification_set_size=2, reads_text=False)
    engine = toy_engine(
        LookaheadProposer(config),
        target=target,
        num_draft_tokens=2,
        max_num_seqs=16,
        max_num_batched_tokens=512,
    )
    params = SamplingParams(temperature=1.0, max_tokens=24)
    for seed in range(700):
        engine.add_request(request(f"r{seed}", (0, 1, 2, 0, 1, 2), params, seed=seed))
    while engine.has_work:
        engine.step()
    logits = np.array([model.logits(last, 0) for last in range(3)])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = target.counts.sum(-1, keepdims=True) * p
    assert expected.min() > 50
    statistic = ((target.counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, 3 * (3 - 1)))


@pytest.mark.slow
def test_what_is_said_beside_is_independent_of_what_a_rule_draws_itself() -> None:
    assert p_value_behind_drafts(None) > 1e-4


@pytest.mark.slow
def test_control_noise_of_the_target_beside_is_noticed() -> None:
    assert p_value_behind_drafts("target") < 1e-9


def test_over_the_wire() -> None:
    network = MemoryNetwork(seed=1)
    worker, owner = network.open(PeerId("target")), network.open(PeerId("coordinator"))
    worker.admit([owner.address])
    server = TargetServer(worker, ToyTarget(MODEL))
    network.serve(PeerId("target"), lambda: server.step(0))
    target: Any = RemoteTarget(owner, worker.address, incarnation=1)
    engine = toy_engine(lookahead(), target=target, num_draft_tokens=6)
    check_streams(engine, requests_of(6))
    assert engine.metrics().num_rows_beside > 0
    assert engine.metrics().num_accepted_tokens > 0


# ---------------------------------------------------------------------------------- on real models


@dataclass(frozen=True)
class LookaheadSetting(Setting):
    drafter: str = "lookahead"
    num_draft_tokens: int = 8

    def proposer(self, models: Models, architecture: str) -> Proposer:
        return lookahead()


COVER = [
    LookaheadSetting(batch=8, chunk=96, num_blocks=36),
    LookaheadSetting(batch=5, compiled=True),
    LookaheadSetting(batch=8, chunk=96, num_blocks=36, compiled=True),
]


def answer_once(
    models: Models,
    architecture: str,
    setting: Setting,
    params: SamplingParams,
    draft: Sequence[int],
    rule: str = "sample_and_match",
) -> tuple[Sequence[int], RowsBeside, list[int]]:
    """What a target says at the rows beside a draft, the rows, and the text before them."""
    runner = setting.runner(models.load(architecture), setting.num_blocks)
    target = LocalTarget(runner, setting.sampler(), rule=rule_named(rule))
    name = RequestId("a")
    text = [(5 + 7 * index * index) % 120 + 2 for index in range(17)]
    blocks = tuple(range(40, 20, -1))
    prefill = TargetWork(name, tuple(text[:-1]), 0, 0, 0, blocks)
    target.submit(TargetStep(0, (prefill,), (AdmittedSequence(name, 12345, params),)))
    target.collect()
    rng = random.Random(3)
    beside = rows_of(tuple(tuple(rng.choices(range(2, VOCAB_SIZE), k=size)) for size in (3, 4, 4)))
    work = TargetWork(
        name,
        (text[-1], *draft),
        len(text) - 1,
        1 + len(draft),
        len(blocks),
        (),
        parents=(0, 1, 0) if draft else None,
        beside=beside,
    )
    found = []
    for one in (work, msgspec.structs.replace(work, beside=None)):
        target.submit(TargetStep(1, (one,)))
        (answer,) = target.collect().results
        found.append(answer)
    assert found[0].token_ids == found[1].token_ids
    assert found[1].beside == ()
    return found[0].beside, beside, text


@pytest.mark.parametrize("kind", mostly_full(["greedy", "cut", "penalties"], "cut"))
@pytest.mark.parametrize(
    "draft", [pytest.param((), id="alone", marks=pytest.mark.full), pytest.param((9, 4, 11), id="by a tree")]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("architecture", mostly_full(ARCHITECTURES, "llama"))
def test_rows_beside_are_what_the_model_says_to_their_paths(
    models: Models, architecture: str, kind: str, draft: Sequence[int], compiled: bool
) -> None:
    """Masks, positions, and the noise of the positions; penalties have no say."""
    params = {"greedy": GREEDY, **SAMPLING, **SHAPING}[kind]
    setting = Setting(compiled=compiled)
    answers, beside, text = answer_once(models, architecture, setting, params, draft)
    assert list(answers) == said_alone(models, architecture, params, beside, text)


def said_alone(
    models: Models,
    architecture: str,
    params: SamplingParams,
    beside: RowsBeside,
    text: list[int],
    stream: NoiseStream = "target",
) -> list[int]:
    """What transformers says to each path of the rows, behind the text."""
    said = []
    for path in answered_paths(beside):
        tokens = [*text, *path]
        with torch.inference_mode():
            logits = models.reference(architecture)(torch.tensor([tokens])).logits[0, -1:]
        rows = SamplingRows.build([RowSpec(params, 12345, len(tokens), 1)])
        said.append(int(Sampler().sample(logits, rows, stream).token_ids))
    return said


@pytest.mark.parametrize("draft", [(), (9, 4, 11)], ids=["alone", "by a tree"])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_beside_have_the_noise_of_drafts_where_the_rule_draws_itself(
    models: Models, draft: Sequence[int], compiled: bool
) -> None:
    params, setting = SAMPLING["cut"], Setting(compiled=compiled)
    answers, beside, text = answer_once(models, "llama", setting, params, draft, "multi_round")
    assert list(answers) == said_alone(models, "llama", params, beside, text, "draft")
    assert list(answers) != said_alone(models, "llama", params, beside, text, "target")


@pytest.mark.parametrize("setting", mostly_full(COVER, COVER[0]), ids=str)
@pytest.mark.parametrize("architecture", mostly_full(ARCHITECTURES, "llama"))
def test_greedy_equals_transformers(models: Models, architecture: str, setting: Setting) -> None:
    metrics = check_greedy(models, architecture, setting).metrics()
    assert metrics.num_rows_beside > 0
    if setting.num_blocks == 36:
        assert metrics.num_preemptions > 0


@pytest.mark.parametrize("kind", mostly_full([*SAMPLING, *SHAPING], "cut"))
@pytest.mark.parametrize("setting", mostly_full(COVER[:2], COVER[1]), ids=str)
def test_sampled_tokens_are_those_without(models: Models, kind: str, setting: Setting) -> None:
    check_sampled(models, "llama", setting, {**SAMPLING, **SHAPING}[kind])


def test_goodput_decides_whether_there_is_a_window(tmp_path: Path) -> None:
    save_model(tmp_path)
    params = [ranked_engines.GREEDY, ranked_engines.SAMPLED]
    with Engine(ranked_engines.config_of(tmp_path)) as engine:
        expected = ranked_engines.generate(engine, params)
    keys = {**ranked_engines.drafting("lookahead", tmp_path), "controller": "goodput", "profile_seconds": 0.0}
    with Engine(ranked_engines.config_of(tmp_path, **keys)) as engine:
        assert ranked_engines.generate(engine, params) == expected
        assert engine.metrics().num_rows_beside > 0


@pytest.mark.full
@pytest.mark.parametrize("stages", [1, 2], ids=["tensor parallel", "pipeline"])
def test_same_tokens_over_ranks(rank_pool: Pools, tmp_path: Path, stages: int) -> None:
    save_model(tmp_path)
    params = [ranked_engines.GREEDY, ranked_engines.PLAIN, ranked_engines.SHAPED]
    answer = ranked_engines.check(rank_pool(2), tmp_path, params, method="lookahead", stages=stages)
    assert answer.num_accepted > 0
    assert answer.num_rows_beside > 0
