"""The ranks that hold one model together, and what they say to each other.

Two process groups over one TCP store: tensors of the model travel over NCCL on GPUs and Gloo elsewhere;
commands (bytes, from rank 0 to the others) always over Gloo. They are made without the process-wide default
group of `torch.distributed`, so that a process may be in several groups (target and draft model). Nothing is
pickled. Neither the store nor Gloo nor NCCL authenticates or encrypts: they belong on a private network.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from specdec.core.errors import CheckpointError, ConfigError, ResourceError, TransportError
from specdec.model.parallel.listening_store import open_store

# torch types its process groups too narrowly to be of use.
_GLOO: Any = ProcessGroupGloo

_FOREVER = timedelta(days=365)
"""For commands: an idle group is silent for hours. The end of a peer is noticed by its closed link."""
_FIRST_BYTES = 4096
"""Commands up to this size (length included) take one broadcast, longer ones two."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One rank's place in its group, and where the group meets."""

    rank: int
    size: int
    store_host: str
    """Address of the store that rank 0 serves."""
    store_port: int
    own_host: str
    """Address under which the other ranks reach this one."""
    timeout_s: float = 120.0
    """A collective that takes longer (seconds) counts as the death of a peer."""


class _Work(Protocol):
    def wait(self) -> object: ...


class _Backend(Protocol):
    """What Gloo's and NCCL's process groups have in common; torch leaves them untyped."""

    def allreduce(self, tensors: list[torch.Tensor]) -> _Work: ...
    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> _Work: ...
    def broadcast(self, tensor: torch.Tensor, root: int) -> _Work: ...
    def send(self, tensors: list[torch.Tensor], to_rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[torch.Tensor], from_rank: int, tag: int) -> _Work: ...


