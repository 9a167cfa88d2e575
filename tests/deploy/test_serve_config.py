"""The arguments of the application in a Serve config file, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from deploy.openai.certificates import CertificateFiles
from deploy.serve_config import _being_deployed, build, parse_arguments
from specdec.core.errors import CheckpointError, ConfigError
from tests.deploy.certificates import make_certificate

TARGET = {"target": {"model": "/models/target"}}


def test_arguments_are_a_configuration_and_leave_to_serve_anybody() -> None:
    kept = parse_arguments({"config": TARGET | {"http": {"api_keys_file": "/etc/keys"}}})
    assert (kept.config.target.model, kept.insecure) == ("/models/target", False)
    assert parse_arguments({"config": TARGET, "insecure": True}).insecure


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"args.config: is required"),
        ({"config": TARGET}, r"no API key would be asked for: set args.config.http.api_keys_file"),
        ({"config": TARGET, "insecur": True}, r"args.insecur: unknown key"),
        ({"config": TARGET, "insecure": "yes"}, r"args.insecure: must be true or false"),
        ({"config": TARGET, "models_everywhere": 1}, r"args.models_everywhere: must be true or false, got 1"),
        ({"config": []}, r"must hold keys and values"),
        ({"config": {"target": {"model": "models/target"}}}, r"target.model: must be absolute here"),
        ({"config": TARGET | {"http": {"api_keys_file": "keys"}}}, r"http.api_keys_file: must be absolute"),
        ({"config": {"target": {"model": "/m", "dtyp": "x"}}}, r"target.dtyp: unknown key; did you"),
        ({"config": {"target": {}, "cash": 1}}, r"target.model: is required\ncash: unknown key"),
    ],
)  # fmt: skip
def test_mistakes_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments(args)


def test_made_up_output_is_not_served() -> None:
    """Before Ray is asked for anything, wherever the models are."""
    made_up = {"method": "draft_model", "model": "/d", "synthetic_acceptance": {"acceptance": [0.8]}}
    with pytest.raises(ConfigError, match="synthetic_acceptance: what comes out is made up"):
        build({"config": TARGET | {"speculative_config": made_up}, "insecure": True})


def test_nothing_is_built_without_the_packages_for_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door would find out, when the one before has been asked to go."""
    tracing = {"endpoint": "http://collector:4318/v1/traces"}
    args = {"config": {"target": {"model": "/nowhere"}, "http": {"tracing": tracing}}, "insecure": True}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"http\.tracing: needs more packages"):
        build(args)


def test_nothing_is_built_without_the_keys(tmp_path: Path) -> None:
    """Before Ray is asked for anything."""
    http = {"api_keys_file": str(tmp_path / "keys")}
    with pytest.raises(ConfigError, match=r"keys cannot be read: No such file"):
        build({"config": TARGET | {"http": http}})


@pytest.mark.parametrize("passphrase", [None, "secret"])
def test_doors_are_told_by_which_files_serve_listens(
    passphrase: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say when the certificate ends. The file of the application cannot: it is Serve that listens."""
    files = {
        "ssl_certfile": "/etc/tls.crt",
        "ssl_keyfile": "/etc/tls.key",
        "ssl_keyfile_password": passphrase,
    }
    told = certificate_told(HTTPOptions(**files), monkeypatch)
    assert told == CertificateFiles(
        certificate_file="/etc/tls.crt", key_file="/etc/tls.key", passphrase=passphrase
    )
    assert "secret" not in repr(told)
    assert certificate_told(HTTPOptions(), monkeypatch) is None


def test_files_that_no_server_can_use_are_refused_and_an_expired_certificate_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Proxies would say it in their logs alone."""

    def told(certificate: str, key: str) -> Any:
        return certificate_told(HTTPOptions(ssl_certfile=certificate, ssl_keyfile=key), monkeypatch)

    good, other = make_certificate(tmp_path), make_certificate(tmp_path, "other")
    expired = make_certificate(tmp_path, "expired", days=-1)
    assert told(good.certificate_file, good.key_file) is not None
    caplog.clear()
    with pytest.raises(
        ConfigError, match=r"http_options\.ssl_certfile.*other\.key is not the key of the first"
    ):
        told(good.certificate_file, other.key_file)
    assert told(expired.certificate_file, expired.key_file) is not None
    assert "certificate has expired" in caplog.text


def test_what_is_missing_here_is_missing_everywhere_where_that_is_said() -> None:
    args = {"config": {"target": {"model": "/models/tarjet"}}, "insecure": True, "models_everywhere": True}
    with pytest.raises(CheckpointError, match=r"/models/tarjet: there is no such folder.*models_everywhere"):
        build(args)


def certificate_told(options: HTTPOptions, monkeypatch: pytest.MonkeyPatch) -> Any:
    client = SimpleNamespace(http_config=options)
    monkeypatch.setattr("deploy.serve_config._get_global_client", lambda **_: client)
    monkeypatch.setattr("deploy.serve_config.build_application", lambda config, own, certificate: certificate)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    return build({"config": TARGET, "insecure": True})


def test_a_builder_knows_by_what_serve_deploys_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve does not tell it; what another application runs is not for its own former version."""
    states = {"mine": ApplicationStatus.DEPLOYING, "other": ApplicationStatus.RUNNING}
    applications = {name: SimpleNamespace(status=status) for name, status in states.items()}
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))
    assert _being_deployed() == {"mine"}
    del applications["mine"]
    assert _being_deployed() is None, "a program builds what it deploys later"

    def fail() -> None:
        raise RayServeException("the controller is away")

    monkeypatch.setattr(serve, "status", fail)
    assert _being_deployed() is None
