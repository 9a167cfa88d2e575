"""What one hop between a coordinator and a draft worker costs: serialisation, wire, and waking whoever waits.

A hop is half of a round trip of real messages (`ProposeRequest` with its entries, `ProposeReply` with as many
answers of `k` tokens) between two processes, one core each. It is taken apart:

    serialisation   encode + decode of one such message, alone, in one process
    wire            half of a round trip of as many bytes between two such processes over a bare socket of the
                    same kind, both ends polling: nobody sleeps, nobody is woken; none within a process
    wake-up         the rest: threads that wake one another and then the reader, and the channel's own Python

`paced` hops begin after a pause in which both processes have slept and then read through 16 MiB, as a round
does behind a forward; `busy` ones follow one another at once. Headlines are of paced hops. `torch_dist` also
carries what it is for: hidden states of three layers of 4096 in bf16, for 5 rows of each sequence.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.report import Spread, report_headlines, write_results
from specdec.core.ids import RequestId
from specdec.transport.base import Channel, PeerAddress, PeerId
from specdec.transport.memory import MemoryNetwork
from specdec.transport.messages import (
    HiddenRun,
    HiddenStates,
    Message,
    Ping,
    ProposeAnswer,
    ProposeEntry,
    ProposeReply,
    ProposeRequest,
    decode,
    encode,
)
from specdec.transport.torch_dist import TorchDistChannel
from specdec.transport.zmq import ZmqChannel, ZmqOptions

Kind = Literal["memory", "zmq_local", "zmq_tcp", "torch_dist"]
Pace = Literal["busy", "paced"]
BATCHES = (1, 64)
_NUM_DRAFT_TOKENS = 4
_PAUSE_S = 0.002
_READ_THROUGH = 16 << 20
_STOP = Ping(-1)
_WAIT_S = 60.0
_LAYERS = (3, 17, 30)
_ROWS_PER_SEQUENCE = 5
_HIDDEN_SIZE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    num_busy: int
    num_paced: int
    num_warm: int
    num_turns: int
    """All kinds one after the other, so many times."""


QUICK = Plan(num_busy=200, num_paced=40, num_warm=50, num_turns=2)
FULL = Plan(num_busy=1000, num_paced=150, num_warm=100, num_turns=5)


def request_of(batch: int) -> ProposeRequest:
    """One round's wishes: five new tokens each."""
    return ProposeRequest(
        7,
        tuple(
            ProposeEntry(
                request_id=RequestId(f"cmpl-{index:032x}-0"),
                epoch=3,
                committed_len=1000 + index,
                prefix_hash=0x9E3779B97F4A7C15 * (index + 1) & (2**63 - 1),
                num_draft_tokens=_NUM_DRAFT_TOKENS,
                base_len=995 + index,
                token_ids=(11, 31_999, 128_000, 7, 500),
            )
            for index in range(batch)
        ),
    )


def reply_to(request: ProposeRequest) -> ProposeReply:
    """One chain for each entry."""
    answers = tuple(
        ProposeAnswer(
            request_id=entry.request_id,
            epoch=entry.epoch,
            committed_len=entry.committed_len,
            prefix_hash=entry.prefix_hash,
            token_ids=(128_000, 17, 4_000, 31_999)[:_NUM_DRAFT_TOKENS],
            noise_stream="target",
        )
        for entry in request.entries
    )
    return ProposeReply(request.round_id, answers, 0.001)


def open_channel(kind: Kind, name: str) -> Channel:
    """Open one end of a kind that crosses processes."""
    match kind:
        case "zmq_local" | "zmq_tcp":
            return ZmqChannel(PeerId(name), options=ZmqOptions(local_lanes=kind == "zmq_local"))
        case "torch_dist":
            return TorchDistChannel(PeerId(name))
        case "memory":
            raise ValueError("memory stays within a process")


def serve(channel: Channel) -> None:
    """Answer as a draft worker that needs no time, until told to stop."""
    replies = {batch: reply_to(request_of(batch)) for batch in BATCHES}
    cold = _Cold()
    while True:
        envelope = channel.receive(None)
        match envelope.message:
            case ProposeRequest(entries=entries):
                channel.send(envelope.sender, replies[len(entries)])
            case HiddenStates():
                channel.send(envelope.sender, Ping(1))
            case Ping(nonce=0):  # a pause begins
                cold.read_through()
                channel.send(envelope.sender, Ping(0))
            case Ping():
                return


