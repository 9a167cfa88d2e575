"""The runner's forward as CUDA graphs: recorded while idle, one per number of rows, then replayed.

A step of a language model is a thousand small launches, each of which costs the host more than the device.
A graph holds them all: one launch, with no Python between.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeGuard

import torch

from specdec.attention.base import AttentionBackend
from specdec.attention.observation import Observation
from specdec.attention.triton import MAX_PARTIAL_BYTES, TritonPagedAttention, TritonUnavailable
from specdec.core.idle_work import WorkProgress, WorkState
from specdec.model.batch import Generated, NativeChooser, SequenceSlice
from specdec.model.config import CompileConfig
from specdec.model.graph_recorder import CannotRecord, CudaRecorder, Recorder
from specdec.model.row_buckets import RowBuckets, smallest_holding
from specdec.model.runner import ForwardInputs, Incoming
from specdec.model.static_batch import StaticBatch, StaticLayers, StaticModel

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest difference from eager logits, relative to the largest logit, with which a graph is used."""


class RecordedModel(StaticModel, Protocol):
    """What steps are recorded of: a `ModelRunner`, or what runs a drafter."""

    @property
    def backend(self) -> AttentionBackend: ...
    @property
    def vocab_size(self) -> int: ...

    def pack(self, slices: Sequence[SequenceSlice]) -> ForwardInputs:
        """As `ModelRunner.pack`."""
        ...

    def forward_eager(self, inputs: ForwardInputs) -> torch.Tensor:
        """As `ModelRunner.forward_eager`."""
        ...


class GraphRecording(ABC):
    """Implements `core.idle_work.IdleWork`: records one graph per piece of work.

    The thread that replays the graphs also calls `run_next`.
    """

    def __init__(self, name: str, num_graphs: int) -> None:
        """`name`: of what is recorded, for people."""
        self._name = name
        self._num_graphs = num_graphs
        self._num_recorded = 0
        self._state: WorkState = "pending" if num_graphs else "off"
        self._pieces = self._record_all()

    @abstractmethod
    def _record_all(self) -> Iterator[None]:
        """Record the graphs, yielding after each: largest first, then the others find memory in the pool.

        Raises:
            TritonUnavailable, CannotRecord: the model cannot be recorded.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Use no graph any more."""

    @property
    def state(self) -> WorkState:
        """off: switched off, or no Triton attention; failed: all stays eager, and a log line has said why."""
        return self._state

    def pending(self) -> bool:
        """Whether `run_next` has anything to do."""
        return self._state == "pending"

    def progress(self) -> WorkProgress:
        """How many graphs are recorded."""
        return WorkProgress(stage="recording CUDA graphs", done=self._num_recorded, total=self._num_graphs)

    def run_next(self) -> None:
        """Record one more graph: about as long as a few eager runs of what is in it."""
        if self._state != "pending":
            return
        name = self._name
        try:
            next(self._pieces)
            self._num_recorded += 1
        except StopIteration:
            self._state = "ready"
            logger.info("%s: recorded %d CUDA graphs", name, self._num_recorded)
        except (TritonUnavailable, CannotRecord) as error:
            self._fail(name, str(error))
        except Exception as error:
            # What cannot be recorded must never take down what runs.
            logger.debug("recording a CUDA graph failed", exc_info=True)
            self._fail(name, f"{type(error).__name__}: {error}")

    def warm_up(self) -> WorkState:
        """Record all graphs now; return the state this ends in."""
        while self.pending():
            self.run_next()
        return self._state

    def _fail(self, name: str, reason: str) -> None:
        self._state = "failed"
        self._forget()
        logger.warning("%s runs eagerly, which is slower: %s", name, reason)


class _Recorded:
    """One bucket."""

    def __init__(self, batch: StaticBatch, logits: torch.Tensor, replay: Callable[[], None]) -> None:
        self.batch = batch
        self._logits = logits
        self._replay = replay

    def prepare(self, inputs: ForwardInputs) -> Callable[[], None]:
        self.batch.fill(inputs)
        return self._replay

    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        self.prepare(inputs)()
        return self._logits[: inputs.logit_rows.shape[0]]


