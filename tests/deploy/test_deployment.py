"""What is made of Serve's reports, without a cluster."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from deploy.application import door_settings
from deploy.config import DrafthouseConfig, HttpConfig
from deploy.deployment import (
    Deployment,
    DeploymentFailed,
    _check_running_serve,
    _Places,
    _raise_if_failed,
    base_url,
)
from deploy.openai.keys import ApiKey
from deploy.preflight import check_local_resources
from specdec.core.errors import CheckpointError, DrafthouseError, ResourceError, UserError
from specdec.model.config import ModelConfig
from specdec.sampling.config import GrammarConfig
from specdec.scheduling.config import SchedulerConfig

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
    deployment = Deployment(DrafthouseConfig(target=ModelConfig(model="x")), ())
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


def test_door_settings_follow_the_configuration() -> None:
    http = HttpConfig(served_model_name="m", max_body_bytes=2048, max_choices=3, request_timeout_s=9)
    config = DrafthouseConfig(target=ModelConfig(model="x"), http=http, grammar=GrammarConfig(max_bytes=4096))
    settings = door_settings(config, (ApiKey(name="a", digest=b"digest"),))
    assert (settings.served_model_name, settings.max_body_bytes) == ("m", 2048)
    assert (settings.max_choices, settings.request_timeout_s) == (3, 9)
    assert settings.max_grammar_bytes == 4096
    assert [key.digest for key in settings.api_keys] == [b"digest"]
    assert not settings.share_prefixes_between_keys
    shared = config.model_copy(update={"http": HttpConfig(share_prefixes_between_keys=True)})
    assert door_settings(shared, ()).share_prefixes_between_keys


def test_no_more_choices_than_there_is_room_for() -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_waiting=3)
    config = DrafthouseConfig(target=ModelConfig(model="x"), scheduler=scheduler)
    assert door_settings(config, ()).max_choices == 5


class Coordinators:
    """The handle of a model's coordinators; None: there are none."""

    def __init__(self, *streams: list[int] | None) -> None:
        self.deployment_name = "Coordinator"
        self.streams = list(streams)
        self.closed_after_s: list[float] = []

    def broadcast(self, method: str, *args: float) -> Coordinators:
        if self.streams[0] is None:
            raise RayServeException("no replica")
        self.closed_after_s += args
        self.asked = method
        return self

    def results(self, timeout_s: float) -> list[int | None]:
        if self.asked == "close_down":
            return [None]
        streams = self.streams.pop(0) if len(self.streams) > 1 else self.streams[0]
        assert streams is not None
        return list(streams)


def test_models_without_a_group_do_not_keep_others_from_being_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was scaled to zero has no replica that could be asked."""
    handles = {
        "Coordinator": Coordinators(None),
        "Coordinator-b": Coordinators([2, 1], [0, 1], [0, 0]),
        "Coordinator-c": Coordinators([0]),
    }
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, application: handles[name])
    model = {"target": {"model": "x"}}
    config = DrafthouseConfig.model_validate(
        {**model, "models": {"b": model, "c": model}, "cluster": {"drain_timeout_s": 7.0}}
    )
    Deployment(config, ())._drain()
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
        list(Deployment(config, ()).wait_ready())
    waiting.groups = ()
    with pytest.raises(DeploymentFailed, match=r"placing the workers$"):
        list(Deployment(config, ()).wait_ready())
