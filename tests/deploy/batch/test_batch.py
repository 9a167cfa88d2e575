"""A batch over the real door: what is written, what is left out on the way, and going on after any end."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deploy.batch.lines import BadLine, num_lines
from deploy.batch.results import ResultsFile, result_of_bad_line
from deploy.batch.runner import BatchInterrupted, BatchOptions
from specdec.core.description import TargetDescription
from specdec.core.error_codes import ENGINE_FAILED
from specdec.core.errors import ConfigError, RequestFailed
from tests.deploy.batch.batch_runs import OPTIONS, request, results_of, run, write
from tests.deploy.openai.fakes import PIECES, Door, ScriptedService

TEXT = "".join(PIECES)


def test_openai_results_come_out(tmp_path: Path) -> None:
    door = Door()
    chat = {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "scripted", "messages": [{"role": "user", "content": "abc"}]},
    }
    requests = write(tmp_path / "in", request("a"), "", request("b", temperature=-1), chat)
    run(httpx.ASGITransport(door.app), requests, tmp_path / "out")
    results = {result["custom_id"]: result for result in results_of(tmp_path / "out")}
    assert set(results) == {"a", "b", "chat"}
    assert all(set(result) == {"id", "custom_id", "response", "error"} for result in results.values())
    good = results["a"]
    assert good["error"] is None
    assert good["response"]["status_code"] == 200
    assert good["response"]["request_id"] == good["response"]["body"]["id"]
    assert good["response"]["body"]["choices"][0]["text"] == TEXT
    assert results["chat"]["response"]["body"]["choices"][0]["message"]["content"] == TEXT
    bad = results["b"]
    assert bad["response"]["status_code"] == 400
    assert bad["error"]["message"].startswith("line 3: body.temperature: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ("[]", "line 2: is not a JSON object"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "line 2: body is required"),
        ({**request("a"), "custom_id": 7}, "line 2: custom_id"),
        ({**request("a"), "custom_id": ""}, "line 2: custom_id"),
        ({**request("a"), "method": "GET"}, "line 2: method"),
        ({**request("a"), "url": "/v1/embeddings"}, "line 2: url"),
        ({**request("a"), "body": "abc"}, "line 2: body"),
        ({**request("a"), "priority": 1}, "line 2: unknown field priority"),
        (request("a", stream=True), "line 2: body.stream"),
        (request("first"), "line 2: custom_id: is that of line 1, too"),
        (request("a", temperature=math.nan), "line 2: is not JSON"),
        (request("a", logit_bias={"5": [-math.inf]}), "line 2: is not JSON"),
        (json.dumps(request("a", temperature=7)).replace("7", "1e999"), "line 2: body: holds a number"),
    ],
)
def test_a_bad_line_is_named_and_does_not_stop_the_others(tmp_path: Path, line: Any, message: str) -> None:
    door = Door()
    requests = write(tmp_path / "in", request("first"), line, request("last"))
    assert num_lines(requests) == 3
    for _ in range(2):  # the second time there is nothing left to do
        run(httpx.ASGITransport(door.app), requests, tmp_path / "out")
        results = results_of(tmp_path / "out")
        assert len(results) == 3
    assert len(door.service.requests) == 2
    (bad,) = [result for result in results if result["response"] is None]
    assert bad["error"]["code"] == "invalid_line"
    assert bad["error"]["message"].startswith(message)


def test_the_mark_of_an_editor_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    door = Door()
    requests = write(tmp_path / "in", request("first"), request("last"))
    requests.write_bytes(codecs.BOM_UTF8 + requests.read_bytes())
    run(httpx.ASGITransport(door.app), requests, tmp_path / "out")
    assert [result["error"] for result in results_of(tmp_path / "out")] == [None, None]


def test_what_has_a_result_is_not_asked_for_again(tmp_path: Path) -> None:
    door = Door()
    lines = [request(str(number)) for number in range(9)]
    out = tmp_path / "out"
    run(httpx.ASGITransport(door.app), write(tmp_path / "in", *lines[:5]), out)
    before = out.read_bytes()
    run(httpx.ASGITransport(door.app), write(tmp_path / "in", *lines), out)
    assert out.read_bytes().startswith(before)
    assert len(door.service.requests) == 9
    assert {result["custom_id"] for result in results_of(out)} == set("012345678")


def test_a_file_cut_off_anywhere_becomes_whole(tmp_path: Path) -> None:
    door = Door()
    requests = write(tmp_path / "in", request("a"), "nonsense", request("ü"))
    out = tmp_path / "out"
    run(httpx.ASGITransport(door.app), requests, out)
    whole = out.read_bytes()
    for length in random.Random(1).sample(range(len(whole)), 40):
        out.write_bytes(whole[:length])
        run(httpx.ASGITransport(door.app), requests, out)
        assert out.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, length) + 1])
        assert sorted(str(result["custom_id"]) for result in results_of(out)) == ["None", "a", "ü"]


@pytest.mark.parametrize("content", ["not ours\n", '{"id": 3}\n', "not ours", '{"custom_id": "a"'])
def test_another_file_is_left_alone(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    out.write_text(content)
    with pytest.raises(ConfigError, match=f"{out}:1: is it a result"):
        ResultsFile(out)
    assert out.read_text() == content


def test_failures_stay_unless_they_are_to_be_tried_again(tmp_path: Path) -> None:
    door = Door()
    requests = write(tmp_path / "in", request("a"), request("b"), "nonsense")
    out = tmp_path / "out"
    door.service.fail_after = 1
    run(httpx.ASGITransport(door.app), requests, out)
    assert [result["response"]["status_code"] for result in results_of(out) if result["response"]] == [
        500,
        500,
    ]
    door.service.fail_after = None
    run(httpx.ASGITransport(door.app), requests, out)
    assert len(door.service.requests) == 2
    with ResultsFile(out) as file:
        assert file.num_failures == 3
    run(httpx.ASGITransport(door.app), requests, out, drop_failures=True)
    with ResultsFile(out) as file:
        assert (file.num_failures, file.num_results) == (1, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_who_leads_elsewhere_and_who_may_read_stay_so_where_failures_are_tried_again(tmp_path: Path) -> None:
    door = Door()
    requests = write(tmp_path / "in", request("a"))
    (tmp_path / "disk").mkdir()
    there, out = tmp_path / "disk" / "results", tmp_path / "out"
    there.touch(mode=0o600)
    out.symlink_to(there)
    door.service.fail_after = 1
    run(httpx.ASGITransport(door.app), requests, out)
    door.service.fail_after = None
    run(httpx.ASGITransport(door.app), requests, out, drop_failures=True)
    assert out.is_symlink()
    assert there.stat().st_mode & 0o777 == 0o600
    assert [result["response"]["status_code"] for result in results_of(there)] == [200]


def answers(*given: httpx.Response | Exception) -> httpx.MockTransport:
    """A server that gives these answers, the last one again and again."""
    remaining = list(given)

    def answer(sent: httpx.Request) -> httpx.Response:
        item = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if isinstance(item, Exception):
            raise item
        return item

    return httpx.MockTransport(answer)


GOOD = httpx.Response(200, json={"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 5}})


def test_what_passes_is_waited_for_as_long_as_the_server_says(tmp_path: Path) -> None:
    busy = httpx.Response(429, headers={"Retry-After": "7"}, json={"error": {"message": "full"}})
    restarting = httpx.Response(503, json={"error": {"message": "not ready"}})
    transport = answers(busy, restarting, httpx.ConnectError("refused"), GOOD)
    waits = run(transport, write(tmp_path / "in", request("a")), tmp_path / "out")
    assert waits.seconds == [7.0, 1.0, 2.0]
    (result,) = results_of(tmp_path / "out")
    assert result["response"]["status_code"] == 200


NO_ROUTE = httpx.Response(404, text="Path '/v1/completions' not found. Ping http://.../-/routes for routes.")
"""What Ray's proxy answers while the server restarts."""


