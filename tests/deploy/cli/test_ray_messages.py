"""What Ray prints, made readable."""

from __future__ import annotations

import contextlib

import pytest

from deploy.cli.ray_messages import RayMessages


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (
            "\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected "
            "system error. To troubleshoot the problem, check the logs. Lease ID: 06 Worker ID: c3",
            ["Ray: A worker died or was killed while executing a task by an unexpected system error (LOGS)"],
        ),
        (
            "(raylet, ip=10.0.0.7) Raylet is terminated. Possible reasons: (1) SIGKILL\n  [state-dump] x",
            ["Ray: Raylet is terminated (LOGS)"],
        ),
        ("(autoscaler +3s) Error: no node: try again", ["Ray: Error: no node: try again (LOGS)"]),
        ("another library says so\n", ["another library says so"]),
        ("", []),
    ],
)
def test_of_a_message_the_first_sentence_is_shown(printed: str, shown: list[str]) -> None:
    lines: list[str] = []
    with contextlib.redirect_stdout(RayMessages(lines.append, lambda: "/tmp/logs")):
        print(printed)
    assert lines == [line.replace("LOGS", "the logs are in /tmp/logs") for line in shown]
