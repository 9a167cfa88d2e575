"""The benchmark of hops measures what it says: real messages, answered, and parts that add up."""

from __future__ import annotations

import pytest

from benchmarks.report import Spread
from benchmarks.transport import (
    BATCHES,
    headlines,
    hidden_of,
    hops_us,
    link_to_process,
    link_to_thread,
    reply_to,
    request_of,
    serialisation_us,
)
from specdec.transport.messages import ProposeReply, decode, encode
from specdec.transport.torch_dist import TorchDistChannel


@pytest.mark.parametrize("batch", BATCHES)
def test_messages_are_real(batch: int) -> None:
    request = request_of(batch)
    assert decode(encode(request)) == request
    assert [answer.prefix_hash for answer in reply_to(request).answers] == [
        entry.prefix_hash for entry in request.entries
    ]
    assert 0 < serialisation_us(request, repeats=5) < 1e6


def test_a_thread_answers() -> None:
    with link_to_thread() as (channel, peer):
        hops = hops_us(channel, peer, lambda: channel.send(peer, request_of(64)), count=3, cold=None)
        assert len(hops) == 3
        channel.send(peer, request_of(1))
        reply = channel.receive(10).message
        assert isinstance(reply, ProposeReply)
        assert len(reply.answers) == 1


def test_a_process_answers_messages_and_tensors() -> None:
    with link_to_process("torch_dist", core=None) as (channel, peer):
        assert isinstance(channel, TorchDistChannel)
        message, hidden = hidden_of(1)
        hops_us(channel, peer, lambda: channel.send(peer, request_of(1)), count=1, cold=None)
        channel.send_tensors(peer, message, {"hidden": hidden})
        channel.receive(30)


def test_headlines_are_of_paced_hops() -> None:
    rows = [
        {"transport": kind, "batch": 1, "pace": pace, "hop": Spread((value,))}
        for kind, pace, value in (
            ("zmq_local", "busy", 1.0),
            ("zmq_local", "paced", 2.0),
            ("memory", "paced", 3.0),
        )
    ]
    hidden = [{"batch": 64, "pace": "paced", "one_way": Spread((9.0,))}]
    assert headlines({"hops_us": rows, "hidden_us": hidden}) == {
        "hop_us_zmq_b1": 2.0,
        "hop_us_memory_b1": 3.0,
        "hidden_us_torch_dist_b64": 9.0,
    }
