"""Hidden states of the target for training rows, computed when they are needed or kept on disk."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from specdec.core.errors import ResourceError
from specdec.drafters.base import FINAL_NORM, TargetParts
from specdec.model.layer_map import LayerMap

_DTYPE = torch.bfloat16


class Capture:
    """What the target makes of tokens. The state behind the final norm is always part of it."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """``layers`` as ``Drafter.hidden_layers``."""
        self.model = model
        self.parts = TargetParts.of(model)
        self.layers = tuple(layers)
        assert all(layer < self.parts.num_layers for layer in layers), "the last layer's is behind the norm"
        kept = LayerMap.of_model(model.config)
        self._places = [layer if layer <= 0 else kept.layers_for(layer) for layer in layers]

    @property
    def width(self) -> int:
        """Features of a row: those of ``layers`` side by side, then the final one where it is not all."""
        return (len(self.layers) + (not self._is_final)) * self.parts.hidden_size

    @property
    def _is_final(self) -> bool:
        return self.layers == (FINAL_NORM,)

    def hidden(self, states: torch.Tensor) -> torch.Tensor:
        """What the drafter reads, [B, T, F], of what ``states`` returned."""
        return states if self._is_final else states[..., : -self.parts.hidden_size]

    def final(self, states: torch.Tensor) -> torch.Tensor:
        """Behind the final norm, [B, T, H], of what ``states`` returned."""
        return states[..., -self.parts.hidden_size :]

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T, width] of int64 [B, T], in the target's dtype."""
        base: Any = self.model.base_model
        output = base(tokens.to(self.model.device), output_hidden_states=True, use_cache=False)
        final = output.last_hidden_state
        chosen = [final if place == FINAL_NORM else output.hidden_states[place] for place in self._places]
        return final if self._is_final else torch.cat([*chosen, final], dim=-1)

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's own, [B, T, V], of what ``states`` returned."""
        return self.parts.logits(self.final(states).to(self.model.dtype))


class KeptStates:
    """States of rows in one file, bfloat16, filled as rows are asked for; later runs find them there."""

    def __init__(self, folder: Path, capture: Capture, rows: torch.Tensor, target_name: str) -> None:
        """``rows`` int64 [N, T]; the file's name depends on them, the layers and the target."""
        digest = hashlib.sha256(rows.numpy().tobytes())
        digest.update(f"{capture.layers}\0{target_name}".encode())
        folder.mkdir(parents=True, exist_ok=True)
        name = digest.hexdigest()[:16]
        num_rows, length = rows.shape
        shape = (num_rows, length, capture.width)
        states_file, rows_file = (folder / f"hidden-{name}.{kind}" for kind in ("bin", "rows"))
        self._capture = capture
        self._rows = rows
        if not _is_whole(states_file, shape, np.int16):
            # What the other file says to be there was in the one that somebody has removed.
            rows_file.unlink(missing_ok=True)
        _require_space(states_file, int(np.prod(shape)) * _DTYPE.itemsize)
        self._states = _mapped(states_file, shape, np.int16)
        self._is_there = _mapped(rows_file, (num_rows,), np.uint8)

    @property
    def num_kept(self) -> int:
        """Rows that need not be computed again."""
        return int(self._is_there.sum())

    def states(self, indices: Sequence[int]) -> torch.Tensor:
        """[B, T, width] of these rows, bfloat16 on the target's device."""
        missing = [index for index in indices if not self._is_there[index]]
        if missing:
            computed = self._capture.states(self._rows[missing]).to(_DTYPE).cpu()
            self._states[missing] = computed.view(torch.int16).numpy()
            self._is_there[missing] = 1
        stored = torch.from_numpy(self._states[list(indices)]).view(_DTYPE)
        return stored.to(self._capture.model.device)


def _require_space(file: Path, size: int) -> None:
    """Take the space now: a process that writes to a mapped file on a full disk is killed, without a word."""
    is_new = not file.exists()
    free = shutil.disk_usage(file.parent).free
    try:
        if is_new and size > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with file.open("ab") as opened:
            os.posix_fallocate(opened.fileno(), 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return  # not every file system can do it
        if is_new:
            file.unlink(missing_ok=True)
        raise ResourceError(
            f"--keep-hidden: hidden states take {size / 1e9:.1f} GB, {file.parent} has {free / 1e9:.1f} GB "
            "free; without it they are computed again in each epoch"
        ) from error


def _is_whole(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> bool:
    return path.exists() and path.stat().st_size == int(np.prod(shape)) * np.dtype(dtype).itemsize


def _mapped(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> np.memmap[Any, Any]:
    mode: Literal["r+", "w+"] = "r+" if _is_whole(path, shape, dtype) else "w+"
    return np.memmap(path, dtype=dtype, mode=mode, shape=shape)
