"""llama.cpp through its C interface: bf16 weights, f16 K/V (its default), the greedy choice in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from benchmarks.peer_workers.gguf_file import write_gguf
from benchmarks.peer_workers.session import Setup, serve_standard_streams

_CONTEXT_GRAIN = 256
"""llama.cpp pads the context of a sequence to this."""


class _TokenBatch:
    """A llama_batch of one shape: who owns which row is written once, tokens and positions by every call."""

    def __init__(self, owners: NDArray[np.int64], outputs: NDArray[np.int64]) -> None:
        size = len(owners)
        self.batch: Any = llama_cpp.llama_batch_init(size, 0, 1)
        self.batch.n_tokens = size
        for row, owner in enumerate(owners):
            self.batch.n_seq_id[row] = 1
            self.batch.seq_id[row][0] = int(owner)
        self.tokens = np.ctypeslib.as_array(self.batch.token, (size,))
        self.positions = np.ctypeslib.as_array(self.batch.pos, (size,))
        np.ctypeslib.as_array(self.batch.logits, (size,))[:] = 0
        np.ctypeslib.as_array(self.batch.logits, (size,))[outputs] = 1


class _Context:
    """A context for one shape of batches."""

    def __init__(self, model: Any, num_threads: int, batch: int, length: int, num_tokens: int) -> None:
        self._batch = batch
        self._length = length
        params = llama_cpp.llama_context_default_params()
        grains = -(-(length + num_tokens) // _CONTEXT_GRAIN)
        params.n_ctx = batch * grains * _CONTEXT_GRAIN
        params.n_seq_max = batch
        params.n_batch = batch * length
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        rows = np.arange(batch)
        self._prompt = _TokenBatch(np.repeat(rows, length), (rows + 1) * length - 1)
        self._prompt.positions[:] = np.tile(np.arange(length), batch)
        self._step = _TokenBatch(rows, rows)

    def generate(self, prompts: NDArray[np.int32], num_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._prompt.tokens[:] = prompts.reshape(-1)
        chosen = [self._next_tokens(self._prompt)]
        for position in range(self._length, self._length + num_tokens - 1):
            self._step.tokens[:] = chosen[-1]
            self._step.positions[:] = position
            chosen.append(self._next_tokens(self._step))
        tokens: list[list[int]] = np.stack(chosen, axis=1).tolist()
        return tokens

    def _next_tokens(self, rows: _TokenBatch) -> NDArray[np.int64]:
        code = llama_cpp.llama_decode(self._context, rows.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (self._batch, self._num_vocab)).argmax(axis=1)


class LlamaCpp:
    """A checkpoint converted to GGUF, with a context for every shape of batches that was asked for."""

    def __init__(self, setup: Setup) -> None:
        file = Path(setup.folder) / "model.gguf"
        write_gguf(Path(setup.model), file)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        self._num_threads = setup.num_threads
        self._contexts: dict[tuple[int, int, int], _Context] = {}

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Continue prompts of one length at once."""
        array = np.array(prompts, dtype=np.int32)
        shape = (array.shape[0], array.shape[1], num_tokens)
        if shape not in self._contexts:
            self._contexts[shape] = _Context(self._model, self._num_threads, *shape)
        return self._contexts[shape].generate(array, num_tokens)


if __name__ == "__main__":
    serve_standard_streams(LlamaCpp, ("llama-cpp-python", "gguf"))
