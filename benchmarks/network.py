"""Several machines in one: network namespaces with addresses of their own, joined by a switch. Needs root.

A cut link says nothing to anybody: what is sent is lost, connections stay open, and nobody is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

SUBNET = "10.77.0"
_NAMESPACES = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:ff"


class Network:
    """Hosts 1, 2, ... and the switch between them. One that has been made elsewhere is used by its name."""

    def __init__(self, name: str, num_hosts: int) -> None:
        self.name = name
        self.hosts = range(1, num_hosts + 1)
        self._switch = f"{name}-switch"

    def namespace(self, host: int) -> str:
        """The name by which `ip netns` knows a host."""
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        """Its address."""
        return f"{SUBNET}.{host}"

    def command(self, host: int, *words: str) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *words]

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Have this thread on a host, and the threads and processes that it starts meanwhile."""
        with (
            Path("/proc/thread-self/ns/net").open("rb") as before,
            (_NAMESPACES / self.namespace(host)).open("rb") as there,
        ):
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    # -- what happens to links

    def isolate(self, host: int) -> None:
        """Pull a host's plug."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def join(self, host: int) -> None:
        """Put it in again."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def part(self, one: int, other: int) -> None:
        """Lose what two hosts send to each other, and nothing else."""
        self._send_to(one, other, _NOBODY)
        self._send_to(other, one, _NOBODY)

    def reunite(self, one: int, other: int) -> None:
        """End that."""
        self._send_to(one, other, _hardware(other))
        self._send_to(other, one, _hardware(one))

    def _send_to(self, sender: int, receiver: int, hardware: str) -> None:
        _ip(
            "-n", self.namespace(sender), "neighbour", "replace", self.address(receiver),
            "lladdr", hardware, "dev", "eth0", "nud", "permanent",
        )  # fmt: skip

    # -- what runs on hosts

    def processes(self, host: int) -> list[int]:
        """Ids of all processes on a host, where this thread is not `inside`: the question itself is one."""
        return [int(line) for line in _ip("netns", "pids", self.namespace(host)).split()]

    def kill(self, host: int) -> None:
        """kill -9 of all of them, as when the power fails."""
        while alive := self.processes(host):
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    # -- making and removing all of it

    def make(self) -> None:
        """Make hosts and switch."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "addr", "add", f"{SUBNET}.254/24", "dev", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            namespace, port = self.namespace(host), f"port{host}"
            _ip("netns", "add", namespace)
            _ip(
                "-n", self._switch, "link", "add", port, "type", "veth",
                "peer", "name", "eth0", "netns", namespace, "address", _hardware(host),
            )  # fmt: skip
            _ip("-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", link, "up")
            # Ray asks the kernel by which address it would reach the world.
            _ip("-n", namespace, "route", "add", "default", "via", f"{SUBNET}.254")
            _ip("-n", self._switch, "link", "set", port, "master", "bridge")
            _ip("-n", self._switch, "link", "set", port, "up")

    def remove(self) -> None:
        """End every process on every host, and take all of it away again."""
        known = _ip("netns", "list")
        for host in self.hosts:
            if f"{self.namespace(host)} " in known.replace("\n", " \n"):
                self.kill(host)
                _ip("netns", "delete", self.namespace(host))
        if self._switch in known:
            _ip("netns", "delete", self._switch)


@contextlib.contextmanager
def network(name: str, num_hosts: int) -> Iterator[Network]:
    """Make a network; leave nothing of it and of what runs on it."""
    made = Network(name, num_hosts)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def why_not() -> str | None:
    """Why there can be no networks here; None: there can."""
    if os.geteuid() != 0:
        return "makes network namespaces, which needs root"
    if shutil.which("ip") is None:
        return "makes network namespaces, which needs the command ip (Debian: iproute2)"
    probe = Network(f"dhprobe{os.getpid()}", 1)
    try:
        probe.make()
    except subprocess.CalledProcessError as error:
        return f"networks of namespaces cannot be made here: {error.stderr.strip()}"
    finally:
        probe.remove()
    return None


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _hardware(host: int) -> str:
    return f"02:00:00:00:00:{host:02x}"


def _ip(*words: str) -> str:
    command: Sequence[str] = ("ip", *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