def test_a_server_without_route_is_waited_for(tmp_path: Path) -> None:
    waits = run(answers(NO_ROUTE, NO_ROUTE, GOOD), write(tmp_path / "in", request("a")), tmp_path / "out")
    assert waits.seconds == [0.5, 1.0]
    (result,) = results_of(tmp_path / "out")
    assert result["response"]["status_code"] == 200


@pytest.mark.parametrize(
    "answer",
    [
        # What Ray's proxy answers where the process that had the request has ended.
        httpx.Response(500, text="Internal Server Error"),
        httpx.Response(500, json={"detail": "Internal Server Error"}),
        httpx.Response(500, json=["error"]),
        httpx.Response(504, html="<h1>504 Gateway Time-out</h1>"),
        httpx.Response(520),
    ],
)
def test_a_failure_that_the_server_itself_does_not_tell_is_waited_for(
    tmp_path: Path, answer: httpx.Response
) -> None:
    requests = write(tmp_path / "in", request("a"))
    with pytest.raises(BatchInterrupted, match=f"status {answer.status_code}, not from the server itself"):
        run(answers(answer), requests, tmp_path / "out")
    assert not results_of(tmp_path / "out")
    waits = run(answers(answer, answer, GOOD), requests, tmp_path / "out")
    assert waits.seconds == [0.5, 1.0]
    (result,) = results_of(tmp_path / "out")
    assert result["response"]["status_code"] == 200


