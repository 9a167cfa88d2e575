"""`speculative_config.drafters`: what goes together, and what is said where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specdec.core.ids import RequestId
from specdec.engine.build import kv_budgets_of
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import controller_for, drafters_of
from specdec.kv.selection import KvSelectionConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.scheduling.speculation.goodput_controller import GoodputController

LOOKUP = {"name": "lookup", "method": "ngram", "prompt_lookup_min": 3}
MODEL = {"name": "small", "method": "draft_model", "model": "/models/small", "num_speculative_tokens": 3}
WINDOW = {"name": "window", "method": "self", "kv": {"policy": "streaming", "budget": 256}}
HEADS = {"name": "heads", "method": "eagle3", "model": "/models/heads"}
STREAMING = {"policy": "streaming", "budget": 256}


def several(*drafters: dict[str, Any], **more: Any) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate({"method": "several", "drafters": list(drafters)} | more)


def test_each_is_configured_as_if_it_were_alone() -> None:
    config = several(
        LOOKUP, MODEL, WINDOW, {**MODEL, "name": "next", "shadow": 0.1}, num_speculative_tokens=6
    )
    lookup, small, window = config.choices
    assert (lookup.method, lookup.prompt_lookup_min, lookup.num_speculative_tokens) == ("ngram", 3, 6)
    assert (small.model, small.num_speculative_tokens) == ("/models/small", 3)
    assert small == SpeculativeConfig(method="draft_model", model="/models/small", num_speculative_tokens=3)
    assert window.kv.token_budget.amount == 256
    assert config.at_target == window
    assert (config.budgeted_choice, several(LOOKUP, MODEL).budgeted_choice) == (2, None)
    bounded = several(LOOKUP, {**MODEL, "kv": STREAMING}, HEADS)
    assert bounded.budgeted_choice == 1
    assert bounded.choices[1].kv.token_budget.amount == 256
    assert [one.method for one in config.every_drafter] == ["ngram", "draft_model", "self", "draft_model"]
    assert several(LOOKUP, MODEL).at_target.method == "ngram"
    heads = several(LOOKUP, {**HEADS, "kv": STREAMING, "max_model_len": 512}).at_target
    assert (heads.method, heads.kv.token_budget.amount, heads.max_model_len) == ("eagle3", 256, 512)
    drafters = drafters_of(config)
    assert drafters is not None
    assert drafters.names == ("lookup", "small", "window")
    assert SpeculativeConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("drafter", [WINDOW, MODEL, HEADS], ids=["target", "draft model", "heads"])
def test_one_of_several_may_have_a_list_of_budgets(drafter: dict[str, Any]) -> None:
    bounded = {**drafter, "kv": {"policy": "streaming", "budget": [256, "10%"]}}
    config = several(LOOKUP, bounded, *([MODEL] if drafter is WINDOW else []))
    assert [one.amount for one in config.choices[1].kv.budgets] == [256, 0.1]
    assert config.budgeted_choice == 1
    assert SpeculativeConfig.model_validate(config.model_dump()) == config
    engine = EngineConfig.model_validate(
        {"target": {"model": "/models/target"}, "speculative_config": config}
    )
    controller = controller_for(engine, assumed_profile())
    assert isinstance(controller, GoodputController)
    assert controller.pick_kv_budget is not None
    new = RequestId("new")
    assert controller.pick_kv_budget(new, "other").amount == 256, "the first where nothing is known"
    settings = controller._settings
    assert (settings.budgeted_drafter, settings.keeps_kv_budgets) == (1, drafter is not WINDOW)
    budgets = kv_budgets_of(config)
    assert budgets is not None
    assert budgets.drafter == drafter["name"]


def test_one_choice_beside_a_shadow_drafts_no_more_than_it_may() -> None:
    config = several(
        {**LOOKUP, "num_speculative_tokens": 2}, {**MODEL, "shadow": 0.1}, num_speculative_tokens=6
    )
    engine = EngineConfig.model_validate(
        {"target": {"model": "/models/target"}, "speculative_config": config}
    )
    controller = controller_for(engine, assumed_profile())
    assert isinstance(controller, GoodputController)
    assert controller._settings.max_draft_tokens == 2


def test_one_alone_is_what_it_was() -> None:
    config = SpeculativeConfig(method="ngram")
    assert config.budgeted_choice is None
    assert SpeculativeConfig(method="self", kv=KvSelectionConfig(policy="streaming")).budgeted_choice == 0
    assert config.choices == config.every_drafter == (config,)
    assert config.at_target is config
    assert drafters_of(config) is None


def test_what_samples_shares_the_rule_and_its_settings() -> None:
    config = several(LOOKUP, MODEL, rejection_sample_method="block", draft_top_k=64)
    assert [one.rejection_sample_method for one in config.choices] == ["block", "block"]
    assert [one.draft_top_k for one in config.choices] == [1024, 64]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"method": "several"}, "method several needs `drafters`"),
        ({"method": "ngram", "drafters": [LOOKUP]}, "no other method takes it"),
        ({"drafters": [LOOKUP, LOOKUP]}, "the name lookup is there twice"),
        ({"drafters": [{**LOOKUP, "shadow": 0.5}]}, "all of them are shadows"),
        (
            {"drafters": [{**LOOKUP, "name": f"n{index}"} for index in range(5)]},
            "5 to choose from are too many: give at most 4",
        ),
        (
            {"drafters": [WINDOW, HEADS]},
            "window and heads draft in the target's step, where there is place for heads, several",
        ),
        (
            {"drafters": [{**LOOKUP, "share": 0.7}, {**MODEL, "share": 0.6}]},
            "shares add up to 1.3, more than all requests",
        ),
        (
            {"drafters": [LOOKUP, {**MODEL, "share": 0.5, "shadow": 0.5}]},
            r"drafters\[1\] \(small\): no request gets a shadow: leave out share or shadow",
        ),
        ({"drafters": [LOOKUP, {**HEADS, "shadow": 0.5}]}, "shadow: eagle3 drafts only what is verified"),
        (
            {"drafters": [LOOKUP, {**MODEL, "num_speculative_tokens": 9}]},
            r"drafters\[1\] \(small\): num_speculative_tokens: 9 is more than the 4",
        ),
        (
            {"drafters": [LOOKUP, {**MODEL, "shadow": 0.1, "kv": {**STREAMING, "budget": [256, 512]}}]},
            r"drafters\[1\] \(small\): kv.budget: no request gets a shadow, .* give it one",
        ),
        (
            {"drafters": [LOOKUP, {**WINDOW, "kv": {**STREAMING, "budget": [256, 7]}}]},
            r"drafters\[1\] \(window\): kv.budget: 7 tokens do not hold kv.sink_tokens",
        ),
        (
            {"drafters": [LOOKUP, {**WINDOW, "kv": {**STREAMING, "budget": [256, 256]}}]},
            "budget: a list takes one or more budgets, all of them different",
        ),
        (
            {"drafters": [{**MODEL, "kv": {**STREAMING, "budget": [256, 512]}}, WINDOW]},
            "drafters: small and window each attend to a part of the K/V .* leave out kv of all but one",
        ),
        (
            {"drafters": [{**MODEL, "kv": STREAMING}, WINDOW]},
            "drafters: small and window each attend to a part of the K/V .* leave out kv of all but one",
        ),
        (
            {"drafters": [LOOKUP, {**MODEL, "kv": {**STREAMING, "policy": "snapkv"}}]},
            r"drafters\[1\] \(small\): kv.policy: snapkv needs method self",
        ),
        (
            {"drafters": [LOOKUP, {**HEADS, "method": "medusa", "kv": STREAMING}]},
            r"drafters\[1\] \(heads\): kv.policy: streaming .* method medusa has none: leave out kv",
        ),
        ({"drafters": [LOOKUP, {**HEADS, "kv": {**STREAMING, "policy": "verified"}}]}, "needs method self"),
        (
            {"drafters": [LOOKUP, {**HEADS, "method": "medusa", "max_model_len": 512}]},
            r"drafters\[1\] \(heads\): max_model_len: 512 is about .* method medusa has no such limit",
        ),
        (
            {"drafters": [{**LOOKUP, "prompt_lookup_max": 2}]},
            r"drafters\[0\] \(lookup\): prompt_lookup_min \(3\) must not exceed",
        ),
        (
            {"drafters": [LOOKUP, WINDOW], "rejection_sample_method": "rejection"},
            r"drafters\[1\] \(window\): rejection_sample_method: rejection does not go with method self",
        ),
        (
            {"drafters": [LOOKUP, {**MODEL, "shadow": 0.1}], "rejection_sample_method": "block"},
            "write that",
        ),
        ({"drafters": [LOOKUP], "overlap": "draft_ahead"}, "method several has none: leave out overlap"),
        ({"drafters": [{"name": "x", "method": "lookahead"}]}, "lookahead"),
        ({"drafters": [{**LOOKUP, "model": "/models/small"}]}, "Extra inputs are not permitted"),
        ({"drafters": [LOOKUP], "model": "/models/small"}, "method several takes no `model`"),
    ],
)
def test_what_does_not_go_together(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        SpeculativeConfig.model_validate({"method": "several"} | config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float16"),
        ("device", "cpu"),
        ("num_threads", 2),
        ("compile", {"mode": "off"}),
        ("cache", {"num_blocks": 5}),
        ("kv", STREAMING),
        ("prompt_lookup_min", 1),
        ("prompt_lookup_max", 9),
        ("max_model_len", 64),
        ("trust_remote_code", True),
    ],
)
def test_what_is_of_one_drafter_is_not_written_beside_them(key: str, value: Any) -> None:
    """It would be ignored."""
    with pytest.raises(ValidationError, match=rf"{key}.* write it with those of `drafters`"):
        several(LOOKUP, MODEL, **{key: value})
    defaults = SpeculativeConfig().model_dump()
    assert several(LOOKUP, MODEL, **{key: defaults[key]}) == several(LOOKUP, MODEL)


def test_heads_are_compiled_as_their_entry_says() -> None:
    config = several(LOOKUP, {**HEADS, "compile": {"mode": "off"}})
    assert config.at_target.compile.mode == "off"
    assert several(LOOKUP, HEADS).at_target == SpeculativeConfig(method="eagle3", model="/models/heads")


def test_what_the_target_cannot_do_names_the_drafter() -> None:
    target = {"model": "/models/target", "pipeline_parallel_size": 2}
    with pytest.raises(ValidationError, match=r"drafters\[1\] \(window\): .*pipeline_parallel_size: 2 yet"):
        EngineConfig.model_validate({"target": target, "speculative_config": several(LOOKUP, WINDOW)})


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    from deploy.config_file import load_config

    file = tmp_path / "several.yaml"
    file.write_text(
        "target: {model: target}\n"
        "speculative_config:\n"
        "  method: several\n"
        "  drafters:\n"
        "    - {name: lookup, method: ngram}\n"
        "    - {name: small, method: draft_model, model: ../draft}\n"
    )
    small = load_config(file).speculative_config.choices[1]
    assert small.model == str((tmp_path / "../draft").resolve())


def test_pickled_weights_are_allowed_for_all_heads_or_none() -> None:
    for allowed in (False, True):
        config = several(LOOKUP, HEADS, allow_pickled_weights=allowed)
        assert [one.allow_pickled_weights for one in config.every_drafter] == [allowed] * 2
