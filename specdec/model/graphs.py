"""The compiled forward of a runner: made while idle, piece by piece, then used for batches of every shape.

The model's forward is recorded, lowered to native operations and run by one C++ call in one parallel
region (docs/decisions/compiled-forward.md says why). Until it is ready, and for good where there is no C++
compiler or the model does something that has no native form, the runner runs eagerly.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from specdec.attention.base import LayerCaches
from specdec.attention.cpu import NativeLayer
from specdec.attention.metadata import slot_list, slots_of
from specdec.attention.observation import Observation
from specdec.core.errors import CheckpointError
from specdec.kv.packed_copy import PackedCopy
from specdec.kv.pool import FIRST_BLOCK, KvPool
from specdec.model.batch import Generated, NativeChooser, SequenceSlice
from specdec.model.checked_batches import LONGEST_CHECKED, MOST_CHECKED, checked_batches
from specdec.model.compile_work import CompileWork, build_libraries
from specdec.model.config import CompileConfig
from specdec.model.exit_states import ExitStates, ExitTap
from specdec.model.experts import recorded_experts
from specdec.model.loader import LoadedModel
from specdec.model.native_compile import (
    CHECK_STAGE,
    NUM_STAGES,
    RecordedCall,
    compile_call,
    relative_difference,
    tolerance_of,
)
from specdec.model.native_forward import NativeForward, StagedForward
from specdec.model.packed_weights import PackedWeights
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.pool_sizing import kv_shapes
from specdec.model.recording import NUM_ROWS, CannotLower, HiddenOf, single_threaded
from specdec.model.runner import ForwardInputs, Incoming, ModelRunner

logger = logging.getLogger(__name__)

_NUM_SINGLE_PIECES = 2 + NUM_STAGES
"""Pieces beside those that pack one weight each: the build and the check too."""


def packed_weight_bytes(loaded: LoadedModel, config: CompileConfig) -> int:
    """Return about how much memory a compiled forward's packed weights are going to take."""
    if loaded.device.type != "cpu" or (config.mode == "off" and loaded.invariant is None):
        return 0
    if loaded.quantization is not None:  # they are packed already
        return 0
    matrices = sum(one.nbytes for one in loaded.model.parameters() if one.dim() >= 2)
    return min(config.max_frozen_bytes, matrices)


def can_stay_compiled(loaded: LoadedModel) -> bool:
    """Whether, once compiled, nothing runs eagerly any more; true where eager forwards may be mixed in.

    Batches in which one prompt exceeds the rotary tables run eagerly: with `batch_invariant` all must then.
    """
    return loaded.invariant is None or loaded.rotary is None or loaded.rotary.is_tabulated


