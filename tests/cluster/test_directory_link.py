"""The thread that keeps a process in touch with the directory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from cluster.directory import DirectorySnapshot, DirectoryVersion, Member
from cluster.directory_actor import DirectoryLink
from tests.cluster.test_directory import A


@pytest.mark.parametrize("members", [(A,), ()])
def test_no_answer_is_not_the_answer_that_nobody_is_there(
    members: tuple[Member, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A door that took it for that would open before its coordinators serve."""
    snapshot = DirectorySnapshot(version=DirectoryVersion(1, 1), members=members)
    answers: Iterator[DirectorySnapshot | None] = iter([None, None, snapshot, None, None])
    num_asked = 0

    def exchange(link: DirectoryLink) -> DirectorySnapshot | None:
        nonlocal num_asked
        num_asked += 1
        return next(answers, None)

    heard: list[tuple[int, tuple[Member, ...]]] = []
    monkeypatch.setattr(DirectoryLink, "_exchange", exchange)
    link = DirectoryLink(
        namespace="none",
        lease_s=3.0,
        renew_s=0.001,
        on_change=lambda members: heard.append((num_asked, members)),
        name="link",
    )
    link.start()
    until_s = time.monotonic() + 10.0
    while num_asked < 6:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    link.close()
    assert heard == [(3, members)]
