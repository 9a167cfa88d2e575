"""`drafthouse serve` in a process of its own, for benchmarks that measure it from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

_TOO_LONG_S = 240.0
_STOP_S = 60.0
_POLL_S = 0.05


@dataclass
class ServedProcess:
    """The command, and how to reach what it serves."""

    process: subprocess.Popen[str]
    url: str
    started_s: float
    log: list[tuple[float, str]] = field(default_factory=list)

    def read_log(self) -> None:
        """Collect what the command says until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append((round(time.monotonic() - self.started_s, 2), line.rstrip()))

    def wait_healthy(self, limit_s: float = _TOO_LONG_S) -> None:
        """Wait for the first 200."""
        while time.monotonic() - self.started_s < limit_s:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
        raise RuntimeError("the server did not start:\n" + "\n".join(line for _, line in self.log))

    def cpu_seconds(self, titles: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
        """Return the CPU time so far of the processes of each part, by how their titles begin."""
        seconds = dict.fromkeys(titles, 0.0)
        for process in self._descendants():
            try:
                command, times = process.cmdline(), process.cpu_times()
            except psutil.Error:
                continue
            name = Path(command[0]).name if command and command[0].startswith("/") else "".join(command[:1])
            for part, its in titles.items():
                if name.startswith(its):
                    seconds[part] += times.user + times.system
        return seconds

    def stop(self) -> None:
        """As Ctrl-C does; after a minute with force, so that a benchmark comes to its end."""
        descendants = self._descendants()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            descendants |= self._descendants()
            self.process.kill()
            self.process.wait()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _descendants(self) -> set[psutil.Process]:
        try:
            return set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return set()


@contextmanager
def serving(
    values: Mapping[str, Any], cores: Sequence[int] | None = None, *, niceness: int = 0
) -> Iterator[ServedProcess]:
    """Serve a configuration on a free port of loopback; it is healthy some time later.

    With `cores` it keeps to those, whatever this process may use. With `niceness` this process goes before it
    where they share cores: what is sent late is no fault of who serves.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {**values, "http": {**values.get("http", {}), "host": "127.0.0.1", "port": port}}
    # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(values))
        command = [sys.executable, "-c", "from deploy.cli import main; main()", "serve", str(file)]
        started_s = time.monotonic()
        process = subprocess.Popen(
            command,
            env=os.environ | {"RAY_TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if cores is not None:  # long before it has threads or children
            os.sched_setaffinity(process.pid, cores)
        if niceness:
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        server = ServedProcess(process, f"http://127.0.0.1:{port}", started_s)
        reader = threading.Thread(target=server.read_log, daemon=True)
        reader.start()
        try:
            yield server
        finally:
            server.stop()
            reader.join(_STOP_S)