class CompiledForward(CompileWork):
    """Implements `runner.ForwardGraphs` for one runner on the CPU.

    `run_next` and `try_run` are called from the runner's thread.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: CompileConfig,
        slots: RankSlots | None = None,
        like: CompiledForward | None = None,
    ) -> None:
        """Prepare; nothing is compiled yet.

        With `slots`, the runner has a part of a model: use `rank_graphs.compile_over_ranks`. `like` is
        that of a model with the same weights: what it has packed is not packed again.
        """
        self._like = like
        self._slots = slots
        self._runner = runner
        self._forward: NativeForward | None = None
        self._caches: ctypes.Array[NativeLayer] | None = None
        self._weights: PackedWeights | None = None
        self._num_position_ids = 0
        self.meetings: Sequence[tuple[bool, int]] = ()
        """See `NativeForward.meetings`, once it is made."""
        loaded = runner.loaded
        super().__init__(
            loaded.path.name,
            config,
            is_wanted=config.mode == "auto" and loaded.device.type == "cpu",
            num_single_pieces=_NUM_SINGLE_PIECES,
            # Every matrix of a model is, nearly always, a weight to be packed; known exactly after lowering.
            num_weights=sum(parameter.dim() >= 2 for parameter in loaded.model.parameters()),
        )

    @property
    def is_ready(self) -> bool:
        """See `ForwardGraphs`."""
        return self._forward is not None

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """None: it runs as many rows as there are."""
        return ()

    @property
    def num_packed_bytes(self) -> int:
        """Memory that packed weights take."""
        return 0 if self._weights is None else self._weights.num_bytes

    @property
    def native(self) -> NativeForward | None:
        """What is compiled; None: nothing yet."""
        return self._forward

    @property
    def packed_weights(self) -> PackedWeights | None:
        """What has been packed, for others with weights of this model; None: nothing yet."""
        return self._weights

    def try_run(self, inputs: ForwardInputs) -> torch.Tensor | None:
        """Return fp32 logits [L, vocab], valid until the next call; None when nothing is compiled.

        In a stage before the last, hidden states [1, T, hidden_size] instead.

        Also None for position ids that have no table (prompts beyond the original length, dynamic NTK).

        Raises:
            IndexError: a token id is not in the vocabulary.
        """
        if self._forward is None or self._caches is None:
            return None
        shifted = inputs.shifted_positions
        if shifted is not None and int(shifted.max()) >= self._num_position_ids:
            return None
        output = self._run(self._forward, self._caches, inputs)
        slots, collected = inputs.metadata.slot_mapping, self._collected
        if self._runner.taps is not None:
            self._runner.keep_hidden(slots, self._forward.hidden(len(slots)))
        if collected is not None:
            collected.keep(slots.tolist(), self._forward.hidden(len(slots)).clone())
        return output

    def try_generate(
        self,
        slices: Sequence[SequenceSlice],
        num_more: Sequence[int],
        chooser: NativeChooser,
        incoming: Incoming | None = None,
        observation: Observation | None = None,
    ) -> Generated | None:
        """See `ForwardGraphs.try_generate`: None when nothing is compiled, and for tokens behind a tree.

        Raises:
            IndexError: a token id is not in the vocabulary.
        """
        if self._forward is None or self._caches is None:
            return None
        if any(more and piece.parents is not None for piece, more in zip(slices, num_more, strict=True)):
            return None
        if any(self._has_no_table(piece, more) for piece, more in zip(slices, num_more, strict=True)):
            return None
        keeps_hidden = self._runner.taps is not None
        if keeps_hidden and any(num_more):
            return None  # only the last of its forwards would be there to be kept
        arrived = None if incoming is None else incoming()
        hidden, collected = None, self._collected
        if collected is not None:
            places = slot_list(slices, block_size=self._runner.block_size, num_more=num_more)
            hidden = self._forward.room_for_hidden(len(places))
            collected.keep(places, hidden)
        generated = self._forward.generate(
            slices, num_more, chooser, self._caches, arrived, observation, hidden
        )
        if keeps_hidden:
            slots = slots_of(slices, block_size=self._runner.block_size)
            self._runner.keep_hidden(slots, self._forward.hidden(len(slots)))
        return generated

    @property
    def _collected(self) -> ExitStates | None:
        """Where this forward is to keep what it leaves as an early exit."""
        return None if self._runner.exit_tap is None else self._runner.exit_tap.states

    def _has_no_table(self, piece: SequenceSlice, num_more: int) -> bool:
        """Whether position ids of a slice, or of the tokens behind it, are beyond those of the tables."""
        if piece.shift is not None and piece.shift.offset >= self._num_position_ids:
            return True
        if not piece.num_dropped:
            return False
        offset = 0 if piece.shift is None else piece.shift.offset
        end = piece.start + piece.num_dropped + len(piece.token_ids) + num_more
        return end + offset > self._num_position_ids

    def stage_weights(self, replaced: Callable[[torch.Tensor], torch.Tensor | None]) -> StagedForward | None:
        """Prepare other weights for what is compiled, if anything is; any thread.

        Raises:
            CheckpointError: it holds something that was computed from weights.
        """
        forward = self._forward
        try:
            return None if forward is None else forward.stage(replaced)
        except CannotLower as error:
            raise CheckpointError(
                f"{self._runner.loaded.path.name} cannot be given other weights, unless compile.mode is off: "
                f"{error}"
            ) from error

    def take_weights(self, staged: StagedForward | None) -> bool:
        """Run with what was staged; False when that was before, or is while, something is compiled."""
        if self._state == "pending" or self._forward is not (None if staged is None else staged.of):
            return False
        if staged is not None and self._forward is not None:
            self._forward.take(staged)
            self._weights = staged.weights
        return True

    def _forget(self) -> None:
        self._weights = self._forward = None

    def _compile(self) -> Iterator[str]:
        runner = self._runner
        is_quantized = runner.loaded.quantization is not None
        libraries = yield from build_libraries(self._cache_dir, is_quantized=is_quantized)
        layers = runner.loaded.layers
        if all(libraries.attention.supports(runner.loaded.dtype, layer.head_dim) for layer in layers):
            runner.backend = libraries.attention
        else:
            raise CannotLower(f"the C++ attention does not run {runner.loaded.dtype} with these heads")
        started_s = time.perf_counter()
        self._num_position_ids = num_position_ids(runner)
        weights = None if self._like is None else self._like._weights
        if weights is None:
            self._weights = weights = PackedWeights(libraries.forward, self._config.max_frozen_bytes)
        recorded = RecordedCall(
            call=runner.call_model,
            layers=layers,
            num_position_ids=self._num_position_ids,
            incoming=_any_incoming(runner),
            hidden_of=_hidden_of(runner),
            output="logit_rows" if _gives_logits(runner) else "rows",
            recording=recording(runner, runner.exit_tap),
        )
        forward = yield from compile_call(recorded, libraries, weights, self._slots, self._expect_weights)
        self.meetings = forward.meetings
        yield CHECK_STAGE
        self._check(forward)
        self._forward, self._caches = forward, forward.bind_caches(runner.caches)
        logger.info(
            "%s: forward compiled in %.1f s (%d operations, %.0f MB of packed weights, %d left in place)",
            runner.loaded.path.name,
            time.perf_counter() - started_s,
            forward.num_operations,
            weights.num_bytes / 1e6,
            weights.num_left_out,
        )

    def _run(
        self, forward: NativeForward, caches: ctypes.Array[NativeLayer], inputs: ForwardInputs
    ) -> torch.Tensor:
        output = forward.run(
            inputs.input_ids,
            inputs.logit_rows,
            inputs.metadata,
            caches,
            inputs.position_ids,
            inputs.incoming,
        )
        return output if _gives_logits(self._runner) else output[None]

    def _check(self, forward: NativeForward) -> None:
        """Run a few small batches both ways, on pools of their own; stages run them one after the other.

        Raises:
            CannotLower: the logits differ.
            TransportError: a rank is gone.
        """
        runner = self._runner
        pools = [small_caches(runner) for _ in range(2)]
        caches = forward.bind_caches(pools[0])
        largest = 0.0
        for slices in checked_batches(
            vocab_size=runner.vocab_size, max_model_len=runner.max_model_len, num_blocks=LONGEST_CHECKED
        ):
            inputs = runner.pack(slices)
            ours, theirs = (replace(inputs, incoming=_arrived(runner, inputs, tag)) for tag in range(2))
            output = self._run(forward, caches, ours)
            with torch.inference_mode(), single_threaded():
                expected = runner.forward_eager(theirs, pools[1])
            if not _gives_logits(runner):
                _hand_on(runner, output, expected)
                continue
            pairs = [(output, expected)]
            if runner.taps is not None:
                pairs.append((forward.hidden(inputs.metadata.num_rows), runner.taps.rows))
            for compiled, eager in pairs:
                difference = relative_difference(compiled.float(), eager.float())
                largest = difference if not difference <= largest else largest
        # At the end: other ranks go through all batches too.
        # Where one of the two rounds to another of 255 steps, packed K and V differ as rounded weights do.
        is_quantized = runner.loaded.quantization is not None or runner.attends_packed
        tolerance = tolerance_of(runner.loaded.dtype, is_quantized=is_quantized)
        if not largest <= tolerance:
            what = "logits" if runner.taps is None else "logits or hidden states"
            raise CannotLower(f"its {what} differ from the eager ones by {largest:.1e} (relative)")


def num_position_ids(runner: ModelRunner) -> int:
    """Return below which number the position ids are that have tables."""
    rule = runner.loaded.rotary
    return runner.max_model_len if rule is None else rule.num_position_ids


@contextmanager
def recording(runner: ModelRunner, tap: ExitTap | None) -> Iterator[None]:
    """Within, the model of `runner` is recorded, with what `tap` is told of."""
    with recorded_experts(runner.loaded.model), nullcontext() if tap is None else tap.listening():
        yield


def _hidden_of(runner: ModelRunner) -> HiddenOf | None:
    """What a forward hands out beside its output: its taps' states, or what it leaves as an early exit."""
    taps = runner.taps
    if taps is not None:
        return lambda: taps.rows
    return None if runner.exit_tap is None else runner.exit_tap.state


