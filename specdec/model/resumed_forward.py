"""Verification that goes on from where drafts have stopped: the layers behind an early exit, compiled.

What the exit's layers make of a row is the same whether the row is drafted or verified, K/V included, as long
as drafts attend to everything and both forwards are compiled: no row depends on what else is in a batch. So
verification runs these layers on rows alone that no draft has run, and those behind them on all rows.
(LayerSkip, Elhoushi et al., arXiv 2404.16710.)
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from specdec.attention.cpu import NativeLayer
from specdec.model.batch import Generated, NativeChooser, SequenceSlice
from specdec.model.checked_batches import LONGEST_CHECKED, checked_batches
from specdec.model.compile_work import CompileWork, build_libraries
from specdec.model.config import CompileConfig
from specdec.model.exit_states import ExitStates
from specdec.model.graphs import CompiledForward, num_position_ids, recording, small_caches
from specdec.model.native_compile import CHECK_STAGE, NUM_STAGES, RecordedCall, compile_call
from specdec.model.native_forward import NativeForward
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.recording import CannotLower
from specdec.model.runner import ModelRunner

logger = logging.getLogger(__name__)

_NUM_SINGLE_PIECES = 2 + NUM_STAGES
_FEWEST_PRODUCTS = 1 << 24
"""Products of numbers and weights that are worth a native call more. Measured on the demo target, several
times: to spare 11 million made steps slower by 0 to 7 %, 22 million faster by 2 to 8 %."""
_NO_CHOICE = NativeChooser(0, 0, None)
"""For slices none of whose rows yields logits: it is not called."""


class ResumedForward(CompileWork):
    """Runs batches of a model of which an early exit has run some rows; not thread-safe.

    Logits and K/V are bit for bit those of the whole model's compiled forward.
    """

    def __init__(
        self, runner: ModelRunner, view: ModelRunner, config: CompileConfig, slots: RankSlots | None = None
    ) -> None:
        """Prepare; nothing is compiled yet, and nothing will be before both runners are.

        `view` is a runner of the early exit with an `exit_tap`, on the pool of `runner`. With `slots`, both
        have a part of a model: use `rank_graphs.resume_over_ranks`.
        """
        assert view.exit_tap is not None, "nobody is told what the exit leaves"
        self._runner, self._view, self._tap = runner, view, view.exit_tap
        self._slots = slots
        self._forward: NativeForward | None = None
        self._caches: ctypes.Array[NativeLayer] | None = None
        self.meetings: Sequence[tuple[bool, int]] = ()
        """See `NativeForward.meetings`, once it is made."""
        self.fewest_rows = 0
        """Rows that are worth it, once it is made; of ranks, all have the same."""
        loaded = runner.loaded
        super().__init__(
            loaded.path.name,
            config,
            is_wanted=config.mode == "auto" and loaded.device.type == "cpu",
            num_single_pieces=_NUM_SINGLE_PIECES,
            num_weights=sum(parameter.dim() >= 2 for parameter in loaded.model.parameters()),
        )

    @contextmanager
    def collecting(self, num_rows: int) -> Iterator[ExitStates | None]:
        """Within, drafts of the view, which run so many rows, leave their states in what is returned.

        None: they leave none. It is not compiled, or so few rows are not worth a call more.
        """
        if self._forward is None or num_rows < self.fewest_rows:
            yield None
            return
        states = ExitStates(self._runner.block_size)
        with self._tap.collecting(states):
            yield states

    def try_run(self, slices: Sequence[SequenceSlice], states: ExitStates) -> torch.Tensor | None:
        """As `ModelRunner.forward`, of a batch of which `states` are there; None: that has to run it.

        Logits are valid until the next call.

        Raises:
            IndexError: a token id is not in the vocabulary.
            TransportError: another rank is gone.
        """
        if self._forward is None or self._caches is None or self._complete(slices, states) is None:
            return None
        inputs = self._runner.pack(slices)
        return self._forward.run(
            inputs.input_ids,
            inputs.logit_rows,
            inputs.metadata,
            self._caches,
            inputs.position_ids,
            states.of(slices),
        )

    def try_generate(
        self, slices: Sequence[SequenceSlice], chooser: NativeChooser, states: ExitStates
    ) -> Generated | None:
        """As `ModelRunner.try_generate` without further tokens; otherwise as `try_run`.

        Raises:
            IndexError: a token id is not in the vocabulary.
        """
        if self._forward is None or self._caches is None:
            return None
        exit_s = self._complete(slices, states)
        if exit_s is None:
            return None
        generated = self._forward.generate(
            slices, [0] * len(slices), chooser, self._caches, states.of(slices)
        )
        return generated._replace(forward_s=exit_s + generated.forward_s)

    def give_up(self, reason: str) -> None:
        """Leave verification to the whole model, which costs nothing but time; a log line says why."""
        self._state = "ready"  # there is nothing left to do, and nothing wrong that anybody could see to
        self.failure = reason
        self._forget()
        logger.info("%s verifies drafts from its first layer on: %s", self._name, reason)

    def _complete(self, slices: Sequence[SequenceSlice], states: ExitStates) -> float | None:
        """Run rows without states through the exit; return the seconds that it took, None: it cannot."""
        missing = states.missing(slices)
        if not missing:
            return 0.0
        with self._tap.collecting(states):
            read = self._view.try_generate(missing, [0] * len(missing), _NO_CHOICE)
        return None if read is None else read.forward_s

    def _compile(self) -> Iterator[str]:
        runner, whole, view = self._runner, self._runner.graphs, self._view.graphs
        if not isinstance(whole, CompiledForward) or not isinstance(view, CompiledForward):
            raise CannotLower("forwards are not compiled")
        if whole.native is None or view.native is None or whole.packed_weights is None:
            raise CannotLower("its forward, or that of its first layers, is not compiled")
        is_quantized = runner.loaded.quantization is not None
        libraries = yield from build_libraries(self._cache_dir, is_quantized=is_quantized)
        recorded = RecordedCall(
            call=runner.call_model,
            layers=runner.loaded.layers,
            num_position_ids=num_position_ids(runner),
            hidden_of=self._tap.state,
            begins_at_hidden=True,
            recording=recording(runner, self._tap),
        )
        forward = yield from compile_call(
            recorded, libraries, whole.packed_weights, self._slots, self._expect_weights
        )
        self.meetings = forward.meetings
        yield CHECK_STAGE
        self._check(whole.native, view.native, forward)
        products_spared = whole.native.products_per_row - forward.products_per_row
        self.fewest_rows = -(-_FEWEST_PRODUCTS // products_spared)
        self._forward, self._caches = forward, forward.bind_caches(runner.caches)

    def _check(self, whole: NativeForward, view: NativeForward, resumed: NativeForward) -> None:
        """Run a few small batches both ways, on pools of their own.

        Raises:
            CannotLower: logits or K/V are not the same bits.
            TransportError: a rank is gone.
        """
        runner = self._runner
        pools = [small_caches(runner) for _ in range(2)]
        of_whole, of_resumed = (whole.bind_caches(pool) for pool in pools)
        is_same = True
        for slices in checked_batches(
            vocab_size=runner.vocab_size, max_model_len=runner.max_model_len, num_blocks=LONGEST_CHECKED
        ):
            inputs = runner.pack(slices)
            batch = (inputs.input_ids, inputs.logit_rows, inputs.metadata)
            expected = whole.run(*batch, of_whole, inputs.position_ids)
            view.run(*batch, of_resumed, inputs.position_ids)
            hidden = view.hidden(inputs.metadata.num_rows)
            logits = resumed.run(*batch, of_resumed, inputs.position_ids, hidden)
            is_same = is_same and torch.equal(logits, expected)
        # At the end: other ranks go through all batches too.
        expected_pool, pool = pools
        for mine, theirs in ((pool.keys, expected_pool.keys), (pool.values, expected_pool.values)):
            is_same = is_same and all(map(torch.equal, mine, theirs))
        if not is_same:
            raise CannotLower("what follows on its first layers' states is not what it computes as a whole")

    def _forget(self) -> None:
        self._forward = None
