"""A worker actor as its owner sees it: started, awaited, watched, ended."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from specdec.core.errors import CheckpointError, ConfigError, ResourceError, TransportError, UserError
from specdec.core.idle_work import WorkState
from specdec.transport.base import PeerAddress

logger = logging.getLogger(__name__)

_USER_ERRORS = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (UserError, CheckpointError, ConfigError, ResourceError)
}
"""By the name that ends a traceback: Ray hands a constructor's error on as text."""


class WorkerHandle:
    """One worker process.

    Ray says in many ways that there is none: that its memory monitor has ended it (`OutOfMemoryError`), its
    node has died or its environment cannot be made is no `RayActorError`. So each of Ray's errors counts as
    its death but `RayTaskError`: what the worker itself has raised.
    """

    def __init__(self, actor: Any, what: str) -> None:
        self._actor = actor
        self._what = what
        self._stopped = False
        self._asked: Any = None

    def await_address(self, timeout_s: float) -> PeerAddress:
        """Wait until the worker serves.

        Raises:
            UserError: the model cannot be loaded, with the worker's own words.
            ResourceError: it did not become ready in time.
            TransportError: the process died.
        """
        try:
            address: PeerAddress = ray.get(self._actor.address.remote(), timeout=timeout_s)
        except GetTimeoutError as error:
            self.stop()
            raise ResourceError(f"the {self._what} was not ready after {timeout_s:g} s") from error
        except RayError as error:
            raise _readable(error, self._what) from error
        return address

    def tensor_address(self) -> PeerAddress | None:
        """Ask where the worker sends hidden states from, or takes them; None: it does neither.

        Raises:
            TransportError: the process is dead or does not answer.
        """
        address: PeerAddress | None = self.call("tensor_address")
        return address

    def call(self, method: str, *args: object, timeout_s: float = 10.0) -> Any:
        """Call a method and wait.

        Raises:
            TransportError: the process is dead or does not answer.
            RayTaskError: what the method has raised.
        """
        try:
            return ray.get(getattr(self._actor, method).remote(*args), timeout=timeout_s)
        except RayTaskError:
            raise
        except RayError as error:
            raise TransportError(f"the {self._what} does not answer: {type(error).__name__}") from error

    def compile_state(self, timeout_s: float = 10.0) -> WorkState:
        """Ask what has become of compiling the forward.

        Raises:
            TransportError: the process is dead or does not answer.
        """
        state: WorkState = self.call("compile_state", timeout_s=timeout_s)
        return state

    def device(self) -> str:
        """Ask a draft worker what it runs on.

        Raises:
            TransportError: the process is dead or does not answer.
        """
        device: str = self.call("device")
        return device

    def poll_compile_state(self) -> WorkState | None:
        """As `compile_state`, without waiting: the answer to an earlier call of this, if it has come."""
        if self._asked is None:
            self._asked = self._actor.compile_state.remote()
        answered, _ = ray.wait([self._asked], timeout=0)
        if not answered:
            return None
        self._asked = None
        try:
            state: WorkState = ray.get(answered[0])
        except RayTaskError:
            raise
        except RayError:
            return None  # whoever looks after the worker will find out
        return state

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if not self._stopped:
            self._stopped = True
            ray.kill(self._actor, no_restart=True)


def _readable(error: Exception, what: str) -> Exception:
    """Turn Ray's error about a failed constructor into the user's own, where it was one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    for line in reversed(lines):
        name, _, text = line.strip().partition(": ")
        kind = _USER_ERRORS.get(name)
        if kind is not None:
            return kind(text)
    return TransportError(f"the {what} died: {lines[-1].strip()}")
