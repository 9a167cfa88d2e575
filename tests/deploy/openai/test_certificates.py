"""Certificates that are renewed under a server that runs: those who come see the new one; what is no use
changes nothing."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from deploy.config import TlsConfig
from deploy.openai.bounded_http import BoundedHttp
from deploy.openai.certificates import (
    LOOK_S,
    CertificateFiles,
    FollowedCertificate,
    expiry_timestamp_s,
)
from specdec.core.clock import ManualClock
from tests.deploy.certificates import make_certificate
from tests.deploy.openai.live import live_server

APP = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])


def mounted(folder: Path, tls: TlsConfig) -> CertificateFiles:
    """Put files where a server reads them, in the way of a Secret of Kubernetes: all change at once."""
    data = folder / f"..data-{time.monotonic_ns()}"
    data.mkdir(parents=True)
    for name, file in (("tls.crt", tls.certificate_file), ("tls.key", tls.key_file)):
        (data / name).write_bytes(Path(file).read_bytes())
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    link = folder / "..data-tmp"
    link.symlink_to(data.name)
    os.replace(link, folder / "..data")
    return CertificateFiles(certificate_file=str(folder / "tls.crt"), key_file=str(folder / "tls.key"))


def text_of(tls: TlsConfig) -> str:
    return Path(tls.certificate_file).read_text()


def shown_at(url: str, host: str = "127.0.0.1") -> str:
    """The certificate that a client of the port is shown."""
    return ssl.get_server_certificate((host, int(url.rpartition(":")[2])), timeout=30)


@contextmanager
def served(files: CertificateFiles, loop: str = "auto") -> Iterator[str]:
    options = {"ssl_certfile": files.certificate_file, "ssl_keyfile": files.key_file, "loop": loop}
    if files.passphrase is not None:
        options["ssl_keyfile_password"] = files.passphrase
    with live_server(APP, http=BoundedHttp, **options) as url:
        yield url


@pytest.fixture
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FollowedCertificate, "look_s", 0.0)


@pytest.mark.usefixtures("_looks_each_time")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_clients_are_shown_the_certificate_that_the_files_hold_now(loop: str, tmp_path: Path) -> None:
    """By address, without a server name in the greeting, and by name; who was there before stays."""
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    files = mounted(tmp_path / "mount", first)
    trusting = ssl.create_default_context(cafile=first.certificate_file)
    with served(files, loop) as url, httpx.Client(base_url=url, verify=trusting) as before:
        assert before.get("/").text == "here"
        assert shown_at(url) == text_of(first)
        mounted(tmp_path / "mount", second)
        assert shown_at(url) == shown_at(url, "localhost") == text_of(second)
        assert before.get("/").text == "here", "the same connection"
        renewed = ssl.create_default_context(cafile=second.certificate_file)
        assert httpx.get(url, verify=renewed).text == "here"


@pytest.mark.usefixtures("_looks_each_time")
def test_a_key_with_a_passphrase_is_followed_where_the_server_has_it(tmp_path: Path) -> None:
    """As Serve has it of `ssl_keyfile_password`: it shows what is new, and says when that ends."""
    first = make_certificate(tmp_path, "first", passphrase=b"x")
    second = make_certificate(tmp_path, "second", days=30, passphrase=b"x")
    files = dataclasses.replace(mounted(tmp_path / "mount", first), passphrase="x")
    with served(files) as url:
        assert shown_at(url) == text_of(first)
        mounted(tmp_path / "mount", second)
        assert shown_at(url) == text_of(second)
    assert expiry_timestamp_s(files) == pytest.approx(time.time() + 30 * 86400, abs=120)
    for wrong in (None, "y"):
        with pytest.raises(OSError, match=r"passphrase|SSL"):
            expiry_timestamp_s(dataclasses.replace(files, passphrase=wrong))


def garbage(tmp_path: Path, second: TlsConfig) -> TlsConfig:
    Path(second.certificate_file).write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    return second


def key_of_another(tmp_path: Path, second: TlsConfig) -> TlsConfig:
    return second.model_copy(update={"key_file": make_certificate(tmp_path, "other").key_file})


def locked(tmp_path: Path, second: TlsConfig) -> TlsConfig:
    return make_certificate(tmp_path, "locked", passphrase=b"x")


@pytest.mark.usefixtures("_looks_each_time")
@pytest.mark.parametrize(
    ("make", "reason"),
    [(garbage, "PEM"), (key_of_another, "KEY_VALUES_MISMATCH"), (locked, "needs a passphrase")],
)
def test_files_that_are_no_use_leave_the_certificate_from_before(  # type: ignore[no-untyped-def]
    make, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And so does one half of a renewal, until the other half is there."""
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    files = mounted(tmp_path / "mount", first)
    with served(files) as url:
        assert shown_at(url) == text_of(first)
        mounted(tmp_path / "mount", make(tmp_path, second))
        for _ in range(3):
            assert shown_at(url) == text_of(first)
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert files.certificate_file in record.message
        assert files.key_file in record.message
        assert "the one from before stays in force" in record.message
        assert reason in record.message
        third = make_certificate(tmp_path, "third")
        mounted(tmp_path / "mount", third)
        assert shown_at(url) == text_of(third)


def test_files_are_looked_at_now_and_then_and_read_when_they_have_changed(tmp_path: Path) -> None:
    files = mounted(tmp_path, make_certificate(tmp_path, "first"))
    clock = ManualClock()
    read: list[str] = []
    followed = FollowedCertificate(files, lambda _: read.append(text_of(files)) or len(read), clock)
    assert [followed.current() for _ in range(3)] == [1, 1, 1]
    clock.advance(LOOK_S)
    assert followed.current() == 1, "they are the same"
    mounted(tmp_path, make_certificate(tmp_path, "second"))
    assert followed.current() == 1
    clock.advance(LOOK_S)
    assert followed.current() == 2
    assert read[0] != read[1]


def test_files_that_are_away_are_looked_for_again_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be read may look the same when it can."""
    tls = make_certificate(tmp_path)
    files = CertificateFiles(certificate_file=tls.certificate_file, key_file=tls.key_file)
    clock = ManualClock()
    followed = FollowedCertificate(files, expiry_timestamp_s, clock)
    hidden = tmp_path / "hidden"
    Path(files.key_file).rename(hidden)
    for _ in range(3):
        assert followed.current() is None
        clock.advance(LOOK_S)
    (record,) = caplog.records
    assert record.message.endswith(f"with the key {files.key_file} cannot be used: No such file or directory")
    hidden.rename(files.key_file)
    assert followed.current() == expiry_timestamp_s(files)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("days", [90, -3], ids=["good", "ended"])
def test_when_a_certificate_ends_is_known_when_it_has_ended_too(days: int, tmp_path: Path) -> None:
    tls = make_certificate(tmp_path, days=days)
    files = CertificateFiles(certificate_file=tls.certificate_file, key_file=tls.key_file)
    expected = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    assert expiry_timestamp_s(files) == pytest.approx(expected.timestamp(), abs=120)
