"""Messages with tensors there and back, and the news that a peer is gone."""

from __future__ import annotations

import torch

from specdec.transport.base import PeerId, PeerLost, TensorChannel
from specdec.transport.messages import Ping
from specdec.transport.torch_dist import TorchDistChannel

SERVER, CLIENT, ECHO = PeerId("server"), PeerId("client"), PeerId("echo")


def exchange_tensors(server: TensorChannel, client: TensorChannel) -> None:
    server.admit([client.address])
    client.connect(server.address)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 0, 700, 40_000, 3):  # in one slot; without rows; two chunks; many chunks
        hidden = torch.randn((rows, 48), generator=generator).bfloat16()
        client.send_tensors(SERVER, Ping(rows), {"hidden": hidden, "rows": torch.arange(rows)})
        client.send(SERVER, Ping(-1))
        hidden_sent = hidden.clone()
        hidden.zero_()
        envelope = server.receive(10)
        assert (envelope.sender, envelope.message) == (CLIENT, Ping(rows))
        assert envelope.tensors is not None
        assert torch.equal(envelope.tensors["hidden"], hidden_sent)
        assert torch.equal(envelope.tensors["rows"], torch.arange(rows))
        plain = server.receive(10)
        assert (plain.message, plain.tensors) == (Ping(-1), None)
    server.send_tensors(CLIENT, Ping(9), {"back": torch.ones(3)})
    answer = client.receive(10)
    assert answer.tensors is not None
    assert torch.equal(answer.tensors["back"], torch.ones(3))


def until_lost(channel: TorchDistChannel) -> object:
    """Return the news; what was in flight when a peer ended may still arrive before it."""
    while not isinstance(message := channel.receive(10).message, PeerLost):
        pass
    return message