class _Begin(Protocol):
    def __call__(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> _Work: ...


class Transfer:
    """A tensor on its way between two ranks."""

    def __init__(self, tensor: torch.Tensor, wait: Callable[[], None]) -> None:
        self._tensor = tensor
        self._wait = wait

    def finish(self) -> torch.Tensor:
        """Return the tensor once it may be used; on a GPU, by what is queued on the current stream.

        Raises:
            TransportError: as all of `RankGroup`.
        """
        self._wait()
        return self._tensor


def serve_store(host: str, timeout_s: float = 120.0) -> TCPStore:
    """Open the meeting point of a group at a free port of `host`: rank 0 does, and passes it to `join`.

    Raises:
        ResourceError: the address cannot be bound.
    """
    return open_store(host, timeout_s)


class RankGroup:
    """Collectives of one group. Every rank must call the same ones in the same order.

    All raise TransportError when a peer died or did not answer in time; the group is of no use after that.
    """

    def __init__(
        self, spec: RankSpec, device: torch.device, data: _Backend, commands: _Backend, store: Store
    ) -> None:
        """See `join`."""
        self.rank = spec.rank
        self.size = spec.size
        self.device = device
        self.timeout_s = spec.timeout_s
        self._spec = spec
        self._data = data
        self._commands = commands
        self._store = store  # it ends with its last reference
        self._num_parts = 0
        self.adds_in_order = False
        """Whether `sum_` adds rank after rank, in fp32, whatever the size of the tensor, by which collectives
        choose their order. It costs as much as sending everyone's tensor to everyone."""

    @classmethod
    def join(cls, spec: RankSpec, device: torch.device, store: TCPStore | None = None) -> RankGroup:
        """Meet the other ranks; blocks until all are there.

        Args:
            spec: this rank's place.
            device: where the tensors of the model will be; CUDA takes NCCL.
            store: what `serve_store` returned, in rank 0.

        Raises:
            TransportError: not all ranks came in time.
            ResourceError: two ranks are on one GPU.
        """
        timeout = timedelta(seconds=spec.timeout_s)
        try:
            store = store or TCPStore(spec.store_host, spec.store_port, is_master=False, timeout=timeout)
            _refuse_shared_devices(store, spec, device)
            return cls._meet(spec, device, store)
        except RuntimeError as error:
            raise TransportError(
                f"rank {spec.rank} of {spec.size} cannot meet the others: {error}"
            ) from error

    @classmethod
    def _meet(cls, spec: RankSpec, device: torch.device, store: Store) -> RankGroup:
        options: Any = _GLOO._Options()
        options._devices = [_GLOO.create_device(hostname=spec.own_host)]
        options._timeout = timedelta(seconds=spec.timeout_s)
        data = _data_backend(PrefixStore("data", store), spec, device, options)
        commands: Any = _GLOO(PrefixStore("commands", store), spec.rank, spec.size, options)
        group = cls(spec, device, data, commands, store)
        # The first collective connects all pairs; only then may the commands wait without an end.
        commands.broadcast(torch.zeros(1, dtype=torch.uint8), 0).wait()
        commands.set_timeout(_FOREVER)
        group.sum_(torch.zeros(1, device=device))
        return group

    def part(self, size: int) -> RankGroup:
        """Divide the ranks into groups of `size` consecutive ones and return this rank's.

        All ranks call it at the same time.

        Raises:
            TransportError: as `join`.
        """
        index, rank = divmod(self.rank, size)
        spec = replace(self._spec, rank=rank, size=size)
        self._num_parts += 1  # what others have left in the store under an old name would mislead
        store = PrefixStore(f"part-{self._num_parts}-{index}", self._store)
        try:
            return self._meet(spec, self.device, store)
        except RuntimeError as error:
            raise self._loss(error) from error

    def open_store(self) -> Store:
        """Return a connection of its own to the store where the group has met, for another thread."""
        store: Any = self._store  # torch does not declare it
        connection: Store = store.clone()
        return connection

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous `tensor` by its sum over the ranks, the same bits on all; return it."""
        if self.adds_in_order:
            return self._sum_in_order_(tensor)
        self._wait(self._data.allreduce([tensor]))
        return tensor

    def _sum_in_order_(self, tensor: torch.Tensor) -> torch.Tensor:
        first, *others = self.gather(tensor).to(torch.float32).unbind(0)
        for other in others:
            first.add_(other)
        return tensor.copy_(first)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return everyone's `tensor` (equal shapes), stacked: [size, *tensor.shape]."""
        tensor = tensor.contiguous()
        everyone = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._wait(self._data.allgather([list(everyone.unbind(0))], [tensor]))
        return everyone

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a contiguous `tensor` by rank 0's; return it."""
        self._wait(self._data.broadcast(tensor, 0))
        return tensor

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        """Begin to send a contiguous `tensor`; it must not change before the transfer is over."""
        return self._transfer(self._data.send, tensor, rank, tag)

    def receive_(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        """Begin to replace a contiguous `tensor` by what `rank` sends with the same `tag`."""
        return self._transfer(self._data.recv, tensor, rank, tag)

    def _transfer(self, begin: _Begin, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        try:
            work = begin([tensor], rank, tag)
        except RuntimeError as error:
            raise self._loss(error) from error
        return Transfer(tensor, lambda: self._wait(work))

    def send_command(self, payload: bytes) -> None:
        """Rank 0: hand `payload` to the other ranks."""
        assert self.rank == 0, "only rank 0 commands"
        framed = torch.frombuffer(
            bytearray(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload), dtype=torch.uint8
        )
        head = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        head[: framed.numel()] = framed[:_FIRST_BYTES]
        self._wait(self._commands.broadcast(head, 0))
        if framed.numel() > _FIRST_BYTES:
            self._wait(self._commands.broadcast(framed[_FIRST_BYTES:].clone(), 0))

    def receive_command(self) -> bytes:
        """Other ranks: wait, however long, for rank 0's next command."""
        assert self.rank != 0, "rank 0 commands"
        head = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._wait(self._commands.broadcast(head, 0))
        content = bytes(head.numpy())
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        missing = _LENGTH_BYTES + length - _FIRST_BYTES
        if missing > 0:
            rest = torch.empty(missing, dtype=torch.uint8)
            self._wait(self._commands.broadcast(rest, 0))
            content += bytes(rest.numpy())
        return content[_LENGTH_BYTES : _LENGTH_BYTES + length]

    def exchange(self, message: bytes) -> list[bytes]:
        """Return everyone's message of at most a few kilobytes (the rest is cut off), by rank."""
        message = message[: _FIRST_BYTES - _LENGTH_BYTES]
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        mine = torch.frombuffer(bytearray(framed.ljust(_FIRST_BYTES, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(self._commands.allgather([everyone], [mine]))
        contents = [bytes(one.numpy()) for one in everyone]
        return [one[_LENGTH_BYTES:][: int.from_bytes(one[:_LENGTH_BYTES], "little")] for one in contents]

    def smallest(self, number: int) -> int:
        """Return the smallest of everyone's numbers."""
        return min(int(answer) for answer in self.exchange(str(number).encode()))

    def _wait(self, work: _Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._loss(error) from error

    def _loss(self, error: RuntimeError) -> TransportError:
        return TransportError(f"rank {self.rank} of {self.size} has lost a peer: {error}")


@contextmanager
def same_fate(ranks: RankGroup | None) -> Iterator[None]:
    """Let all ranks raise when the body, which holds no collective, raises in one of them.

    Raises:
        UserError: another rank's, with its number.
        TransportError: another rank met another kind of error, or is gone.
    """
    try:
        yield
    except Exception as error:
        if ranks is not None:
            with suppress(TransportError):  # what went wrong here is the better news
                ranks.exchange(f"{type(error).__name__}\n{error}".encode())
        raise
    if ranks is not None:
        _raise_first([report.decode(errors="replace") for report in ranks.exchange(b"")])


def _raise_first(reports: list[str]) -> None:
    for rank, report in enumerate(reports):
        if report:
            name, _, text = report.partition("\n")
            kind = _USER_ERRORS.get(name)
            raise (
                TransportError(f"rank {rank}: {name}: {text}")
                if kind is None
                else kind(f"rank {rank}: {text}")
            )


_USER_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError, ResourceError)}


def _data_backend(store: Store, spec: RankSpec, device: torch.device, options: Any) -> _Backend:
    if device.type == "cpu":
        gloo: Any = _GLOO(store, spec.rank, spec.size, options)
        return gloo  # type: ignore[no-any-return]
    from torch import distributed

    torch.cuda.set_device(device)
    backend: Any = distributed.ProcessGroupNCCL  # not in CPU builds of torch
    nccl_options = backend.Options()
    nccl_options._timeout = options._timeout
    nccl: Any = backend(store, spec.rank, spec.size, nccl_options)
    return nccl  # type: ignore[no-any-return]


def _refuse_shared_devices(store: Store, spec: RankSpec, device: torch.device) -> None:
    """Raise ResourceError when a rank before this one has the same GPU."""
    if device.type != "cuda":
        return
    name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device-{spec.rank}", name)
    for other in range(spec.rank):
        if store.get(f"device-{other}").decode() == name:
            raise ResourceError(
                f"a model over {spec.size} ranks needs as many GPUs: ranks {other} and {spec.rank} are both "
                f"on {name}"
            )
