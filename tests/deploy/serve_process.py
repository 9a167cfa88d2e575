"""`drafthouse serve` on tiny models, as a process of its own."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.architectures import save_model
from tests.ports import free_port

_MARK = "DRAFTHOUSE_TEST_RUN"
_START_S = 240
STOP_S = 60


@dataclass
class Server:
    """A running `drafthouse serve`."""

    process: subprocess.Popen[str]
    mark: str
    url: str
    config: Path
    log: Path
    ray_folder: Path

    def processes(self) -> list[psutil.Process]:
        """All processes that this run started, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_all_gone(self) -> None:
        """Check that nothing is left soon: what Ray's own children start late ends when it sees them gone."""
        until_s = time.monotonic() + STOP_S
        while left := self.processes():
            assert time.monotonic() < until_s, [process.cmdline() for process in left]
            time.sleep(0.1)

    def clean_up(self) -> None:
        """Stop whatever is left."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(STOP_S)
        for process in self.processes():
            process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self.ray_folder)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(f"ray_drafthouse_{name} ")]
        return sum(values)


def start(
    folder: Path, controller: str = "fixed", home: Path | None = None, *, of_drafts: str = ""
) -> Server:
    """Start the command on tiny models and wait until it prints its URL.

    `of_drafts` are further lines of `speculative_config`.
    """
    save_model(folder / "target", seed=1)
    save_model(folder / "draft", seed=1)
    text = f"""\
target: {{model: target, dtype: float32, device: cpu, num_threads: 1, compile: {{mode: "off"}}}}
speculative_config:
  method: draft_model
  model: draft
  num_speculative_tokens: 3
  controller: {controller}
  num_threads: 1
  compile: {{mode: "off"}}
{textwrap.indent(of_drafts, "  ")}
cache: {{num_blocks: 128, block_size: 8}}
cluster: {{drain_timeout_s: 3}}
http: {{port: {free_port()}, served_model_name: tiny}}
"""
    # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
    return launch(folder, text, Path(tempfile.mkdtemp(prefix="dh-", dir="/tmp")), home)


def launch(folder: Path, text: str, ray_folder: Path, home: Path | None = None) -> Server:
    """Start the command with a configuration and wait until it prints its URL.

    With a home folder of its own it finds a token for Ray, or makes one; else Ray does without.
    """
    config = folder / "config.yaml"
    config.write_text(text)
    mark, log = uuid.uuid4().hex, folder / "log"
    environment = os.environ | {_MARK: mark, "RAY_TMPDIR": str(ray_folder), "RAY_AUTH_MODE": "disabled"}
    if home is not None:
        del environment["RAY_AUTH_MODE"]
        environment["HOME"] = str(home)
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "serve"]
    with log.open("w") as log_stream:
        process = subprocess.Popen(
            [*command, str(config), "--num-cpus", "2"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log_stream,
            text=True,
            # A group of its own, so that Ctrl-C can be played to all of it as a terminal does.
            start_new_session=True,
        )
    assert process.stdout is not None
    # Ends the wait when the command never gets there; a ready one is stopped by its test.
    watchdog = subprocess.Popen(["sh", "-c", f"sleep {_START_S} && kill -TERM {process.pid}"])
    first_line = process.stdout.readline()
    watchdog.kill()
    watchdog.wait()
    server = Server(process, mark, first_line.strip().removesuffix("/v1"), config, log, ray_folder)
    if not first_line:
        server.clean_up()
        pytest.fail(f"the command ended with {process.returncode}: {log.read_text()}")
    return server


def prompts(number: int) -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(2, 128) for _ in range(generator.randrange(1, 60))] for _ in range(number)]
