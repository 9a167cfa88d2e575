"""What a worker's owner makes of Ray's errors, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from cluster.worker_handle import WorkerHandle
from specdec.core.errors import CheckpointError, ResourceError, TransportError

DEATHS = [
    ActorDiedError(),
    OutOfMemoryError("killed by the memory monitor"),
    NodeDiedError("its node died"),
    ActorUnschedulableError("there is no such node"),
    RuntimeEnvSetupError("no environment"),
]


class Actor:
    """Each call of any method is answered by an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.is_killed = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self)


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(call: Actor, timeout: float | None = None) -> None:
        raise call.error

    def kill(actor: Actor, *, no_restart: bool) -> None:
        actor.is_killed = True

    fake = SimpleNamespace(get=get, kill=kill, wait=lambda calls, timeout: (calls, []))
    monkeypatch.setattr("cluster.worker_handle.ray", fake)


def handle(error: Exception) -> WorkerHandle:
    return WorkerHandle(Actor(error), "target worker")


def raised(text: str) -> RayError:
    return RayTaskError("f", text, RuntimeError(text))


@pytest.mark.parametrize("error", DEATHS, ids=lambda error: type(error).__name__)
def test_however_a_worker_died_it_is_dead(error: RayError) -> None:
    with pytest.raises(TransportError, match="the target worker died"):
        handle(error).await_address(1.0)
    with pytest.raises(TransportError, match=f"does not answer: {type(error).__name__}"):
        handle(error).call("check_health")
    assert handle(error).poll_compile_state() is None


def test_what_a_worker_raises_is_not_its_death() -> None:
    error = raised("its thread has ended")
    with pytest.raises(RayTaskError):
        handle(error).call("check_health")
    with pytest.raises(RayTaskError):
        handle(error).poll_compile_state()


def test_why_a_model_cannot_be_loaded_is_said_in_the_worker_s_words() -> None:
    error = raised("specdec.core.errors.CheckpointError: there is no /m")
    with pytest.raises(CheckpointError, match="there is no /m"):
        handle(error).await_address(1.0)


def test_a_worker_that_is_silent_is_ended_where_it_should_have_started() -> None:
    actor = Actor(GetTimeoutError())
    with pytest.raises(ResourceError, match="not ready after 1 s"):
        WorkerHandle(actor, "target worker").await_address(1.0)
    assert actor.is_killed
    with pytest.raises(TransportError, match="GetTimeoutError"):
        WorkerHandle(actor, "target worker").call("check_health")