def failure(code: str) -> httpx.Response:
    """A failure of the server itself."""
    return httpx.Response(500, json={"error": {"message": "it broke", "code": code}})


MISHAPS = ["coordinator_lost", "replay_failed", "request_lost", "request_abort", "grammar_not_compiled"]


@pytest.mark.parametrize("code", MISHAPS)
def test_a_failure_that_lies_in_no_request_is_waited_out(tmp_path: Path, code: str) -> None:
    waits = run(
        answers(failure(code), failure(code), GOOD), write(tmp_path / "in", request("a")), tmp_path / "out"
    )
    assert waits.seconds == [0.5, 1.0]
    (result,) = results_of(tmp_path / "out")
    assert (result["response"]["status_code"], result["error"]) == (200, None)


@pytest.mark.parametrize("code", MISHAPS)
def test_a_line_that_brings_it_about_each_time_is_not_sent_for_ever(tmp_path: Path, code: str) -> None:
    waits = run(answers(failure(code)), write(tmp_path / "in", request("a")), tmp_path / "out")
    assert waits.seconds == [0.5, 1.0, 2.0]
    (result,) = results_of(tmp_path / "out")
    assert result["error"]["code"] == code


def test_a_mishap_is_waited_for_no_longer_than_anything_else(tmp_path: Path) -> None:
    options = BatchOptions(concurrency=1, patience_s=1.0)
    requests = write(tmp_path / "in", request("a"))
    with pytest.raises(BatchInterrupted, match=r"no answer for 1 s \(status 500\)"):
        run(answers(failure("coordinator_lost")), requests, tmp_path / "out", options=options)
    assert not results_of(tmp_path / "out")


@pytest.mark.parametrize("code", ["internal_error", "request_failed_repeatedly", "non_finite_logits"])
def test_a_failure_that_may_lie_in_a_request_is_an_error_of_that_line(tmp_path: Path, code: str) -> None:
    assert not run(answers(failure(code)), write(tmp_path / "in", request("a")), tmp_path / "out").seconds
    (result,) = results_of(tmp_path / "out")
    assert result["error"]["code"] == code


@pytest.mark.parametrize("status", [500, 504])
def test_a_failure_that_the_server_tells_is_an_error_of_that_line(tmp_path: Path, status: int) -> None:
    told = httpx.Response(status, json={"error": {"message": "it broke", "code": "broken"}})
    assert not run(answers(told), write(tmp_path / "in", request("a")), tmp_path / "out").seconds
    (result,) = results_of(tmp_path / "out")
    assert result["response"]["status_code"] == status
    assert result["error"]["code"] == "broken"


