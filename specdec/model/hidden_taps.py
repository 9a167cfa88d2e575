"""Hidden states out of a model's own forward, by hooks: the model is never forked.

Layers are numbered as in the tuple that transformers returns for `output_hidden_states`:

    0          what goes into the first layer: the embeddings
    i          what layer i - 1 (counted from 0) gives and layer i reads, for 0 < i < N
    N, or -1   what the head reads: behind the last of the N layers and the final norm

So Medusa, Hydra, EAGLE-1/2 and MTP modules, which read what the head reads, take -1, and an early exit after
E layers reads E. Of EAGLE-3, vLLM's `eagle_aux_hidden_state_layer_ids` (2, N / 2, N - 3 where a checkpoint
does not say) are these numbers; code that counts a layer's output by that layer's index has them one smaller.
What the last layer gives before the final norm has no number: nobody drafts from it.

In checkpoints with inserted do-nothing layers the numbers are those of the original (`layer_map`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specdec.core.errors import ConfigError
from specdec.model.layer_map import LayerMap
from specdec.model.loader import LoadedModel
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stages import layer_stack


class LayerTaps:
    """Collects the states of some layers while the model runs. Of one runner; not thread-safe."""

    def __init__(self, loaded: LoadedModel, layers: Sequence[int]) -> None:
        """Hook into the model.

        Args:
            loaded: the model; hooks of several runners do not disturb each other.
            layers: numbers as above, in the order in which their states shall be side by side.

        Raises:
            ConfigError: there is no such layer, or its state is in another rank.
        """
        text_config: Any = loaded.config.get_text_config()
        self.layers = tuple(layers)
        """As asked for."""
        self.hidden_size = int(text_config.hidden_size)
        self._name = name = loaded.path.name
        self._states: dict[int, torch.Tensor] | None = None
        self._rows: torch.Tensor | None = None
        self._places = places_of(loaded, layers)
        try:
            _, stack = layer_stack(loaded.model)
        except UnsupportedParallelism as error:
            raise ConfigError(f"{name} cannot be tapped for hidden states: {error}") from error
        for place in set(self._places):
            if place < len(stack):
                stack[place].register_forward_pre_hook(self._before(place), with_kwargs=True)
            else:
                hf_model: Any = loaded.model
                hf_model.get_decoder().register_forward_hook(self._behind(place))

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return len(self.layers) * self.hidden_size

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within, the model runs once; afterwards `rows` are those of its batch.

        Raises:
            ConfigError: what its layers hand on is not one row of the hidden size for each token.
        """
        self._states, self._rows = {}, None
        try:
            yield
            states = [self._states[place] for place in self._places]
        finally:
            self._states = None
        self._rows = states[0][0] if len(states) == 1 else torch.cat(states, dim=-1)[0]

    @property
    def rows(self) -> torch.Tensor:
        """[T, width], in the model's dtype: of every row of the last batch."""
        assert self._rows is not None, "the model has not run"
        return self._rows

    def _before(self, place: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._states is not None:
                self._note(place, args[0] if args else kwargs["hidden_states"])

        return hook

    def _behind(self, place: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._states is not None:
                self._note(place, output[0])

        return hook

    def _note(self, place: int, state: torch.Tensor) -> None:
        assert self._states is not None
        if state.dim() != 3 or state.shape[0] != 1 or state.shape[2] != self.hidden_size:
            raise ConfigError(
                f"{self._name} cannot be tapped for hidden states: its layers hand on a tensor of shape "
                f"{list(state.shape)} instead of [1, tokens, {self.hidden_size}]"
            )
        self._states[place] = state


def resolve_layers(layers: Sequence[int], num_layers: int, name: str) -> tuple[int, ...]:
    """Return the numbers of layers counted from 0 (-1 becomes `num_layers`).

    Raises:
        ConfigError: the model `name` has no such layer.
    """
    for layer in layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise ConfigError(
                f"hidden_layers: {layer} is not a hidden state of {name}, whose {num_layers} layers have "
                f"numbers 0 (embeddings) to {num_layers} (behind the final norm), or -1 for the last"
            )
    return tuple(layer % (num_layers + 1) for layer in layers)


def places_of(loaded: LoadedModel, layers: Sequence[int]) -> list[int]:
    """Return which layer of this checkpoint reads each state; the number of layers for what the head reads.

    Raises:
        ConfigError: there is no such layer, or its state is in another rank.
    """
    kept = LayerMap.of_model(loaded.config)
    counted = resolve_layers(layers, kept.num_original_layers, loaded.path.name)
    places = [_place(layer, kept) for layer in counted]
    _require_here(loaded, counted, places)
    return places


def _place(layer: int, kept: LayerMap) -> int:
    if layer in (0, kept.num_original_layers):
        return 0 if layer == 0 else kept.num_layers
    return kept.layers_for(layer)


def _require_here(loaded: LoadedModel, layers: Sequence[int], places: Sequence[int]) -> None:
    stage = loaded.stage
    if stage is None:
        return
    assert stage.is_last or not layers, "drafts are made where tokens are chosen"
    for layer, place in zip(layers, places, strict=True):
        if place < stage.layers.start:
            raise ConfigError(
                f"the drafter reads hidden state {layer} of {loaded.path.name}, which an earlier stage of "
                f"the pipeline computes; the last stage has those from {stage.layers.start} on. Leave out "
                "target.pipeline_parallel_size (tensor_parallel_size divides every layer), or take a drafter "
                "that reads later layers"
            )
