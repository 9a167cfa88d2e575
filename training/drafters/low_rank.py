"""Low-rank additions to a target's weights (LoRA, Hu et al. 2022): y = W x + (alpha / rank) B A x."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specdec.core.errors import ConfigError
from specdec.model.adapter import LowRankPair
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stages import layer_stack


class LowRankAdditions(nn.Module):
    """What is added to the linear layers in a model's decoder layers, by hooks: the model stays whole."""

    def __init__(self, model: PreTrainedModel, *, rank: int, alpha: float) -> None:
        """Add nothing yet: B is zero.

        Raises:
            ConfigError: the model has no such layers.
        """
        super().__init__()
        self._linears = decoder_linears(model)
        self.rank, self.alpha = rank, alpha
        self._is_on = True
        self.downs = nn.ParameterList()
        self.ups = nn.ParameterList()
        for number, linear in enumerate(self._linears.values()):
            down = torch.empty(rank, linear.in_features, device=linear.weight.device)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
            self.downs.append(nn.Parameter(down))
            self.ups.append(nn.Parameter(torch.zeros(linear.out_features, rank, device=down.device)))
            linear.register_forward_hook(self._hook(number))

    @property
    def pairs(self) -> dict[str, LowRankPair]:
        """A and B by name of the linear layer."""
        return {
            name: LowRankPair(down=self.downs[number].data, up=self.ups[number].data)
            for number, name in enumerate(self._linears)
        }

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """For a while the model is what it was."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    @torch.no_grad()
    def settle(self, dtype: torch.dtype) -> None:
        """Add all to the weights themselves, rounded to ``dtype``; from now on nothing else is added."""
        for name, pair in self.pairs.items():
            weight = self._linears[name].weight
            weight.data = pair.added_to(weight.data, self.alpha / self.rank, dtype).to(weight.dtype)
        self._is_on = False

    def _hook(self, number: int) -> Any:
        def add(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if not self._is_on:
                return output
            reduced = F.linear(inputs[0], self.downs[number].to(inputs[0].dtype))
            added = F.linear(reduced, self.ups[number].to(reduced.dtype))
            return output + added.to(output.dtype) * (self.alpha / self.rank)

        return add


def decoder_linears(model: PreTrainedModel) -> Mapping[str, nn.Linear]:
    """Linear layers inside the decoder layers, by name in the model.

    Raises:
        ConfigError: there are none, or the decoder layers are not in one list.
    """
    try:
        name, stack = layer_stack(model)
    except UnsupportedParallelism as error:
        raise ConfigError(f"--lora-rank does not go with this target: {error}") from error
    found = {
        inner: module for inner, module in stack.named_modules(prefix=name) if isinstance(module, nn.Linear)
    }
    if not found:
        raise ConfigError(
            f"--lora-rank: a model of type {model.config.model_type} has no linear layers; leave it out"
        )
    return found
