"""`drafthouse bench online` against the real door over HTTP."""

from __future__ import annotations

import json
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typer.testing import CliRunner

from deploy.cli.main import app
from specdec.core.errors import CapacityError
from tests.deploy.certificates import make_certificate
from tests.deploy.openai.fakes import PIECES, Door, ScriptedService
from tests.deploy.openai.live import live_server

runner = CliRunner()


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(app, ["bench", "online", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_streams_of_the_door(tmp_path: Path) -> None:
    door = Door()
    files = {option: tmp_path / f"run.{option}" for option in ("json", "csv")}
    plot = tmp_path / "run.svg"
    with live_server(door.app) as url:
        code, stdout, stderr = invoke(
            *(url, "--rate", 500, "-n", 40, "--prompt-length", "4-8", "--output-length", 6),
            *("--vocab-size", 128, "--slo", "ttft=60", "--slo", "e2e=60"),
            *("--json", files["json"], "--csv", files["csv"], "--plot", plot),
        )
        assert code == 0, stderr
        chat = invoke(f"{url}/v1", "--endpoint", "chat", "-n", 5, "--rate", 500, "--prompt-length", 4)
    assert chat[0] == 0, chat[2]
    assert "40 of 40 requests complete" in stdout
    assert "100.0 % of all requests" in stdout
    assert len(door.service.requests) == 45
    assert 4 <= len(door.service.requests[0].prompt_token_ids) <= 8
    results = json.loads(files["json"].read_text())
    assert results["report"]["num_output_tokens"] == 40 * len(PIECES)
    assert results["report"]["latencies"]["itl"]["number"] == 40 * (len(PIECES) - 1)
    assert len(results["requests"]) == len(files["csv"].read_text().splitlines()) - 1 == 40
    assert plot.stat().st_size > 1000


def test_failures_are_counted(tmp_path: Path) -> None:
    door = Door()
    door.service.refuse_with = CapacityError("full", retry_after_s=3)
    with live_server(door.app) as url:
        code, stdout, _ = invoke(url, "-n", 7, "--rate", 500, "--prompt-length", 4)
    assert code == 1
    assert "failed: 7 with status 429, the first: full\n" in stdout


def test_ctrl_c_tells_what_has_come_out_so_far(tmp_path: Path) -> None:
    command = (
        # What starts the tests may have told its children to ignore it, as shells do with background jobs.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from deploy.cli import main; main()"
    )
    door = Door()
    with live_server(door.app) as url:
        trace = tmp_path / "trace"
        trace.write_text("0\n0.01\n0.02\n1000\n")
        options = ["bench", "online", url, "--trace", trace, "--prompt-length", 4, "--json", tmp_path / "run"]
        arguments = [sys.executable, "-c", command, *map(str, options)]
        with subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                deadline_s = time.monotonic() + 60
                while len(door.service.closed) < 3:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
                time.sleep(0.5)  # the client has to read some of what the door has written
                process.send_signal(signal.SIGINT)
                stdout, stderr = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 130
    assert "interrupted: of 4 requests" in stderr
    complete = re.match(r"([123]) of \1 requests complete", stdout)
    assert complete is not None
    assert len(json.loads((tmp_path / "run").read_text())["requests"]) == int(complete[1])


def test_a_certificate_that_cannot_be_verified_is_taken_when_that_is_asked_for(tmp_path: Path) -> None:
    """As behind a port-forward, whose address no certificate names."""
    tls = make_certificate(tmp_path)
    files = {"ssl_certfile": tls.certificate_file, "ssl_keyfile": tls.key_file}
    with live_server(Door().app, **files) as url:
        arguments = (url, "-n", 3, "--rate", 500, "--prompt-length", 4)
        code, stdout, stderr = invoke(*arguments)
        assert code == 2
        assert f"the certificate of {url} cannot be verified" in stderr
        assert "--insecure" in stderr
        assert "nothing answers" not in stderr
        assert not stdout
        code, stdout, stderr = invoke(*arguments, "--insecure")
    assert code == 0, stderr
    assert "3 of 3 requests complete" in stdout


def test_a_server_that_loads_is_not_ready_yet() -> None:
    with live_server(Door(ScriptedService(is_ready=False)).app) as url:
        code, stdout, stderr = invoke(url, "-n", 2)
    assert code == 1
    assert f"{url} is not ready yet: no model is loaded" in stderr
    assert not stdout


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (PlainTextResponse("Path '/v1/models' not found. Ping ...", 404), 1, "is not ready yet (status 404)"),
        (JSONResponse({"error": {"message": "loading"}}, 503), 1, "is not ready yet (status 503)"),
        (PlainTextResponse("Internal Server Error", 500), 1, "is not ready yet (status 500)"),
        (PlainTextResponse("404 page not found", 404), 2, "names no model (status 404): give --model"),
        (JSONResponse({"detail": "Not Found"}, 404), 2, "names no model (status 404): give --model"),
        (JSONResponse({"models": ["m"]}), 2, "names no model (status 200): give --model"),
    ],
)
def test_a_server_that_starts_is_told_from_one_without_a_list(
    answer: Response, code: int, message: str
) -> None:
    with live_server(answer, lifespan="off") as url:
        found, stdout, stderr = invoke(url, "-n", 2)
    assert found == code
    assert message in stderr
    assert not stdout


