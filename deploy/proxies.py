"""Ray Serve's two HTTP proxies, and what its processes have to find in their environment for each.

`python`: an ASGI server in a process of its own passes requests on to the doors by Ray's calls.
`haproxy`: HAProxy, of the package that comes with Ray, speaks HTTP to the doors themselves; Serve writes its
configuration (`deploy.haproxy` mends it), and reloads it when a door comes or goes.

Serve's processes read the environment when they start, so it has to be there for Ray's: `drafthouse serve`
sets it, the chart (`ingress.proxy`) does, and `deploy/ray/haproxy.env` is for `ray start`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from deploy import haproxy
from deploy.haproxy import BINARY_VARIABLE, COMMAND
from deploy.openai.slow_readers import PROXY_CALLBACK

ProxyKind = Literal["python", "haproxy"]

HAPROXY_PORTS: Mapping[str, int] = {"metrics": 9101, "statistics": 8404}
"""Where HAProxy listens on loopback beside the endpoint."""

HAPROXY_CONNECTIONS = 4096
"""Most clients of one proxy at a time; further ones wait. Ray's own default."""
HAPROXY_OPEN_FILES = 11_000
"""What it may have to open for them; it does not start where it may not."""

IMAGE_COMMAND = f"/opt/venv/bin/{COMMAND}"
"""Where our images have it."""

_EVERY_PROXY: Mapping[str, str] = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_CALLBACK,
    # A proxy that died is found out after three checks: half a minute at Serve's own ten seconds.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # Between proxy and door, gRPC takes less CPU for a delivery than Ray's generators of objects. Doors
    # listen for it anyway, behind Ray's token and Ray's TLS.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # gRPC's own bound of 4 MiB makes a 500 of a long answer, and of a body that is as long as it may be.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
}
_HAPROXY: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_METRICS_PORT": str(HAPROXY_PORTS["metrics"]),
    "RAY_SERVE_HAPROXY_STATS_PORT": str(HAPROXY_PORTS["statistics"]),
    # Streams keep their process when another takes over after a reload: at Ray's 120 s they would be cut.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_HAPROXY_MAXCONN": str(HAPROXY_CONNECTIONS),
    # HAProxy stops sending to a door that ends within a second; at Ray's 30 s every end would take so long.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
}
_HAPROXY_FILES: Mapping[str, str] = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}


def proxy_environment(kind: ProxyKind, haproxy_command: str = IMAGE_COMMAND) -> dict[str, str]:
    """Return what Ray's processes have to be started with.

    `haproxy_command` is where `drafthouse-haproxy` (`deploy.haproxy`) is installed, on every node.
    """
    if kind == "python":
        return dict(_EVERY_PROXY)
    return {**_EVERY_PROXY, **_HAPROXY, BINARY_VARIABLE: haproxy_command}


def local_haproxy(folder: Path) -> dict[str, str]:
    """Return the environment of a cluster on this machine that keeps HAProxy's files in a folder.

    Ray's own folder is one for all users of a machine. This one has to have a short path: sockets lie in it,
    below the id of the node.
    """
    command = folder / COMMAND
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {haproxy.__name__} "$@"\n')
    command.chmod(0o700)
    files = {name: str(folder / file) for name, file in _HAPROXY_FILES.items()}
    return proxy_environment("haproxy", str(command)) | files
