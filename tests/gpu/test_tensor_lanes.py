"""Tensors from the GPU of one process to that of another. Not run yet: two GPUs were never at hand."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specdec.core.errors import ConfigError
from specdec.transport.base import PeerId, PeerLost
from specdec.transport.device_lane import DeviceLane
from specdec.transport.gloo_link import TorchDistOptions
from specdec.transport.lane_choice import TensorLane
from specdec.transport.messages import Ping
from specdec.transport.nccl import nccl_lanes
from specdec.transport.torch_dist import TorchDistChannel
from tests.specdec.transport.echo_peer import echo_process
from tests.specdec.transport.tensor_exchange import until_lost

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

ECHO = PeerId("echo")
OURS = torch.device("cuda:0")
TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL takes one process for each GPU, and there are not two GPUs"
)


@contextmanager
def channel_to(
    theirs: str, *, wanted: TensorLane = "auto"
) -> Iterator[tuple[TorchDistChannel, DeviceLane | None, int]]:
    """A channel of the first GPU to a process that echoes on another; its lane, and the process's id."""
    options = TorchDistOptions(heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0)
    channel = TorchDistChannel(PeerId("client"), options=options, lanes=nccl_lanes(wanted, OURS))
    try:
        with echo_process(channel.address, lanes=theirs) as (process, address):
            channel.connect(address)
            channel.send(ECHO, Ping(0))
            assert channel.receive(90).message == Ping(0)
            link = channel._links[ECHO].link
            assert link is not None
            yield channel, link.lane, process.pid
    finally:
        channel.close()


def echo(channel: TorchDistChannel, num_rows: int, *, arrive_at: torch.device) -> None:
    generator = torch.Generator(OURS).manual_seed(num_rows)
    hidden = torch.randn((num_rows, 48), generator=generator, device=OURS).bfloat16()
    positions = torch.arange(num_rows, device=OURS)
    sent = hidden.clone()
    channel.send_tensors(ECHO, Ping(num_rows), {"hidden": hidden, "positions": positions})
    hidden.zero_()  # behind the copy, on the same stream
    channel.send(ECHO, Ping(-1))
    envelope = channel.receive(30)
    assert envelope.message == Ping(num_rows)
    assert envelope.tensors is not None
    assert {tensor.device for tensor in envelope.tensors.values()} == {arrive_at}
    assert torch.equal(envelope.tensors["hidden"].to(OURS), sent)
    assert torch.equal(envelope.tensors["positions"].to(OURS), positions)
    assert channel.receive(30).message == Ping(-1)


@TWO_GPUS
def test_tensors_travel_from_gpu_to_gpu() -> None:
    with channel_to("cuda:1", wanted="nccl") as (channel, lane, _):
        assert lane is not None
        for num_rows in (1, 0, 700, 40_000, 3, 1_000_000):
            echo(channel, num_rows, arrive_at=OURS)
        assert channel.counters.dropped == {}


@TWO_GPUS
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_peer_that_dies_or_hangs_leaves_the_gpu_usable(end: str) -> None:
    with channel_to("cuda:1", wanted="nccl") as (channel, _, process_id):
        echo(channel, 700, arrive_at=OURS)
        os.kill(process_id, signal.SIGKILL if end == "killed" else signal.SIGSTOP)
        started_s = time.monotonic()
        for _ in range(5):
            channel.send_tensors(ECHO, Ping(1), {"hidden": torch.randn(3000, 64, device=OURS)})
        assert until_lost(channel) == PeerLost()
        torch.cuda.synchronize(OURS)  # nothing spins there any more
        assert time.monotonic() - started_s < 20


def test_two_processes_on_one_gpu_have_gloo() -> None:
    with channel_to("cuda:0") as (channel, lane, _):
        assert lane is None
        echo(channel, 700, arrive_at=torch.device("cpu"))


def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.channels\.tensors"):
        nccl_lanes("nccl", torch.device("cpu"))
