"""Who may connect to a Ray cluster that asks for a token."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

_CONNECT = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False); print('let in:', len(ray.nodes()))"
_PATIENCE_S = 180.0


def require_token(address: str, token: str) -> None:
    """Check that whoever has the cluster's token is let in, and nobody without it or with another one."""
    callers = {
        "with it": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        "without": {"RAY_AUTH_MODE": "disabled"},
        "with another": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * len(token)},
    }
    with tempfile.TemporaryDirectory() as empty:
        # Ray would look for a token in the home folder, and in what this process has been told.
        neutral = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        processes = {
            who: subprocess.Popen(
                [sys.executable, "-c", _CONNECT, address],
                env=neutral | {"HOME": empty} | said,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for who, said in callers.items()
        }
        told: dict[str, str] = {}
        try:
            for who, process in processes.items():
                told[who], _ = process.communicate(timeout=_PATIENCE_S)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    let_in = {who: "let in:" in text for who, text in told.items()}
    assert let_in == {"with it": True, "without": False, "with another": False}, told
    for who in ("without", "with another"):
        assert "authenticat" in told[who].lower(), f"{who}: refused for another reason: {told[who][-2000:]}"
