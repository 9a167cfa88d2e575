"""What is made of Serve's reports, without a cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from ray import serve
from ray.exceptions import GetTimeoutError
from ray.serve._private.common import DeploymentID
from ray.serve.config import ControllerOptions, HTTPOptions
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from deploy.config import DrafthouseConfig, HttpConfig
from deploy.deployment import (
    Deployment,
    DeploymentFailed,
    _check_environment,
    _check_running_serve,
    _Places,
    _raise_if_failed,
    base_url,
    start_serve,
)
from deploy.openai.bounded_http import BoundedHttp
from deploy.openai.certificates import FollowedCertificate
from deploy.openai.errors import keys_unread, not_ready
from deploy.preflight import check_local_resources
from specdec.core.errors import CheckpointError, DrafthouseError, ResourceError, UserError
from specdec.model.config import ModelConfig
from tests.deploy.certificates import make_certificate
from tests.deploy.openai.fakes import Door
from tests.deploy.openai.live import live_server

TRACEBACK = """\
Failed to update the deployments ['Coordinator'].
Traceback (most recent call last):
  File "worker.py", line 1, in load
specdec.core.errors.{name}: {text}

The above exception was the direct cause of the following exception:

  File "replica.py", line 7, in initialize
RuntimeError: the replica could not start
"""


def overview(status: ApplicationStatus, message: str) -> ApplicationStatusOverview:
    return ApplicationStatusOverview(status=status, message=message, last_deployed_time_s=0.0, deployments={})


@pytest.mark.parametrize(
    ("name", "kind"),
    [("CheckpointError", CheckpointError), ("UserError", UserError), ("TransportError", DeploymentFailed)],
)
def test_failure_of_a_worker_is_told_in_its_own_words(name: str, kind: type[DrafthouseError]) -> None:
    message = TRACEBACK.format(name=name, text="/models/x is odd")
    with pytest.raises(DrafthouseError, match=r"^/models/x is odd$") as caught:
        _raise_if_failed(overview(ApplicationStatus.DEPLOY_FAILED, message))
    assert type(caught.value) is kind


def test_other_failures_are_told_whole_and_progress_is_none() -> None:
    with pytest.raises(DeploymentFailed, match="no bundle"):
        _raise_if_failed(overview(ApplicationStatus.DEPLOY_FAILED, "no bundle"))
    _raise_if_failed(overview(ApplicationStatus.DEPLOYING, TRACEBACK))


class RunningServe:
    """What Ray knows of a Serve that is there already."""

    http_config = HTTPOptions(host="127.0.0.1", port=8000)


@pytest.mark.parametrize(
    ("port", "applications", "message"),
    [
        (8001, {}, r"listens on 127.0.0.1 port 8000.*--port 8000"),
        (8000, {"drafthouse": None}, "named drafthouse runs on this cluster already"),
        (8000, {"another": None}, None),
    ],
)
def test_a_serve_that_runs_already_is_looked_at_first(
    monkeypatch: pytest.MonkeyPatch, port: int, applications: dict[str, None], message: str | None
) -> None:
    monkeypatch.setattr("deploy.deployment._get_global_client", lambda **_: RunningServe())
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))
    refusal = pytest.raises(ResourceError, match=message) if message else contextlib.nullcontext()
    with refusal:
        _check_running_serve(HttpConfig(port=port))


def test_what_was_there_before_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("somebody else's application was touched")

    monkeypatch.setattr("deploy.deployment._get_global_client", lambda **_: RunningServe())
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"drafthouse": None}))
    monkeypatch.setattr(serve, "delete", refuse)
    monkeypatch.setattr("deploy.deployment.close_directory", refuse)
    deployment = Deployment(DrafthouseConfig(target=ModelConfig(model="x")))
    with pytest.raises(ResourceError):
        deployment.start()
    deployment.stop()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("node-1.example", "http://node-1.example:8000"),
    ],
)
def test_base_url(host: str, url: str) -> None:
    assert base_url(HttpConfig(host=host)) == url


LATE = [-1]
"""They do not answer in time."""


class Coordinators:
    """The handle of a model's coordinators; None: there are none."""

    def __init__(self, *streams: list[int] | None) -> None:
        self.deployment_name = "Coordinator"
        self.streams = list(streams)
        self.closed_after_s: list[float] = []

    def broadcast(self, method: str, *args: float) -> Coordinators:
        if self.streams[0] is None:
            raise DeploymentUnavailableError(DeploymentID("Coordinator"))
        self.closed_after_s += args
        self.asked = method
        return self

    def results(self, timeout_s: float) -> list[int | None]:
        if self.asked == "close_down":
            return [None]
        streams = self.streams.pop(0) if len(self.streams) > 1 else self.streams[0]
        assert streams is not None
        if streams == LATE:
            raise TimeoutError
        return list(streams)