LOGIN = "<html>Sign in</html>"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            httpx.Response(308, headers={"Location": "https://door/v1/completions"}),
            "status 308 leads to https://door/v1/completions: give the URL of the server itself",
        ),
        (httpx.Response(302, headers={"Location": "/login"}, html=LOGIN), "status 302 leads to /login"),
        (httpx.Response(302), "status 302 leads to nowhere"),
        (httpx.Response(400, html="<h1>The plain HTTP request was sent to HTTPS port</h1>"), "status 400"),
        (httpx.Response(403, html=LOGIN), "status 403, and no JSON: this is not the server itself"),
        (httpx.Response(405, html=LOGIN), "status 405"),
        (
            httpx.Response(401, json={"error": {"message": "wrong"}}),
            "status 401: the API key is not accepted",
        ),
        (httpx.Response(401, text="Unauthorized"), "status 401"),
    ],
)
def test_what_would_be_said_to_every_line_is_no_result_of_any(
    tmp_path: Path, answer: httpx.Response, reason: str
) -> None:
    requests = write(tmp_path / "in", *(request(str(number)) for number in range(20)))
    with pytest.raises(BatchInterrupted, match=rf"line \d+: {reason}"):
        run(answers(GOOD, GOOD, answer), requests, tmp_path / "out")
    assert len(results_of(tmp_path / "out")) == 2
    run(answers(GOOD), requests, tmp_path / "out")
    assert [result["error"] for result in results_of(tmp_path / "out")] == [None] * 20


