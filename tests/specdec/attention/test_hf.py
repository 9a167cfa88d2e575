"""What the probe learns about a model's attention, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from specdec.attention.hf import AttentionProbe, UnsupportedAttention, paged_attention, remember_step


class Layer(torch.nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def call(probe: AttentionProbe, layer_idx: int = 0, **settings: Any) -> torch.Tensor:
    heads, kv_heads = settings.pop("heads", (4, 2))
    key_dim, value_dim = settings.pop("dims", (8, 8))
    output, weights = paged_attention(
        Layer(layer_idx),
        torch.ones(1, heads, 1, key_dim),
        torch.ones(1, kv_heads, 1, key_dim),
        torch.ones(1, kv_heads, 1, value_dim),
        settings.pop("attention_mask", None),
        paged=probe,
        **settings,
    )
    assert weights is None
    return output


def test_layers_are_recorded_one_by_one() -> None:
    probe = AttentionProbe()
    assert call(probe, 1, scaling=0.5, sliding_window=7, softcap=30.0).shape == (1, 1, 4, 8)
    call(probe, 0)
    first, second = probe.layers(range(2))
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == (4, 2, 8)
    assert first.scaling == pytest.approx(8**-0.5)
    assert (first.sliding_window, first.softcap) == (None, None)
    assert (second.scaling, second.sliding_window, second.softcap) == (0.5, 7, 30.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"s_aux": torch.zeros(4)}, "layer 0 passes `s_aux`"),
        ({"position_bias": torch.zeros(1)}, "layer 0 passes `position_bias`"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "layer 0 passes `attention_mask`"),
        ({"dims": (8, 4)}, "layer 0 has keys and values of different shapes"),
    ],
)
def test_what_the_paged_attention_does_not_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedAttention, match=message):
        call(AttentionProbe(), **settings)


def test_keywords_without_effect_are_let_through() -> None:
    probe = AttentionProbe()
    call(probe, output_attentions=False, is_causal=True, s_aux=None, position_ids=torch.zeros(1, 1))
    assert len(probe.layers(range(1))) == 1


def test_a_layer_that_does_not_call_the_hook_is_found_out() -> None:
    probe = AttentionProbe()
    call(probe, 0)
    call(probe, 2)
    with pytest.raises(
        UnsupportedAttention, match="of 3 layers, 2 use the attention interface; layer 1 does"
    ):
        probe.layers(range(3))


def test_a_layer_that_attends_twice_is_refused() -> None:
    probe = AttentionProbe()
    call(probe, 0)
    with pytest.raises(UnsupportedAttention, match="layer 0 attends more than once"):
        call(probe, 0)


def test_a_model_that_drops_the_keywords_is_refused() -> None:
    with pytest.raises(UnsupportedAttention, match="layer 0 is not handed the keywords"):
        paged_attention(Layer(0), *[torch.ones(1, 1, 1, 8)] * 3, None)


class Forgetful(torch.nn.Module):
    """A model that does not hand its keywords on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(0)

    def forward(self, rows: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        assert rows.isfinite().all()
        return paged_attention(self.layer, rows, rows, rows, None)[0]


def test_a_layer_finds_the_step_that_it_is_not_handed() -> None:
    model, rows = Forgetful(), torch.ones(1, 1, 1, 8)
    remember_step(model)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        probe = AttentionProbe()
        one(rows, paged=probe)
        assert len(probe.layers(range(1))) == 1
        with pytest.raises(UnsupportedAttention, match="is not handed"):
            one(rows)


def test_a_step_is_forgotten_where_the_forward_fails() -> None:
    model = Forgetful()
    remember_step(model)
    with pytest.raises(AssertionError):
        model(torch.full((1, 1, 1, 8), torch.nan), paged=AttentionProbe())
    with pytest.raises(UnsupportedAttention, match="is not handed"):
        model.forward(torch.ones(1, 1, 1, 8))


def test_attention_that_is_not_causal_is_refused() -> None:
    layer = Layer(3)
    layer.is_causal = False
    with pytest.raises(UnsupportedAttention, match="layer 3 is not causal"):
        paged_attention(layer, *[torch.ones(1, 1, 1, 8)] * 3, None, paged=AttentionProbe())
