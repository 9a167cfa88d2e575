"""A draft worker in a process of its own, whose drafter lives on hidden states that come over Gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from specdec.engine.draft_pool.hidden_inbox import HiddenInbox
from specdec.engine.draft_pool.server import DraftServer
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.torch_dist import TorchDistChannel
from specdec.transport.zmq import ZmqChannel
from tests.specdec.engine.hidden_toy import LAYERS, WIDTH, HiddenToyDrafter

_ROOT = Path(__file__).parents[3]


class Addresses(msgspec.Struct, frozen=True):
    """Told to the process: of the coordinator and the target worker. Told by it: its own two."""

    messages: PeerAddress
    tensors: PeerAddress


@contextmanager
def hidden_draft_process(peers: Addresses) -> Iterator[tuple[subprocess.Popen[bytes], Addresses]]:
    """Start one that serves a coordinator, with tensors from its target worker."""
    command = [sys.executable, "-m", "tests.specdec.engine.hidden_draft_process"]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(peers) + b"\n")
            process.stdin.flush()
            yield process, msgspec.json.decode(process.stdout.readline(), type=Addresses)
        finally:
            process.kill()


def _main() -> None:
    peers = msgspec.json.decode(sys.stdin.buffer.readline(), type=Addresses)
    channel = ZmqChannel(PeerId("draft"))
    channel.admit([peers.messages])
    tensors = TorchDistChannel(PeerId("draft-tensors"))
    inbox = HiddenInbox(tensors, layers=LAYERS, width=WIDTH, wait_s=1.0)
    inbox.admit([(peers.tensors, peers.messages.peer_id)])
    server = DraftServer(channel, HiddenToyDrafter(inbox))
    print(msgspec.json.encode(Addresses(channel.address, tensors.address)).decode(), flush=True)
    while True:
        server.step(None)


if __name__ == "__main__":
    _main()
