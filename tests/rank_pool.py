"""Processes that form groups of ranks and run functions of the tests, group after group of calls.

Starting a process costs seconds (torch, transformers), so they are forked from one that has imported all
that, and all pools of a session take the same ones: those of three ranks the first three. A group in which a
rank was killed, or a function has raised, is of no use after that; the processes that outlive it are: such
tests take a pool that only they have.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 240.0
_RESTING_S = 30.0
"""How long a process that has outlived its group may take to notice."""


class RankProcesses:
    """As many as the largest pool needs."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._pools: dict[int, RankPool] = {}

    def pool(self, size: int) -> RankPool:
        """Return the pool of so many ranks; rank 0 is one of the processes, not the caller."""
        if size not in self._pools:
            self._pools[size] = self._form(size)
        return self._pools[size]

    @contextmanager
    def breakable_pool(self, size: int) -> Iterator[RankPool]:
        """A pool of its own, which may be left in any state."""
        pool = self._form(size)
        try:
            yield pool
        finally:
            self._end([process for process in self._processes[:size] if not process.has_come_to_rest()])

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def _form(self, size: int) -> RankPool:
        self._processes += [_Process() for _ in range(size - len(self._processes))]
        try:
            return RankPool(self._processes[:size])
        except BaseException:
            self._end(self._processes[:size])  # some of them wait for the others
            raise

    def _end(self, processes: list[_Process]) -> None:
        for process in processes:
            process.kill()
        if processes:
            self._processes = [process for process in self._processes if process not in processes]
            self._pools.clear()  # the ranks of others than these have moved


class RankPool:
    """A group of ranks, each in a process of its own."""

    def __init__(self, processes: list[_Process]) -> None:
        self.size = len(processes)
        self._processes = processes
        port: Any = None
        for rank, process in enumerate(processes):
            process.pipe.send((_join, (id(self), rank, self.size, port)))
            if rank == 0:
                port = self.receive(0)
        for rank in range(self.size):
            assert self.receive(rank) == "joined"

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(group, *args)` in every rank; return the results by rank."""
        results = self.attempt(function, *args)
        for rank, result in enumerate(results):
            if isinstance(result, Failure):
                raise AssertionError(f"rank {rank}: {result.text}") from result.error
        return results

    def attempt(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`, but return failures too."""
        self.send(function, *args)
        return [self.receive(rank) for rank in range(self.size)]

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin `run`."""
        for rank in range(self.size):
            self.send_to(rank, function, *args)

    def send_to(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in one rank; `receive` gives the result."""
        self._processes[rank].pipe.send((_call, (id(self), function, args)))

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()

    def receive(self, rank: int) -> Any:
        pipe = self._processes[rank].pipe
        assert pipe.poll(TIMEOUT_S), f"rank {rank} does not answer"
        return pipe.recv()


Pools = Callable[[int], RankPool]
BreakablePools = Callable[[int], AbstractContextManager[RankPool]]


class Failure:
    def __init__(self, error: BaseException) -> None:
        self.text = "".join(traceback.format_exception(error))
        try:
            self.error: BaseException = type(error)(str(error))
        except TypeError:
            self.error = RuntimeError(str(error))


class _Process:
    """Does what it is told through a pipe, one thing after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # Imports may ask torch whether there is a GPU: that must not start CUDA, which survives no fork.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        # What fails to be imported there is imported later: it only takes longer.
        context.set_forkserver_preload(["tests.specdec.engine.ranked_engines"])
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def has_come_to_rest(self) -> bool:
        """Whether it lives and has nothing left to do; what it has said meanwhile is thrown away."""
        try:
            self.pipe.send((_say_resting, ()))
            while self.pipe.poll(_RESTING_S):
                if self.pipe.recv() == _RESTING:
                    return True
        except (EOFError, OSError):
            pass
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


_RESTING = "resting"


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    groups: dict[int, Any] = {}
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(pipe, groups, *args))
        except Exception as error:  # noqa: BLE001 - carried to the test
            pipe.send(Failure(error))


def _join(pipe: Connection, groups: dict[int, Any], name: int, rank: int, size: int, port: int | None) -> str:
    import torch

    from specdec.model.parallel.group import RankGroup, RankSpec, serve_store

    store = serve_store("127.0.0.1") if rank == 0 else None
    if store is not None:
        port = store.port
        pipe.send(port)
    assert port is not None
    spec = RankSpec(rank=rank, size=size, store_host="127.0.0.1", store_port=port, own_host="127.0.0.1")
    groups[name] = RankGroup.join(spec, torch.device("cpu"), store)
    return "joined"


def _call(
    pipe: Connection, groups: dict[int, Any], name: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    return function(groups[name], *args)


def _say_resting(pipe: Connection, groups: dict[int, Any]) -> str:
    return _RESTING