def _peer(kind: Kind, core: int | None, pipe: Connection) -> None:
    """The other process."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    channel = open_channel(kind, "draft")
    pipe.send(channel.address)
    channel.admit([pipe.recv()])
    serve(channel)
    channel.close(flush_s=1.0)


@contextmanager
def link_to_process(kind: Kind, core: int | None) -> Iterator[tuple[Channel, PeerId]]:
    """A channel to an answering process on a core of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, its_pipe = context.Pipe()
    process = context.Process(target=_peer, args=(kind, core, its_pipe))
    process.start()
    channel = open_channel(kind, "coordinator")
    address: PeerAddress = pipe.recv()
    pipe.send(channel.address)
    channel.connect(address)
    try:
        yield channel, address.peer_id
    finally:
        channel.send(address.peer_id, _STOP)
        process.join(_WAIT_S)
        channel.close()


@contextmanager
def link_to_thread() -> Iterator[tuple[Channel, PeerId]]:
    """The memory transport: a thread of this process answers."""
    import threading

    network = MemoryNetwork()
    draft, coordinator = network.open(PeerId("draft")), network.open(PeerId("coordinator"))
    draft.admit([coordinator.address])
    coordinator.connect(draft.address)
    thread = threading.Thread(target=serve, args=(draft,))
    thread.start()
    try:
        yield coordinator, PeerId("draft")
    finally:
        coordinator.send(PeerId("draft"), _STOP)
        thread.join()


