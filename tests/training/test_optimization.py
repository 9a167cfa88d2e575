from __future__ import annotations

import torch
from torch import nn

from training.optimization import ORDINARY, ModuleRates, make_optimizers, set_learning_rates


def rates(optimizers: list[torch.optim.Optimizer]) -> dict[float, set[float]]:
    """Learning rates of the groups that have parameters, by their first element."""
    found: dict[float, set[float]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(parameter.flatten()[0].item(), set()).add(group["lr"])
    return found


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.Parameter(torch.ones(2, 3, 4))


def test_stacked_experts_are_adamws() -> None:
    """They decay as other matrices do, move, and their gradients are cleared."""
    module = Mixture()
    optimizers = make_optimizers([(module, ORDINARY)], muon_lr=0.1, adamw_lr=0.1, weight_decay=0.5)
    groups = [group for one in optimizers for group in one.param_groups]
    (own,) = [group for group in groups if any(one is module.experts for one in group["params"])]
    assert own["weight_decay"] == 0.5
    grouped = {id(one) for group in groups for one in group["params"]}
    assert grouped == {id(one) for one in module.parameters()}
    module.experts.square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert bool((module.experts != 1.0).all())
    assert module.experts.grad is None


def test_modules_move_at_their_own_rates() -> None:
    heads, target = nn.Linear(2, 3), nn.Linear(2, 3)
    for module, value in ((heads, 1.0), (target, 2.0)):
        for parameter in module.parameters():
            nn.init.constant_(parameter, value)
    optimizers = make_optimizers(
        [(heads, ORDINARY), (target, ModuleRates(share=0.25, first_step=10))],
        muon_lr=0.4,
        adamw_lr=0.8,
        weight_decay=0.0,
    )

    def at(step: int, factor: float) -> dict[float, set[float]]:
        set_learning_rates(optimizers, factor, step, warmup_steps=4)
        return rates(optimizers)

    assert at(5, 1.0) == {1.0: {0.4, 0.8}, 2.0: {0.0}}
    assert at(10, 1.0) == {1.0: {0.4, 0.8}, 2.0: {0.1 / 4, 0.2 / 4}}
    assert at(20, 1.0) == {1.0: {0.4, 0.8}, 2.0: {0.1, 0.2}}
    assert at(30, 0.5) == {1.0: {0.2, 0.4}, 2.0: {0.05, 0.1}}
