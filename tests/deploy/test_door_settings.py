"""What a door is told of the configuration."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import ClusterConfig
from deploy.config import DrafthouseConfig, HttpConfig, TlsConfig
from deploy.door_settings import door_settings
from deploy.openai.certificates import CertificateFiles
from specdec.model.config import ModelConfig
from specdec.sampling.config import GrammarConfig
from specdec.scheduling.config import SchedulerConfig


def test_door_settings_follow_the_configuration() -> None:
    http = HttpConfig(served_model_name="m", max_body_bytes=2048, max_choices=3, request_timeout_s=9)
    config = DrafthouseConfig(target=ModelConfig(model="x"), http=http, grammar=GrammarConfig(max_bytes=4096))
    (model,) = config.served_models()
    settings = door_settings(http, model)
    assert (settings.served_model_name, settings.max_body_bytes) == ("m", 2048)
    assert (settings.max_choices, settings.request_timeout_s) == (3, 9)
    assert settings.max_grammar_bytes == 4096
    assert not settings.api_keys, "doors read them themselves"
    assert not settings.share_prefixes_between_keys
    assert door_settings(HttpConfig(share_prefixes_between_keys=True), model).share_prefixes_between_keys


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, 15),
        *[({"stream_keep_alive_s": s}, s or None) for s in (0, None, 1, 3600)],
        pytest.param({"resume_window_s": 0}, None, id="nothing but data"),
        pytest.param({"resume_window_s": 0, "stream_keep_alive_s": 15}, 15, id="no ids, but comments"),
        ({"resume_window_s": 30}, 15),
    ],
)
def test_a_door_is_told_when_silent_streams_get_a_comment(given: dict[str, Any], told: float | None) -> None:
    http = HttpConfig.model_validate(given)
    (model,) = DrafthouseConfig(target=ModelConfig(model="x"), http=http).served_models()
    assert door_settings(http, model).stream_keep_alive_s == told


@pytest.mark.parametrize("seconds", [-1, 0.5, 3601])
def test_silences_have_bounds(seconds: float) -> None:
    with pytest.raises(ValidationError, match="stream_keep_alive_s"):
        HttpConfig(stream_keep_alive_s=seconds)


def test_a_door_is_told_what_clients_are_shown_by_whoever_listens() -> None:
    tls = TlsConfig(certificate_file="/own.crt", key_file="/own.key")
    of_serve = CertificateFiles(certificate_file="/a.crt", key_file="/a.key", passphrase="x")
    (model,) = DrafthouseConfig(target=ModelConfig(model="x")).served_models()
    assert door_settings(HttpConfig(), model).certificate is None
    own = CertificateFiles(certificate_file="/own.crt", key_file="/own.key")
    assert door_settings(HttpConfig(tls=tls), model).certificate == own
    assert door_settings(HttpConfig(), model, of_serve).certificate == of_serve


def test_a_stream_can_be_resumed_once_there_is_another_coordinator() -> None:
    cluster = ClusterConfig(failover_timeout_s=900)
    (model,) = DrafthouseConfig(target=ModelConfig(model="x"), cluster=cluster).served_models()
    assert door_settings(HttpConfig(resume_window_s=20), model).replay_window_s == 920
    assert door_settings(HttpConfig(resume_window_s=0), model).replay_window_s == 0


def test_no_more_choices_than_there_is_room_for() -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_waiting=3)
    config = DrafthouseConfig(target=ModelConfig(model="x"), scheduler=scheduler)
    (model,) = config.served_models()
    assert door_settings(config.http, model).max_choices == 5


def test_who_needs_no_ray_does_not_wait_for_it() -> None:
    """`drafthouse batch` with an engine of its own reads them, too."""
    program = "import sys, deploy.door_settings; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