class CudaForward(GraphRecording):
    """Implements `runner.ForwardGraphs` for one runner on a GPU.

    Chunks of prompts larger than the largest bucket, trees where none are expected, and everything until its
    bucket is recorded, run eagerly.
    """

    def __init__(
        self,
        runner: RecordedModel,
        config: CompileConfig,
        recorder: Recorder | None = None,
        *,
        takes_trees: bool = False,
    ) -> None:
        """Prepare; nothing is recorded yet.

        Args:
            runner: one on a CUDA device with the Triton attention; with any other everything stays eager.
            config: whether to record, and up to which number of rows.
            recorder: None takes CUDA's own.
            takes_trees: whether rows of a sequence may be a tree.
        """
        self._takes_trees = takes_trees
        self._recorder = recorder
        self._recorded: dict[int, _Recorded] = {}
        self._sizes: list[int] = []
        self._buckets = RowBuckets(())
        if (backend := recordable(runner, config)) is not None:
            self._backend = backend
            self._buckets = RowBuckets.up_to(config.cuda_graph_max_rows)
        super().__init__(runner.loaded.path.name, len(self._buckets.sizes))
        self._model = runner

    @property
    def is_ready(self) -> bool:
        """See `ForwardGraphs`: whether all graphs are recorded."""
        return self._state == "ready"

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """See `ForwardGraphs`: there is a graph for each."""
        return self._buckets.sizes

    @torch.inference_mode()
    def try_run(self, inputs: ForwardInputs) -> torch.Tensor | None:
        """Return fp32 logits [L, vocab], valid until the next call; None when no graph holds the batch."""
        recorded = self._holding(inputs)
        return None if recorded is None else recorded.run(inputs)

    @torch.inference_mode()
    def prepare(self, inputs: ForwardInputs) -> Callable[[], None] | None:
        """Return what runs this batch on the device, as often as it is called, until another batch is run.

        For measurements: `try_run` does both. None when no graph holds the batch.
        """
        recorded = self._holding(inputs)
        return None if recorded is None else recorded.prepare(inputs)

    def _holding(self, inputs: ForwardInputs) -> _Recorded | None:
        size = smallest_holding(self._sizes, inputs.metadata.num_rows)
        recorded = None if size is None else self._recorded[size]
        return recorded if recorded is not None and recorded.batch.holds(inputs) else None

    def try_generate(
        self,
        slices: Sequence[SequenceSlice],
        num_more: Sequence[int],
        chooser: NativeChooser,
        incoming: Incoming | None = None,
        observation: Observation | None = None,
    ) -> Generated | None:
        """None: native choosers run on CPUs (`proposers.draft_graph` drafts on a GPU)."""
        return None

    def _forget(self) -> None:
        self._recorded.clear()
        self._sizes.clear()

    def _record_all(self) -> Iterator[None]:
        loaded = self._model.loaded
        recorder = CudaRecorder(loaded.device) if self._recorder is None else self._recorder
        with torch.inference_mode():
            logits = torch.zeros(
                (self._buckets.sizes[-1], loaded.vocab_size), dtype=torch.float32, device=loaded.device
            )
        for size in reversed(self._buckets.sizes):
            with torch.inference_mode():
                recorded = self._record(size, logits[:size], recorder)
                self._check(size, recorded)
            self._recorded[size] = recorded
            self._sizes.insert(0, size)
            yield

    def _record(self, size: int, logits: torch.Tensor, recorder: Recorder) -> _Recorded:
        batch = StaticBatch(self._model, self._backend, size, size, takes_trees=self._takes_trees)

        def run() -> None:
            logits.copy_(batch.forward())

        batch.fill(self._probe(size))
        return _Recorded(batch, logits, recorder.record(run))

    def _probe(self, size: int) -> ForwardInputs:
        """One-token sequences, all in the scratch block, where what they leave harms nobody."""
        piece = SequenceSlice(
            token_ids=(1 % self._model.vocab_size,), start=0, block_table=(0,), num_logit_rows=1
        )
        return self._model.pack([piece] * size)

    def _check(self, size: int, recorded: _Recorded) -> None:
        """Compare a replay with the eager forward.

        Raises:
            CannotRecord: the logits differ.
        """
        inputs = self._probe(size)
        expected = self._model.forward_eager(inputs).float()
        logits = recorded.run(inputs)
        # Of ids that a drafter does not know both are -inf.
        differences = torch.where(logits == expected, 0.0, (logits - expected).abs())
        largest = expected.masked_fill(expected.isinf(), 0.0).abs().max().clamp(min=1e-6)
        difference = float(differences.max() / largest)
        if not difference <= _TOLERANCE[self._model.loaded.dtype]:
            raise CannotRecord(f"its logits differ from the eager ones by {difference:.1e} (relative)")


def can_be_recorded(backend: AttentionBackend) -> TypeGuard[TritonPagedAttention]:
    """Whether steps with this attention can be recorded: it must not lay out each of them on the host."""
    return isinstance(backend, TritonPagedAttention)


def recordable(runner: RecordedModel, config: CompileConfig) -> TritonPagedAttention | None:
    """Return the runner's attention where graphs are wanted and it can be recorded."""
    backend = runner.backend
    return backend if can_be_recorded(backend) and config.mode == "auto" else None


def recording_bytes(loaded: StaticLayers, config: CompileConfig) -> int:
    """Return about how much memory the graphs of a model are going to take: logits, and partial attention."""
    if config.mode == "off":
        return 0
    bytes_per_logit = torch.float32.itemsize + loaded.dtype.itemsize
    return config.cuda_graph_max_rows * loaded.vocab_size * bytes_per_logit + MAX_PARTIAL_BYTES
