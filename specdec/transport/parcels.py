"""Tensors beside a message, as one run of bytes.

    8 bytes      `DP`, parcel version, 0, length of the head (uint32, little endian)
    head         msgpack: the message's own frame (`messages.encode`); name, dtype and shape of each tensor
    tensors      raw, in the byte order of x86 and ARM (little endian), each at a multiple of 64 bytes

Nothing is pickled. A head that does not describe exactly the bytes behind it is malformed as a whole: there
is no tensor of a shape that nobody has checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Final

import msgspec
import torch

from specdec.core.errors import UNDECODABLE, ProtocolError
from specdec.transport.messages import Message, WrongVersion, decode, encode

PARCEL_MAGIC: Final = b"DP"
_VERSION: Final = 1
_PREAMBLE: Final = struct.Struct("<2sBxI")
_ALIGNMENT: Final = 64
"""Bytes; what vector loads and copies like, and a multiple of every item's size."""
_MAX_TENSORS: Final = 64
_MAX_DIMENSIONS: Final = 8
_MAX_ITEMS: Final = 1 << 40
"""Of a tensor, were each dimension at least one: sizes beside a zero may be too large for torch."""
_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


class _Spec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class ParcelHead(msgspec.Struct, frozen=True, array_like=True):
    """A message, and what its tensors are."""

    message: bytes
    specs: tuple[_Spec, ...]

    @classmethod
    def of(cls, message: Message, tensors: Mapping[str, torch.Tensor]) -> ParcelHead:
        """Describe a message and its tensors."""
        specs = tuple(
            _Spec(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
        )
        return cls(encode(message), specs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, with what is left free between them."""
        return sum(_aligned(spec.num_bytes) for spec in self.specs)

    def encode(self) -> bytes:
        """Return preamble and head."""
        head = _encoder.encode(self)
        return _PREAMBLE.pack(PARCEL_MAGIC, _VERSION, len(head)) + head

    def pack(self, tensors: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        """Copy the tensors that this describes into `flat`, uint8 [num_bytes] on any device."""
        begin = 0
        for spec, tensor in zip(self.specs, tensors.values(), strict=True):
            _part(flat, begin, spec).copy_(tensor)
            begin += _aligned(spec.num_bytes)

    def unpack(self, flat: torch.Tensor) -> tuple[Message, dict[str, torch.Tensor]]:
        """Return the message and its tensors, which are views of `flat`, uint8 [num_bytes] on any device.

        Raises:
            WrongVersion, ProtocolError: of the message.
        """
        tensors: dict[str, torch.Tensor] = {}
        begin = 0
        for spec in self.specs:
            tensors[spec.name] = _part(flat, begin, spec)
            begin += _aligned(spec.num_bytes)
        return decode(self.message), tensors


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ParcelHead] = msgspec.msgpack.Decoder(ParcelHead)


def encode_parcel(message: Message, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return uint8 [bytes] on the CPU: a copy, so that the tensors may change at once.

    Tensors on an accelerator are copied from it, which waits for what computes them.
    """
    head = ParcelHead.of(message, tensors)
    start = head.encode()
    begin = _aligned(len(start))
    flat = torch.zeros(begin + head.num_bytes, dtype=torch.uint8)
    flat[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    head.pack(tensors, flat[begin:])
    return flat


def decode_parcel(flat: torch.Tensor) -> tuple[Message, dict[str, torch.Tensor]]:
    """Return the message and its tensors, which are views of `flat` (uint8 [bytes], CPU).

    Raises:
        WrongVersion: of the parcel, or of the message in it.
        ProtocolError: it is not a parcel, or not one whose parts agree.
    """
    head, num_head_bytes = decode_head(flat)
    begin = _aligned(num_head_bytes)
    num_bytes = flat.numel() - begin
    if head.num_bytes != num_bytes:
        raise ProtocolError(f"the tensors of a parcel do not fill its {num_bytes} bytes")
    return head.unpack(flat[begin:])


def decode_head(flat: torch.Tensor) -> tuple[ParcelHead, int]:
    """Return the head that `flat` (uint8 [bytes], CPU) begins with, and its length in bytes.

    Raises:
        WrongVersion: of the parcel.
        ProtocolError: it is none, or describes tensors that there cannot be.
    """
    if flat.numel() < _PREAMBLE.size:
        raise ProtocolError("a parcel without a preamble")
    magic, version, head_bytes = _PREAMBLE.unpack(bytes(flat[: _PREAMBLE.size].numpy()))
    if magic != PARCEL_MAGIC:
        raise ProtocolError("not a parcel")
    if version != _VERSION:
        raise WrongVersion(f"parcel version {version}, expected {_VERSION}")
    end = _PREAMBLE.size + head_bytes
    try:
        head = _decoder.decode(flat[_PREAMBLE.size : end].numpy().data)
    except UNDECODABLE as error:
        raise ProtocolError(f"malformed head of a parcel: {error}") from error
    _check(head.specs)
    return head, end


def _check(specs: tuple[_Spec, ...]) -> None:
    """Raise ProtocolError unless the specs describe tensors."""
    if len(specs) > _MAX_TENSORS or len({spec.name for spec in specs}) != len(specs):
        raise ProtocolError("too many tensors in a parcel, or two of one name")
    for spec in specs:
        if spec.dtype not in _DTYPES or len(spec.shape) > _MAX_DIMENSIONS or min(spec.shape, default=0) < 0:
            raise ProtocolError(f"a tensor of dtype {spec.dtype!r} and shape {spec.shape} in a parcel")
        if math.prod(max(1, size) for size in spec.shape) > _MAX_ITEMS:
            raise ProtocolError(f"a tensor of shape {spec.shape} in a parcel")


def _part(flat: torch.Tensor, begin: int, spec: _Spec) -> torch.Tensor:
    return flat[begin : begin + spec.num_bytes].view(_DTYPES[spec.dtype]).view(spec.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
