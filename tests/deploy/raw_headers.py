"""Requests with headers that no library would send."""

from __future__ import annotations

import socket


def raw_answer(url: str, *headers: bytes) -> bytes:
    """Return what is answered to a request with headers that no library would send."""
    host, _, port = url.removeprefix("http://").partition(":")
    lines = (b"GET /v1/models HTTP/1.1", b"Host: x", *headers, b"Connection: close", b"", b"")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"\r\n".join(lines))
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


HEADERS_THAT_SERVE_READS = (
    (b"X-Request-ID: \xff",),
    (b"X-Request-ID: a", b"X-Request-ID: \xff"),
    (b"serve_multiplexed_model_id: \xff", b"X-Session-ID: \xff"),
    (b"X-Request-Timeout-Seconds: 0.000001", b"X-Request-Disconnect-Disabled: \xff"),
)
