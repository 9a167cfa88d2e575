"""Making something native while idle: the C++ libraries that it takes, and the work in pieces."""

from __future__ import annotations

import ctypes
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable, resolve_cache_dir
from specdec.core.errors import TransportError
from specdec.core.idle_work import WorkProgress, WorkState
from specdec.model.config import CompileConfig
from specdec.model.native_forward import load_forward_library, load_quantized_kernel
from specdec.model.recording import CannotLower

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_FIRST_STAGE = "building the C++ kernels"

_Made = TypeVar("_Made")


class WarmUpProgress(Protocol):
    """Called by `CompileWork.warm_up` when a piece begins."""

    def __call__(self, stage: str) -> None:
        """`stage` says what is being done, for people."""
        ...


@dataclass(frozen=True, slots=True)
class Libraries:
    """What is built once per machine."""

    forward: ctypes.CDLL
    attention: CpuPagedAttention
    quantized_kernel: ctypes.c_void_p | None
    """Where a weight is quantized."""


class _InThread(Generic[_Made]):
    """Something that is made in a thread of its own, which does not outlive the process."""

    def __init__(self, make: Callable[[], _Made]) -> None:
        self._outcome: list[_Made | NativeUnavailable] = []
        self._thread = threading.Thread(target=self._run, args=(make,), name="kernel-build", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it is over, waiting at most `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> _Made:
        """Return what was made, once it is over.

        Raises:
            NativeUnavailable: it could not be made.
        """
        if not self._outcome:
            raise NativeUnavailable("the build of the C++ kernels died")
        if isinstance(self._outcome[0], NativeUnavailable):
            raise self._outcome[0]
        return self._outcome[0]

    def _run(self, make: Callable[[], _Made]) -> None:
        try:
            self._outcome.append(make())
        except NativeUnavailable as error:
            self._outcome.append(error)


def build_libraries(cache_dir: Path, *, is_quantized: bool) -> Generator[str, None, Libraries]:
    """Build or load them, all at once, beside whatever else this thread does; yields while they are built.

    Raises:
        NativeUnavailable: one of them cannot be built or loaded here.
    """
    forward = _InThread(lambda: load_forward_library(cache_dir))
    attention = _InThread(lambda: CpuPagedAttention(cache_dir))
    quantized = _InThread(lambda: load_quantized_kernel(cache_dir) if is_quantized else None)
    while not all(library.wait(_POLL_S) for library in (forward, attention, quantized)):
        yield _FIRST_STAGE
    return Libraries(forward.result(), attention.result(), quantized.result())


class CompileWork(ABC):
    """Implements `core.idle_work.IdleWork`: until it is done, and for good where it fails, all is eager."""

    def __init__(
        self, name: str, config: CompileConfig, *, is_wanted: bool, num_single_pieces: int, num_weights: int
    ) -> None:
        """Prepare; nothing is compiled yet.

        Args:
            name: what is compiled, for people.
            config: where kernels are kept, and how much memory packed weights may take.
            is_wanted: False: the state is off, and stays so.
            num_single_pieces: pieces of the work beside those that pack one weight each.
            num_weights: these, as far as is known.
        """
        self._name = name
        self._config = config
        self._cache_dir = resolve_cache_dir(config.cache_dir)
        self._stage = _FIRST_STAGE
        self._num_done = 0
        self._num_single_pieces = num_single_pieces
        self._num_weights = num_weights
        self.failure = ""
        """Why it was given up."""
        self._pieces = self._compile()
        self._state: WorkState = "pending" if is_wanted else "off"

    @property
    def state(self) -> WorkState:
        """off: switched off, or not on a CPU; failed: everything stays eager, and a log line has said why."""
        return self._state

    @property
    def stage(self) -> str:
        """What `run_next` does next."""
        return self._stage

    def pending(self) -> bool:
        """Whether `run_next` has anything to do."""
        return self._state == "pending"

    def progress(self) -> WorkProgress:
        """How many pieces are done; the build of the kernels counts as one."""
        return WorkProgress(
            stage=self._stage, done=self._num_done, total=self._num_single_pieces + self._num_weights
        )

    def run_next(self) -> None:
        """Do the next piece of the work: well under a second, unless the model is very deep."""
        if self._state != "pending":
            return
        try:
            stage = next(self._pieces)
            self._num_done += stage != _FIRST_STAGE
            self._stage = stage
        except StopIteration:
            self._state = "ready"
        except (NativeUnavailable, CannotLower) as error:
            self.give_up(str(error))
        except TransportError:
            raise  # another rank is gone: nothing runs any more
        except Exception as error:
            # A forward that cannot be compiled must never take down the one that runs.
            logger.debug("compiling the forward failed", exc_info=True)
            self.give_up(f"{type(error).__name__}: {error}")

    def warm_up(self, progress: WarmUpProgress | None = None) -> WorkState:
        """Do all of the work now; return the state it ends in."""
        while self.pending():
            if progress is not None:
                progress(self._stage)
            self.run_next()
        return self._state

    def give_up(self, reason: str) -> None:
        """Run eagerly from now on; one log line says why."""
        self._state = "failed"
        self.failure = reason
        self._forget()
        logger.warning("%s runs eagerly, which is slower: %s", self._name, reason)

    def _expect_weights(self, num_weights: int) -> None:
        """Correct how many weights there are, once that is known."""
        self._num_weights = num_weights

    @abstractmethod
    def _compile(self) -> Iterator[str]:
        """Do the work; yield the name of the next piece before each.

        Raises:
            NativeUnavailable, CannotLower: it cannot be done; the text says why.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Free what has been made: it is not going to be used."""
