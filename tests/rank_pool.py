"""Processes that form a group of ranks and run functions of the tests, group after group of calls.

Starting a process costs seconds (torch, transformers), so a pool serves many tests. A function that raises
in one rank leaves the group unusable: such tests take a pool of their own.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

TIMEOUT_S = 120.0


class RankPool:
    """`size` processes; rank 0 is one of them, not the caller."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        port: Any = None
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
            if rank == 0:
                port = self.receive(0)
        for rank in range(size):
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
        for pipe in self._pipes:
            pipe.send((function, args))

    def send_to(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in one rank; `receive` gives the result."""
        self._pipes[rank].send((function, args))

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def receive(self, rank: int) -> Any:
        assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} does not answer"
        return self._pipes[rank].recv()


class Failure:
    def __init__(self, error: BaseException) -> None:
        self.text = "".join(traceback.format_exception(error))
        try:
            self.error: BaseException = type(error)(str(error))
        except TypeError:
            self.error = RuntimeError(str(error))


def _serve(pipe: Connection, rank: int, size: int, port: int | None) -> None:
    import torch

    from specdec.model.parallel.group import RankGroup, RankSpec, serve_store

    torch.set_num_threads(1)
    store = serve_store("127.0.0.1") if rank == 0 else None
    if store is not None:
        port = store.port
        pipe.send(port)
    assert port is not None
    spec = RankSpec(rank=rank, size=size, store_host="127.0.0.1", store_port=port, own_host="127.0.0.1")
    group = RankGroup.join(spec, torch.device("cpu"), store)
    pipe.send("joined")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(group, *args))
        except Exception as error:  # noqa: BLE001 - carried to the test
            pipe.send(Failure(error))