class _Shell(socketserver.BaseRequestHandler):
    """What listens there is no HTTP server."""

    def handle(self) -> None:
        self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        self.request.recv(1 << 16)


def test_another_port_is_no_server() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Shell) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            code, stdout, stderr = invoke(f"http://127.0.0.1:{server.server_address[1]}", "-n", 2)
        finally:
            server.shutdown()
            thread.join()
    assert code == 2
    assert "nothing answers at http://127.0.0.1" in stderr
    assert not stdout


def test_mistakes(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    whole.write_text('{"prompt": "a"}\n')
    halves = tmp_path / "halves.jsonl"
    halves.write_text('{"prompt": "\\ud83d\\ude00"}\n{"prompt": "\\ud83d"}\n')
    for arguments, message in (
        (("http://127.0.0.1:9",), "nothing answers"),
        (("http://:99999999",), "is not a URL"),
        (("--slo", "fast"), "--slo"),
        (("--prompt-length", "long"), "--prompt-length"),
        (("--trace", tmp_path / "none"), "--trace"),
        (("--extra-body", "[]"), "--extra-body"),
        (("--extra-body", '{"temperature": NaN}'), "--extra-body: is not JSON"),
        (("--extra-body", '{"temperature": 1e999}'), "--extra-body: is not JSON"),
        (("--extra-body", '{"stop": "\\ud83d"}'), "--extra-body: is not JSON"),
        (("--prompts", halves), f"--prompts: {halves}:2: is not JSON"),
        (("--json", tmp_path / "no" / "run.json"), "--json"),
        (("--csv", tmp_path), f"--csv: {tmp_path} is a folder"),
        (("--plot", tmp_path / "run.foo"), "has to end in one of"),
        (("--duration", 0.001, "--rate", 0.001), "no request arrives"),
        (("--duration", "inf"), "--duration: give a number of seconds, got inf"),
        (("--rate", "inf"), "--rate: give a number of requests per second, got inf"),
        (("--timeout", "inf"), "--timeout: give a number of seconds, got inf"),
        (("--vocab-size", 100, "--endpoint", "chat"), "--vocab-size"),
        (("--vocab-size", 100, "--prompts", whole), "--vocab-size: is for made-up prompts"),
        (("--prompt-length", 4, "--prompts", whole), "--prompt-length: is for made-up prompts"),
        (("--speedup", 2), "--speedup: plays a --trace faster"),
        (("--json", tmp_path / "run", "--csv", tmp_path / "." / "run"), "--csv: "),
    ):
        code, stdout, stderr = invoke(*arguments)
        assert code == 2, message
        assert message in stderr
        assert not stdout
