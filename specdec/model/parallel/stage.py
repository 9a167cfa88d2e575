"""A whole model on the meta device becomes one stage of a pipeline, in which its own forward still runs.

Layers of other stages give way to stand-ins without weights, so that the indices of layers, and all that a
forward looks up by them (masks, rotary tables, caches), stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specdec.model.parallel.grid import RankGrid
from specdec.model.parallel.group import Transfer
from specdec.model.parallel.stages import StagePlan, StandIn


class _EndOfStage(Exception):
    """No error: how what a model's forward does behind the layers of a stage is left out."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Stage:
    """One stage's layers within a model, and the way in and out."""

    def __init__(self, plan: StagePlan, grid: RankGrid) -> None:
        """See `cut_stage`."""
        self.plan = plan
        self.grid = grid
        self.index = grid.stage
        self.layers = plan.layers(grid.stage)
        """Layers of the model that are here."""
        self._incoming: torch.Tensor | None = None

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.index == self.plan.num_stages - 1

    def run(self, forward: Callable[[], torch.Tensor], incoming: torch.Tensor | None) -> torch.Tensor:
        """Run the model's forward through this stage's layers.

        Args:
            forward: calls the model.
            incoming: hidden states [1, T, hidden_size] of the stage before; None in the first.

        Returns:
            What `forward` returns in the last stage, else hidden states [1, T, hidden_size].
        """
        assert (incoming is None) == self.is_first
        self._incoming = incoming
        try:
            return forward()
        except _EndOfStage as end:
            return end.hidden
        finally:
            self._incoming = None

    def relay(
        self, forward: Callable[[], torch.Tensor], num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """`run` between what the stage before sends and what the stage behind gets, one batch at a time.

        Raises:
            TransportError: a rank is gone.
        """
        transfer = self.expect(num_tokens, 0, dtype, device)
        output = self.run(forward, None if transfer is None else transfer.finish())
        if not self.is_last:
            self.hand_on(output, 0).finish()
        return output

    def expect(self, num_tokens: int, tag: int, dtype: torch.dtype, device: torch.device) -> Transfer | None:
        """Begin to receive the hidden states of so many tokens; None in the first stage.

        `tag` tells apart what is under way at the same time.

        Raises:
            TransportError: a rank is gone.
        """
        if self.is_first:
            return None
        hidden = torch.empty((1, num_tokens, self.plan.hidden_size), dtype=dtype, device=device)
        return self.grid.ranks.receive_(hidden, self.grid.sender, tag)

    def hand_on(self, hidden: torch.Tensor, tag: int) -> Transfer:
        """Begin to send hidden states to the stage behind.

        Raises:
            TransportError: a rank is gone.
        """
        return self.grid.ranks.send(hidden.contiguous(), self.grid.receiver, tag)

    def _cut(self, model: torch.nn.Module) -> None:
        stack: Any = model.get_submodule(self.plan.stack)
        for index, layer in enumerate(list(stack)):
            if index not in self.layers:
                stack[index] = StandIn(layer, self._way(index))
        absent = set() if self.is_first else (set(self.plan.before) - self.plan.behind) | self.plan.idle
        absent |= set() if self.is_last else self.plan.behind - set(self.plan.before)
        kept = _tied_to_others(model, absent)
        for name in absent:
            width = self.plan.before.get(name)
            module = model.get_submodule(name)
            stand_in = StandIn(module, _never_called if width is None else self._nothing(width))
            if name in kept:
                module.forward = stand_in.forward
            else:
                model.set_submodule(name, stand_in)
        _forget_ties(model)

    def _way(self, index: int) -> Callable[..., Any]:
        """Forward of the layer `index`, which is not here."""
        is_entrance = index == self.layers.start - 1
        returns_tuple = self.plan.returns_tuple

        def pass_on(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            hidden = self._arrived() if is_entrance else hidden
            return (hidden, None) if returns_tuple else hidden

        def leave(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise _EndOfStage(hidden)

        return pass_on if index < self.layers.start else leave

    def _nothing(self, width: int) -> Callable[..., torch.Tensor]:
        """Forward of a module whose result the entrance replaces."""

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            arrived = self._arrived()
            return arrived.new_zeros((*arrived.shape[:-1], width))

        return forward

    def _arrived(self) -> torch.Tensor:
        assert self._incoming is not None, "a stage is run by Stage.run"
        return self._incoming


def cut_stage(model: torch.nn.Module, plan: StagePlan, grid: RankGrid) -> Stage:
    """Take out of a model on the meta device what this rank's stage does not need."""
    stage = Stage(plan, grid)
    stage._cut(model)
    return stage


def _never_called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a stage ends before what is behind the layers")


def _ties(model: torch.nn.Module) -> dict[str, str]:
    hf_model: Any = model
    ties: dict[str, str] = hf_model.all_tied_weights_keys
    return ties


def _tied_to_others(model: torch.nn.Module, absent: set[str]) -> set[str]:
    """Modules of `absent` whose weights one that stays has too: it is through them that these are loaded."""
    pairs = [tuple(name.rpartition(".")[0] for name in pair) for pair in _ties(model).items()]
    return {one for pair in pairs for one in pair if one in absent and not set(pair) <= absent}


def _forget_ties(model: torch.nn.Module) -> None:
    """Leave no tie of weights that are not here any more."""
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    hf_model: Any = model
    hf_model.all_tied_weights_keys = {
        target: source for target, source in _ties(model).items() if {target, source} <= present
    }
