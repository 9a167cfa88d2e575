"""Muon (Jordan et al. 2024) whose products are in float32, for processors to which bfloat16 is foreign.

PyTorch's Muon makes matrices orthogonal in bfloat16, whatever they are. Where processors have no such
products, PyTorch makes them number by number: a hundred times slower than in float32, and most of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def new_muon(groups: list[dict[str, Any]], *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return the Muon that suits the device of the matrices in ``groups``; the learning rate is as AdamW's.

    Both have the same state: a checkpoint of one goes on with the other.
    """
    on_cpu = all(matrix.device.type == "cpu" for group in groups for matrix in group["params"])
    is_foreign = on_cpu and not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    kind = FloatMuon if is_foreign else torch.optim.Muon
    return kind(groups, lr=lr, momentum=0.95, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


class FloatMuon(torch.optim.Muon):
    """`torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, but for the dtype of its products."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step, of all matrices that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._learn(group, matrix, matrix.grad)
        return loss

    def _learn(self, group: dict[str, Any], matrix: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-0.2 * math.sqrt(max(matrix.shape)) * group["lr"])


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Return about U V^T of a matrix U S V^T [m, n], by Newton and Schulz's iteration, in float32."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
