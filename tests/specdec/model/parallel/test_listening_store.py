"""Where ranks and workers meet: at one address of the machine."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from specdec.core.errors import ResourceError
from specdec.model.parallel.group import serve_store
from specdec.model.parallel.listening_store import open_store
from specdec.transport.gloo_door import Door, MeetingTerms

OTHER = "127.0.0.2"
"""An address of this machine, too: all of 127.0.0.0/8 is, on Linux."""


def is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5.0).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(autouse=True)
def has_two_addresses() -> None:
    with socket.socket() as one:
        try:
            one.bind((OTHER, 0))
        except OSError:
            pytest.skip(f"{OTHER} is no address of this machine")


@pytest.mark.parametrize("host", ["127.0.0.1", OTHER])
def test_ranks_meet_at_one_address(host: str) -> None:
    store = serve_store(host, timeout_s=20.0)
    assert is_open(host, store.port)
    assert not is_open(OTHER if host != OTHER else "127.0.0.1", store.port)
    guest = TCPStore(host, store.port, is_master=False, timeout=timedelta(seconds=20))
    guest.set("said", "by the guest")
    assert store.get("said") == b"by the guest"
    assert store.clone().get("said") == b"by the guest"


def test_workers_meet_at_one_address() -> None:
    door = Door(
        "127.0.0.1",
        is_member=lambda peer_id, key: False,
        let_in=lambda knock, meeting: None,
        on_guest=lambda thread: None,
        on_dropped=lambda reason: None,
        terms=MeetingTerms(timeout_s=5.0, lane_timeout_s=5.0, lanes=None),
    )
    assert is_open("127.0.0.1", door.port)
    assert not is_open(OTHER, door.port)
    door.close()


def test_pytorchs_own_store_would_be_at_all_of_them() -> None:
    """What the test above would find."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert is_open(OTHER, store.port)


def test_a_store_that_ends_frees_its_port() -> None:
    store = open_store("127.0.0.1")
    port = store.port
    del store
    assert not is_open("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused_with_its_name() -> None:
    with pytest.raises(ResourceError, match=r"cannot bind a channel to 192\.0\.2\.1: "):
        serve_store("192.0.2.1")
