"""Hosts in network namespaces: who is inside one speaks with its address, and plugs can be pulled."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from benchmarks.network import Network, network, why_not

ONE, OTHER = 1, 2
PORT = 7070


@pytest.fixture
def made() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network(f"dht{os.getpid()}", 2) as made:
        yield made


def answers(made: Network) -> bool:
    """Whether a host can be reached from the other one within a moment."""
    with made.inside(OTHER), contextlib.suppress(OSError):
        socket.create_connection((made.address(ONE), PORT), timeout=0.5).close()
        return True
    return False


def test_a_thread_is_on_a_host_while_it_is_inside(made: Network) -> None:
    with pytest.raises(OSError, match="assign"):
        socket.create_server((made.address(ONE), PORT))
    with made.inside(ONE), socket.create_server((made.address(ONE), PORT)):
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(answers(made)))
        thread.start()
        thread.join()
        assert elsewhere == [True]
    with pytest.raises(OSError, match="assign"):
        socket.create_server((made.address(ONE), PORT))


@pytest.mark.parametrize("cut", ["isolate", "part"])
def test_what_is_cut_can_be_joined_again(made: Network, cut: str) -> None:
    with made.inside(ONE):
        server = socket.create_server((made.address(ONE), PORT))
    with server:
        assert answers(made)
        if cut == "isolate":
            made.isolate(ONE)
            assert not answers(made)
            made.join(ONE)
        else:
            made.part(ONE, OTHER)
            assert not answers(made)
            made.reunite(ONE, OTHER)
        assert answers(made)
