"""Drafters with weights of their own as native calls on a CPU, made as a target's forward is, while idle.

Heads: a call for each depth, over rows; what their layers make of committed rows (Hydra++, parallel heads) is
one more. Drafters of features: a call is a forward over paged K/V, which takes features beside token ids and
hands on new ones; what EAGLE-3 fuses of the target's states is another. Weights that are the target's own are
packed once for both. Until all of it is made, and for good where it cannot be, they run eagerly.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from specdec.attention.base import LayerAttention
from specdec.attention.cpu import NativeLayer
from specdec.attention.metadata import AttentionMetadata
from specdec.drafters.base import Drafter, FeatureDrafter, HeadsDrafter, SequentialHeads
from specdec.kv.pool import KvPool
from specdec.model.batch import Generated, NativeChooser, SequenceSlice
from specdec.model.checked_batches import LONGEST_CHECKED, MOST_CHECKED, checked_batches
from specdec.model.compile_work import CompileWork, Libraries, build_libraries
from specdec.model.config import CompileConfig
from specdec.model.native_compile import (
    CHECK_STAGE,
    NUM_STAGES,
    RecordedCall,
    compile_call,
    relative_difference,
    tolerance_of,
)
from specdec.model.native_forward import NativeForward
from specdec.model.packed_weights import PackedWeights
from specdec.model.recording import NUM_ROWS, CannotLower, single_threaded
from specdec.proposers.drafter_pool import DrafterPool

PackedOfTarget = Callable[[], PackedWeights | None]
"""What the target has packed by now."""

_CHECKED_ROWS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCompilation:
    """How a drafter is compiled, beside whatever it is."""

    name: str
    """For people."""
    config: CompileConfig
    is_quantized: bool = False
    """Whether weights that it borrows are."""
    of_target: PackedOfTarget = lambda: None


def packed_bytes(drafter: Drafter, config: CompileConfig) -> int:
    """Return about how much memory packed weights of a drafter are going to take; the target's own apart."""
    if not _is_wanted(drafter, config):
        return 0
    return min(config.max_frozen_bytes, sum(one.nbytes for one in drafter.parameters() if one.dim() >= 2))


def _is_wanted(drafter: Drafter, config: CompileConfig) -> bool:
    return config.mode == "auto" and next(drafter.parameters()).device.type == "cpu"


