"""A real HTTP server on loopback, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def live_server(app: ASGIApp, **options: Any) -> Iterator[str]:
    """Serve `app` on a free port; yield the base URL. `options` are uvicorn's."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline_s, "the server did not start"
        time.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"{'https' if 'ssl_certfile' in options else 'http'}://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
