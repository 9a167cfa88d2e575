"""Quantizes a model's weights while they are read, so that it is never there in full.

transformers' own loading code runs. What it gets for a weight that is quantized is a stand-in of the right
shape without memory of its own; the weight itself is read in stretches of rows and laid out at once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.kv.host_memory import give_back_freed
from specdec.model.checkpoint import Checkpoint
from specdec.model.config import QuantizationName
from specdec.model.parallel.loading import StoredTensor
from specdec.model.quantization import Scheme, layers_of, quantize, replace_layers, scheme_of, shape_of
from specdec.model.quantized_linear import QuantizedWeight
from specdec.model.stored_tensors import named_tensors, prepared


class _Readable(Protocol):
    """A tensor in a file, as transformers reads it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: EllipsisType) -> torch.Tensor: ...


def read_quantized(
    model_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    name: QuantizationName,
    *,
    note_read: Callable[[int], None],
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model with quantized layers in the place of linear ones.

    Args:
        model_class: its class.
        checkpoint: its files.
        config: its configuration.
        name: how it is quantized.
        note_read: called with the number of bytes of every tensor read, from loading threads.
        options: of `from_pretrained`; `dtype` is the one that weights have before they are quantized.

    Returns:
        The model and transformers' loading info.
    """
    quantized: dict[str, QuantizedWeight] = {}
    stored: dict[str, _Readable] = {}

    def prepare(model: PreTrainedModel) -> None:
        wanted = _quantized_on_reading(model, scheme_of(name))
        for tensor in named_tensors(model, model.state_dict(), checkpoint.weight_files):
            # One that is only a part of a parameter is read as it is.
            layer = wanted.get(tensor.parameter) if tensor.pattern is None else None
            if layer is None:
                stored[tensor.name] = StoredTensor(tensor.handle, tensor.name, None, note_read)
            else:
                piece = tensor.handle.get_slice(tensor.name)
                stored[tensor.name] = _QuantizedTensor(piece, layer, options["dtype"], quantized, note_read)

    loaded: Any = prepared(model_class, prepare)
    model, info = loaded.from_pretrained(None, config=config, state_dict=stored, **options)
    stored.clear()  # the model's class knows `prepare`, and so would keep the files mapped
    if not info["missing_keys"] and not info["mismatched_keys"]:
        replace_layers(model, name, quantized)
    give_back_freed()
    return model, info


class _Layer:
    """A layer whose weight is quantized when it is read."""

    def __init__(self, name: str, scheme: Scheme, shape: tuple[int, int]) -> None:
        self.name = name
        self.scheme = scheme
        self.shape = shape


class _QuantizedTensor:
    """Puts the quantized weight aside and answers with a stand-in; called from several threads."""

    def __init__(
        self,
        piece: Any,
        layer: _Layer,
        dtype: torch.dtype,
        quantized: dict[str, QuantizedWeight],
        note_read: Callable[[int], None],
    ) -> None:
        self._piece = piece
        self._layer = layer
        self._dtype = dtype
        self._quantized = quantized
        self._note_read = note_read

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return tuple(self._piece.get_shape())

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        # One of another shape is reported by whoever compares it with the model's.
        if self.shape == self._layer.shape:
            self._quantized[self._layer.name] = quantize(self._rows, *self._layer.shape, self._layer.scheme)
        return torch.zeros((), dtype=self._dtype).expand(self.shape)

    def _rows(self, first: int, end: int) -> torch.Tensor:
        rows: torch.Tensor = self._piece[first:end]
        self._note_read(rows.nbytes)
        return rows.to(self._dtype)


def _quantized_on_reading(model: PreTrainedModel, scheme: Scheme) -> dict[str, _Layer]:
    """By parameter name: the layers whose weight is stored as it is used, and for nothing else."""
    hf_model: Any = model
    tied = hf_model.get_output_embeddings() if hf_model.config.get_text_config().tie_word_embeddings else None
    return {
        f"{name}.weight": _Layer(name, layer_scheme, shape_of(module))
        for name, module, layer_scheme in layers_of(model, scheme)
        if not isinstance(module, Conv1D) and module is not tied
    }
