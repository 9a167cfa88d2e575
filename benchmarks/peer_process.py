"""A peer at work: its program in its own environment, asked over pipes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peer_environments import PeerUnavailableError, Recipe
from benchmarks.peer_workers.session import Setup

_REPOSITORY = Path(__file__).parent.parent
_STOP_S = 20.0
_TAIL_LINES = 5


class PeerProcess:
    """One peer, which keeps its model until it is closed."""

    def __init__(self, recipe: Recipe, python: Path, setup: Setup) -> None:
        """Start the program; `wait_ready` has to follow.

        Several can start side by side; the model is converted and compiled meanwhile.
        """
        self._log = Path(setup.folder) / f"{recipe.worker}.log"
        environment = {
            **os.environ,
            "PYTHONPATH": str(_REPOSITORY),
            "OMP_NUM_THREADS": str(setup.num_threads),
            "HF_HUB_OFFLINE": "1",
        }
        if recipe.preload is not None and (python.parent.parent / recipe.preload).exists():
            environment["LD_PRELOAD"] = str(python.parent.parent / recipe.preload)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.peer_workers.{recipe.worker}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self._send(asdict(setup))

    def wait_ready(self) -> dict[str, str]:
        """Wait for the model; return the versions of what runs it."""
        versions: dict[str, str] = self._receive()["versions"]
        return versions

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """Return the seconds that the generation took, by the peer's own clock, and the new tokens."""
        self._send({"prompts": prompts, "num_tokens": num_tokens})
        reply = self._receive()
        return reply["seconds"], reply["token_ids"]

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, with a request unread
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failure(self) -> PeerUnavailableError:
        tail = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return PeerUnavailableError("its program ended: " + " | ".join(tail))