class CompiledDrafter(CompileWork):
    """What all have in common: libraries, weights, and counting what is to be packed."""

    def __init__(
        self,
        drafter: Drafter,
        layers: Sequence[LayerAttention],
        how: DrafterCompilation,
        *,
        num_calls: int,
    ) -> None:
        self._layers = layers
        self._how = how
        self._dtype = next(drafter.parameters()).dtype
        self._weights: PackedWeights | None = None
        super().__init__(
            how.name,
            how.config,
            is_wanted=_is_wanted(drafter, how.config),
            num_single_pieces=2 + num_calls * NUM_STAGES,
            num_weights=0,
        )

    @property
    def is_ready(self) -> bool:
        """Whether the native form is there: before, everything runs eagerly."""
        return self.state == "ready"

    @property
    def num_packed_bytes(self) -> int:
        """Memory that packed weights take, beside those of the target."""
        return 0 if self._weights is None else self._weights.num_bytes

    @abstractmethod
    def weight_bytes(self, num_tokens: int) -> int:
        """Return the bytes of weights that drafting so many tokens, one behind the other, reads.

        For measurements, once it is ready.
        """

    def _compile(self) -> Iterator[str]:
        libraries = yield from build_libraries(self._cache_dir, is_quantized=self._how.is_quantized)
        self._weights = PackedWeights(
            libraries.forward, self._config.max_frozen_bytes, borrowed=self._how.of_target()
        )
        for layer in self._layers:
            if not libraries.attention.supports(self._dtype, layer.head_dim):
                raise CannotLower(f"the C++ attention does not run {self._dtype} with these heads")
        yield from self._make(libraries)
        yield CHECK_STAGE
        with torch.inference_mode(), single_threaded():
            self._check()

    @abstractmethod
    def _make(self, libraries: Libraries) -> Iterator[str]:
        """Compile the calls; as `_compile`."""

    @abstractmethod
    def _check(self) -> None:
        """Run them both ways.

        Raises:
            CannotLower: results differ.
        """

    def _call(self, recorded: RecordedCall, libraries: Libraries) -> Generator[str, None, NativeForward]:
        assert self._weights is not None
        return compile_call(recorded, libraries, self._weights, expect_weights=self._expect)

    def _expect(self, num_weights: int) -> None:
        self._num_weights += num_weights

    def _made_up(self, num_rows: int, width: int) -> torch.Tensor:
        """Return rows to be recorded or checked with."""
        generator = torch.Generator().manual_seed(num_rows)
        return torch.randn(num_rows, width, generator=generator).to(self._dtype)

    def _require_equal(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Raise CannotLower unless both are the same but for rounding, and -inf in the same places."""
        ours, theirs = ours.float(), theirs.float()
        is_known = theirs > float("-inf")
        difference = relative_difference(ours[is_known], theirs[is_known])
        if not torch.equal(is_known, ours > float("-inf")):
            raise CannotLower(f"its {what} know other tokens than the eager ones")
        tolerance = tolerance_of(self._dtype, is_quantized=self._how.is_quantized)
        if not difference <= tolerance:
            raise CannotLower(f"its {what} differ from the eager ones by {difference:.1e} (relative)")


class CompiledHeads(CompiledDrafter):
    """Heads of a depth each, and their layers where they have any."""

    def __init__(self, heads: HeadsDrafter, how: DrafterCompilation, pool: DrafterPool | None = None) -> None:
        """Prepare to compile `heads`, whose layers have their K/V in `pool`."""
        assert (pool is None) == (not heads.attention_layers)
        self._heads = heads
        self._pool = pool
        self._calls: list[NativeForward] = []
        self._prepare: NativeForward | None = None
        self._caches: ctypes.Array[NativeLayer] | None = None
        num_calls = heads.max_depth + (pool is not None)
        super().__init__(heads, heads.attention_layers, how, num_calls=num_calls)

    def try_prepare(
        self, hidden: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor | None:
        """Return what `HeadsDrafter.prepare` makes of rows [T, F] at positions [T]; valid until another.

        None: it is not compiled (yet).
        """
        if not self.is_ready or self._prepare is None or self._caches is None:
            return None
        return _run_batch(self._prepare, self._caches, hidden, positions, metadata)

    def try_logits(self, depth: int, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return what a head says of its inputs [T, I], fp32, valid until the next call.

        None: it is not compiled (yet).
        """
        return self._calls[depth].run_rows(inputs) if self.is_ready else None

    def try_choose(
        self,
        depth: int,
        inputs: torch.Tensor,
        chooser: NativeChooser,
        sequences: Sequence[int],
        positions: Sequence[int],
    ) -> list[int] | None:
        """Choose a token behind every row of a head's inputs; see `NativeForward.choose_behind`."""
        if not self.is_ready:
            return None
        return self._calls[depth].choose_behind(inputs, chooser, sequences, positions)

    def weight_bytes(self, num_tokens: int) -> int:
        of_rows = 0 if self._prepare is None else self._prepare.weight_bytes
        return of_rows + sum(call.weight_bytes for call in self._calls[:num_tokens])

    def _make(self, libraries: Libraries) -> Iterator[str]:
        heads = self._heads
        if self._pool is not None:
            recorded = RecordedCall(
                call=partial(_prepare_call, heads),
                layers=self._layers,
                num_position_ids=self._pool.max_model_len,
                incoming=self._made_up(max(NUM_ROWS), _states_size(heads))[None],
                output="rows",
            )
            self._prepare = yield from self._call(recorded, libraries)
            self._caches = self._prepare.bind_caches(self._pool.kv)
        for depth in range(heads.max_depth):
            recorded = RecordedCall(
                call=partial(_head_call, heads, depth),
                layers=(),
                num_position_ids=1,
                incoming=self._made_up(max(NUM_ROWS), self._width(depth))[None],
            )
            self._calls.append((yield from self._call(recorded, libraries)))

    def _width(self, depth: int) -> int:
        """Numbers that the head of a depth reads."""
        heads = self._heads
        if not isinstance(heads, SequentialHeads):
            return heads.prepared_size
        row = torch.zeros(1, heads.prepared_size, dtype=self._dtype)
        with torch.inference_mode():
            return heads.inputs(row, torch.zeros(1, depth + 1, dtype=torch.int64)).shape[-1]

    def _check(self) -> None:
        for depth, call in enumerate(self._calls):
            inputs = self._made_up(_CHECKED_ROWS, self._width(depth))
            self._require_equal("logits", call.run_rows(inputs), self._heads.head(depth, inputs))
        if self._prepare is None or self._pool is None:
            return
        for batch in _checked_batches(self._pool, self._prepare):
            hidden = self._made_up(batch.metadata.num_rows, _states_size(self._heads))
            positions = batch.metadata.positions
            ours = _run_batch(self._prepare, batch.caches, hidden, positions, batch.metadata)
            eager = self._pool.batch(batch.slices, batch.eager_kv)
            theirs = self._heads.prepare(hidden[None], positions[None], eager)[0]
            self._require_equal("rows", ours, theirs)

    def _forget(self) -> None:
        self._weights = self._prepare = self._caches = None
        self._calls.clear()


class FeatureBatch(NamedTuple):
    """What a drafter of features reads of one flat batch."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]: what the drafter is given as such."""
    logit_rows: torch.Tensor
    """int64 [L]"""
    metadata: AttentionMetadata
    features: torch.Tensor
    """[T, H], of `FeatureDrafter.fuse` or made before."""


class CompiledFeatures(CompiledDrafter):
    """A step of a drafter of features: it may go on behind its own tokens without coming back."""

    def __init__(self, drafter: FeatureDrafter, pool: DrafterPool, how: DrafterCompilation) -> None:
        """Prepare to compile `drafter`, which has its K/V in `pool`."""
        self._drafter = drafter
        self._pool = pool
        self._step: NativeForward | None = None
        self._fuse: NativeForward | None = None
        self._caches: ctypes.Array[NativeLayer] | None = None
        width = _states_size(drafter)
        probe = next(drafter.parameters()).new_zeros(1, width)
        with torch.inference_mode():
            fused = drafter.fuse(probe)
        self._fuses, self._feature_size = fused is not probe, fused.shape[-1]
        super().__init__(drafter, drafter.attention_layers, how, num_calls=1 + self._fuses)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Return what `FeatureDrafter.fuse` makes of states [T, F]: valid until the next call."""
        if not self._fuses:
            return states
        if self.is_ready and self._fuse is not None:
            return self._fuse.run_rows(states)
        return self._drafter.fuse(states)

    def try_run(self, batch: FeatureBatch) -> torch.Tensor | None:
        """Return logits over all of the target's tokens, fp32 [L, V], valid until the next call."""
        if not self.is_ready or self._step is None or self._caches is None:
            return None
        return self._run(self._step, batch, self._caches)

    def try_generate(
        self,
        slices: Sequence[SequenceSlice],
        num_more: Sequence[int],
        chooser: NativeChooser,
        features: torch.Tensor,
    ) -> Generated | None:
        """See `NativeForward.generate`; behind a row come its own features."""
        if not self.is_ready or self._step is None or self._caches is None:
            return None
        return self._step.generate(slices, num_more, chooser, self._caches, features)

    def features(self, num_rows: int) -> torch.Tensor:
        """Return the features [T, H] that the latest forward, of so many rows, has made."""
        assert self._step is not None
        return self._step.hidden(num_rows)

    def weight_bytes(self, num_tokens: int) -> int:
        assert self._step is not None
        fused = 0 if self._fuse is None else self._fuse.weight_bytes
        return fused + num_tokens * self._step.weight_bytes

    def _make(self, libraries: Libraries) -> Iterator[str]:
        drafter = self._drafter
        if self._fuses:
            recorded = RecordedCall(
                call=partial(_fuse_call, drafter),
                layers=(),
                num_position_ids=1,
                incoming=self._made_up(max(NUM_ROWS), _states_size(drafter))[None],
                output="rows",
            )
            self._fuse = yield from self._call(recorded, libraries)
        made: list[torch.Tensor] = []
        recorded = RecordedCall(
            call=partial(_step_call, drafter, made),
            layers=self._layers,
            num_position_ids=self._pool.max_model_len,
            incoming=self._made_up(max(NUM_ROWS), self._feature_size)[None],
            hidden_of=made.pop,
        )
        self._step = yield from self._call(recorded, libraries)
        self._step.go_on_with_hidden()
        self._caches = self._step.bind_caches(self._pool.kv)

    def _check(self) -> None:
        drafter, step = self._drafter, self._step
        assert step is not None
        if self._fuse is not None:
            states = self._made_up(_CHECKED_ROWS, _states_size(drafter))
            self._require_equal("fused states", self._fuse.run_rows(states), drafter.fuse(states))
        for checked in _checked_batches(self._pool, step):
            token_ids = torch.tensor([token for piece in checked.slices for token in piece.token_ids])
            every = torch.arange(len(token_ids))
            features = self._made_up(len(token_ids), self._feature_size)
            batch = FeatureBatch(token_ids, checked.metadata.positions, every, checked.metadata, features)
            logits = self._run(step, batch, checked.caches)
            made: list[torch.Tensor] = []
            eager = self._pool.batch(checked.slices, checked.eager_kv)
            positions = checked.metadata.positions[None]
            theirs = _step_call(drafter, made, token_ids[None], positions, every, eager, features[None])
            self._require_equal("logits", logits, theirs)
            self._require_equal("features", step.hidden(len(token_ids)), made.pop())

    def _run(
        self, step: NativeForward, batch: FeatureBatch, caches: ctypes.Array[NativeLayer]
    ) -> torch.Tensor:
        return step.run(
            batch.token_ids, batch.logit_rows, batch.metadata, caches, batch.positions, batch.features
        )

    def _forget(self) -> None:
        self._weights = self._step = self._fuse = self._caches = None


# What is recorded: `recording.ModelCall`, each given one kind of rows, and part of the rest.


def _head_call(
    heads: HeadsDrafter,
    depth: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
    paged: Any,
    inputs: torch.Tensor | None,
) -> torch.Tensor:
    assert inputs is not None
    return heads.head(depth, inputs[0][logit_rows])


def _prepare_call(
    heads: HeadsDrafter,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
    paged: Any,
    states: torch.Tensor | None,
) -> torch.Tensor:
    assert states is not None
    return heads.prepare(states, positions, paged)


def _fuse_call(
    drafter: FeatureDrafter,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
    paged: Any,
    states: torch.Tensor | None,
) -> torch.Tensor:
    assert states is not None
    return drafter.fuse(states)


def _step_call(
    drafter: FeatureDrafter,
    made: list[torch.Tensor],
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
    paged: Any,
    features: torch.Tensor | None,
) -> torch.Tensor:
    """Return logits over the target's vocabulary; add the features [T, H] to `made`."""
    assert features is not None
    step = drafter.step(drafter.embed(token_ids), features, positions, paged)
    made.append(step.features[0])
    logits = drafter.logits(step.outputs[0][logit_rows])
    return logits if drafter.vocabulary is None else drafter.vocabulary.expand(logits)


def _states_size(drafter: Drafter) -> int:
    return len(drafter.hidden_layers) * drafter.target.hidden_size


def _run_batch(
    call: NativeForward,
    caches: ctypes.Array[NativeLayer],
    rows: torch.Tensor,
    positions: torch.Tensor,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Run a call that reads no tokens and gives a row for each of `rows`."""
    no_logits = torch.empty(0, dtype=torch.int64)
    return call.run(positions, no_logits, metadata, caches, positions, rows)


class _CheckedBatch(NamedTuple):
    """One of the self-check, to be run both ways on pools of their own."""

    slices: Sequence[SequenceSlice]
    metadata: AttentionMetadata
    caches: ctypes.Array[NativeLayer]
    eager_kv: KvPool


def _checked_batches(pool: DrafterPool, call: NativeForward) -> Iterator[_CheckedBatch]:
    """Yield them in order: each finds what those before have written."""
    num_blocks = -(-LONGEST_CHECKED // pool.block_size)
    native_kv, eager_kv = (pool.spare_kv(MOST_CHECKED * num_blocks) for _ in range(2))
    caches = call.bind_caches(native_kv)
    for slices in checked_batches(
        vocab_size=pool.vocab_size, max_model_len=pool.max_model_len, num_blocks=num_blocks
    ):
        yield _CheckedBatch(slices, pool.batch(slices).metadata, caches, eager_kv)
