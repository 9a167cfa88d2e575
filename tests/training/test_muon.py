"""Muon in float32: the steps of PyTorch's, but for the rounding of its products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from training.muon import FloatMuon, new_muon, orthogonalized

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    made = orthogonalized(matrix, COEFFICIENTS, 5, 1e-7)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert made.shape == matrix.shape
    values = left.T @ made @ right.T  # diagonal: the directions are those of the matrix
    diagonal = values.diagonal()
    assert torch.allclose(values, torch.diag(diagonal), atol=1e-4)
    assert 0.3 < diagonal.min() < diagonal.max() < 1.3


def stepped(kind: Any, shape: tuple[int, int], num_steps: int) -> torch.Tensor:
    torch.manual_seed(1)
    matrix = nn.Parameter(torch.randn(shape))
    optimizer = kind([{"params": [matrix]}], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(num_steps):
        matrix.grad = torch.randn(shape)
        optimizer.step()
    return matrix.detach()


@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (20, 8)])
def test_steps_are_those_of_pytorch(shape: tuple[int, int]) -> None:
    expected, mine = stepped(torch.optim.Muon, shape, 6), stepped(FloatMuon, shape, 6)
    begun = stepped(FloatMuon, shape, 0)
    moved = (expected - begun).norm()
    assert (mine - expected).norm() < 0.03 * moved, "what bfloat16 rounds is less"
    assert (stepped(FloatMuon, shape, 5) - expected).norm() > 0.1 * moved, "a step is more than that"


def test_a_checkpoint_of_one_goes_on_with_the_other() -> None:
    matrix = nn.Parameter(torch.eye(3))
    optimizers = [
        kind([{"params": [matrix]}], lr=0.1, adjust_lr_fn="match_rms_adamw")
        for kind in (torch.optim.Muon, FloatMuon)
    ]
    for first, second in (optimizers, optimizers[::-1]):
        matrix.grad = torch.ones(3, 3)
        first.step()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert torch.equal(second.state[matrix]["momentum_buffer"], first.state[matrix]["momentum_buffer"])
        second.step()


@pytest.mark.parametrize(("capability", "kind"), [("AVX512", torch.optim.Muon), ("AVX2", FloatMuon)])
def test_which_one_follows_from_the_processor(
    monkeypatch: pytest.MonkeyPatch, capability: str, kind: type[torch.optim.Optimizer]
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    groups = [{"params": [nn.Parameter(torch.eye(2))]}]
    assert type(new_muon(groups, lr=0.1, weight_decay=0.0)) is kind


def test_without_gradients_nothing_moves() -> None:
    matrix = nn.Parameter(torch.eye(2))
    FloatMuon([{"params": [matrix]}], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(matrix, torch.eye(2))
