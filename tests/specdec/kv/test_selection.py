"""KV selection: what is selected, budgets, and settings that cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specdec.kv.block_scores import RunningScores
from specdec.kv.block_table import num_blocks_for
from specdec.kv.selection import (
    FullSelection,
    KvBudget,
    KvSelectionConfig,
    ScoredSelection,
    Selection,
    StreamingSelection,
    budgets_of,
)


def _streaming(
    budget: int | float, *, sink: int = 4, block_size: int = 4, floor: int = 8
) -> StreamingSelection:
    return StreamingSelection(KvBudget(budget, floor), sink_tokens=sink, block_size=block_size)


def test_full_selects_everything() -> None:
    assert FullSelection(4).select(9) == Selection(range(3), 0)
    assert FullSelection(4).select(0).table([7, 8]) == [7, 8]


def test_streaming_keeps_the_sink_and_rolls_the_window() -> None:
    policy = _streaming(12)
    assert list(policy.select(12).blocks) == [0, 1, 2]
    # 8 recent tokens: 12 .. 19 are blocks 3 and 4; 13 .. 20 begin in block 3 too.
    assert policy.select(20) == Selection((0, 3, 4), 8)
    assert policy.select(21) == Selection((0, 3, 4, 5), 8)
    assert policy.select(24) == Selection((0, 4, 5), 12)


def test_table_appends_the_blocks_of_tokens_to_come() -> None:
    assert _streaming(12).select(20).table([10, 11, 12, 13, 14, 15, 16]) == [10, 13, 14, 15, 16]


def test_without_a_sink_only_the_window_is_left() -> None:
    assert _streaming(8, sink=0).select(20) == Selection((3, 4), 12)


def test_the_block_of_the_last_token_is_always_selected() -> None:
    assert _streaming(4, sink=4).select(20) == Selection((0, 4), 12)


@given(
    num_tokens=st.integers(0, 3_000),
    budget=st.one_of(st.integers(1, 3_500), st.floats(0.01, 1.0)),
    sink=st.integers(0, 70),
    block_size=st.sampled_from([1, 4, 16, 64]),
)
def test_properties_of_streaming(num_tokens: int, budget: int | float, sink: int, block_size: int) -> None:
    limit = KvBudget(budget, 32)
    blocks, num_dropped = _streaming(budget, sink=sink, block_size=block_size, floor=32).select(num_tokens)
    num_blocks = num_blocks_for(num_tokens, block_size)
    assert list(blocks) == sorted(set(blocks))
    assert num_dropped == (num_blocks - len(blocks)) * block_size
    assert num_tokens - num_dropped >= min(num_tokens, limit.tokens(num_tokens))
    if limit.tokens(num_tokens) > sink:
        assert num_tokens - num_dropped < limit.tokens(num_tokens) + 2 * block_size
    if num_blocks:
        assert blocks[-1] == num_blocks - 1
        assert set(range(min(num_blocks, num_blocks_for(sink, block_size)))) <= set(blocks)
    if limit.tokens(num_tokens) >= num_tokens:
        assert (list(blocks), num_dropped) == (list(range(num_blocks)), 0)


def test_budget_as_share_has_a_floor() -> None:
    budget = KvBudget(0.05, 256)
    assert [budget.tokens(length) for length in (10, 5_120, 10_000)] == [256, 256, 500]
    assert KvBudget(512, 256).tokens(100_000) == 512


@pytest.mark.parametrize(("written", "meant"), [("5%", 0.05), (0.1, 0.1), (512, 512), (" 100 % ", 1.0)])
def test_budget_is_tokens_or_a_share(written: Any, meant: float) -> None:
    budget = KvSelectionConfig(policy="streaming", budget=written).budget
    assert budget == pytest.approx(meant)
    assert type(budget) is type(meant)


def test_a_configuration_read_again_is_the_same() -> None:
    config = KvSelectionConfig(policy="streaming", budget=512)
    assert KvSelectionConfig.model_validate_json(config.model_dump_json()) == config
    assert isinstance(KvSelectionConfig.model_validate_json(config.model_dump_json()).budget, int)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0}, "budget: 0 tokens"),
        ({"budget": 1.5}, "budget: 1.5 is no share"),
        ({"budget": 0.0}, "budget: 0.0 is no share"),
        ({"budget": "some"}, "budget: 'some'"),
        ({"budget": "x%"}, "budget: 'x%'"),
        ({"budget": True}, "budget: must be a number of tokens"),
        ({"budget": [64, True]}, "budget: must be a number of tokens"),
        ({"budget": None}, "budget: must be a number of tokens"),
        ({"budget": {"tokens": 64}}, "budget: must be a number of tokens"),
        ({"budget": float("nan")}, "budget: nan is no share"),
        ({"budget": float("inf")}, "budget: inf is no share"),
        ({"policy": "quest"}, "policy"),
        ({"sink": 4}, "sink"),
        ({"floor": 0}, "floor"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KvSelectionConfig.model_validate({"policy": "streaming", **settings})


@pytest.mark.parametrize(
    ("settings", "name"), [({"budget": 7}, "kv.budget: 7"), ({"budget": 0.5, "floor": 7}, "kv.floor: 7")]
)
def test_budget_below_sink_plus_k_is_refused(settings: dict[str, Any], name: str) -> None:
    config = KvSelectionConfig(policy="streaming", sink_tokens=4, **settings)
    config.require_room(3)
    with pytest.raises(ValueError, match=f"{name} .*at least 8"):
        config.require_room(4)


@pytest.mark.parametrize("written", [10**23, [64, 10**23]])
def test_a_budget_beyond_all_texts_fits_a_message(written: Any) -> None:
    config = KvSelectionConfig(policy="streaming", budget=written)
    assert config.budgets[-1].tokens(100) == 1 << 32
    assert len(msgspec.msgpack.encode(config.budgets[-1].tokens(100))) < 10


def test_a_budget_beyond_all_texts_that_was_not_read_fits_a_message_too() -> None:
    """That of a request, or of `Engine.set_kv_budget`, comes as a number; a floor counts with any share."""
    budgets = budgets_of(KvSelectionConfig(policy="streaming", budget=64, floor=10**30), 4)
    assert budgets is not None
    budgets.set_default(10**30)
    for own in (None, 10**30, 0.5):
        assert budgets.tokens(own, 5) == 1 << 32


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ()),
        ({"budget": 0.05, "floor": 256, "sink_tokens": 4}, ()),
        ({"budget": 512}, ("budget",)),
        ({"floor": 8, "sink_tokens": 0}, ("floor", "sink_tokens")),
        ({"policy": "streaming", "budget": 512, "floor": 8}, ()),
    ],
)
def test_what_counts_for_nothing_without_a_policy(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert KvSelectionConfig.model_validate(settings).unheeded == names


def test_full_needs_no_budget() -> None:
    KvSelectionConfig(policy="full", budget=1).require_room(64)


def test_make() -> None:
    config = KvSelectionConfig(policy="streaming", budget=8, sink_tokens=4)
    assert list(config.make(4).select(40).blocks) == [0, 9]
    assert list(KvSelectionConfig().make(4).select(40).blocks) == list(range(10))


def _scores(values: Sequence[float]) -> RunningScores:
    scores = RunningScores(1)
    scores.learn(np.array([values], np.float32), 4 * len(values))
    return scores


def _scored(budget: int | float, *, sink: int = 4, block_size: int = 4, floor: int = 8) -> ScoredSelection:
    streaming = _streaming(budget, sink=sink, block_size=block_size, floor=floor)
    return ScoredSelection(streaming, lambda: RunningScores(1))


def test_blocks_of_the_highest_scores_are_selected() -> None:
    policy = _scored(24)
    scores = _scores([0, 1, 9, 2, 8, 3, 7, 4, 0, 0])
    # As many as streaming takes: the sink, two of the window, three between them, before two gaps and more.
    assert policy.select(40, scores) == Selection((0, 2, 4, 6, 8, 9), 16)
    assert policy.select(40) == _streaming(24).select(40) == Selection((0, 5, 6, 7, 8, 9), 16)
    assert policy.select(40, RunningScores(1)) == policy.select(40), "nothing is known yet"
    assert policy.select(40, scores).table(range(10, 22)) == [10, 12, 14, 16, 18, 19, 20, 21]


def test_young_blocks_come_first_and_ties_go_to_the_later_one() -> None:
    assert _scored(20).select(40, _scores([9, 9, 9, 9])).blocks == (0, 6, 7, 8, 9)
    assert _scored(20).select(40, _scores([5.0] * 10)).blocks == (0, 6, 7, 8, 9)
    assert _scored(20).select(40, _scores([5.0] * 7)).blocks == (0, 6, 7, 8, 9)


@given(
    num_tokens=st.integers(0, 1_000),
    budget=st.one_of(st.integers(1, 1_200), st.floats(0.01, 1.0)),
    sink=st.integers(0, 70),
    block_size=st.sampled_from([1, 4, 16, 64]),
    num_known=st.integers(0, 1_000),
    seed=st.integers(0, 3),
)
def test_properties_of_scored(
    num_tokens: int, budget: int | float, sink: int, block_size: int, num_known: int, seed: int
) -> None:
    """It costs what streaming costs, and has what streaming must have."""
    num_blocks = num_blocks_for(num_tokens, block_size)
    known = np.random.default_rng(seed).random(min(num_known, num_blocks)).tolist()
    streamed = _streaming(budget, sink=sink, block_size=block_size, floor=32).select(num_tokens)
    selected = _scored(budget, sink=sink, block_size=block_size, floor=32).select(num_tokens, _scores(known))
    assert selected.num_dropped == streamed.num_dropped
    assert len(selected.blocks) == len(streamed.blocks)
    assert list(selected.blocks) == sorted(set(selected.blocks))
    if num_blocks:
        assert selected.blocks[-1] == num_blocks - 1
        assert set(range(min(num_blocks, num_blocks_for(sink, block_size)))) <= set(selected.blocks)


@pytest.mark.parametrize("policy", ["full", "streaming"])
def test_only_scores_are_made_anew(policy: str) -> None:
    with pytest.raises(ValidationError, match=f"rescore_every: policy {policy} scores nothing"):
        KvSelectionConfig.model_validate({"policy": policy, "rescore_every": 8})
    assert KvSelectionConfig.model_validate({"policy": policy}).make(4).make_scores() is None


@pytest.mark.parametrize("policy", ["snapkv", "verified"])
def test_settings_of_scores(policy: str) -> None:
    for settings in ({}, {"rescore_every": 8}):
        config = KvSelectionConfig.model_validate({"policy": policy, "budget": 64, **settings})
        assert KvSelectionConfig.model_validate_json(config.model_dump_json()) == config
        assert config.make(4).make_scores() is not None
    with pytest.raises(ValidationError, match="rescore_every"):
        KvSelectionConfig.model_validate({"policy": policy, "rescore_every": 0})
