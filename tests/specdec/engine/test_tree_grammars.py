"""Grammars at the rows of trees."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from specdec.core.sampling_params import Grammar
from specdec.sampling.grammar import ConstrainedTree, GrammarCompiler, GrammarState
from tests.specdec.engine.grammar_models import EOS, VOCAB_SIZE, GrammarModels, token_of
from tests.specdec.engine.grammars_of_all_kinds import PROMPTS, params_of, streams

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GrammarModels:
    return GrammarModels(tmp_path_factory.mktemp("models"))


COVER = [
    ("schema", "same model", 8, {"temperature": 0.7}),
    ("regex", "same model", 12, {}),
    ("gbnf", "ngram", 6, {"temperature": 0.0}),
]


@pytest.mark.parametrize(("kind", "drafter", "num_draft_tokens", "fields"), COVER)
def test_same_tokens_with_trees(
    models: GrammarModels, kind: str, drafter: str, num_draft_tokens: int, fields: dict[str, Any]
) -> None:
    """Every row of a tree has the mask of its own path."""
    params = params_of(kind, **fields)
    with models.engine("none", 0) as engine:
        expected = streams(engine.generate(PROMPTS, params))
    with models.engine(f"bushy {drafter}", num_draft_tokens) as engine:
        results = engine.generate(PROMPTS, params)
        engine.check_integrity()
        metrics = engine.metrics()
    assert streams(results) == expected
    assert metrics.num_accepted_tokens > 0


def test_control_masks_of_other_paths_show(models: GrammarModels, monkeypatch: pytest.MonkeyPatch) -> None:
    own = GrammarState.constrain_tree

    def mixed_up(*args: Any, **kwargs: Any) -> ConstrainedTree:
        kept, masks = own(*args, **kwargs)
        return ConstrainedTree(kept, (masks[0], *reversed(masks[1:])))

    params = params_of("schema", temperature=0.7)
    with models.engine("none", 0) as engine:
        expected = streams(engine.generate(PROMPTS, params))
    monkeypatch.setattr(GrammarState, "constrain_tree", mixed_up)
    with models.engine("bushy same model", 12) as engine:
        assert streams(engine.generate(PROMPTS, params)) != expected


@pytest.mark.parametrize("is_sampled", [False, True])
def test_trees_are_cut_where_the_grammar_forbids(models: GrammarModels, is_sampled: bool) -> None:
    """With all that comes behind; what was sampled has to be seen and rejected, so it stays itself."""
    with closing(
        GrammarCompiler(models.tokenizer.to_json, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    ) as compiler:
        state = compiler.begin(Grammar("regex", "a(b|cd)e")).result()
    a, b, c, d, e = (token_of(models, one) for one in "abcde")
    drafted = (a, b, c, c, d, e, e, b)
    parents = (-1, -1, 0, 1, 2, 2, 4, 0)
    kept, masks = state.constrain_tree(drafted, parents, is_sampled=is_sampled)
    assert kept == ((0, 1, 2, 4, 5, 6, 7) if is_sampled else (0, 2, 4, 6, 7))
    assert masks[0] == state.allowed_after(())
    after = dict(zip(kept, masks[1:], strict=True))
    paths = {0: [a], 2: [a, c], 4: [a, c, d], 6: [a, c, d, e], 7: [a, b]}
    assert {node: after[node] for node in paths} == {
        node: state.allowed_after(path) for node, path in paths.items()
    }
    if is_sampled:
        assert after[1] == after[5] == b"\xff" * len(masks[0])
