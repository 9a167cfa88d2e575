"""The experts of a mixture as one operation of a recorded forward.

Which rows go to which expert depends on the data, so that the model's own loop over experts cannot be
recorded operation by operation. transformers lets an implementation of the experts be chosen by name; while
a forward is recorded, ours notes the call and answers with anything of the right shape. Eager forwards never
see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec.model.recording import EXPERTS, CannotLower, active_recorder

_NAME = "drafthouse_recorded"
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""Names in transformers' table of activations."""
_CONTRARY_FLAGS = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")


class ExpertWeights(NamedTuple):
    """Weights of all experts of one layer: y = down(activation(gate x) * up x)."""

    gate_up: torch.Tensor
    """[experts, 2 * inner, hidden]: the gate's rows, then the other half's."""
    down: torch.Tensor
    """[experts, hidden, inner]"""
    activation: str
    """One of `_ACTIVATIONS`."""


@contextmanager
def recorded_experts(model: torch.nn.Module) -> Iterator[None]:
    """Within it, experts of `model` are noted by the active recorder as `EXPERTS` operations."""
    configs = _configs_of_experts(model)
    before = [config._experts_implementation for config in configs]
    for config in configs:
        config._experts_implementation = _NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._experts_implementation = name


def run_experts_one_by_one(model: torch.nn.Module) -> None:
    """Let eager forwards take expert after expert, as the model's own code does, not grouped products."""
    for config in _configs_of_experts(model):
        config._experts_implementation = "eager"


def _configs_of_experts(model: torch.nn.Module) -> list[Any]:
    return list(
        {
            id(module.config): module.config
            for module in model.modules()
            if hasattr(module, "_apply_gate") and hasattr(module, "config")
        }.values()
    )


def _record(
    module: Any, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Experts function in the signature of transformers."""
    recorder = active_recorder()
    assert recorder is not None, "these experts run only while a forward is recorded"
    with recorder.paused():
        output = torch.ones_like(hidden_TH)
    return recorder.note(EXPERTS, (*_weights_of(module), hidden_TH, index_TK, weights_TK), output)


def _weights_of(module: Any) -> ExpertWeights:
    """Return the weights of a module of gated experts.

    Raises:
        CannotLower: it computes something else as well.
    """
    name = type(module).__name__
    contrary = [flag for flag in _CONTRARY_FLAGS if getattr(module, flag, False)]
    if contrary or not (module.has_gate and module.is_concatenated) or _has_own_gate(module):
        raise CannotLower(f"experts of the kind {name} have no native form")
    activation = next((kind for kind in _ACTIVATIONS if type(ACT2FN[kind]) is type(module.act_fn)), None)
    if activation is None:
        raise CannotLower(f"experts with the activation {type(module.act_fn).__name__} have no native form")
    return ExpertWeights(module.gate_up_proj, module.down_proj, activation)


def _has_own_gate(module: Any) -> bool:
    """Whether the class combines gate and up in another way than activation(gate) * up."""
    home: str = type(module)._apply_gate.__module__
    return home != type(ALL_EXPERTS_FUNCTIONS).__module__


ALL_EXPERTS_FUNCTIONS.register(_NAME, _record)
