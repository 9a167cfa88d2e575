"""EAGLE, EAGLE-3 and MTP against their formulas: in whole rows, drafting from every row, and over pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specdec.attention.base import PagedBatch
from specdec.attention.metadata import build_metadata
from specdec.attention.sdpa import SdpaAttention
from specdec.drafters.attention import CausalRows, UnrolledRows
from specdec.drafters.base import FINAL_NORM, FeatureDrafter
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings, default_fused_layers
from specdec.drafters.mtp import Mtp
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.kv.pool import KvPool, KvShape
from specdec.model.batch import SequenceSlice
from tests.specdec.drafters.conftest import LAYERS, VOCAB, Target, randomize, tiny_config
from tests.specdec.drafters.formulas import Memory, Weights, attention, llama_layer, rms_norm, swiglu

EPS, HEAD_DIM = 1e-5, 8
Row = Callable[[torch.Tensor, torch.Tensor, int, int, list[Memory]], tuple[torch.Tensor, torch.Tensor]]
"""(embedding, feature, position, depth, memory per layer, extended in place) -> (next feature, logits)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    drafter: FeatureDrafter
    fuse: Callable[[torch.Tensor], torch.Tensor]
    row: Row
    num_layers: int = 1


def eagle_case(target: Target, *, has_bias: bool = True, num_layers: int = 1) -> Case:
    config = tiny_config(num_hidden_layers=num_layers)
    drafter = Eagle(target.parts, config, has_bias=has_bias)
    randomize(drafter, seed=4)
    with torch.no_grad():
        # Features go round without a norm: with larger weights they, and what is rounded, grow at each depth.
        drafter.fc.weight.mul_(0.3)
    weights = drafter.state_dict()
    head = target.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]

    def row(
        embedded: torch.Tensor, feature: torch.Tensor, position: int, depth: int, memories: list[Memory]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = weights["fc.weight"] @ torch.cat([embedded, feature])
        if has_bias:
            x = x + weights["fc.bias"]
        for layer in range(num_layers):
            x, memories[layer] = llama_layer(
                x, position, weights, f"layers.{layer}.", HEAD_DIM, EPS, memories[layer]
            )
        return x, head @ x

    return Case(drafter=drafter, fuse=lambda hidden: hidden, row=row, num_layers=num_layers)


def eagle3_case(target: Target, **changes: Any) -> Case:
    settings = replace(
        Eagle3Settings(config=tiny_config(num_hidden_layers=1), fused_layers=(1, 2, 3)), **changes
    )
    known = torch.tensor([3, 5, 6, 11, 30, 47])
    drafter = Eagle3(target.parts, settings, DraftVocabulary.of_ids(known, VOCAB))
    randomize(drafter, seed=4)
    weights = drafter.state_dict()

    def fuse(hidden: torch.Tensor) -> torch.Tensor:
        if settings.norm_before_fc:
            hidden = rms_norm(hidden, weights["input_norm.weight"], EPS)
        if settings.fc_norm:
            parts = hidden.split(target.parts.hidden_size)
            hidden = torch.cat(
                [rms_norm(part, weights[f"fc_norm.{i}.weight"], EPS) for i, part in enumerate(parts)]
            )
        return weights["fc.weight"] @ hidden

    def row(
        embedded: torch.Tensor, feature: torch.Tensor, position: int, depth: int, memories: list[Memory]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = rms_norm(feature, weights["midlayer.hidden_norm.weight"], EPS)
        inputs = torch.cat([rms_norm(embedded, weights["midlayer.input_layernorm.weight"], EPS), normed])
        attended, memories[0] = attention(
            inputs, position, weights, "midlayer.self_attn.", HEAD_DIM, memories[0]
        )
        x = (normed if settings.norm_before_residual else feature) + attended
        after = rms_norm(x, weights["midlayer.post_attention_layernorm.weight"], EPS)
        x = x + swiglu(after, weights, "midlayer.mlp.")
        output = rms_norm(x, weights["norm.weight"], EPS)
        return output if settings.norm_output else x, weights["lm_head.weight"] @ output

    return Case(drafter=drafter, fuse=fuse, row=row)


def mtp_case(target: Target, *, num_modules: int = 1) -> Case:
    drafter = Mtp(target.parts, num_modules=num_modules)
    randomize(drafter, seed=4)
    weights = drafter.state_dict()
    head = target.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]

    def row(
        embedded: torch.Tensor, feature: torch.Tensor, position: int, depth: int, memories: list[Memory]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        which = min(depth, num_modules - 1)
        name = f"mtp_modules.{which}."
        x = weights[f"{name}eh_proj.weight"] @ torch.cat(
            [
                rms_norm(embedded, weights[f"{name}enorm.weight"], EPS),
                rms_norm(feature, weights[f"{name}hnorm.weight"], EPS),
            ]
        )
        x, memories[which] = llama_layer(
            x, position, weights, f"{name}block.", HEAD_DIM, EPS, memories[which]
        )
        normed = rms_norm(x, weights[f"{name}norm.weight"], EPS)
        return normed, head @ normed

    return Case(drafter=drafter, fuse=lambda hidden: hidden, row=row, num_layers=num_modules)


CASES: dict[str, Callable[[Target], Case]] = {
    "eagle": eagle_case,
    "eagle without bias, two layers": lambda target: eagle_case(target, has_bias=False, num_layers=2),
    "eagle3": eagle3_case,
    "eagle3 norm_before_residual": lambda target: eagle3_case(target, norm_before_residual=True),
    "eagle3 norm_before_fc": lambda target: eagle3_case(target, norm_before_fc=True),
    "eagle3.1": lambda target: eagle3_case(target, fc_norm=True, norm_output=True),
    "eagle3 with bias": lambda target: eagle3_case(target, attention_bias=True),
    "mtp": mtp_case,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, target: Target) -> Case:
    return CASES[request.param](target)


def drafted_by_formula(
    case: Case, target: Target, tokens: torch.Tensor, start: int, path: list[int]
) -> list[torch.Tensor]:
    """Logits of depths 0 .. len(path) behind row `start` of one row of tokens int64 [T]."""
    hidden = target.hidden(tokens[None], case.drafter.hidden_layers)[0]
    embeddings = target.model.get_input_embeddings().weight
    memories = [Memory() for _ in range(case.num_layers)]
    for position in range(start + 1):
        following = embeddings[tokens[position + 1]]  # type: ignore[index]
        feature, logits = case.row(following, case.fuse(hidden[position]), position, 0, memories)
    found = [logits]
    for depth, token in enumerate(path, 1):
        feature, logits = case.row(embeddings[token], feature, start + depth, depth, memories)  # type: ignore[index]
        found.append(logits)
    return found


@torch.no_grad()
def test_rows_are_the_formula(case: Case, target: Target, tokens: torch.Tensor) -> None:
    drafter = case.drafter
    hidden = target.hidden(tokens, drafter.hidden_layers)[:, :-1]
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    step = drafter.step(drafter.embed(tokens[:, 1:]), drafter.fuse(hidden), positions, CausalRows())
    logits = drafter.logits(step.outputs)
    for batch, row in ((0, 0), (0, 7), (1, 4)):
        expected = drafted_by_formula(case, target, tokens[batch], row, [])[0]
        torch.testing.assert_close(logits[batch, row], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_every_row_drafts_in_the_training_time_test(case: Case, target: Target, tokens: torch.Tensor) -> None:
    drafter = case.drafter
    hidden = target.hidden(tokens, drafter.hidden_layers)[:, :-1]
    features, attention_rows = drafter.fuse(hidden), UnrolledRows()
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    paths = torch.randint(2, VOCAB, (*hidden.shape[:2], 3), generator=torch.Generator().manual_seed(9))
    given = [tokens[:, 1:], *paths.unbind(dim=-1)]
    found = []
    for depth, ids in enumerate(given):
        step = drafter.step(drafter.embed(ids), features, positions + depth, attention_rows, depth)
        features = step.features
        found.append(drafter.logits(step.outputs))
    for batch, row in ((0, 0), (0, 7), (1, 4)):
        path = paths[batch, row].tolist()
        expected = drafted_by_formula(case, target, tokens[batch], row, path)
        for depth, logits in enumerate(expected):
            torch.testing.assert_close(found[depth][batch, row], logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_drafts_over_pages(case: Case, target: Target, tokens: torch.Tensor) -> None:
    """Two sequences of different lengths in one flat batch, then two drafted tokens each."""
    drafter = case.drafter
    layers = drafter.attention_layers
    pool = KvPool(
        [KvShape(num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim) for layer in layers],
        num_blocks=9,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    backend = SdpaAttention()
    tables = ([3, 1, 7], [2, 5, 4])
    lengths = (8, 5)
    paths = ([7, 21], [40, 9])

    def attend(starts: list[int], ids: list[list[int]]) -> PagedBatch:
        slices = [
            SequenceSlice(token_ids=own, start=start, block_table=table, num_logit_rows=1)
            for own, start, table in zip(ids, starts, tables, strict=True)
        ]
        metadata = build_metadata(slices, block_size=4)
        return PagedBatch(
            backend=backend, layers=layers, caches=pool, metadata=metadata, plan=backend.begin(metadata)
        )

    hidden = target.hidden(tokens, drafter.hidden_layers)
    ids = [tokens[0, 1:9].tolist(), tokens[1, 1:6].tolist()]
    flat = torch.cat([hidden[0, :8], hidden[1, :5]])[None]
    paged = attend([0, 0], ids)
    features = drafter.fuse(flat)
    step = drafter.step(
        drafter.embed(torch.tensor([ids[0] + ids[1]])), features, paged.metadata.positions[None], paged
    )
    last = torch.tensor([7, 12])
    features, outputs = step.features[:, last], [step.outputs[:, last]]
    for depth in (1, 2):
        drafted = [[path[depth - 1]] for path in paths]
        paged = attend([length + depth - 1 for length in lengths], drafted)
        embedded = drafter.embed(torch.tensor([[own[0] for own in drafted]]))
        step = drafter.step(embedded, features, paged.metadata.positions[None], paged, depth)
        features = step.features
        outputs.append(step.outputs)
    for batch, length in enumerate(lengths):
        expected = drafted_by_formula(case, target, tokens[batch], length - 1, paths[batch])
        for depth, logits in enumerate(expected):
            found = drafter.logits(outputs[depth][0, batch])
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_modules_of_one_checkpoint_follow_each_other(target: Target, tokens: torch.Tensor) -> None:
    """With as many modules as depths, each has attention of its own over the rows of its depth."""
    drafter = mtp_case(target, num_modules=2).drafter
    assert [layer.layer_idx for layer in drafter.attention_layers] == [LAYERS, LAYERS + 1]
    assert isinstance(drafter, Mtp)
    hidden = target.hidden(tokens, drafter.hidden_layers)[:, :-2]
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    first = drafter.step(drafter.embed(tokens[:, 1:-1]), hidden, positions, CausalRows())
    second = drafter.step(drafter.embed(tokens[:, 2:]), first.features, positions, CausalRows(), depth=1)
    weights: Weights = drafter.state_dict()
    embeddings = target.model.get_input_embeddings().weight
    memory = Memory()
    for row in range(4):
        name = "mtp_modules.1."
        x = weights[f"{name}eh_proj.weight"] @ torch.cat(
            [
                rms_norm(embeddings[tokens[0, row + 2]], weights[f"{name}enorm.weight"], EPS),  # type: ignore[index]
                rms_norm(first.features[0, row], weights[f"{name}hnorm.weight"], EPS),
            ]
        )
        x, memory = llama_layer(x, row, weights, f"{name}block.", HEAD_DIM, EPS, memory)
        expected = rms_norm(x, weights[f"{name}norm.weight"], EPS)
        torch.testing.assert_close(second.outputs[0, row], expected, rtol=1e-4, atol=1e-4)


def test_which_states_of_the_target_they_read(target: Target) -> None:
    assert eagle_case(target).drafter.hidden_layers == (FINAL_NORM,)
    assert mtp_case(target).drafter.hidden_layers == (FINAL_NORM,)
    assert eagle3_case(target).drafter.hidden_layers == (1, 2, 3)
    assert default_fused_layers(32) == (2, 16, 29)


def test_eagle3_can_start_with_what_the_target_says_of_tokens(target: Target) -> None:
    """Of states of the target it then says what the target does, of the ids that it knows."""
    settings = Eagle3Settings(config=tiny_config(num_hidden_layers=1), fused_layers=(1, 2, 3))
    known = torch.arange(1, VOCAB, 2)
    states = torch.randn(5, target.parts.hidden_size)
    with torch.no_grad():
        said = target.parts.head(target.parts.final_norm(states))
        for vocabulary in (None, DraftVocabulary.of_ids(known, VOCAB)):
            drafter = Eagle3(target.parts, settings, vocabulary)
            drafter.start_from_target()
            expected = said if vocabulary is None else said[:, known]
            torch.testing.assert_close(drafter.logits(drafter.norm(states)), expected)


def test_gradients_reach_every_parameter(case: Case, target: Target, tokens: torch.Tensor) -> None:
    drafter = case.drafter
    hidden = target.hidden(tokens, drafter.hidden_layers)[:, :-1]
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    features, rows = drafter.fuse(hidden), UnrolledRows()
    total = torch.zeros(())
    for depth in range(2):
        step = drafter.step(drafter.embed(tokens[:, 1:]), features, positions + depth, rows, depth)
        features = step.features
        total = total + drafter.logits(step.outputs).square().mean()
    total.backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in drafter.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_runs_in_its_dtype(case: Case, target: Target, tokens: torch.Tensor, dtype: torch.dtype) -> None:
    drafter = case.drafter.to(dtype)
    hidden = target.hidden(tokens, drafter.hidden_layers)[:, :-1].to(dtype)
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    step = drafter.step(drafter.embed(tokens[:, 1:]), drafter.fuse(hidden), positions, CausalRows())
    assert step.features.dtype == step.outputs.dtype == dtype


class TestVocabulary:
    def test_ids_there_and_back(self) -> None:
        vocabulary = DraftVocabulary.of_ids(torch.tensor([9, 2, 4]), 10)
        assert vocabulary.target_ids.tolist() == [2, 4, 9]
        assert vocabulary.d2t.tolist() == [2, 3, 7]
        assert vocabulary.t2d.nonzero().flatten().tolist() == [2, 4, 9]
        assert vocabulary.to_target(torch.tensor([2, 0])).tolist() == [9, 2]
        logits = vocabulary.expand(torch.tensor([[1.0, 2.0, 3.0]]))
        assert logits[0, [2, 4, 9]].tolist() == [1.0, 2.0, 3.0]
        assert torch.isneginf(logits).sum() == 7

    @pytest.mark.parametrize(
        ("d2t", "what"), [([0, 9], "outside"), ([1, 0], "same token id"), ([-1], "outside")]
    )
    def test_impossible_maps_are_refused(self, d2t: list[int], what: str) -> None:
        with pytest.raises(ValueError, match=what):
            DraftVocabulary(torch.tensor(d2t), 10)