def test_models_without_a_group_do_not_keep_others_from_being_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was scaled to zero has no replica that could be asked."""
    handles = {
        "Coordinator": Coordinators(None),
        "Coordinator-b": Coordinators([2, 1], LATE, [0, 1], LATE, [0, 0]),
        "Coordinator-c": Coordinators([0]),
    }
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, application: handles[name])
    model = {"target": {"model": "x"}}
    config = DrafthouseConfig.model_validate(
        {**model, "models": {"b": model, "c": model}, "cluster": {"drain_timeout_s": 7.0}}
    )
    Deployment(config)._drain()
    assert [handle.closed_after_s for handle in handles.values()] == [[], [7.0], [7.0]]
    assert handles["Coordinator-b"].streams == [[0, 0]], "it was waited for"


def test_as_many_as_there_may_ever_be_have_to_fit_this_machine() -> None:
    """Before Ray is started, and not once it has been."""
    config = {
        "target": {"model": "x"},
        "cluster": {"target_groups": {"autoscaling": {"max_groups": 3}}},
    }
    check_local_resources(DrafthouseConfig.model_validate(config), 3)
    with pytest.raises(ResourceError, match="target group 3 of 3 needs 1 CPU"):
        check_local_resources(DrafthouseConfig.model_validate(config), 2)


class Waiting:
    """What waits for a place, and what was said of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: tuple[str, ...] = ()
        monkeypatch.setattr("deploy.deployment.pending_groups", lambda application: self.groups)


def test_what_has_no_place_for_a_minute_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, places = Waiting(monkeypatch), _Places()
    for now_s in range(100):
        places.look(float(now_s))
    assert not caplog.records
    waiting.groups = ("Coordinator: 1 placement group with 4 x (1 GPU), STRICT_PACK",)
    for now_s in range(100, 160):
        places.look(float(now_s))
    assert not caplog.records, "Ray may yet find one"
    for now_s in range(160, 300):
        places.look(float(now_s))
    (record,) = caplog.records
    assert record.message.startswith("no node has had room for 60 s for Coordinator: 1 placement group")
    waiting.groups = (*waiting.groups, "DraftPool: 1 placement group with 1 x (1 GPU), STRICT_PACK")
    for now_s in range(300, 400):
        places.look(float(now_s))
    assert len(caplog.records) == 2


def test_who_gives_up_waiting_says_what_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch)
    waiting.groups = ("Coordinator: 1 placement group with 4 x (1 GPU), STRICT_PACK",)
    starting = overview(ApplicationStatus.DEPLOYING, "")
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"drafthouse": starting}))
    config = DrafthouseConfig.model_validate(
        {"target": {"model": "x"}, "cluster": {"startup_timeout_s": 1e-9}}
    )
    with pytest.raises(
        DeploymentFailed, match=r"placing the workers; no node has room for Coord.*4 x \(1 GPU"
    ):
        list(Deployment(config).wait_ready())
    waiting.groups = ()
    with pytest.raises(DeploymentFailed, match=r"placing the workers$"):
        list(Deployment(config).wait_ready())


