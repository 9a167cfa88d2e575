"""Throws bytes at a port."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator

_CONNECT_S = 5.0
_NUM_HELD_OPEN = 20


def throw(
    endpoint: str, num_connections: int, pieces: Callable[[random.Random], Iterator[bytes]], seed: int = 7
) -> None:
    """Open connections one after the other and send `pieces` on each; the first stay open until the end."""
    host, _, port = endpoint.rpartition("/")[2].rpartition(":")
    generator = random.Random(seed)
    with contextlib.ExitStack() as opened:
        for number in range(num_connections):
            connection = socket.create_connection((host, int(port)), _CONNECT_S)
            if number < _NUM_HELD_OPEN:
                opened.enter_context(connection)
            with contextlib.suppress(OSError):  # it may be cut off, at any byte
                for piece in pieces(generator):
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
            if number >= _NUM_HELD_OPEN:
                connection.close()
