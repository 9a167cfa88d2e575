"""Several models behind one door: requests choose by name."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from specdec.transport.status import DraftWorkerStatus, ServiceStatus, TargetGroupStatus
from tests.deploy.openai.fakes import Door, ScriptedService


def ask(door: Door, path: str = "completions", **body: object) -> httpx.Response:
    text = {"prompt": "def f"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return asyncio.run(door.send("POST", f"/v1/{path}", json={**text, **body}))


def get(door: Door, path: str) -> httpx.Response:
    return asyncio.run(door.send("GET", path))


def two(**options: object) -> tuple[Door, ScriptedService, ScriptedService]:
    first = ScriptedService(snapshot={"rounds": 3.0, 'request_success{finished_reason="stop"}': 1.0})
    second = ScriptedService(pieces=("other",), snapshot={"rounds": 5.0}, **options)  # type: ignore[arg-type]
    return Door(first, further={"org/second": second}), first, second


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_requests_choose_by_name(path: str) -> None:
    door, first, second = two()
    answer = ask(door, path, model="org/second")
    assert answer.status_code == 200
    assert answer.json()["model"] == "org/second"
    assert "other" in answer.text
    assert (len(first.requests), len(second.requests)) == (0, 1)
    for body in ({"model": "scripted"}, {}):
        assert ask(door, path, **body).json()["model"] == "scripted"
    assert (len(first.requests), len(second.requests)) == (2, 1)


def test_an_unknown_model_is_a_404_that_says_what_there_is() -> None:
    door, *_ = two()
    answer = ask(door, model="third")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'third'" in error["message"]
    assert "'scripted', 'org/second'" in error["message"]
    assert get(door, "/v1/models/third").status_code == 404


def test_all_models_are_listed_each_under_its_name() -> None:
    door, *_ = two()
    assert [card["id"] for card in get(door, "/v1/models").json()["data"]] == ["scripted", "org/second"]
    assert get(door, "/v1/models/org/second").json()["id"] == "org/second"
    assert get(door, "/v1/status").json()["application"]["further_models"] == ["org/second"]


def test_one_that_is_not_ready_does_not_hold_up_the_other() -> None:
    door, first, _ = two(is_ready=False)
    assert get(door, "/health").status_code == 200
    assert ask(door, model="org/second").status_code == 503
    assert ask(door, model="scripted").status_code == 200
    assert [card["id"] for card in get(door, "/v1/models").json()["data"]] == ["scripted"]
    first.is_ready = False
    assert get(door, "/health").status_code == 503
    assert ask(door, model="third").status_code == 503


def test_the_status_says_what_is_of_which_model() -> None:
    status = ServiceStatus(
        target_groups=(TargetGroupStatus(id="coordinator-a"),),
        draft_workers=(
            DraftWorkerStatus(
                id="draft-a",
                since=0.0,
                incarnation=1,
                compile_state="off",
                is_waited_for=True,
                num_requests=0,
                max_requests=8,
            ),
        ),
    )
    door, first, second = two()
    first.service_status = ServiceStatus(target_groups=(TargetGroupStatus(id="coordinator-b"),))
    second.service_status = status
    body = get(door, "/v1/status").json()
    assert [(group["id"], group["model"]) for group in body["target_groups"]] == [
        ("coordinator-b", "scripted"),
        ("coordinator-a", "org/second"),
    ]
    assert [(worker["id"], worker["model"]) for worker in body["draft_workers"]] == [
        ("draft-a", "org/second")
    ]
    alone = get(Door(ScriptedService(service_status=first.service_status)), "/v1/status").json()
    assert [group["model"] for group in alone["target_groups"]] == [None]
    assert alone["application"]["missing_models"] == []


def test_it_is_ready_where_one_of_several_is_and_says_which_is_not() -> None:
    door, first, second = two(is_ready=False)
    for are_ready, is_ready, model, further, missing in (
        ((True, False), True, "scripted", [], ["org/second"]),
        ((False, True), True, None, ["org/second"], [""]),
        ((False, False), False, None, [], ["", "org/second"]),
    ):
        first.is_ready, second.is_ready = are_ready
        application = get(door, "/v1/status").json()["application"]
        assert (application["is_ready"], application["model"]) == (is_ready, model)
        assert (application["further_models"], application["missing_models"]) == (further, missing)


def test_series_of_several_models_are_told_apart() -> None:
    door, *_ = two()
    text = get(door, "/metrics").text
    for line in (
        'ray_drafthouse_rounds_total{model_name="scripted"} 3.0',
        'ray_drafthouse_rounds_total{model_name="org/second"} 5.0',
        'ray_drafthouse_request_success_total{finished_reason="stop",model_name="scripted"} 1.0',
        'ray_drafthouse_model_info{model_name="org/second"} 1.0',
    ):
        assert line in text, text
    alone = get(Door(ScriptedService(snapshot={"rounds": 3.0})), "/metrics").text
    assert "ray_drafthouse_rounds_total 3.0" in alone