@pytest.mark.parametrize("body", [{"text": "Forbidden"}, {"json": {"error": {"message": "not for you"}}}])
def test_a_server_that_may_be_asked_again_is_waited_for_whatever_it_says(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    requests = write(tmp_path / "in", request("a"))
    assert run(answers(httpx.Response(429, **body), GOOD), requests, tmp_path / "out").seconds == [0.5]


@pytest.mark.parametrize(
    "body",
    [
        {"message": "Forbidden"},
        ["Forbidden"],
        {"error": "Forbidden"},
        {"error": {"message": "blocked", "code": "key_blocked"}},
        {"error": {"message": "not you", "type": "permission_error"}},
        {"error": {"message": "not from there", "code": "origin_not_allowed"}},
        {"error": {"message": "not there", "code": "unsupported_country_region_territory"}},
    ],
)
def test_a_key_that_is_taken_back_takes_no_line_with_it(tmp_path: Path, body: object) -> None:
    requests = write(tmp_path / "in", *(request(str(number)) for number in range(20)))
    with pytest.raises(BatchInterrupted, match=r"line \d+: status 403: the API key is not accepted, or not"):
        run(answers(GOOD, httpx.Response(403, json=body)), requests, tmp_path / "out")
    assert len(results_of(tmp_path / "out")) == 1
    run(answers(GOOD), requests, tmp_path / "out")
    assert [result["error"] for result in results_of(tmp_path / "out")] == [None] * 20


@pytest.mark.parametrize("code", ["content_filter", 403, None, ["moderation"]])
def test_a_text_that_a_filter_forbids_is_an_error_of_that_line(tmp_path: Path, code: object) -> None:
    told = httpx.Response(403, json={"error": {"message": "flagged", "code": code}})
    requests = write(tmp_path / "in", request("a"), request("b"))
    options = BatchOptions(concurrency=1, patience_s=20.0)
    assert not run(answers(told, GOOD), requests, tmp_path / "out", options=options).seconds
    flagged, good = results_of(tmp_path / "out")
    assert flagged["error"]["message"] == "line 1: flagged"
    assert good["error"] is None


def test_what_the_server_itself_forbids_is_an_error_of_that_line(tmp_path: Path) -> None:
    told = httpx.Response(403, json={"error": {"message": "no such model for you", "param": "model"}})
    assert not run(answers(told), write(tmp_path / "in", request("a")), tmp_path / "out").seconds
    (result,) = results_of(tmp_path / "out")
    assert result["error"]["message"] == "line 1: body.model: no such model for you"


def test_a_line_that_is_too_long_for_a_proxy_is_an_error_of_that_line(tmp_path: Path) -> None:
    """nginx says so in HTML; others of the batch may be shorter."""
    too_long = httpx.Response(413, html="<h1>413 Request Entity Too Large</h1>")
    requests = write(tmp_path / "in", request("long"), request("short"))
    options = BatchOptions(concurrency=1, patience_s=20.0)
    assert not run(answers(too_long, GOOD), requests, tmp_path / "out", options=options).seconds
    long, short = results_of(tmp_path / "out")
    assert long["error"]["code"] == "request_too_large"
    assert long["error"]["message"].startswith("line 1: ")
    assert short["error"] is None


class _Dying(ScriptedService):
    """Fails every stream, and is no more then."""

    def description(self) -> TargetDescription | None:
        return None if self.closed else super().description()


def test_a_server_in_this_process_that_has_failed_leaves_no_results(tmp_path: Path) -> None:
    service = _Dying(fail_after=1, failure=RequestFailed("the engine failed", code=ENGINE_FAILED))
    transport = httpx.ASGITransport(Door(service).app)
    requests = write(tmp_path / "in", *(request(str(number)) for number in range(9)))

    def is_gone() -> bool:
        return service.description() is None

    with pytest.raises(BatchInterrupted, match="the engine in this process failed; the same command goes on"):
        run(transport, requests, tmp_path / "out", is_gone=is_gone)
    assert not results_of(tmp_path / "out")
    with pytest.raises(BatchInterrupted, match="the engine in this process failed"):  # it says 503 now
        run(transport, requests, tmp_path / "out", is_gone=is_gone)
    run(httpx.ASGITransport(Door().app), requests, tmp_path / "out")
    assert [result["error"] for result in results_of(tmp_path / "out")] == [None] * 9


def test_a_server_that_never_has_a_route_ends_the_batch(tmp_path: Path) -> None:
    with pytest.raises(BatchInterrupted, match=r"status 404, .* is the URL right"):
        run(answers(NO_ROUTE), write(tmp_path / "in", request("a")), tmp_path / "out")
    assert not results_of(tmp_path / "out")


def test_a_model_that_the_server_does_not_know_is_an_error_of_that_line(tmp_path: Path) -> None:
    door = Door()
    requests = write(tmp_path / "in", request("a", model="another"))
    assert not run(httpx.ASGITransport(door.app), requests, tmp_path / "out").seconds
    (result,) = results_of(tmp_path / "out")
    assert result["response"]["status_code"] == 404
    assert result["error"]["code"] == "model_not_found"


def test_a_line_that_is_put_off_while_others_are_answered_is_waited_for(tmp_path: Path) -> None:
    """In a queue that is always full its turn may come last."""
    num_answered = 0

    async def answer(sent: httpx.Request) -> httpx.Response:
        nonlocal num_answered
        await asyncio.sleep(0)
        if b'"late"' in sent.content and num_answered < 40:
            return httpx.Response(429, headers={"Retry-After": "7"}, json={})
        num_answered += 1
        return GOOD

    requests = write(
        tmp_path / "in",
        request("late", prompt="late"),
        *(request(str(number)) for number in range(40)),
    )
    options = BatchOptions(concurrency=2, patience_s=20.0)
    waits = run(httpx.MockTransport(answer), requests, tmp_path / "out", options=options)
    assert sum(waits.seconds) > 2 * options.patience_s
    assert [result["response"]["status_code"] for result in results_of(tmp_path / "out")] == [200] * 41


def test_a_server_that_asks_for_more_patience_than_there_is_gets_what_there_is(tmp_path: Path) -> None:
    """A key that has overdrawn its tokens of a minute is told to wait for long; its other lines go on."""
    late = httpx.Response(429, headers={"Retry-After": "1860"}, json={})
    requests = write(tmp_path / "in", request("a"))
    waits = run(answers(late, GOOD), requests, tmp_path / "out")
    assert waits.seconds == [OPTIONS.patience_s]
    (result,) = results_of(tmp_path / "out")
    assert result["response"]["status_code"] == 200
    with pytest.raises(BatchInterrupted, match=r"no answer for 20 s \(status 429\)"):
        run(answers(late), write(tmp_path / "in", request("b")), tmp_path / "other")


def test_what_does_not_pass_ends_the_batch_and_is_no_result(tmp_path: Path) -> None:
    requests = write(tmp_path / "in", *(request(str(number)) for number in range(20)))
    with pytest.raises(BatchInterrupted, match=r"line \d+: no answer for \d+ s \(refused\)"):
        run(answers(GOOD, GOOD, httpx.ConnectError("refused")), requests, tmp_path / "out")
    assert len(results_of(tmp_path / "out")) == 2
    run(answers(GOOD), requests, tmp_path / "out")
    assert len(results_of(tmp_path / "out")) == 20


@pytest.mark.parametrize(
    ("answer", "code"),
    [(httpx.ReadTimeout("slow"), "timeout"), (httpx.Response(200, text="<html>"), "not_json")],
)
def test_no_answer_is_an_error_of_that_line(
    tmp_path: Path, answer: httpx.Response | Exception, code: str
) -> None:
    run(answers(answer), write(tmp_path / "in", request("a")), tmp_path / "out")
    (result,) = results_of(tmp_path / "out")
    assert result["error"]["code"] == code
    assert result["error"]["message"].startswith("line 1: ")


def test_no_more_at_once_than_asked_for(tmp_path: Path) -> None:
    running = most = 0

    async def answer(sent: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return GOOD

    requests = write(tmp_path / "in", *(request(str(number)) for number in range(50)))
    run(httpx.MockTransport(answer), requests, tmp_path / "out")
    assert most == OPTIONS.concurrency
    assert len(results_of(tmp_path / "out")) == 50


def test_a_line_of_results_begins_as_the_reader_expects() -> None:
    """Else a line that was cut off would be taken for another program's."""
    result = result_of_bad_line(BadLine(number=1, custom_id=None, message="x"))
    assert msgspec.json.encode(result).startswith(b'{"id":"')


def test_a_second_run_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    """It would take the line that the first is just writing for one that was cut off."""
    out = tmp_path / "out"
    failure = result_of_bad_line(BadLine(number=1, custom_id=None, message="x"))
    with ResultsFile(out) as first:
        first.write(failure)
        for drop_failures in (False, True):
            with pytest.raises(ConfigError, match=rf"{out} is being written by another run"):
                ResultsFile(out, drop_failures=drop_failures)
        first.write(failure)
        assert len(results_of(out)) == 2
    with ResultsFile(out) as second:
        assert second.num_failures == 2


def test_a_file_without_failures_is_locked_as_the_one_before_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ResultsFile(out) as file:
        file.write(result_of_bad_line(BadLine(number=1, custom_id=None, message="x")))
    with ResultsFile(out, drop_failures=True):
        assert not results_of(out)
        with pytest.raises(ConfigError, match="another run"):
            ResultsFile(out)
    with ResultsFile(out) as file:
        assert file.num_results == 0


def test_a_process_that_is_killed_locks_nobody_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "import sys, time; from pathlib import Path; from deploy.batch.results import ResultsFile\n"
        "file = ResultsFile(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, out], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match="another run"):
            ResultsFile(out)
        process.kill()
    with ResultsFile(out) as file:
        assert file.num_results == 0


def test_results_are_not_written_where_they_cannot_be_read_again(tmp_path: Path) -> None:
    """Opening a pipe waits for somebody who reads; reading what is in it, for somebody who writes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in (pipe, Path("/dev/null")):
        with pytest.raises(ConfigError, match=rf"{file} is a pipe or a device, and results are read again"):
            ResultsFile(file)
    with pytest.raises(ConfigError, match="Is a directory"):
        ResultsFile(tmp_path)


def test_what_is_refused_is_locked_no_more(tmp_path: Path) -> None:
    out = write(tmp_path / "out", "somebody's diary")
    for _ in range(2):
        with pytest.raises(ConfigError, match="is it a result of"):
            ResultsFile(out)
    assert out.read_text() == "somebody's diary\n"
