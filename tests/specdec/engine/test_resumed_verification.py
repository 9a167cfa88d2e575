"""Verification that goes on from what drafts have left behind the exit: as if it began anew, bit for bit.

Compared are two targets, of which one goes on and the other begins anew: tokens, log-probabilities, and
everything in the pool, rejected drafts included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.core.plan import TargetStep, TargetWork, WorkResult
from specdec.engine.build_target import build_target_part
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.kv.config import CacheConfig
from specdec.model.batch import Generated, SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.exit_states import ExitStates
from specdec.model.graphs import CompiledForward
from specdec.model.loader import load_model
from specdec.model.native_forward import NativeForward
from specdec.model.parallel.group import RankGroup
from specdec.model.resumed_forward import ResumedForward
from specdec.proposers.config import SpeculativeConfig
from tests.rank_pool import Pools
from tests.specdec.engine.mixed_rounds import CHUNK, NUM_BLOCKS, MixedRounds, assert_same_bits
from tests.specdec.engine.ranked_engines import config_of, folder_of
from tests.specdec.engine.sampling_kinds import KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models, SharpModels
from tests.specdec.engine.view_settings import ViewSetting

__all__ = ["folder_of"]
pytestmark = pytest.mark.usefixtures("one_thread")
RESUMING = ViewSetting(view="exit 2", num_blocks=NUM_BLOCKS, compiled=True)
ANEW = ViewSetting(view="exit 2", num_blocks=NUM_BLOCKS, compiled=True, resumes=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return SharpModels(tmp_path_factory.mktemp("models"))


def num_rejected(steps: Sequence[Sequence[WorkResult]]) -> int:
    return sum(
        drafted != told
        for answers in steps
        for answer in answers
        for drafted, told in zip(answer.drafted, answer.token_ids, strict=False)
    )


@pytest.mark.parametrize("wants_logits", [False, True], ids=["native", "python looks at logits"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mix_of_requests_is_verified_bit_for_bit(models: Models, dtype: Any, wants_logits: bool) -> None:
    loaded = load_model(ModelConfig(model=str(models.load("llama").path), dtype=dtype))
    resuming, anew = (
        MixedRounds(setting.target(loaded), wants_logits=wants_logits) for setting in (RESUMING, ANEW)
    )
    steps = resuming.run()
    assert steps == anew.run()
    assert_same_bits(resuming.pool(), anew.pool())
    assert num_rejected(steps) > 5


def test_control_a_wrong_state_is_noticed(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of one row, behind a draft token, by the least that there is."""
    loaded, of = models.load("llama"), ExitStates.of

    def wrong(states: ExitStates, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        rows = of(states, slices)
        rows[1, 0] = torch.nextafter(rows[1, 0], torch.tensor(torch.inf))
        return rows

    monkeypatch.setattr(ExitStates, "of", wrong)
    resuming, anew = (MixedRounds(setting.target(loaded)) for setting in (RESUMING, ANEW))
    resuming.run()
    anew.run()
    with pytest.raises(AssertionError):
        assert_same_bits(resuming.pool(), anew.pool())


def test_a_draft_token_without_values_ends_its_draft(models: Models) -> None:
    """It spoils rows before it, which are run again without a draft: there is nothing to go on from."""
    loaded = load_model(ModelConfig(model=str(models.load("llama").path), dtype="float32"))
    expected = MixedRounds(ANEW.target(loaded))
    steps = expected.run()
    committed = {token_id for one in expected.requests for token_id in one.token_ids}
    ended = {token_id for answers in steps for one in answers for token_id in one.drafted[:-1]} - committed
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[sorted(ended)] = torch.nan  # type: ignore[index,operator]
    resuming = MixedRounds(RESUMING.target(loaded))
    spoilt = resuming.run()
    assert any(one.error for answers in spoilt for one in answers)
    for mine, theirs in zip(resuming.requests, expected.requests, strict=True):
        same = min(len(mine.token_ids), len(theirs.token_ids))
        assert mine.token_ids[:same] == theirs.token_ids[:same]


# ------------------------------------------------------------------------------------- what is run


class Rows(NamedTuple):
    """Rows that each of a target's compiled forwards has run."""

    whole: int
    exit: int
    behind: int


class CountedRows:
    """Counts while a target works."""

    def __init__(self, target: LocalTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        assert target._self_drafter is not None
        whole, view = target.runner.graphs, target._resumed._view.graphs if target._resumed else None
        assert isinstance(whole, CompiledForward)
        assert isinstance(view, CompiledForward)
        self._forwards = (whole.native, view.native, target._resumed and target._resumed._forward)
        self._counts: Counter[int] = Counter()
        generate = NativeForward.generate

        def counted(
            forward: NativeForward,
            slices: Sequence[SequenceSlice],
            num_more: Sequence[int],
            *rest: Any,
        ) -> Generated:
            self._counts[id(forward)] += sum(len(piece.token_ids) for piece in slices) + sum(num_more)
            return generate(forward, slices, num_more, *rest)

        monkeypatch.setattr(NativeForward, "generate", counted)

    def take(self) -> Rows:
        """Return the rows since the last time."""
        rows = Rows(*(self._counts[id(forward)] for forward in self._forwards))
        self._counts.clear()
        return rows


def test_drafted_rows_are_not_run_again(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the first layers go the draft's rows, and those alone that it did not run."""
    target = RESUMING.target(models.load("llama"))
    rounds, rows = MixedRounds(target), CountedRows(target, monkeypatch)
    seen: list[TargetWork] = []
    run = target.run

    def noted(step: TargetStep) -> Any:
        seen[:] = step.works
        return run(step)

    monkeypatch.setattr(target, "run", noted)
    num_spared = 0
    for number in range(8):
        answers = rounds._step(number)
        num_rows = sum(len(work.token_ids) for work in seen)
        num_drafted = sum(len(answer.drafted) for answer in answers)
        # Of each row once: the last token of a draft is not run to draft.
        expected = Rows(0, num_rows + num_drafted, num_rows + num_drafted)
        if not num_drafted:
            expected = Rows(num_rows, 0, 0)
        assert rows.take() == expected
        num_spared += num_rows * (num_drafted > 0)
    assert num_spared > 3 * CHUNK


@pytest.mark.parametrize(
    ("changes", "resumes"),
    [
        ({}, True),
        ({"kv": {"policy": "streaming", "budget": 16}}, False),
        ({"kv": {"dtype": "int8"}}, False),
        ({"tree": {"shape": "dynamic"}}, False),
        ({"method": "self", "exit_layer": None}, False),
    ],
    ids=str,
)
def test_where_it_goes_on(models: Models, changes: dict[str, Any], resumes: bool) -> None:
    """An engine from a configuration: where drafts attend to everything, in chains."""
    block = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 4, "controller": "fixed"}
    config = EngineConfig(
        target=ModelConfig(model=str(models.load("llama").path), dtype="float32", compile=CompileConfig()),
        speculative_config=SpeculativeConfig.model_validate({**block, **changes}),
        cache=CacheConfig(block_size=4, num_blocks=80),
    )
    params = KINDS["plain"]
    with Engine(config) as engine:
        resumed = [work for work in engine.idle_work if isinstance(work, ResumedForward)]
        assert len(resumed) == resumes
        expected = [result.token_ids for result in engine.generate(PROMPTS, params)]
        engine.warm_up()
        for work in resumed:
            assert work.state == "ready"
            work.fewest_rows = 0
        # A second time prompts are found in the prefix cache.
        assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected
        assert engine.metrics().num_accepted_tokens > 0


# ------------------------------------------------------------------------------------- over ranks


class Verified(NamedTuple):
    """Of one rank."""

    state: str
    steps: list[tuple[WorkResult, ...]]
    pool: list[torch.Tensor]
    num_kept: int


def verify(group: RankGroup, config: EngineConfig, resumes: bool) -> Verified:
    target = build_target_part(config, group)
    resumed = target._resumed
    assert resumed is not None
    resumed.fewest_rows = 0
    if not resumes:
        target._resumed = None
    num_kept, keep = 0, ExitStates.keep

    def counted(states: ExitStates, slots: Sequence[int], rows: torch.Tensor) -> None:
        nonlocal num_kept
        num_kept += len(slots)
        keep(states, slots, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExitStates, "keep", counted)
        rounds = MixedRounds(target, wants_logits=True)
        return Verified(resumed.state, rounds.run(), rounds.pool(), num_kept)


def test_over_ranks(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    config = config_of(folder_of("llama"), 2, num_blocks=NUM_BLOCKS, method="layerskip", exit_layer=2)
    config = config.model_copy(
        update={"target": config.target.model_copy(update={"compile": CompileConfig()})}
    )
    pool = rank_pool(2)
    resuming: list[Verified] = pool.run(verify, config, True)
    anew: list[Verified] = pool.run(verify, config, False)
    assert [one.state for one in resuming] == ["ready", "ready"]
    assert all(one.num_kept > 100 for one in resuming)
    assert all(one.num_kept == 0 for one in anew)
    for mine, expected in zip(resuming, anew, strict=True):
        assert mine.steps == expected.steps
        assert_same_bits(mine.pool, expected.pool)
