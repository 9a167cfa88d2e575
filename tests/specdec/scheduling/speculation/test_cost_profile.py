"""Profiles on disk: what comes back, and what is done about files that are of no use."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import msgspec
import pytest

from specdec.scheduling.speculation.cost_profile import ProfileStore, profile_key
from tests.specdec.scheduling.speculation.world import COSTS, profile_of

KEY = profile_key(target="rev1", device="cpu", threads=2)


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "profiles")


def test_a_profile_comes_back(store: ProfileStore) -> None:
    profile = msgspec.structs.replace(profile_of(COSTS["cpu"]), key=KEY)
    assert store.load(KEY) is None
    store.save(profile)
    assert store.load(KEY) == profile
    assert store.load(profile_key(target="rev2", device="cpu", threads=2)) is None
    assert [path.suffix for path in store.path_of(KEY).parent.iterdir()] == [".json"]


def test_the_key_names_everything_in_any_order() -> None:
    assert profile_key(b=1, a="x") == profile_key(a="x", b=1) == "a=x b=1"


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 999},
        {"verify": ()},
        {"key": "another"},
        {"verify": (msgspec.structs.replace(profile_of(COSTS["cpu"]).verify[0], seconds=-1.0),)},
        {"verify": (msgspec.structs.replace(profile_of(COSTS["cpu"]).verify[0], num_rows=0),)},
        {"draft": (msgspec.structs.replace(profile_of(COSTS["cpu"]).draft[0], wire_s=-1.0),)},
    ],
)
def test_what_cannot_be_used_is_measured_anew(
    store: ProfileStore, damage: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    profile = msgspec.structs.replace(profile_of(COSTS["cpu"]), key=KEY)
    store.save(profile)
    broken = msgspec.structs.replace(profile, **damage)
    store.path_of(KEY).write_bytes(msgspec.json.encode(broken))
    with caplog.at_level(logging.WARNING):
        assert store.load(KEY) is None
    assert len(caplog.records) == 1
    store.save(profile)
    assert store.load(KEY) == profile


@pytest.mark.parametrize(
    "content", [b"", b"not json", b"[]", b'{"key": 3}', b'{"key": "\xff"}', b'{"a":' + b"[" * 100_000]
)
def test_files_that_are_no_profiles(
    store: ProfileStore, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = store.path_of(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert store.load(KEY) is None
    assert len(caplog.records) == 1


def test_a_file_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", is_full)
    with caplog.at_level(logging.WARNING):
        ProfileStore(tmp_path).save(profile_of(COSTS["cpu"]))
    assert "No space left" in caplog.text
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_folder_that_cannot_be_written_to_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = ProfileStore(tmp_path / "file" / "profiles")
    with caplog.at_level(logging.WARNING):
        store.save(profile_of(COSTS["cpu"]))
    assert len(caplog.records) == 1
