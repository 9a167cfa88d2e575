"""Tensors beside a message: bit for bit, or not at all."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from specdec.core.errors import ProtocolError
from specdec.transport.messages import Ping, WrongVersion, encode
from specdec.transport.parcels import decode_parcel, encode_parcel

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {str(dtype): (100 * torch.rand((3, 5), generator=generator)).to(dtype) for dtype in DTYPES}
    return tensors | {
        "strided": torch.arange(24).reshape(4, 6).t()[::2],
        "empty": torch.empty((0, 7)),
        "one number": torch.tensor(2.5),
    }


def as_parcel(content: bytes | bytearray) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )


def with_head(head: object, body: bytes = b"") -> torch.Tensor:
    packed = msgspec.msgpack.encode(head)
    start = b"DP\x01\x00" + len(packed).to_bytes(4, "little") + packed
    return as_parcel(start.ljust(-(-len(start) // 64) * 64, b"\0") + body)


def test_what_is_sent_is_what_arrives() -> None:
    sent = some_tensors()
    message, arrived = decode_parcel(encode_parcel(Ping(7), sent))
    assert message == Ping(7)
    assert list(arrived) == list(sent)
    for name, tensor in sent.items():
        assert arrived[name].dtype == tensor.dtype
        assert arrived[name].shape == tensor.shape
        assert torch.equal(arrived[name], tensor)


def test_a_parcel_is_a_copy() -> None:
    tensor = torch.zeros(3)
    flat = encode_parcel(Ping(1), {"x": tensor})
    tensor.fill_(9)
    assert torch.equal(decode_parcel(flat)[1]["x"], torch.zeros(3))


@pytest.mark.parametrize(
    "flat",
    [
        as_parcel(b""),
        as_parcel(b"DP"),
        as_parcel(encode(Ping(1))),
        as_parcel(b"DP\x01\x00\xff\xff\xff\xff" + bytes(64)),
        with_head([encode(Ping(1)), [["x", "float32", [4]]]]),
        with_head([encode(Ping(1)), [["x", "float32", [4]]]], bytes(128)),
        with_head([encode(Ping(1)), [["x", "float32", [-1, -16]]]], bytes(64)),
        with_head([encode(Ping(1)), [["x", "object", [16]]]], bytes(64)),
        with_head([encode(Ping(1)), [["x", "uint8", [64]], ["x", "uint8", [64]]]], bytes(128)),
        with_head([encode(Ping(1)), [["x", "uint8", [1] * 9]]], bytes(64)),
        with_head([encode(Ping(1)), [["x", "uint8", [2**40, 2**40]]]], bytes(64)),
        with_head([encode(Ping(1)), [["x", "uint8", [0, 2**63]]]]),
        with_head([encode(Ping(1)), [["x", "uint8", [2**40, 2**40, 0]]]]),
        with_head([b"rubbish", []]),
        with_head(["text", []]),
        with_head(7),
    ],
)
def test_what_does_not_agree_with_itself_is_malformed(flat: torch.Tensor) -> None:
    with pytest.raises(ProtocolError):
        decode_parcel(flat)


def test_another_version_says_so() -> None:
    flat = encode_parcel(Ping(1), {})
    flat[2] = 9
    with pytest.raises(WrongVersion):
        decode_parcel(flat)


def test_damaged_parcels_are_parcels_or_errors_and_nothing_else() -> None:
    rng = random.Random(3)
    good = encode_parcel(Ping(7), some_tensors())
    num_refused = 0
    for _ in range(2000):
        flat = good.clone()
        for _ in range(rng.randint(1, 4)):
            flat[rng.randrange(rng.choice([16, 300, len(flat)]))] = rng.randrange(256)
        flat = flat[: rng.choice([len(flat), rng.randrange(len(flat))])]
        try:
            decode_parcel(flat)
        except ProtocolError:
            num_refused += 1
    assert num_refused > 1000