class Controller:
    """Serve's, in an environment of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.__ray_call__ = SimpleNamespace(remote=self._call)

    def _call(self, function: Callable[[object], dict[str, str]]) -> dict[str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", self.environment)
            return function(self)


WANTED = {"RAY_SERVE_PROXY_USE_GRPC": "1", "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}


@pytest.mark.parametrize(
    ("has", "missing"),
    [
        (WANTED | {"HOME": "/"}, None),
        ({"RAY_SERVE_PROXY_USE_GRPC": "1"}, "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1:"),
        (WANTED | {"RAY_SERVE_PROXY_USE_GRPC": "0"}, "RAY_SERVE_PROXY_USE_GRPC=1:"),
    ],
)
def test_who_joins_a_serve_that_was_not_told_everything_is_warned(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has: dict[str, str],
    missing: str | None,
) -> None:
    client = SimpleNamespace(_controller=Controller(has))
    monkeypatch.setattr("deploy.deployment._get_global_client", lambda **_: client)
    monkeypatch.setattr("ray.get", lambda answer, timeout: answer)
    with caplog.at_level("WARNING", "deploy.deployment"):
        _check_environment(WANTED)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (missing is not None)
    assert missing is None or f"without {missing}" in told[0]


def test_a_serve_that_does_not_answer_is_not_thought_to_be_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def time_out(*_: object, **__: object) -> None:
        raise GetTimeoutError("3 s")

    client = SimpleNamespace(_controller=Controller({}))
    monkeypatch.setattr("deploy.deployment._get_global_client", lambda **_: client)
    monkeypatch.setattr("ray.get", time_out)
    with caplog.at_level("WARNING", "deploy.deployment"):
        _check_environment(WANTED)
    assert [record.getMessage() for record in caplog.records] == [
        "Serve does not say what is in its environment: 3 s"
    ]


@pytest.mark.parametrize("environment", [None, WANTED])
def test_a_serve_that_is_started_on_somebody_elses_ray_is_told(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str] | None
) -> None:
    told: list[ControllerOptions | None] = []
    monkeypatch.setattr(serve, "start", lambda *, controller_options, **_: told.append(controller_options))
    start_serve(HttpConfig(), environment)
    (options,) = told
    env = None if options is None else options.runtime_env
    assert env == (None if environment is None else {"env_vars": environment})


def test_a_door_that_cannot_read_its_keys_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `--address` is a cluster whose nodes do not have the file."""
    answers = [keys_unread("/etc/keys cannot be read: No such file"), not_ready(), None]
    monkeypatch.setattr("deploy.deployment._without_place", lambda: ())
    monkeypatch.setattr("deploy.deployment.read_start_reports", lambda namespace: ())
    monkeypatch.setattr("deploy.deployment._POLL_S", 0.0)
    running = overview(ApplicationStatus.RUNNING, "")
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"drafthouse": running}))

    def get(url: str, **_: object) -> httpx.Response:
        error = answers.pop(0)
        return httpx.Response(200) if error is None else httpx.Response(error.status, content=error.body())

    monkeypatch.setattr(httpx, "get", get)
    told = list(Deployment(DrafthouseConfig(target=ModelConfig(model="x"))).wait_ready())
    assert ["/etc/keys cannot be read" in line for line in told] == [True, False]


def test_a_certificate_that_is_renewed_while_models_load_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the one from before, which proxies may still greet with; half of one is not yet one."""
    monkeypatch.setattr(FollowedCertificate, "look_s", 0.0)
    tls, second = make_certificate(tmp_path), make_certificate(tmp_path, "second")
    before = Path(tls.certificate_file).read_text()
    options = {"http": BoundedHttp, "ssl_certfile": tls.certificate_file, "ssl_keyfile": tls.key_file}
    with live_server(Door().app, **options) as url:
        http = HttpConfig(port=httpx.URL(url).port, tls=tls)
        deployment = Deployment(DrafthouseConfig(target=ModelConfig(model="x"), http=http))
        assert deployment._answers()
        Path(tls.certificate_file).write_text(before[: len(before) // 2])
        assert deployment._answers(), "the server shows the one from before"
        for old, new in ((tls.certificate_file, second.certificate_file), (tls.key_file, second.key_file)):
            os.replace(new, old)
        assert deployment._answers()


def test_no_proxy_of_the_environment_is_asked_whether_this_machine_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with live_server(Door().app) as url:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        http = HttpConfig(port=httpx.URL(url).port)
        assert Deployment(DrafthouseConfig(target=ModelConfig(model="x"), http=http))._answers()
