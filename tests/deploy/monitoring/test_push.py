"""`drafthouse dashboards` against a double of Grafana, and against what one may meet instead."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from typer.testing import CliRunner, Result

from deploy.cli.main import app
from deploy.monitoring.dashboards import ALL_DASHBOARDS
from tests.deploy.certificates import make_certificate
from tests.deploy.monitoring.grafana_double import EDITOR, VIEWER, Grafana, serving
from tests.deploy.openai.live import live_server

pytest.importorskip("grafana_foundation_sdk", reason="the extra `grafana` is not installed")
pytest.importorskip("grafana_client", reason="the extra `grafana` is not installed")
import deploy.monitoring.push as push_module

runner = CliRunner()
NUM = len(ALL_DASHBOARDS)


@dataclass(frozen=True, slots=True)
class Pusher:
    """The command, and what it pushes to."""

    grafana: Grafana
    url: str
    token_file: Path

    def push(self, *options: str, url: str | None = None, token: str = EDITOR) -> Result:
        self.token_file.write_text(f"{token}\n")
        arguments = ["--url", url or self.url, "--token-file", str(self.token_file), *options]
        return runner.invoke(app, ["dashboards", "push", *arguments])


@pytest.fixture
def pusher(tmp_path: Path) -> Iterator[Pusher]:
    grafana = Grafana()
    with serving(grafana) as url:
        yield Pusher(grafana, url, tmp_path / "token")


def told(result: Result) -> str:
    return " ".join(result.stderr.split())


def test_the_first_push_creates_everything_in_its_folder(pusher: Pusher) -> None:
    result = pusher.push()
    assert result.exit_code == 0, result.stderr
    assert pusher.grafana.folders == {"drafthouse": "Drafthouse"}
    assert pusher.grafana.dashboards.keys() == {page.uid for page in ALL_DASHBOARDS}
    assert set(pusher.grafana.folder_of.values()) == {"drafthouse"}
    assert result.stdout.count("created") == NUM
    assert f"{pusher.url}/d/drafthouse-overview" in result.stdout
    assert f"dashboard {NUM} of {NUM}" in told(result)


def test_the_second_push_changes_nothing(pusher: Pusher) -> None:
    pusher.push()
    writes = list(pusher.grafana.writes)
    result = pusher.push(url=f"{pusher.url}/")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("unchanged") == NUM
    assert pusher.grafana.writes == writes
    assert {stored["version"] for stored in pusher.grafana.dashboards.values()} == {1}


def test_what_somebody_has_changed_is_put_right_and_the_rest_left_alone(pusher: Pusher) -> None:
    pusher.push()
    pusher.grafana.dashboards["drafthouse-pools"]["title"] = "Mine"
    pusher.grafana.dashboards["theirs"] = {"uid": "theirs", "title": "Theirs", "version": 7}
    pusher.grafana.folder_of["theirs"] = "drafthouse"
    result = pusher.push()
    assert result.stdout.count("updated") == 1
    assert result.stdout.count("unchanged") == NUM - 1
    assert pusher.grafana.dashboards["drafthouse-pools"]["title"] == "Drafthouse / Pools"
    assert pusher.grafana.dashboards["drafthouse-pools"]["version"] == 2
    assert pusher.grafana.dashboards["theirs"]["version"] == 7


def test_a_folder_that_is_there_is_used_whatever_its_uid(pusher: Pusher) -> None:
    pusher.grafana.folders["ab12"] = "LLM serving"
    result = pusher.push("--folder", "LLM serving")
    assert result.exit_code == 0, result.stderr
    assert pusher.grafana.folders == {"ab12": "LLM serving"}
    assert set(pusher.grafana.folder_of.values()) == {"ab12"}


def test_another_folder_moves_the_dashboards(pusher: Pusher) -> None:
    pusher.push()
    result = pusher.push("--folder", "Other place")
    assert result.stdout.count("updated") == NUM
    assert set(pusher.grafana.folder_of.values()) == {"other-place"}
    assert len(pusher.grafana.dashboards) == NUM


def test_a_wrong_token(pusher: Pusher) -> None:
    result = pusher.push(token="glsa_of_another_grafana")
    assert result.exit_code == 2
    assert "does not accept the token" in told(result)
    assert "Service accounts" in told(result)
    assert "glsa_of_another_grafana" not in result.output
    assert not pusher.grafana.writes


def test_a_token_that_may_only_look(pusher: Pusher) -> None:
    result = pusher.push(token=VIEWER)
    assert result.exit_code == 2
    assert "does not let the token use folder 'Drafthouse'" in told(result)
    assert "role Editor" in told(result)
    pusher.grafana.folders["drafthouse"] = "Drafthouse"
    assert "dashboards:write" in told(pusher.push(token=VIEWER))
    assert not pusher.grafana.dashboards


@pytest.mark.parametrize("content", ["", "two tokens", "glsa_\u00e9"])
def test_a_token_file_that_holds_no_token(pusher: Pusher, content: str) -> None:
    result = pusher.push(token=content)
    assert result.exit_code == 2
    assert "must hold one token" in told(result)
    assert not pusher.grafana.writes


def test_a_token_file_that_is_not_there(pusher: Pusher, tmp_path: Path) -> None:
    arguments = ["dashboards", "push", "--url", pusher.url, "--token-file", str(tmp_path / "none")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "cannot read the token file" in told(result)


def test_nobody_at_the_url(pusher: Pusher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = pusher.push(url=f"http://127.0.0.1:{port}")
    assert result.exit_code == 2
    assert "nothing answers at" in told(result)
    assert "Connection refused" in told(result)
    assert "HTTPConnection" not in told(result)


@pytest.mark.parametrize(
    "url",
    [
        "http://h:port",
        "http://[::1",
        "127.0.0.1:3000",
        "ftp://host",
        "http://",
        "http://admin:pw@host",
        "http://h?verify=no",
    ],
)
def test_what_is_not_a_url_of_grafana(pusher: Pusher, url: str) -> None:
    result = pusher.push(url=url)
    assert result.exit_code == 2
    assert "URL" in told(result)
    assert "pw" not in told(result)


def test_a_grafana_that_does_not_answer(pusher: Pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = pusher.push(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert result.exit_code == 1
    assert "did not answer within 0.3 s" in told(result)


def test_a_grafana_that_fails(pusher: Pusher) -> None:
    pusher.grafana.failure = 500
    result = pusher.push()
    assert result.exit_code == 1
    assert "database is locked" in told(result)


def test_a_login_page_instead_of_grafana(pusher: Pusher) -> None:
    async def login(_: Request) -> HTMLResponse:
        return HTMLResponse("<html>who are you?</html>")

    with live_server(Starlette(routes=[Route("/{path:path}", login, methods=["GET", "POST"])])) as url:
        result = pusher.push(url=url)
    assert result.exit_code == 2
    assert "is not Grafana's API" in told(result)


def test_another_path_of_the_right_server(pusher: Pusher) -> None:
    result = pusher.push(url=f"{pusher.url}/elsewhere")
    assert result.exit_code == 2
    assert "with its path" in told(result)


@pytest.mark.parametrize("end", ["", "/"])
def test_a_grafana_under_a_path(pusher: Pusher, end: str) -> None:
    with live_server(Starlette(routes=[Mount("/grafana", app=pusher.grafana.app())])) as url:
        for change in ("created", "unchanged"):
            result = pusher.push(url=f"{url}/grafana{end}")
            assert result.exit_code == 0, result.stderr
            assert result.stdout.count(change) == NUM
    assert f"{url}/grafana/d/drafthouse-overview" in result.stdout


def test_a_grafana_at_an_address_of_many_colons(pusher: Pusher) -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("there is no IPv6 here")
    with server:
        port = server.getsockname()[1]
    result = pusher.push(url=f"http://[::1]:{port}")
    assert "nothing answers at" in told(result)
    assert "Connection refused" in told(result)


def test_a_certificate_that_nobody_trusts(pusher: Pusher, tmp_path: Path) -> None:
    own = make_certificate(tmp_path)
    files = {"ssl_certfile": own.certificate_file, "ssl_keyfile": own.key_file}
    with live_server(pusher.grafana.app(), **files) as url:
        result = pusher.push(url=url)
    assert result.exit_code == 2
    assert "a certificate that is not trusted" in told(result)


def test_a_namesake_in_the_folder(pusher: Pusher) -> None:
    pusher.grafana.folders["drafthouse"] = "Drafthouse"
    pusher.grafana.dashboards["theirs"] = {"uid": "theirs", "title": "Drafthouse / Pools", "version": 1}
    pusher.grafana.folder_of["theirs"] = "drafthouse"
    result = pusher.push()
    assert result.exit_code == 2
    assert "'Drafthouse / Pools'" in told(result)
    assert "another --folder" in told(result)


def test_a_folder_that_somebody_has_given_another_title(pusher: Pusher) -> None:
    """Its uid is the one that the title gives."""
    pusher.grafana.folders["drafthouse"] = "LLM serving"
    result = pusher.push()
    assert result.exit_code == 2
    assert "'Drafthouse'" in told(result)
    assert "another --folder" in told(result)
    assert pusher.push("--folder", "LLM serving").exit_code == 0


def test_files_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        result = runner.invoke(app, ["dashboards", "write", str(folder)])
        assert result.exit_code == 0, result.stderr
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == sorted(f"{page.uid}.json" for page in ALL_DASHBOARDS)
    assert all(json.loads(file.read_text())["panels"] for file in files)


def test_files_cannot_be_written_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = runner.invoke(app, ["dashboards", "write", str(tmp_path / "taken")])
    assert result.exit_code == 2
    assert "cannot write dashboards" in told(result)


def test_no_proxy_is_asked_for_this_machine(pusher: Pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    result = pusher.push()
    assert result.exit_code == 0, result.stderr
