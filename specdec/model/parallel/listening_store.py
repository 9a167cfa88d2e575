"""Where processes of `torch.distributed` meet: a TCP store that listens on one address."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from specdec.core.errors import ResourceError


def open_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """Return a store at a free port of `host`; others connect to `store.port` there, and nowhere else.

    By itself PyTorch's store listens on all addresses of the machine, whatever it is told: it takes the name
    for that of the address to connect to. Whoever reaches its port may write what they like to it.

    Args:
        host: one of this machine's addresses.
        timeout_s: how long a question to the store may take.

    Raises:
        ResourceError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            store = TCPStore(
                host,
                int(listener.getsockname()[1]),
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.fileno(),
            )
            listener.detach()  # the store closes it
            return store
    except (OSError, RuntimeError) as error:
        raise ResourceError(f"cannot bind a channel to {host}: {error}") from error
