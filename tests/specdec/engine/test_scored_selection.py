"""Self-speculation that goes by what the target attends to: says the same, and looks where it should.

That drafts are made of the right blocks, which exactness does not show, is compared with the attention
weights of transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
import torch
from numpy.typing import NDArray

from specdec.attention.observation import Observation
from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, SlotMove, TargetStep, TargetWork
from specdec.core.sampling_params import Grammar, SamplingParams
from specdec.engine.build_target import build_target_part
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.attention_watch import AttentionWatch, rows_to_observe
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.text.tokenizer import build_tokenizer
from specdec.kv.block_scores import DECAY, MAX_WINDOW, BlockScores, RunningScores
from specdec.kv.config import CacheConfig
from specdec.kv.selection import KvPolicyName, KvSelectionConfig
from specdec.model.config import ModelConfig
from specdec.model.parallel.group import RankGroup
from specdec.proposers.config import SpeculativeConfig
from specdec.tree.static import StaticTree
from specdec.verification.answers import verdict_of
from tests.architectures import POSITIONS_OF_OTHER_KINDS
from tests.rank_pool import Pools
from tests.specdec.engine.ranked_engines import config_of
from tests.specdec.engine.sampling_kinds import KINDS, UNENDING
from tests.specdec.engine.self_drafting import (
    BLOCK_SIZE,
    BUSHY,
    SCORED,
    SelfSetting,
    Streams,
    check,
    selecting,
)
from tests.specdec.engine.target_alone import LONG, draft_once, reference_draft
from tests.specdec.engine.tiny_models import PROMPTS, Models, SharpModels
from tests.specdec.engine.toy_engines import request

pytestmark = pytest.mark.usefixtures("one_thread")
DEMO = Path(__file__).parents[3] / "models" / "demo" / "target"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def sharp_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return SharpModels(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def streams(models: Models) -> Streams:
    return Streams(models)


COVER = [
    ("greedy", SelfSetting(num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, kv=selecting("verified"))),
    ("greedy", SelfSetting(num_draft_tokens=7, batch=5, chunk=9, kv=selecting("snapkv", 16), compiled=True)),
    ("plain", SelfSetting(num_draft_tokens=1, batch=5, kv=selecting("verified", 0.5), compiled=True)),
    ("plain", SelfSetting(num_draft_tokens=7, batch=1, kv=selecting("snapkv", every=3))),
    ("cut", SelfSetting(num_draft_tokens=7, batch=8, chunk=16, num_blocks=18, kv=selecting("snapkv", 0.3))),
    ("cut", SelfSetting(num_draft_tokens=4, batch=5, kv=selecting("verified", every=6), compiled=True)),
    ("hot", SelfSetting(num_draft_tokens=4, batch=8, chunk=16, kv=selecting("verified", 16, sink=0))),
    ("penalties", SelfSetting(num_draft_tokens=4, batch=8, num_blocks=18, kv=selecting("verified"))),
    ("bad words", SelfSetting(num_draft_tokens=6, batch=5, kv=selecting("snapkv"), compiled=True)),
]


@pytest.mark.cover(1, "kind", "setting.compiled", "setting.kv.policy", "setting.num_blocks")
@pytest.mark.parametrize(("kind", "setting"), COVER, ids=str)
def test_says_what_it_says_alone(models: Models, streams: Streams, kind: str, setting: SelfSetting) -> None:
    metrics = check(models, streams, setting, kind)
    assert metrics.num_accepted_tokens > 0
    if setting.num_blocks == 18:
        assert metrics.num_preemptions > 0


@pytest.mark.cover(1)
@pytest.mark.parametrize("architecture", ["llama", "mistral", *POSITIONS_OF_OTHER_KINDS])
@pytest.mark.parametrize(("compiled", "policy"), [(False, "snapkv"), (True, "verified")])
def test_every_kind_of_position(
    models: Models, streams: Streams, architecture: str, compiled: bool, policy: KvPolicyName
) -> None:
    setting = SelfSetting(
        num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, compiled=compiled, kv=selecting(policy, 16)
    )
    assert check(models, streams, setting, "greedy", architecture).num_accepted_tokens > 0


@pytest.mark.parametrize("policy", SCORED)
def test_everything_selected_is_all_accepted(models: Models, policy: KvPolicyName) -> None:
    setting = SelfSetting(num_draft_tokens=5, batch=8, chunk=64, kv=selecting(policy, 4096))
    with setting.engine(models, "llama") as engine:
        engine.generate(PROMPTS, UNENDING["plain"])
        metrics = engine.metrics()
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 8 * 10


@pytest.mark.parametrize("policy", SCORED)
@pytest.mark.parametrize("compiled", [False, True])
def test_prefix_cache(models: Models, streams: Streams, policy: KvPolicyName, compiled: bool) -> None:
    """Later requests find their prompts read, and are scored by what is left of them."""
    expected = streams.alone("llama", "plain", KINDS["plain"])
    setting = SelfSetting(num_draft_tokens=6, batch=8, kv=selecting(policy), compiled=compiled)
    with setting.engine(models, "llama") as engine:
        for _ in range(2):
            results = engine.generate(PROMPTS, KINDS["plain"])
            assert [result.token_ids for result in results] == expected
        assert engine.metrics().prefix_cache_hits > 50


@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_bf16(models: Models, kind: str) -> None:
    """With kernels whose rows do not depend on their batch."""
    folder = models.load("llama").path
    texts = []
    for speculative in (
        {"method": "none"},
        *(
            {"method": "self", "controller": "fixed", "kv": {"policy": policy, "budget": 16}}
            for policy in SCORED
        ),
    ):
        config = EngineConfig(
            target=ModelConfig(model=str(folder), dtype="bfloat16", batch_invariant=True),
            speculative_config=SpeculativeConfig.model_validate(speculative),
            cache=CacheConfig(block_size=4, num_blocks=60),
        )
        with Engine(config) as engine:
            texts.append([result.token_ids for result in engine.generate(PROMPTS, KINDS[kind])])
    assert texts[0] == texts[1] == texts[2]


def run_rounds(
    target: LocalTarget,
    params: SamplingParams,
    num_rounds: int,
    num_self_drafted: int = 4,
    num_plain: int = 0,
) -> tuple[list[int], int]:
    """Serve `LONG` for some rounds, behind `num_plain` ones without drafts; return its committed tokens and
    how many drafts were rejected.
    """
    name, tokens, num_rejected = RequestId("a"), list(LONG), 0
    blocks = tuple(range(40, 20, -1))
    work = TargetWork(name, tuple(tokens), 0, 1, 0, blocks)
    (answer,) = target.run(TargetStep(0, (work,), (AdmittedSequence(name, 12345, params),))).results
    tokens += answer.token_ids
    moves: tuple[SlotMove, ...] = ()
    for step_id in range(1, num_plain + num_rounds + 1):
        length, k = len(tokens), num_self_drafted if step_id > num_plain else 0
        work = TargetWork(name, tuple(tokens[-1:]), length - 1, 1, 20, (), num_self_drafted=k)
        (answer,) = target.run(TargetStep(step_id, (work,), moves=moves)).results
        verdict = verdict_of(answer.drafted, answer.drafted_parents, answer.token_ids)
        num_rejected += len(answer.drafted) - len(verdict.accepted_nodes)
        tokens += verdict.token_ids
        moves = tuple(
            SlotMove(*(blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places))
            for index, node in enumerate(verdict.accepted_nodes)
            if (places := (length + node, length + index))[0] != places[1]
        )
    return tokens, num_rejected


def scores_of(target: LocalTarget) -> BlockScores:
    scores = target._sequences[RequestId("a")].scores
    assert scores is not None
    return scores


def reference_masses(models: Models, tokens: Sequence[int]) -> NDArray[np.float64]:
    """By transformers: what each token attends to, summed over layers and heads, [tokens, blocks]."""
    model = models.reference("llama")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor([tokens]), output_attentions=True).attentions
    summed = torch.stack(weights).double().sum((0, 1, 2)).numpy()
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    padded = np.zeros((len(tokens), num_blocks * BLOCK_SIZE))
    padded[:, : len(tokens)] = summed
    masses: NDArray[np.float64] = padded.reshape(len(tokens), num_blocks, BLOCK_SIZE).sum(-1)
    return masses


def reference_scores(masses: NDArray[np.float64]) -> NDArray[np.float64]:
    """verified, of all tokens from the observation window of the prompt on."""
    observed = masses[max(0, len(LONG) - MAX_WINDOW) :]
    scores: NDArray[np.float64] = DECAY ** np.arange(len(observed))[::-1] @ observed
    return scores


def target_of(
    models: Models, kv: KvSelectionConfig, *, compiled: bool, tree: StaticTree | None = None
) -> LocalTarget:
    setting = SelfSetting(compiled=compiled, kv=kv)
    runner = setting.runner(models.load("llama"), setting.num_blocks)
    return LocalTarget(runner, setting.sampler(), self_drafting=kv.make(BLOCK_SIZE), self_tree=tree)


@pytest.mark.parametrize("kind", ["greedy", "hot", "penalties"])
@pytest.mark.parametrize("compiled", [False, True])
def test_scores_are_those_of_committed_tokens(sharp_models: Models, kind: str, compiled: bool) -> None:
    """Whatever was drafted and rejected in between."""
    target = target_of(sharp_models, selecting("verified", 16), compiled=compiled)
    tokens, num_rejected = run_rounds(target, UNENDING[kind], 6)
    assert num_rejected > 3
    masses = reference_masses(sharp_models, tokens[:-1])  # nobody has run the last one
    np.testing.assert_allclose(scores_of(target).values, reference_scores(masses), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_scores_are_those_of_the_path_of_a_tree_that_stands(sharp_models: Models, compiled: bool) -> None:
    """Of the last blocks they tell where the nodes lay when they attended to each other."""
    target = target_of(sharp_models, selecting("verified", 16), compiled=compiled, tree=BUSHY)
    tokens, num_rejected = run_rounds(target, UNENDING["plain"], 6, BUSHY.max_nodes)
    assert num_rejected > 10
    assert len(tokens) > len(LONG) + 8, "paths of trees stand"
    masses = reference_masses(sharp_models, tokens[:-1])
    values, num_blocks = scores_of(target).values, len(LONG) // BLOCK_SIZE
    assert values is not None
    np.testing.assert_allclose(
        values[:num_blocks], reference_scores(masses)[:num_blocks], rtol=1e-3, atol=1e-3
    )


def test_control_rejected_tokens_would_show(sharp_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "specdec.engine.targets.attention_watch._standing_rows",
        lambda work, result: range(work.num_sampled_rows),
    )
    target = target_of(sharp_models, selecting("verified", 16), compiled=False)
    tokens, _ = run_rounds(target, UNENDING["hot"], 6)
    values = scores_of(target).values
    assert values is not None
    expected = reference_scores(reference_masses(sharp_models, tokens[:-1]))
    num_blocks = min(len(values), len(expected))
    assert np.abs(values[:num_blocks] - expected[:num_blocks]).max() > 0.05


def test_a_window_is_that_of_the_prompt(sharp_models: Models) -> None:
    target = target_of(sharp_models, selecting("snapkv", 16), compiled=True)
    run_rounds(target, UNENDING["plain"], 3)
    window = reference_masses(sharp_models, LONG)[-MAX_WINDOW:].mean(0)
    np.testing.assert_allclose(scores_of(target).values, pooled(window), rtol=1e-3, atol=1e-3)


def pooled(window: NDArray[np.float64]) -> NDArray[np.float64]:
    """snapkv, of the mean of a window."""
    padded = np.pad(window, 1, mode="edge")
    return padded[:-2] / 4 + window / 2 + padded[2:] / 4


def test_a_sequence_that_comes_back_is_scored_anew(models: Models) -> None:
    target = target_of(models, selecting("verified", 16), compiled=False)
    run_rounds(target, UNENDING["plain"], 2)
    target.run(TargetStep(9, (), (), (RequestId("a"),)))
    target.run(TargetStep(10, (), (AdmittedSequence(RequestId("a"), 1, UNENDING["plain"]),)))
    assert scores_of(target).values is None


def needle_selection(models: Models, policy: KvPolicyName) -> tuple[list[int], list[int]]:
    """Blocks that a policy selects behind `LONG` less its last token, and those of streaming."""
    target = target_of(models, selecting(policy, 16), compiled=False)
    name = RequestId("a")
    prefill = TargetWork(name, tuple(LONG[:-1]), 0, 1, 0, tuple(range(40, 20, -1)))
    target.run(TargetStep(0, (prefill,), (AdmittedSequence(name, 12345, UNENDING["plain"]),)))
    selections = [selecting(one, 16).make(BLOCK_SIZE) for one in (policy, "streaming")]
    mine, streamed = (one.select(len(LONG) - 1, scores=scores_of(target)) for one in selections)
    return list(mine.blocks), list(streamed.blocks)


@pytest.mark.parametrize("policy", SCORED)
@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_drafts_attend_to_what_the_target_attends_to(
    sharp_models: Models, policy: KvPolicyName, kind: str
) -> None:
    """With gaps between the blocks: positions, masks and noise are those of the text."""
    blocks, streamed = needle_selection(sharp_models, policy)
    assert len(blocks) == len(streamed)
    assert blocks != streamed, "what matters is not in the window"
    selected = [index * BLOCK_SIZE + at for index in blocks for at in range(BLOCK_SIZE)]
    for compiled in (False, True):
        setting = SelfSetting(compiled=compiled, kv=selecting(policy, 16))
        # The prompt ends where the scores above were taken.
        drafted = draft_scored(sharp_models, setting, KINDS[kind])
        assert drafted == reference_draft(sharp_models, selected, KINDS[kind], 6)


def draft_scored(models: Models, setting: SelfSetting, params: SamplingParams) -> tuple[int, ...]:
    """As `draft_once`, of a prompt that was scored."""
    runner = setting.runner(models.load("llama"), setting.num_blocks)
    target = LocalTarget(runner, setting.sampler(), self_drafting=setting.kv.make(BLOCK_SIZE))
    name, blocks = RequestId("a"), tuple(range(40, 20, -1))
    prefill = TargetWork(name, tuple(LONG[:-1]), 0, 1, 0, blocks)
    target.run(TargetStep(0, (prefill,), (AdmittedSequence(name, 12345, params),)))
    work = TargetWork(name, (LONG[-1],), len(LONG) - 1, 1, len(blocks), (), num_self_drafted=6)
    (answer,) = target.run(TargetStep(1, (work,))).results
    return answer.drafted


def test_without_scores_it_streams(sharp_models: Models) -> None:
    """A prompt of which no token was sampled is not scored."""
    drafts = [
        draft_once(sharp_models, SelfSetting(kv=KvSelectionConfig(**settings)), KINDS["plain"], 6).drafted
        for settings in (
            {"policy": "verified", "budget": 16, "sink_tokens": 4},
            {"policy": "streaming", "budget": 16, "sink_tokens": 4},
        )
    ]
    assert drafts[0] == drafts[1]


def test_what_is_not_asked_for_is_not_observed(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> Observation:
        raise AssertionError("nobody has asked")

    monkeypatch.setattr(AttentionWatch, "ask", refuse)
    setting = SelfSetting(kv=KvSelectionConfig(policy="streaming", budget=12))
    with setting.engine(models, "llama") as engine:
        engine.generate(PROMPTS[:2], KINDS["greedy"])


Rounds = dict[RequestId, list[tuple[int, int]]]
"""By sequence, of every round that samples: how many rows it samples, and how many are looked at."""


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """Those of all targets."""
    seen: Rounds = {}
    ask = AttentionWatch.ask

    def noted(
        self: AttentionWatch, works: Sequence[TargetWork], scores: Sequence[BlockScores | None]
    ) -> Observation | None:
        observation = ask(self, works, scores)
        counts = (0,) * len(works) if observation is None else observation.num_observed
        for work, count in zip(works, counts, strict=True):
            if work.num_sampled_rows:
                seen.setdefault(work.request_id, []).append((work.num_sampled_rows, count))
        return observation

    monkeypatch.setattr(AttentionWatch, "ask", noted)
    return seen


@pytest.mark.parametrize("policy", SCORED)
@pytest.mark.parametrize("every", [None, 4])
def test_plain_rounds_are_not_observed(
    models: Models, policy: KvPolicyName, every: int | None, rounds: Rounds
) -> None:
    """But for the end of the prompt."""
    target = target_of(models, selecting(policy, 16, every=every), compiled=True)
    run_rounds(target, UNENDING["plain"], 0, num_plain=40)
    assert rounds == {RequestId("a"): [(1, MAX_WINDOW), *[(1, 0)] * 40]}


@pytest.mark.parametrize("policy", SCORED)
def test_what_others_have_drafted_is_not_observed(
    models: Models, policy: KvPolicyName, rounds: Rounds
) -> None:
    """Another of several drafters, or a lookup; and a grammar leaves nothing to be drafted here at all."""
    target = target_of(models, selecting(policy, 16, every=1), compiled=True)
    name, grammar = RequestId("a"), RequestId("b")
    tokens, _ = run_rounds(target, UNENDING["plain"], 0)
    work = TargetWork(name, (tokens[-1], 5, 6), len(tokens) - 1, 3, 20, ())
    target.run(TargetStep(1, (work,)))
    assert rounds == {name: [(1, MAX_WINDOW), (3, 0)]}
    constrained = msgspec.structs.replace(UNENDING["plain"], grammar=Grammar("regex"))
    work = TargetWork(grammar, tuple(LONG), 0, 1, 0, tuple(range(41, 61)), masks=(b"\xff" * 16,))
    target.run(TargetStep(2, (work,), (AdmittedSequence(grammar, 1, constrained),)))
    assert rounds[grammar] == [(1, 0)]


@pytest.mark.parametrize("policy", SCORED)
def test_control_rounds_with_drafts_are_observed(
    models: Models, policy: KvPolicyName, rounds: Rounds
) -> None:
    target = target_of(models, selecting(policy, 16, every=4), compiled=True)
    run_rounds(target, UNENDING["plain"], 7)
    assert sum(count > 0 for _, count in rounds[RequestId("a")]) > 2


@pytest.mark.parametrize("policy", SCORED)
def test_of_a_batch_those_without_drafts_are_not_observed(
    models: Models, streams: Streams, policy: KvPolicyName, rounds: Rounds
) -> None:
    """Requests that want none, and the last rounds of others, in which there is room for none."""
    expected = streams.alone("llama", "greedy", KINDS["greedy"])
    setting = SelfSetting(num_draft_tokens=4, batch=8, chunk=64, kv=selecting(policy, every=4))
    got: dict[RequestId, list[int]] = {}
    with setting.engine(models, "llama") as engine:
        for index, prompt in enumerate(PROMPTS):
            k = 0 if index % 2 else None
            engine.add_request(request(f"r{index}", prompt, KINDS["greedy"], num_draft_tokens=k))
        while engine.has_work:
            for output in engine.step():
                got.setdefault(output.request_id, []).extend(output.token_ids)
    for index, tokens in enumerate(expected):
        name = RequestId(f"r{index}")
        assert tuple(got[name]) == tokens
        (_, first), *later = rounds[name]
        assert first > 0, "the prompt"
        assert all(count == 0 for num_sampled, count in later if num_sampled == 1)
        if index % 2:
            assert not any(count for _, count in later)
    assert sum(count > 0 for of_one in rounds.values() for _, count in of_one[1:]) > len(PROMPTS)


@pytest.mark.parametrize("policy", SCORED)
def test_who_is_drafted_for_again_is_scored_at_once(
    sharp_models: Models, policy: KvPolicyName, rounds: Rounds
) -> None:
    """By the tokens of that round: those of the time without drafts nobody has looked at."""
    kv, name = selecting(policy, 16, every=8), RequestId("a")
    paused, resumed = (target_of(sharp_models, kv, compiled=True) for _ in range(2))
    alone, _ = run_rounds(paused, UNENDING["plain"], 0, num_plain=20)
    rounds.clear()
    tokens, _ = run_rounds(resumed, UNENDING["plain"], 1, num_plain=12)
    assert tokens == alone[: len(tokens)]
    assert rounds == {name: [(1, MAX_WINDOW), *[(1, 0)] * 12, (5, 5)]}
    masses = reference_masses(sharp_models, tokens[:-1])
    fresh = masses[len(LONG) + 12 :]
    if policy == "verified":
        before = reference_scores(masses[: len(LONG)])
        expected = DECAY ** np.arange(len(fresh))[::-1] @ fresh + DECAY ** (len(masses) - len(LONG)) * before
    else:
        expected = pooled(fresh.mean(0))
    np.testing.assert_allclose(scores_of(resumed).values, expected, rtol=1e-3, atol=1e-3)
    stale, latest = scores_of(paused).values, scores_of(resumed).values
    assert stale is not None
    assert latest is not None
    assert len(stale) < len(latest), "the control: they end with the prompt"


def test_sequences_of_a_batch_are_looked_at_together() -> None:
    """One that is due, and one that has waited for half of its time; not one that has just had its turn."""
    scores: list[BlockScores | None] = []
    for end in (20, 24, 27):
        of_one = RunningScores(8)
        of_one.learn(np.ones((1, 2), np.float32), end)
        scores.append(of_one)
    works = [TargetWork(RequestId(str(number)), (1, 2, 3), 27, 3, 0, ()) for number in range(3)]
    assert rows_to_observe(works, scores) == [3, 3, 0]
    assert rows_to_observe(works[1:], scores[1:]) == [0, 0], "nobody is due"
    assert rows_to_observe(works, [None, *scores[1:]]) == [0, 0, 0], "who is due has no drafts"


def scores_of_rank(group: RankGroup, config: EngineConfig) -> Any:
    """Values after some rounds, and the text."""
    target = build_target_part(config, group)
    tokens, _ = run_rounds(target, UNENDING["plain"], 5)
    return tokens, scores_of(target).values


def test_ranks_score_alike(sharp_models: Models, rank_pool: Pools) -> None:
    folder = sharp_models.load("llama").path
    config = config_of(folder, 2, method="self", kv={"policy": "verified", "budget": 16, "sink_tokens": 4})
    (tokens, first), (others, second) = rank_pool(2).run(scores_of_rank, config)
    assert tokens == others
    assert np.array_equal(first, second), "to the last bit"
    assert len(tokens) > len(LONG) + 5
    assert first.sum() > 0


def accepted_on_demo(policy: KvPolicyName, prompts: Sequence[Sequence[int]]) -> tuple[int, int, list[Any]]:
    config = EngineConfig(
        target=ModelConfig(model=str(DEMO), dtype="float32"),
        speculative_config=SpeculativeConfig.model_validate(
            {
                "method": "self",
                "controller": "fixed",
                "num_speculative_tokens": 4,
                "kv": {"policy": policy, "budget": 64},
            }
        ),
        cache=CacheConfig(block_size=16, num_blocks=700),
    )
    with Engine(config) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
        texts = [result.token_ids for result in engine.generate(prompts, params)]
        metrics = engine.metrics()
    return metrics.num_accepted_tokens, metrics.num_draft_tokens, texts


@pytest.mark.full
def test_verified_is_right_more_often_on_long_texts() -> None:
    """At the same budget, on the demo model: numbers of tokens, not times."""
    tokenizer = build_tokenizer(EngineConfig(target=ModelConfig(model=str(DEMO))))
    files = [Path(argparse.__file__).with_name(name) for name in ("argparse.py", "ast.py", "configparser.py")]
    prompts = [tuple(tokenizer.encode(file.read_text(encoding="utf-8"))[:2500]) for file in files]
    streamed, verified = (accepted_on_demo(one, prompts) for one in ("streaming", "verified"))
    assert verified[2] == streamed[2]
    assert verified[0] / verified[1] > streamed[0] / streamed[1]


@pytest.mark.parametrize("policy", SCORED)
def test_a_draft_model_cannot_bring_back_what_it_has_freed(policy: KvPolicyName) -> None:
    with pytest.raises(pydantic.ValidationError, match=rf"kv\.policy: {policy} needs method self"):
        SpeculativeConfig.model_validate({"method": "draft_model", "model": "m", "kv": {"policy": policy}})
