"""Guarantee B with trees, on real (tiny, random, fp32) models: as in `test_identity`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec.core.plan import SlotMove
from specdec.core.sampling_params import SamplingParams
from specdec.model.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree
from tests.architectures import ARCHITECTURES, CORE_ARCHITECTURES, VOCAB_SIZE, save_model
from tests.rank_pool import Pools
from tests.specdec.engine import ranked_engines
from tests.specdec.engine.identity_settings import Setting, alone, check_greedy, check_sampled, taking_turns
from tests.specdec.engine.sampling_kinds import SAMPLING, SHAPING
from tests.specdec.engine.tiny_models import Models, ragged_prompts
from tests.specdec.engine.tree_drafters import Bushy


class BushySetting(Setting):
    """Drafts are scattered over trees of twice as many nodes."""

    def proposer(self, models: Models, architecture: str) -> Proposer:
        return Bushy(super().proposer(models, architecture), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


SHAPES: dict[str, TreeShape] = {
    "static": StaticTree.of_widths([4, 2, 1], (0.5, 0.2, 0.1)),
    "dynamic": DynamicTree(top_k=3, depth=5),
}


@dataclass(frozen=True)
class TreeSetting(Setting):
    """A draft model drafts trees."""

    shape: str = "dynamic"

    def proposer(self, models: Models, architecture: str) -> Proposer:
        same = self.drafter == "same model"
        loaded = models.load(architecture) if same else models.load("llama", 1)
        runner = self.runner(loaded, self.num_blocks)
        return TreeDraftProposer(
            runner,
            DraftChoice(sampler=self.sampler(), vocab_size=VOCAB_SIZE, eos_token_ids=loaded.eos_token_ids),
            SHAPES[self.shape],
            reading=DraftReading(max_read_tokens=max(self.chunk, 8), rotary=loaded.rotary),
            generating=runner if self.compiled else None,
        )


DRAFTED = [
    TreeSetting("same model", num_draft_tokens=10, batch=5, shape="static"),
    TreeSetting("other model", num_draft_tokens=16, batch=8, chunk=32, num_blocks=24),
    TreeSetting("same model", num_draft_tokens=12, batch=8, chunk=32, num_blocks=24, compiled=True),
]


@pytest.mark.parametrize("setting", DRAFTED, ids=str)
@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ARCHITECTURES if name != "llama")],
)
def test_draft_models_with_trees_change_no_greedy_token(
    models: Models, architecture: str, setting: TreeSetting
) -> None:
    metrics = check_greedy(models, architecture, setting).metrics()
    if setting.drafter == "same model":
        assert metrics.num_accepted_tokens > metrics.num_drafts > 0  # its first token stands, and more


@pytest.mark.parametrize("setting", DRAFTED, ids=str)
def test_draft_models_with_trees_change_no_sampled_token(models: Models, setting: TreeSetting) -> None:
    check_sampled(models, "llama", setting, SAMPLING["cut"])


@pytest.mark.full
@pytest.mark.parametrize("kind", [*SAMPLING, *SHAPING])
@pytest.mark.parametrize("setting", DRAFTED, ids=str)
def test_draft_models_with_trees_change_no_token_of_any_kind(
    models: Models, kind: str, setting: TreeSetting
) -> None:
    check_sampled(models, "llama", setting, {**SAMPLING, **SHAPING}[kind])


COVER = [
    BushySetting("ngram", num_draft_tokens=6, batch=12, num_blocks=30),
    BushySetting("same model", num_draft_tokens=12, batch=4, chunk=32),
    BushySetting("same model", num_draft_tokens=9, batch=8, chunk=32, num_blocks=19, compiled=True),
    BushySetting("other model", num_draft_tokens=16, batch=5, compiled=True),
]


@pytest.mark.parametrize(("architecture", "setting"), taking_turns(CORE_ARCHITECTURES[:2], COVER), ids=str)
def test_greedy_equals_transformers(models: Models, architecture: str, setting: Setting) -> None:
    """With chunks of prompts, sliding windows, and preemption where blocks are few."""
    metrics = check_greedy(models, architecture, setting).metrics()
    if setting.drafter == "same model":
        assert metrics.num_moved_kv > 0
    if setting.num_blocks == 19:
        assert metrics.num_preemptions > 0


def mostly_full(kinds: Iterable[str], *quick: str) -> list[Any]:
    """All kinds, those that are not named in the long run only."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.full) for kind in kinds]


@pytest.mark.parametrize("kind", mostly_full(SAMPLING, "cut"))
@pytest.mark.parametrize("compiled", [False, True])
def test_sampled_tokens_are_those_without_trees(models: Models, kind: str, compiled: bool) -> None:
    setting = BushySetting("same model", num_draft_tokens=10, batch=5, compiled=compiled)
    check_sampled(models, "llama", setting, SAMPLING[kind])


@pytest.mark.parametrize("kind", mostly_full(SHAPING, "penalties", "bad words"))
def test_every_row_is_shaped_by_its_own_path(models: Models, kind: str) -> None:
    setting = BushySetting("same model", num_draft_tokens=8, batch=4)
    check_sampled(models, "llama", setting, SHAPING[kind])


def test_logprobs_are_those_without_trees(models: Models) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=1, logprobs=3)
    prompts = ragged_prompts(4)
    found = []
    for setting in (Setting("none", batch=4), BushySetting("same model", num_draft_tokens=10, batch=4)):
        with setting.engine(models, "llama") as engine:
            results = engine.generate(prompts, params)
        found.append([one for result in results for one in result.choices[0].logprobs or ()])
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_id == theirs.token_id
        assert math.isclose(ours.logprob, theirs.logprob, abs_tol=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("setting", COVER, ids=str)
def test_greedy_equals_transformers_for_every_architecture(
    models: Models, architecture: str, setting: Setting
) -> None:
    check_greedy(models, architecture, setting)


@pytest.mark.parametrize("compiled", [False, True])
def test_control_moves_left_out_show(models: Models, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ragged_prompts(8, seed=1)
    params = SAMPLING["plain"]
    expected = [alone(models, "llama", prompt, params) for prompt in prompts]

    def ignore(runner: ModelRunner, moves: Sequence[SlotMove]) -> None:
        assert moves

    monkeypatch.setattr(ModelRunner, "move_slots", ignore)
    setting = BushySetting("same model", num_draft_tokens=10, batch=8, compiled=compiled)
    with setting.engine(models, "llama") as engine:
        results = engine.generate(prompts, params)
    assert [result.token_ids for result in results] != expected


@pytest.mark.parametrize("stages", [1, 2], ids=["tensor parallel", "pipeline"])
@pytest.mark.parametrize("num_blocks", [60, pytest.param(24, marks=pytest.mark.full)])
def test_same_tokens_over_ranks(rank_pool: Pools, tmp_path: Path, stages: int, num_blocks: int) -> None:
    """Every rank and stage moves its part of K and V."""
    save_model(tmp_path)
    answer = ranked_engines.check(
        rank_pool(2),
        tmp_path,
        [ranked_engines.PLAIN, ranked_engines.SHAPED],
        method="draft_model",
        stages=stages,
        num_blocks=num_blocks,
        has_trees=True,
    )
    assert answer.num_moved_kv > 0
