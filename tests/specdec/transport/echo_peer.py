"""A process of its own with a `torch_dist` channel: says its address, is told whom to admit, and echoes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.device_lane import DeviceLanes
from specdec.transport.gloo_link import TorchDistOptions
from specdec.transport.nccl import nccl_lanes
from specdec.transport.torch_dist import TorchDistChannel
from tests.specdec.transport.gloo_pipe import gloo_lanes

_ROOT = Path(__file__).parents[3]


@contextmanager
def echo_process(
    admitted: PeerAddress, *, lanes: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], PeerAddress]]:
    """Start one that admits a peer; yields the process and its address.

    `lanes`: the device that it has device lanes of, a GPU (cuda:0) or a made-up one; none by default.
    """
    command = [sys.executable, "-m", "tests.specdec.transport.echo_peer", lanes]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(admitted) + b"\n")
            process.stdin.flush()
            yield process, msgspec.json.decode(process.stdout.readline(), type=PeerAddress)
        finally:
            process.kill()


def _lanes(device: str) -> DeviceLanes | None:
    if device.startswith("cuda"):
        return nccl_lanes("auto", torch.device(device))
    return gloo_lanes(device) if device else None


def _main() -> None:
    channel = TorchDistChannel(
        PeerId("echo"),
        options=TorchDistOptions(heartbeat_interval_s=0.1),
        lanes=_lanes(sys.argv[1]),
    )
    channel.admit([msgspec.json.decode(sys.stdin.buffer.readline(), type=PeerAddress)])
    print(msgspec.json.encode(channel.address).decode(), flush=True)
    while True:
        envelope = channel.receive(None)
        if envelope.tensors is None:
            channel.send(envelope.sender, envelope.message)  # type: ignore[arg-type]
        else:
            channel.send_tensors(envelope.sender, envelope.message, envelope.tensors)  # type: ignore[arg-type]


if __name__ == "__main__":
    _main()