class _Cold:
    """Other work before a hop: a model's weights have gone through the caches."""

    def __init__(self) -> None:
        self._weights = torch.zeros(_READ_THROUGH // 4)

    def read_through(self) -> None:
        self._weights.amax()


def hops_us(
    channel: Channel, peer: PeerId, say: Callable[[], None], *, count: int, cold: _Cold | None
) -> list[float]:
    """Half round trips, microseconds each. `say` sends what is answered by one message."""
    hops: list[float] = []
    for _ in range(count):
        if cold is not None:
            channel.send(peer, Ping(0))
            cold.read_through()
            channel.receive(_WAIT_S)
            time.sleep(_PAUSE_S)  # both sleep now
        started = time.perf_counter()
        say()
        channel.receive(_WAIT_S)
        hops.append(1e6 * (time.perf_counter() - started) / 2)
    return hops


def serialisation_us(message: Message, repeats: int = 300) -> float:
    """Encode and decode once: the median."""
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        decode(encode(message))
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


def _bare_echo(family: int, sizes: tuple[int, int], core: int, pipe: Connection) -> None:
    os.sched_setaffinity(0, {core})
    with socket.socket(family) as listener:
        listener.bind(
            "\0drafthouse-bench-" + str(os.getpid()) if family == socket.AF_UNIX else ("127.0.0.1", 0)
        )
        listener.listen()
        pipe.send(listener.getsockname())
        connection = _polled(listener.accept()[0])
        with connection:
            while _exactly(connection, sizes[0]):
                connection.sendall(bytes(sizes[1]))


def _polled(connection: socket.socket) -> socket.socket:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    return connection


def _exactly(connection: socket.socket, num_bytes: int) -> bool:
    """Poll until so many bytes have come; False when the other end has closed."""
    while num_bytes:
        try:
            piece = connection.recv(num_bytes)
        except BlockingIOError:
            continue
        if not piece:
            return False
        num_bytes -= len(piece)
    return True


def wire_us(family: int, sizes: tuple[int, int], core: int, count: int) -> list[float]:
    """Half round trips of bare bytes between two processes that poll."""
    context = multiprocessing.get_context("spawn")
    pipe, its_pipe = context.Pipe()
    process = context.Process(target=_bare_echo, args=(family, sizes, core, its_pipe))
    process.start()
    hops: list[float] = []
    with socket.socket(family) as connection:
        connection.connect(pipe.recv())
        _polled(connection)
        for _ in range(count):
            started = time.perf_counter()
            connection.sendall(bytes(sizes[0]))
            _exactly(connection, sizes[1])
            hops.append(1e6 * (time.perf_counter() - started) / 2)
    process.join(_WAIT_S)
    return hops


_FAMILIES: dict[Kind, int] = {
    "zmq_local": socket.AF_UNIX,
    "zmq_tcp": socket.AF_INET,
    "torch_dist": socket.AF_INET,
}


class Bench:
    """All measurements; times in microseconds."""

    def __init__(self, plan: Plan, cores: tuple[int, int]) -> None:
        self._plan = plan
        self._cores = cores
        self._hops: dict[tuple[Kind, str, Pace], list[float]] = {}
        """Medians of turns."""

    def run(self) -> dict[str, Any]:
        """Measure everything."""
        os.sched_setaffinity(0, {self._cores[0]})
        for _ in range(self._plan.num_turns):
            for kind in get_args(Kind):
                self._turn(kind)
        return {
            "hops_us": self._rows(),
            "hidden_us": [self._hidden_row(batch, pace) for batch in BATCHES for pace in get_args(Pace)],
        }

    def _turn(self, kind: Kind) -> None:
        link = link_to_thread() if kind == "memory" else link_to_process(kind, self._cores[1])
        if kind == "memory":
            os.sched_setaffinity(0, set(self._cores))
        cold = _Cold()
        with link as (channel, peer):
            for batch in BATCHES:
                request = request_of(batch)
                self._measure(kind, f"b{batch}", channel, peer, lambda: channel.send(peer, request), cold)  # noqa: B023
            if isinstance(channel, TorchDistChannel):
                for batch in BATCHES:
                    message, hidden = hidden_of(batch)
                    self._measure(
                        kind,
                        f"hidden_b{batch}",
                        channel,
                        peer,
                        lambda: channel.send_tensors(peer, message, {"hidden": hidden}),  # noqa: B023
                        cold,
                    )
        os.sched_setaffinity(0, {self._cores[0]})

    def _measure(
        self, kind: Kind, what: str, channel: Channel, peer: PeerId, say: Callable[[], None], cold: _Cold
    ) -> None:
        hops_us(channel, peer, say, count=self._plan.num_warm, cold=None)
        counts: dict[Pace, int] = {"busy": self._plan.num_busy, "paced": self._plan.num_paced}
        for pace, count in counts.items():
            hops = hops_us(channel, peer, say, count=count, cold=cold if pace == "paced" else None)
            self._hops.setdefault((kind, what, pace), []).append(statistics.median(hops))

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for batch in BATCHES:
            request = request_of(batch)
            reply = reply_to(request)
            sizes = (len(encode(request)), len(encode(reply)))
            serialisation = (serialisation_us(request) + serialisation_us(reply)) / 2
            wires = {
                family: statistics.median(wire_us(family, sizes, self._cores[1], self._plan.num_busy))
                for family in sorted(set(_FAMILIES.values()))
            }
            for kind in get_args(Kind):
                wire = wires[_FAMILIES[kind]] if kind in _FAMILIES else 0.0
                for pace in get_args(Pace):
                    hop = Spread(tuple(self._hops[kind, f"b{batch}", pace]))
                    rows.append(
                        {
                            "transport": kind,
                            "batch": batch,
                            "pace": pace,
                            "bytes": sum(sizes) / 2,
                            "hop": hop,
                            "serialisation": serialisation,
                            "wire": wire,
                            "wake_up": hop.median - serialisation - wire,
                        }
                    )
        return rows

    def _hidden_row(self, batch: int, pace: Pace) -> dict[str, Any]:
        """One way: the round trip without the hop of the short answer."""
        answer = statistics.median(self._hops["torch_dist", "b1", pace])
        values = tuple(2 * hop - answer for hop in self._hops["torch_dist", f"hidden_b{batch}", pace])
        _, hidden = hidden_of(batch)
        return {"batch": batch, "pace": pace, "bytes": hidden.nbytes, "one_way": Spread(values)}


def hidden_of(batch: int) -> tuple[HiddenStates, torch.Tensor]:
    """The rows that a round of verification adds, when all drafts are accepted."""
    runs = tuple(
        HiddenRun(RequestId(f"cmpl-{index:032x}-0"), 3, 1001, 12345, 995, _ROWS_PER_SEQUENCE)
        for index in range(batch)
    )
    hidden = torch.ones((batch * _ROWS_PER_SEQUENCE, len(_LAYERS) * _HIDDEN_SIZE), dtype=torch.bfloat16)
    return HiddenStates("coordinator", _LAYERS, runs), hidden


def headlines(results: dict[str, Any]) -> dict[str, float]:
    """Paced hops, microseconds: `zmq` between processes of one machine, `zmq_tcp` as between machines."""
    names = {"zmq_local": "zmq"}
    found = {
        f"hop_us_{names.get(row['transport'], row['transport'])}_b{row['batch']}": row["hop"].median
        for row in results["hops_us"]
        if row["pace"] == "paced"
    }
    return found | {
        f"hidden_us_torch_dist_b{row['batch']}": row["one_way"].median
        for row in results["hidden_us"]
        if row["pace"] == "paced"
    }


def _show(results: dict[str, Any], console: Console) -> None:
    parts = ("hop", "serialisation", "wire", "wake_up")
    table = Table("transport", "proposals", "pace", *parts, title="microseconds")
    for row in results["hops_us"]:
        numbers = (row["hop"].median, *(row[part] for part in parts[1:]))
        table.add_row(row["transport"], str(row["batch"]), row["pace"], *(f"{one:.0f}" for one in numbers))
    console.print(table)


def main(
    quick: Annotated[bool, typer.Option(help="Fewer hops and turns.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
) -> None:
    """Measure what a hop costs; needs two cores that nobody else uses.

    Example: taskset -c 0,1 python -m benchmarks.transport --quick
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise typer.BadParameter("two cores are needed, one for each end")
    torch.set_num_threads(1)
    results = Bench(QUICK if quick else FULL, (cores[0], cores[1])).run()
    numbers = headlines(results)
    _show(results, Console(stderr=True))
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
