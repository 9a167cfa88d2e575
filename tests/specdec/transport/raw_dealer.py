"""A ZeroMQ peer without our code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import zmq

from specdec.transport.zmq import KeyPair, ZmqChannel


@contextmanager
def raw_dealer(
    server: ZmqChannel, keys: KeyPair | None, options: Mapping[int, int] = MappingProxyType({})
) -> Iterator[zmq.Socket[bytes]]:
    """A peer that uses none of our code; with keys it speaks CURVE, without it does not."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        for name, value in {zmq.LINGER: 0, **options}.items():
            dealer.setsockopt(name, value)
        if keys is not None:
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            dealer.setsockopt(zmq.CURVE_SERVERKEY, server.address.public_key.encode())
        dealer.connect(server.address.endpoint)
        yield dealer
