"""Load on a running `drafthouse serve`, what may go wrong with it, and rules that notice it soon."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil
import yaml

from tests.deploy.serve_process import Server


@contextmanager
def load(
    url: str, *, num_clients: int = 4, may_fail: bool = False, api_key: str = "", **parameters: object
) -> Iterator[None]:
    """Ask for completions, so many at a time, until the block ends.

    Who is turned away asks again, and with `may_fail` who fails does, too.
    """
    over = threading.Event()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = {
        "model": "tiny",
        "prompt": [2, 3, 4, 5] * 8,
        "max_tokens": 48,
        "ignore_eos": True,
        **parameters,
    }

    def ask() -> None:
        with httpx.Client(headers=headers, timeout=120) as client:
            while not over.is_set():
                answer = client.post(f"{url}/v1/completions", json=body)
                if answer.status_code == 429 or (may_fail and answer.is_server_error):
                    over.wait(0.2)
                else:
                    answer.raise_for_status()

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(120)


def quickened(rules: str, *, window: str = "2m", of_days: str = "2m") -> str:
    """Return rules that fire after a second, or at once, and look back for so long, whatever they said.

    `of_days`: those that looked back for days.
    """
    content = yaml.safe_load(rules)
    for rule in (rule for group in content["groups"] for rule in group["rules"]):
        quick = re.sub(r"\[\d+[smh]\]", f"[{window}]", rule["expr"])
        rule["expr"] = re.sub(r"\[\d+d\]", f"[{of_days}]", quick)
        if rule.get("for", "0m") != "0m":
            rule["for"] = "1s"
    text: str = yaml.safe_dump(content)
    return text


def has_fired(alert: str) -> str:
    """Return what has a value once an alert has fired."""
    return f'count_over_time(ALERTS{{alertname="Drafthouse{alert}",alertstate="firing"}}[1h])'


def ray_processes(server: Server, title: str) -> list[psutil.Process]:
    """Return those of Ray's processes that are called so."""
    found = []
    for process in server.processes():
        with suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith(f"ray::{title}"):
                found.append(process)
    return found


def kill(server: Server, title: str, number: int = 1) -> None:
    """SIGKILL so many of Ray's processes that are called so."""
    found = ray_processes(server, title)
    assert len(found) >= number, found
    for process in found[:number]:
        process.kill()


@contextmanager
def stuttering(process: psutil.Process, *, stopped_s: float, running_s: float) -> Iterator[None]:
    """Stop a process (SIGSTOP) and let it go on, by turns, until the block ends."""
    over = threading.Event()

    def stutter() -> None:
        while not over.is_set():
            process.suspend()
            time.sleep(stopped_s)
            process.resume()
            over.wait(running_s)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
