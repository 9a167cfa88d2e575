"""What a coordinator says of its health, without Serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster.coordinator import CoordinatorReplica


class Parts(CoordinatorReplica):
    """The threads of a replica alone; `ended` is the one that has ended."""

    def __init__(self, ended: str) -> None:  # not that of a real one
        for name in ("_loop", "_pump", "_directory"):
            setattr(self, name, SimpleNamespace(is_alive=name != ended))

    def __del__(self) -> None:
        """Nothing has been started that would have to end."""


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ("_loop", "the engine's thread has ended"),
        ("_pump", "the channel's thread has ended"),
        ("_directory", "the directory's thread has ended"),
    ],
)
def test_a_coordinator_with_a_thread_that_has_ended_is_not_healthy(ended: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        Parts(ended).check_health()


def test_a_coordinator_whose_threads_run_is_healthy() -> None:
    Parts("").check_health()
