"""Medusa and Hydra against their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.drafters.attention import CausalRows
from specdec.drafters.base import FINAL_NORM
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.parallel_heads import ParallelHeads
from tests.specdec.drafters.conftest import HIDDEN, LAYERS, VOCAB, Target, randomize
from tests.specdec.drafters.formulas import Memory, llama_layer, rms_norm


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa_is_its_formula(target: Target, tokens: torch.Tensor, num_layers: int) -> None:
    heads = Medusa(target.parts, num_heads=3, num_layers=num_layers)
    randomize(heads, seed=2)
    hidden = target.hidden(tokens, heads.hidden_layers)
    weights = heads.state_dict()
    expected = []
    for head in range(3):
        x = hidden
        for layer in range(num_layers):
            name = f"heads.{head}.{layer}.linear."
            x = x + silu(x @ weights[name + "weight"].T + weights[name + "bias"])
        expected.append(x @ weights[f"heads.{head}.{num_layers}.weight"].T)
    torch.testing.assert_close(heads.logits(hidden), torch.stack(expected))
    assert heads.hidden_layers == (FINAL_NORM,)
    assert heads.max_depth == 3


def test_new_heads_predict_what_the_target_does(target: Target, tokens: torch.Tensor) -> None:
    heads = Medusa(target.parts, num_heads=2)
    heads.start_from_target()
    grounded = Hydra(target.parts, num_heads=2)
    grounded.start_from_target()
    hidden = target.hidden(tokens, (FINAL_NORM,))
    with torch.no_grad():
        expected = target.model(tokens).logits
        torch.testing.assert_close(heads.logits(hidden)[1], expected)
        path = tokens[..., None].expand(*tokens.shape, 2)
        # W starts at zero, b does not: SiLU(b) is what is added.
        grounded.mlps[1][0].linear.bias.zero_()  # type: ignore[index, operator]
        torch.testing.assert_close(grounded.logits(1, hidden, path), expected)


@pytest.mark.parametrize("is_grounded", [True, False])
@pytest.mark.parametrize("has_prefix_layer", [True, False])
def test_hydra_is_its_formula(
    target: Target, tokens: torch.Tensor, is_grounded: bool, has_prefix_layer: bool
) -> None:
    heads = Hydra(
        target.parts,
        num_heads=3,
        num_layers=2,
        is_grounded=is_grounded,
        has_prefix_layer=has_prefix_layer,
    )
    randomize(heads, seed=2)
    hidden = target.hidden(tokens, heads.hidden_layers)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    prepared = heads.prepare(hidden, positions, CausalRows())
    weights = heads.state_dict()
    row, depth = 5, 2
    state = hidden[0, row]
    if has_prefix_layer:
        memory = Memory()
        for position in range(row + 1):
            state, memory = llama_layer(
                hidden[0, position], position, weights, "prefix.layers.0.", 8, 1e-5, memory
            )
        state = rms_norm(state, weights["prefix.norm.weight"], 1e-5)
    inputs = [state]
    if is_grounded:
        embeddings = target.model.get_input_embeddings().weight
        inputs += [embeddings[tokens[0, row + 1 + i]] for i in range(depth + 1)]
    x = torch.cat(inputs)  # type: ignore[arg-type]
    kept = x
    if is_grounded:
        name = f"mlps.{depth}.0.res_connection."
        kept = weights[name + "weight"] @ x + weights[name + "bias"]
    name = f"mlps.{depth}.0.linear."
    x = kept + silu(weights[name + "weight"] @ x + weights[name + "bias"])
    name = f"mlps.{depth}.1.linear."
    x = x + silu(weights[name + "weight"] @ x + weights[name + "bias"])
    expected = weights[f"lm_heads.{depth}.weight"] @ x + weights[f"lm_heads.{depth}.bias"]
    path = tokens[0, row + 1 : row + 2 + depth]
    torch.testing.assert_close(heads.logits(depth, prepared[0, row], path), expected)
    assert expected.shape == (VOCAB,)


@torch.no_grad()
def test_parallel_heads_are_their_formula(target: Target, tokens: torch.Tensor) -> None:
    heads = ParallelHeads(target.parts, num_heads=2)
    randomize(heads, seed=2)
    hidden = target.hidden(tokens, heads.hidden_layers)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    prepared = heads.prepare(hidden, positions, CausalRows())
    weights = heads.state_dict() | dict(target.model.state_dict())
    for head in range(2):
        memory = Memory()
        for position in range(6):
            x, memory = llama_layer(
                hidden[0, position], position, weights, f"extra_heads.{head}.", 8, 1e-5, memory
            )
        normed = rms_norm(x, weights["model.norm.weight"], 1e-5)
        expected = weights["lm_head.weight"] @ normed
        torch.testing.assert_close(heads.logits(prepared[0, 5])[head], expected, rtol=1e-4, atol=1e-4)
    assert heads.hidden_layers == (LAYERS - 1,)
    assert [layer.layer_idx for layer in heads.attention_layers] == [LAYERS, LAYERS + 1]


def test_the_targets_last_layer_as_a_parallel_head_is_the_target(
    target: Target, tokens: torch.Tensor
) -> None:
    heads = ParallelHeads(target.parts, num_heads=1)
    last = target.model.base_model.layers[-1]  # type: ignore[index, operator, union-attr]
    heads.extra_heads[0].load_state_dict(last.state_dict())
    hidden = target.hidden(tokens, heads.hidden_layers)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    with torch.no_grad():
        logits = heads.logits(heads.prepare(hidden, positions, CausalRows()))[0]
        torch.testing.assert_close(logits, target.model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_hydra_reads_an_earlier_layer_where_it_is_told_to(target: Target) -> None:
    assert Hydra(target.parts, num_heads=1).hidden_layers == (FINAL_NORM,)
    assert Hydra(target.parts, num_heads=1, hidden_state_offset=1).hidden_layers == (LAYERS - 1,)


def test_layers_that_do_nothing_are_not_counted(make_target: Callable[..., Target]) -> None:
    inflated = make_target(num_hidden_layers=2 * LAYERS, drafthouse_layer_positions=list(range(0, 8, 2)))
    assert ParallelHeads(inflated.parts, num_heads=1).hidden_layers == (LAYERS - 1,)
    assert Hydra(inflated.parts, num_heads=1, hidden_state_offset=1).hidden_layers == (LAYERS - 1,)


def test_parts_of_the_target_are_not_parameters(target: Target) -> None:
    heads = Hydra(target.parts, num_heads=1)
    count = sum(parameter.numel() for parameter in heads.parameters())
    assert count == 2 * (2 * HIDDEN * HIDDEN + HIDDEN) + VOCAB * HIDDEN + VOCAB
