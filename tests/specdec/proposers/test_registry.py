"""Proposers by name, and draft models that do not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.pool_drafter import capabilities_in_pool
from specdec.core.errors import CheckpointError, ConfigError
from specdec.kv.selection import KvSelectionConfig
from specdec.proposers.config import SELF_METHODS, SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_model_factory import draft_model_config, load_draft_model
from specdec.proposers.draft_window import draft_window
from specdec.proposers.registry import FACTORIES, create_proposer
from specdec.proposers.target_facts import TargetFacts
from specdec.proposers.tree_config import tree_shape
from specdec.tree.growth import levels_of
from tests.architectures import VOCAB_SIZE, make_tokenizer, save_model
from tests.specdec.proposers.contract import ProposerContract, view

CONTRACTS: Mapping[str, str] = {
    "none": "test_none.TestNoProposer",
    "ngram": "test_ngram.TestNgramProposer",
    "suffix": "test_suffix.TestSuffixContract",
    "retrieval": "test_retrieval.TestRetrievalContract",
    "lookahead": "lookahead.test_proposer.TestLookaheadProposer",
    "draft_model": "test_draft_model.TestDraftModelProposer",
    "medusa": "test_heads.TestMedusa",
    "hydra": "test_heads.TestHydra",
    "parallel_heads": "test_heads.TestParallelHeads",
    "eagle": "test_features.TestEagle",
    "eagle3": "test_features.TestEagle3",
    "mtp": "test_features.TestMtp",
}
"""By method, who takes its proposer through the contract suite: a class of tests below this folder."""
WITHOUT_CONTRACT = {*SELF_METHODS, "several"}
"""The target drafts, in its own step; and each of several is a proposer of those above."""
TARGET = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4)


def test_every_method_of_the_configuration_has_a_proposer() -> None:
    methods = SpeculativeConfig.model_json_schema()["properties"]["method"]["enum"]
    assert set(methods) == set(FACTORIES)


def test_every_proposer_keeps_the_contract() -> None:
    assert set(CONTRACTS) | WITHOUT_CONTRACT == set(FACTORIES)
    assert not set(CONTRACTS) & WITHOUT_CONTRACT
    for suite in CONTRACTS.values():
        module, _, name = suite.rpartition(".")
        kept_by = getattr(import_module(f"tests.specdec.proposers.{module}"), name)
        assert issubclass(kept_by, ProposerContract)


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_method_names_its_proposer(method: str) -> None:
    config = SpeculativeConfig.model_validate({"method": method})
    assert create_proposer(config, TARGET).capabilities.name == method


def test_unknown_method() -> None:
    config = SpeculativeConfig().model_copy(update={"method": "crystal_ball"})
    with pytest.raises(ConfigError, match=r"no 'crystal_ball'; known are draft_model, .*ngram"):
        create_proposer(config, TARGET)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rejection_sample_method": "typical"}, "typical is lossy.*write allow_lossy: true"),
        (
            {"rejection_sample_method": "typical", "allow_lossy": True, "method": "none"},
            "method none drafts nothing that typical could verify",
        ),
        (
            {"rejection_sample_method": "block", "posterior_alpha": 0.3},
            "posterior_alpha is of the rule typical: leave it out with block",
        ),
        (
            {"rejection_sample_method": "typical", "allow_lossy": True, "posterior_threshold": 2.0},
            "less than or equal to 1",
        ),
        ({"rejection_sample_method": "standard"}, "there is no 'standard' here; write 'rejection'"),
        ({"rejection_sample_method": "synthetic"}, "no 'synthetic' here; write synthetic_acceptance in its"),
        ({"rejection_sample_method": "coin"}, "Input should be 'sample_and_match', 'rejection', 'block'"),
        ({"rejection_sample_method": ["block"]}, "Input should be 'sample_and_match', 'rejection', 'block'"),
        ({"rejection_sample_method": {}}, "Input should be 'sample_and_match', 'rejection', 'block'"),
        ({"draft_top_k": 9}, "method ngram samples nothing: leave out draft_top_k"),
        (
            {"draft_top_k": 9, "method": "draft_model", "model": "m"},
            "sample_and_match needs no probabilities of drafts",
        ),
    ],
)
def test_contradictions_about_the_rule(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("revision", "main", "a model is a folder here, of one revision: write its path as `model`"),
        ("kv_cache_dtype", "fp8", "K/V in the numbers that it runs in: leave it out"),
        ("draft_sample_method", "greedy", "rejection_sample_method says how drafts are sampled, too: leave"),
        ("synthetic_acceptance_length", 2.5, "write synthetic_acceptance, with the acceptance at each"),
    ],
)
def test_keys_that_other_engines_have_are_explained(key: str, value: object, hint: str) -> None:
    with pytest.raises(ValidationError, match=f"there is no key {key} here; .*{hint}"):
        SpeculativeConfig.model_validate({"method": "draft_model", "model": "m", key: value})


TREE = {"method": "draft_model", "model": "m", "num_speculative_tokens": 8}
DYNAMIC = {"shape": "dynamic", "top_k": 3, "depth": 4}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tree": {"shape": "bush"}}, "(?s)tree.*'chain', 'static', 'dynamic', 'entropy'"),
        ({"tree": {"shape": "static"}}, "static needs one of paths, widths and acceptance"),
        ({"tree": {"shape": "static", "widths": [2], "paths": [[0]]}}, "one of paths, widths and acceptance"),
        ({"tree": {"shape": "static", "widths": [8, 8]}}, r"widths: \[8, 8\] make more than 64 nodes"),
        (
            {"tree": {"shape": "static", "paths": [[0], [0, 1]]}},
            r"paths: path \[0, 1\] comes before \[0, 0\], or without it",
        ),
        ({"tree": {"shape": "dynamic", "widths": [2]}}, "tree.dynamic.widths"),
        ({"tree": DYNAMIC, "method": "ngram", "model": None}, "dynamic is .* method ngram has neither"),
        ({"tree": {"shape": "entropy", "least_confidence": 0.0}}, "(?s)least_confidence.*greater than 0"),
        (
            {"tree": {"shape": "entropy", "top_k": 2, "depth": 1}},
            "shape: entropy has 2 nodes at most, fewer than num_speculative_tokens: 8",
        ),
        ({"tree": DYNAMIC, "rejection_sample_method": "block"}, "block takes chains: write sample_and_match"),
        (
            {"tree": {"shape": "static", "widths": [4]}},
            "4 nodes at most, fewer than num_speculative_tokens: 8",
        ),
        (
            {"tree": {"shape": "static", "widths": [4, 2]}},
            "12 nodes, of which num_speculative_tokens: 8 would never",
        ),
        ({"tree": DYNAMIC, "overlap": "draft_ahead"}, "not drafted ahead: write overlap: ping_pong"),
        (
            {"tree": DYNAMIC, "synthetic_acceptance": {"acceptance": [0.5]}},
            "makes up verdicts on chains: leave one out",
        ),
    ],
)
def test_trees_that_cannot_be_drafted(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig.model_validate(TREE | keys)


@pytest.mark.parametrize("tree", [DYNAMIC, {"shape": "static", "widths": [2, 3]}, {"shape": "chain"}])
@pytest.mark.parametrize("rule", ["sample_and_match", "multi_round"])
def test_trees_are_drafted_as_configured(tmp_path: Path, tree: dict[str, object], rule: str) -> None:
    save_model(tmp_path)
    keys = {
        "model": str(tmp_path),
        "tree": tree,
        "rejection_sample_method": rule,
        "cache": {"num_blocks": 16},
    }
    config = SpeculativeConfig.model_validate(TREE | keys)
    assert SpeculativeConfig.model_validate(config.model_dump()) == config
    proposer = create_proposer(config, TARGET)
    is_chain = tree["shape"] == "chain"
    assert proposer.capabilities.shape == ("chain" if is_chain else "tree")
    assert proposer.capabilities.tree_levels == levels_of(tree_shape(config.tree))
    assert proposer.capabilities.tree_levels == capabilities_in_pool(config).tree_levels
    assert proposer.capabilities.looks_ahead == is_chain
    one = view("a", [5, 6, 7])
    proposal = proposer.propose([one], {one.request_id: 8})[one.request_id]
    assert proposal.num_tokens == 8
    assert (proposal.parents is None) == is_chain
    proposer.close()


@pytest.mark.parametrize("positions", ["absolute", "in_cache"])
@pytest.mark.parametrize("tree", [DYNAMIC, {"shape": "static", "widths": [2, 3]}])
def test_trees_have_room_behind_a_window(tmp_path: Path, tree: dict[str, object], positions: str) -> None:
    save_model(tmp_path)
    keys = {
        "model": str(tmp_path),
        "tree": tree,
        "cache": {"num_blocks": 40, "block_size": 4},
        "kv": {"policy": "streaming", "budget": 24, "positions": positions},
    }
    with closing(create_proposer(SpeculativeConfig.model_validate(TREE | keys), TARGET)) as proposer:
        assert isinstance(proposer, DraftModelProposer)
        for length in (10, 200):
            one = view("a", [5 + index % 100 for index in range(length)])
            assert proposer.propose([one], {one.request_id: 8})[one.request_id].num_tokens == 8
        assert proposer.sequences.num_held_blocks < 24


@pytest.mark.parametrize(
    ("keys", "num"),
    [
        ({}, 9),
        ({"method": "eagle3"}, 4),
        ({"tree": {"shape": "static", "widths": [2, 1]}}, 4),
        ({"method": "eagle3", "tree": {"shape": "dynamic", "top_k": 3, "depth": 3}}, 6),
    ],
)
def test_what_is_read_behind_committed_tokens(keys: dict[str, object], num: int) -> None:
    given = {"method": "draft_model", "model": "m", "num_speculative_tokens": 4}
    assert SpeculativeConfig.model_validate(given | keys).num_read_behind == num


@pytest.mark.parametrize(("method", "limit"), [("eagle3", 512), ("draft_model", None)])
def test_heads_have_a_limit_though_they_have_a_window(method: str, limit: int | None) -> None:
    keys = {"method": method, "model": "m", "max_model_len": 512, "kv": {"policy": "streaming"}}
    assert SpeculativeConfig.model_validate(keys).max_prefix_len == limit


def test_what_a_rule_takes() -> None:
    typical = {"rejection_sample_method": "typical", "allow_lossy": True, "posterior_alpha": 0.2}
    assert SpeculativeConfig.model_validate(typical).posterior_alpha == 0.2
    block = {"rejection_sample_method": "block", "draft_top_k": 9, "method": "draft_model", "model": "m"}
    assert SpeculativeConfig.model_validate(block).draft_top_k == 9


def test_draft_model_is_loaded(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = SpeculativeConfig.model_validate(
        {"method": "draft_model", "model": str(tmp_path), "cache": {"num_blocks": 16}, "max_model_len": 50}
    )
    proposer = create_proposer(config, TARGET)
    assert proposer.capabilities.max_context == 50
    one = view("a", [5, 6, 7])
    assert proposer.propose([one], {one.request_id: 3})[one.request_id].num_tokens == 3
    proposer.close()


def test_tokenizers_must_agree(tmp_path: Path) -> None:
    save_model(tmp_path / "target")
    save_model(tmp_path / "draft")
    make_tokenizer(VOCAB_SIZE - 1).save_pretrained(tmp_path / "draft")
    config = SpeculativeConfig.model_validate({"method": "draft_model", "model": str(tmp_path / "draft")})
    facts = TargetFacts(
        vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4, model=str(tmp_path / "target")
    )
    with pytest.raises(CheckpointError, match=f"token id {VOCAB_SIZE - 1} is absent in the draft"):
        create_proposer(config, facts)


@pytest.mark.parametrize("is_target_trusted", [False, True])
@pytest.mark.parametrize("is_draft_trusted", [False, True])
def test_code_of_target_and_draft_is_trusted_apart(
    monkeypatch: pytest.MonkeyPatch, is_target_trusted: bool, is_draft_trusted: bool
) -> None:
    config = SpeculativeConfig.model_validate(
        {"method": "draft_model", "model": "draft", "trust_remote_code": is_draft_trusted}
    )
    facts = TargetFacts(
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        max_num_seqs=4,
        model="target",
        trust_remote_code=is_target_trusted,
    )
    seen: dict[str, bool] = {}

    def compare(target: str, draft: str, **trusted: bool) -> tuple[str, ...]:
        assert (target, draft) == ("target", "draft")
        seen.update(trusted)
        return ()

    monkeypatch.setattr("specdec.proposers.draft_model_factory.check_same_tokenizer", compare)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_draft_model(config, facts)
    assert seen == {"trust_target_code": is_target_trusted, "trust_draft_code": is_draft_trusted}
    assert draft_model_config(config, facts).trust_remote_code is is_draft_trusted


def test_trust_is_about_the_code_of_a_draft_model() -> None:
    with pytest.raises(ValidationError, match=r"trust_remote_code is about .* method ngram has no draft"):
        SpeculativeConfig.model_validate({"method": "ngram", "trust_remote_code": True})
    drafter = {"name": "a", "method": "draft_model", "model": "m", "trust_remote_code": True}
    several = SpeculativeConfig.model_validate({"method": "several", "drafters": [drafter]})
    assert [one.trust_remote_code for one in several.choices] == [True]
    with pytest.raises(ValidationError, match="write it with those of `drafters`"):
        SpeculativeConfig.model_validate(
            {"method": "several", "drafters": [drafter], "trust_remote_code": True}
        )


def test_missing_draft_model(tmp_path: Path) -> None:
    config = SpeculativeConfig.model_validate({"method": "draft_model", "model": str(tmp_path / "nowhere")})
    with pytest.raises(CheckpointError, match="nowhere"):
        create_proposer(config, TARGET)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "ngram", "kv": {"policy": "streaming"}}, "kv.policy: streaming .* method ngram has none"),
        (
            {"method": "draft_model", "model": "m", "kv": {"policy": "streaming", "budget": 7}},
            r"kv.budget: 7 tokens do not hold kv.sink_tokens \(4\) .* at least 8",
        ),
        (
            {"method": "draft_model", "model": "m", "kv": {"policy": "streaming", "floor": 6}},
            r"kv.floor: 6 tokens do not hold",
        ),
        (
            {"method": "self", "kv": {"policy": "streaming", "positions": "in_cache"}},
            "kv.positions: in_cache .* with method self tokens keep theirs: leave it out",
        ),
        (
            {"method": "draft_model", "model": "m", "kv": {"positions": "in_cache"}},
            "kv.positions: in_cache .* write policy: streaming",
        ),
        ({"kv": {"positions": "relative"}}, "positions"),
    ],
)
def test_contradictions_about_kv(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "kv", "budget"),
    [
        ({"method": "draft_model", "model": "m"}, {}, 512),
        ({"method": "eagle3", "model": "m"}, {"sink_tokens": 8}, 512),
        ({"method": "mtp"}, {}, 512),
        ({"method": "draft_model", "model": "m"}, {"budget": "10%"}, 0.1),
        ({"method": "draft_model", "model": "m"}, {"floor": 64}, 0.05),
        ({"method": "self"}, {}, 0.05),
        ({"method": "layerskip", "exit_layer": 1}, {}, 0.05),
    ],
)
def test_what_keeps_kv_of_its_own_keeps_no_more_of_longer_texts_unasked(
    keys: dict[str, object], kv: dict[str, object], budget: float
) -> None:
    kv = {"policy": "streaming", **kv}
    config = SpeculativeConfig.model_validate({**keys, "kv": kv})
    assert config.kv.token_budget.amount == budget
    assert SpeculativeConfig.model_validate({**keys, "kv": KvSelectionConfig.model_validate(kv)}) == config
    assert SpeculativeConfig.model_validate(config.model_dump()) == config
    assert SpeculativeConfig.model_validate_json(config.model_dump_json()) == config
    own = {key: value for key, value in keys.items() if key != "method"}
    drafter = {"name": "one", "method": config.method, **own, "kv": kv}
    several = SpeculativeConfig.model_validate({"method": "several", "drafters": [drafter]})
    assert several.choices == (config,)
    window = draft_window(config)
    assert window is not None
    is_constant = window.max_blocks(10_000, 16) == window.max_blocks(1_000_000, 16)
    assert is_constant == isinstance(budget, int)


def test_without_a_policy_no_budget_counts() -> None:
    config = SpeculativeConfig.model_validate({"method": "draft_model", "model": "m", "kv": {}})
    assert config.kv == KvSelectionConfig()
    assert config.kv.unheeded == ()


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        *(
            ({"method": method}, "leave it out")
            for method in ("none", "ngram", "suffix", "lookahead", "self")
        ),
        ({"method": "retrieval", "retrieval": {"path": "corpus"}}, "leave it out"),
        ({"method": "layerskip", "exit_layer": 1}, "leave it out"),
        ({"method": "quantized", "quantization": "int4"}, "leave it out"),
        ({"method": "medusa", "model": "m"}, "leave it out"),
        (
            {"method": "several", "drafters": [{"name": "one", "method": "ngram"}]},
            "write it with those of `drafters`",
        ),
    ],
)
def test_a_length_that_nothing_would_read_is_refused(keys: dict[str, object], remedy: str) -> None:
    SpeculativeConfig.model_validate(keys)
    message = rf"max_model_len: 512 is about draft_model and heads .*{keys['method']} has no .*: {remedy}"
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig.model_validate({**keys, "max_model_len": 512})


def test_bounded_draft_model_is_loaded(tmp_path: Path) -> None:
    """A pool for 4 sequences, as long as they may be; the same as for ones that are not much longer."""
    save_model(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = SpeculativeConfig.model_validate(
        {
            "method": "draft_model",
            "model": str(tmp_path),
            "cache": {"memory_bytes": 1 << 26, "block_size": 4},
            "kv": {"policy": "streaming", "budget": 32},
        }
    )
    facts = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4)
    with closing(create_proposer(config, facts)) as proposer:
        assert isinstance(proposer, DraftModelProposer)
        assert proposer.capabilities.max_context == 256
        per_sequence = (32 + 2 * 4 + 8 + 9) // 4 + 1
        assert 4 * (32 // 4) <= proposer.runner.num_blocks - 1 <= 4 * per_sequence


@pytest.mark.parametrize("most", [None, 40])
def test_a_prompt_is_read_as_fast_as_the_target_reads_it(tmp_path: Path, most: int | None) -> None:
    save_model(tmp_path)
    keys = {"method": "draft_model", "model": str(tmp_path), "cache": {"num_blocks": 100, "block_size": 4}}
    facts = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4)
    if most is not None:
        facts = replace(facts, max_read_tokens=most)
    with closing(create_proposer(SpeculativeConfig.model_validate(keys), facts)) as proposer:
        assert isinstance(proposer, DraftModelProposer)
        one = view("a", [5 + index % 100 for index in range(100)])
        proposer.propose([one], {})
        assert proposer.num_unread(one) == (0 if most is None else 99 - most)


def test_more_positions_than_a_draft_model_has_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    keys = {"method": "draft_model", "model": str(tmp_path), "max_model_len": 257}
    facts = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4)
    with pytest.raises(ConfigError, match=r"speculative_config.max_model_len: 257 is more than the 256 pos"):
        create_proposer(SpeculativeConfig.model_validate(keys), facts)


def test_draft_model_for_longer_texts_is_loaded(tmp_path: Path) -> None:
    """As many positions as the model has, or fewer that were asked for; texts of any length."""
    save_model(tmp_path)
    keys = {
        "method": "draft_model",
        "model": str(tmp_path),
        "cache": {"num_blocks": 100, "block_size": 4},
        "kv": {"policy": "streaming", "budget": 20, "positions": "in_cache"},
        "max_model_len": 64,
    }
    facts = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4, max_model_len=100_000)
    with closing(create_proposer(SpeculativeConfig.model_validate(keys), facts)) as proposer:
        assert isinstance(proposer, DraftModelProposer)
        assert proposer.capabilities.max_context is None
        assert proposer.runner.num_blocks == 100
        one = view("a", [5 + index % 100 for index in range(5000)])
        assert proposer.num_unread(one) < 20 + 8
        assert proposer.propose([one], {one.request_id: 3})[one.request_id].num_tokens == 3


def test_the_pool_of_a_draft_model_for_longer_texts_is_one_of_windows(tmp_path: Path) -> None:
    save_model(tmp_path)
    keys = {
        "method": "draft_model",
        "model": str(tmp_path),
        "cache": {"memory_bytes": 1 << 26, "block_size": 4},
        "kv": {"policy": "streaming", "budget": 32, "positions": "in_cache"},
    }
    facts = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4, max_model_len=100_000)
    with closing(create_proposer(SpeculativeConfig.model_validate(keys), facts)) as proposer:
        assert isinstance(proposer, DraftModelProposer)
        assert 4 * (32 // 4) <= proposer.runner.num_blocks - 1 <= 4 * ((32 + 2 * 4 + 8 + 9) // 4 + 1)


def test_a_window_moves_by_itself_where_the_target_serves_longer_texts(tmp_path: Path) -> None:
    save_model(tmp_path)
    keys = {"cache": {"num_blocks": 100, "block_size": 4}, "kv": {"policy": "streaming", "budget": 20}}
    config = SpeculativeConfig.model_validate({"method": "draft_model", "model": str(tmp_path), **keys})
    tokens = [5 + index % 100 for index in range(600)]
    for target_len, is_drafted in ((256, False), (257, True), (None, False)):
        facts = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4, max_model_len=target_len)
        with closing(create_proposer(config, facts)) as proposer:
            assert proposer.capabilities.max_context == (None if is_drafted else 256)
            one = view("a", tokens)
            assert bool(proposer.propose([one], {one.request_id: 3})) == is_drafted


@pytest.mark.parametrize(("num_positions", "most"), [(256, 128), (40, 20), (24, 7)])
def test_a_share_of_a_long_text_is_no_more_than_positions_allow(num_positions: int, most: int) -> None:
    keys = {
        "method": "draft_model",
        "model": "m",
        "cache": {"block_size": 4},
        "kv": {"policy": "streaming", "budget": 0.5, "floor": 5, "positions": "in_cache", "sink_tokens": 0},
    }
    config = SpeculativeConfig.model_validate({**keys, "num_speculative_tokens": 4})
    window = draft_window(config, num_positions)
    assert window is not None
    for length in (10, 1_000, 1_000_000):
        kept = length - window.selection.select(length).num_dropped
        assert kept >= min(length, 5 if length == 10 else most)
        assert kept < most + 2 * 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"kv": {"budget": 250}},
            r"kv\.budget: 250 tokens do not fit into the 256 positions of draft .*max_model_len\) "
            r"with kv\.positions: in_cache, beside 17 .* give at most 239",
        ),
        ({"kv": {"floor": 240}}, r"kv\.floor: 240 tokens do not fit into the 256 positions .* at most 239"),
        ({"kv": {"budget": 20}, "max_model_len": 30}, r"kv\.budget: 20 .* the 30 positions .* at most 13"),
    ],
)
def test_windows_that_do_not_fit_into_the_draft_models_positions(
    tmp_path: Path, keys: dict[str, dict[str, object]], message: str
) -> None:
    save_model(tmp_path / "draft")
    config = SpeculativeConfig.model_validate(
        {
            "method": "draft_model",
            "model": str(tmp_path / "draft"),
            "cache": {"num_blocks": 100, "block_size": 4},
            **keys,
            "kv": {"policy": "streaming", "positions": "in_cache", **keys["kv"]},
        }
    )
    with pytest.raises(ConfigError, match=message):
        create_proposer(config, TARGET)


@pytest.mark.parametrize(
    ("keys", "target_len", "message"),
    [
        (
            {},
            300,
            r"draft drafts behind texts of up to 256 tokens .* serves up to 300.*kv\.policy: streaming",
        ),
        ({"max_model_len": 50}, 256, r"up to 50 tokens .*speculative_config\.max_model_len.* up to 256"),
        ({"kv": {"policy": "streaming", "budget": 240}}, 300, r"up to 256 tokens .* up to 300.* at most 239"),
        ({"kv": {"policy": "streaming", "budget": 16}}, 300, None),
        (
            {"kv": {"policy": "streaming", "budget": 200, "positions": "in_cache"}},
            300,
            r"budget: 200 is more than half of the 256 positions .* after every 40 tokens",
        ),
        ({"kv": {"policy": "streaming", "budget": 16, "positions": "in_cache"}}, 300, None),
        ({}, 256, None),
    ],
)
def test_who_drafts_for_a_part_of_the_lengths_says_so(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    keys: dict[str, object],
    target_len: int,
    message: str | None,
) -> None:
    save_model(tmp_path / "draft")
    config = SpeculativeConfig.model_validate(
        {
            "method": "draft_model",
            "model": str(tmp_path / "draft"),
            "cache": {"num_blocks": 100, "block_size": 4},
            **keys,
        }
    )
    facts = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4, max_model_len=target_len)
    with caplog.at_level("WARNING", logger="specdec.proposers.draft_model_factory"):
        create_proposer(config, facts).close()
    said = [record.getMessage() for record in caplog.records if "draft" in record.name]
    if message is None:
        assert said == []
    else:
        assert len(said) == 1
        assert re.search(message, said[0]), said
