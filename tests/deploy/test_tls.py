"""HTTPS at the endpoint: files that cannot work are named before anything starts, and clients are served."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import openai
import pytest
from ray.serve.config import HTTPOptions

from deploy import deployment
from deploy.config import DrafthouseConfig, HttpConfig, TlsConfig
from deploy.config_file import load_config
from deploy.deployment import Deployment, base_url, http_options
from deploy.serve_config import parse_arguments
from deploy.tls import check_tls
from specdec.core.errors import ConfigError, ResourceError
from specdec.model.config import ModelConfig
from tests.deploy.certificates import make_certificate
from tests.deploy.openai.fakes import PIECES, Door
from tests.deploy.openai.live import live_server


@pytest.fixture
def tls(tmp_path: Path) -> TlsConfig:
    return make_certificate(tmp_path)


def test_files_that_fit_each_other_are_taken(tls: TlsConfig) -> None:
    check_tls(tls)


def without(tls: TlsConfig, folder: Path) -> TlsConfig:
    return tls.model_copy(update={"key_file": str(folder / "none.key")})


def of_another(tls: TlsConfig, folder: Path) -> TlsConfig:
    return tls.model_copy(update={"key_file": make_certificate(folder, "other").key_file})


def swapped(tls: TlsConfig, folder: Path) -> TlsConfig:
    return TlsConfig(certificate_file=tls.key_file, key_file=tls.certificate_file)


def not_pem(tls: TlsConfig, folder: Path) -> TlsConfig:
    (folder / "server.der").write_bytes(bytes(range(256)))
    return tls.model_copy(update={"certificate_file": str(folder / "server.der")})


def cut_off(tls: TlsConfig, folder: Path) -> TlsConfig:
    file = Path(tls.certificate_file)
    file.write_text(file.read_text()[:200])
    return tls


def expired(tls: TlsConfig, folder: Path) -> TlsConfig:
    return make_certificate(folder, "old", days=-1)


def with_passphrase(tls: TlsConfig, folder: Path) -> TlsConfig:
    return make_certificate(folder, "locked", passphrase=b"x")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without, r"http\.tls\.key_file: .*none\.key cannot be read: No such file"),
        (of_another, r"http\.tls\.key_file: .*other\.key is not the key of .*server\.crt"),
        (swapped, r"http\.tls\.key_file: .*server\.crt is not in PEM form.*BEGIN PRIVATE KEY"),
        (not_pem, r"http\.tls\.certificate_file: .*server\.der is not in PEM form.*BEGIN CERTIFICATE"),
        (cut_off, r"http\.tls: .*server\.crt \(certificate_file\) and .* cannot be used"),
        (expired, r"http\.tls\.certificate_file: clients would refuse .*old\.crt: certificate has expired"),
        (with_passphrase, r"http\.tls\.key_file: .*locked\.key needs a passphrase.*openssl pkey"),
    ],
)  # fmt: skip
def test_files_that_cannot_work_are_named(make, message, tls: TlsConfig, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        check_tls(make(tls, tmp_path))


def test_serve_is_told_of_them_and_the_url_says_so(tls: TlsConfig) -> None:
    http = HttpConfig(tls=tls, port=8443)
    options = http_options(http)
    assert (options.ssl_certfile, options.ssl_keyfile) == (tls.certificate_file, tls.key_file)
    assert base_url(http) == "https://127.0.0.1:8443"
    plain = http_options(HttpConfig())
    assert (plain.ssl_certfile, plain.ssl_keyfile) == (None, None)


def test_relative_paths_are_those_of_the_file(tls: TlsConfig, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("target: {model: m}\nhttp: {tls: {certificate_file: server.crt, key_file: server.key}}\n")
    assert load_config(file).http.tls == tls
    file.write_text("target: {model: m}\nhttp: {tls: {certificate_file: server.crt}}\n")
    with pytest.raises(ConfigError, match=r"http\.tls\.key_file: .*required"):
        load_config(file)


def test_a_serve_config_says_where_tls_belongs_there() -> None:
    tls = {"certificate_file": "/a.crt", "key_file": "/a.key"}
    config = {"target": {"model": "/m"}, "http": {"tls": tls}}
    with pytest.raises(
        ConfigError, match=r"args\.config\.http\.tls: .*ssl_certfile and ssl_keyfile in http_options"
    ):
        parse_arguments({"config": config, "insecure": True})


def test_a_serve_that_runs_without_tls_is_not_taken_for_one_with(
    tls: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Running:
        http_config = HTTPOptions(host="127.0.0.1", port=8000)

    monkeypatch.setattr(deployment, "_get_global_client", lambda **_: Running())
    config = DrafthouseConfig(target=ModelConfig(model="x"), http=HttpConfig(tls=tls))
    with pytest.raises(ResourceError, match="runs on this cluster already, without TLS"):
        Deployment(config).start()


def test_the_official_client_is_served_and_checks_whom_it_speaks_with(tls: TlsConfig, tmp_path: Path) -> None:
    """By the options that Serve hands to uvicorn."""
    door = Door()
    options = http_options(HttpConfig(tls=tls))
    given = {"ssl_certfile": options.ssl_certfile, "ssl_keyfile": options.ssl_keyfile}
    trusting = ssl.create_default_context(cafile=tls.certificate_file)
    with live_server(door.app, **given) as url:
        assert url.startswith("https://")
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(verify=trusting)
        ) as client:
            completion = client.completions.create(model="scripted", prompt="abc")
            assert completion.choices[0].text == "".join(PIECES)
            stream = client.completions.create(model="scripted", prompt="abc", stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "".join(PIECES)
        http = HttpConfig(tls=tls, port=int(url.rpartition(":")[2]))
        running = Deployment(DrafthouseConfig(target=ModelConfig(model="x"), http=http))
        assert running._answers(), "our own look at /health trusts the certificate it was given"
        other = http.model_copy(update={"tls": make_certificate(tmp_path, "other")})
        stranger = Deployment(DrafthouseConfig(target=ModelConfig(model="x"), http=other))
        assert not stranger._answers(), "and no other"
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/health")