def _gives_logits(runner: ModelRunner) -> bool:
    stage = runner.loaded.stage
    return stage is None or stage.is_last


def _any_incoming(runner: ModelRunner) -> torch.Tensor | None:
    """Made-up hidden states, where a forward begins with such."""
    stage = runner.loaded.stage
    if stage is None or stage.is_first:
        return None
    return torch.ones((1, max(NUM_ROWS), stage.plan.hidden_size), dtype=runner.loaded.dtype)


def _arrived(runner: ModelRunner, inputs: ForwardInputs, tag: int) -> torch.Tensor | None:
    """What the stage before hands on in the self-check, if there is one: 0 compiled, 1 eager."""
    loaded = runner.loaded
    if loaded.stage is None:
        return None
    transfer = loaded.stage.expect(inputs.metadata.num_rows, tag, loaded.dtype, loaded.device)
    return None if transfer is None else transfer.finish()


def _hand_on(runner: ModelRunner, compiled: torch.Tensor, eager: torch.Tensor) -> None:
    stage = runner.loaded.stage
    assert stage is not None
    for tag, hidden in enumerate((compiled, eager)):
        stage.hand_on(hidden, tag).finish()


def small_caches(runner: ModelRunner) -> LayerCaches:
    """Return a pool for `checked_batches`, of whatever kind the runner attends to."""
    pool = KvPool(
        kv_shapes(runner.loaded),
        num_blocks=FIRST_BLOCK + MOST_CHECKED * LONGEST_CHECKED,
        block_size=runner.block_size,
        dtype=runner.loaded.dtype,
        device=runner.loaded.device,
    )
    return PackedCopy(pool) if runner.attends_packed else pool
