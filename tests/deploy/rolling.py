"""Rolling updates under load, for real; run by `test_rolling_update.py`.

python tests/deploy/rolling.py MODELS PORT ROOM

MODELS has the folders target, draft, redrafted (the next version of that draft model), other (another
target), damaged (one whose file is cut off) and broken (one whose weights do not fit its config.json). ROOM
is the number of places for workers on the one Ray node. Two target groups and a draft worker take three, so
that an update is made in place; with more, new groups begin beside old ones.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from deploy.application import APPLICATION
from deploy.config_file import parse_config

_UPDATE_S = 900.0
_PROMPTS = [[5 + index, 6, 7 + index, 8] for index in range(4)]
_MAX_TOKENS = 60
_COUNTED = ("ray_drafthouse_generation_tokens_total", "ray_drafthouse_rounds_total")
_ROOM_IN_PLACE = 3
PLACE = {"num_cpus": 0, "resources": {"place": 1}}


def serve_config(models: Path) -> dict[str, Any]:
    eager = {"num_threads": 1, "compile": {"mode": "off"}}
    return {
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": "deploy.serve_config:build",
                "args": {
                    "insecure": True,
                    "config": {
                        "target": {"model": str(models / "target"), **eager},
                        "speculative_config": {
                            "method": "draft_model",
                            "model": str(models / "draft"),
                            "num_speculative_tokens": 2,
                            "controller": "fixed",
                            **eager,
                        },
                        "cache": {"num_blocks": 256, "block_size": 4},
                        "cluster": {
                            "drain_timeout_s": 60,
                            "target_groups": {"num_groups": 2, "bundle": PLACE},
                            "draft_pool": {"bundle": PLACE},
                        },
                        "http": {"served_model_name": "m"},
                    },
                },
            }
        ]
    }


def changed(config: dict[str, Any], part: str, **values: object) -> dict[str, Any]:
    """The Serve config with some keys of one part of `args.config` changed."""
    other = copy.deepcopy(config)
    other["applications"][0]["args"]["config"][part].update(values)
    return other


def with_second_model(config: dict[str, Any], target: str) -> dict[str, Any]:
    """The Serve config with a model more, and with one target group of the first to make room for it."""
    other = changed(config, "cluster", target_groups={"num_groups": 1, "bundle": PLACE})
    first = other["applications"][0]["args"]["config"]
    first["models"] = {
        "second": {
            "target": {**first["target"], "model": target},
            "cache": first["cache"],
            "cluster": {"target_groups": {"bundle": PLACE}},
        }
    }
    return other


def deploy(config: dict[str, Any]) -> float:
    """What `serve deploy` does, which talks to the dashboard; return when."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    assert client is not None
    now_s = time.time()
    client.deploy_apps(ServeDeploySchema.model_validate(config))
    return now_s


def wait_for(wanted: str, since_s: float, load: Load | None = None) -> str:
    """Return Serve's messages when the application has come to a state after a deployment."""
    from ray import serve

    until_s = time.monotonic() + _UPDATE_S
    while True:
        overview = serve.status().applications.get(APPLICATION)
        if overview is not None and overview.last_deployed_time_s >= since_s - 1.0:
            messages = [overview.message, *(one.message for one in overview.deployments.values())]
            if overview.status == wanted:
                return "\n".join(messages)
            assert wanted == "DEPLOY_FAILED" or overview.status != "DEPLOY_FAILED", messages
        assert time.monotonic() < until_s, overview
        if load is not None:
            load.check()
        time.sleep(0.25)


class NobodyServes(Exception):
    """A 503 that says when to come back."""


class Load:
    """Clients that never rest, the first of which streams.

    Every answer has to be whole, and one of those that a target gives.
    """

    def __init__(self, url: str, num_clients: int = 3) -> None:
        self._url = url
        self._stop = threading.Event()
        self.answers: list[tuple[int, str]] = []
        self.failures: list[str] = []
        self.may_be_refused = False
        """Whether there may be nobody who serves. Who is told so asks again."""
        self.num_refused = 0
        self._threads = [
            threading.Thread(target=self._ask_on, args=(index,), daemon=True) for index in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, client: int) -> None:
        number = client
        while not self._stop.is_set():
            which = number % len(_PROMPTS)
            try:
                answer = ask_for_stream(self._url, which) if client == 0 else ask(self._url, which)
            except NobodyServes as refusal:
                self.num_refused += 1
                if self.may_be_refused:
                    self._stop.wait(0.25)
                    continue
                self._note(refusal)
            except (httpx.HTTPError, AssertionError) as error:
                self._note(error)
            else:
                self.answers.append((which, answer))
            number += 1

    def _note(self, failure: Exception) -> None:
        self.failures.append(f"{time.strftime('%H:%M:%S')} {type(failure).__name__}: {failure}")

    def check(self) -> None:
        assert not self.failures, self.failures[:5]

    def taken(self) -> list[tuple[int, str]]:
        """The answers since the last call."""
        self.check()
        answers, self.answers = self.answers, []
        return answers

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)


class Scrapes:
    """What /metrics says has been generated, and lost, from one moment to the next."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.values: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._scrape_on, daemon=True)
        self._thread.start()

    def _scrape_on(self) -> None:
        while not self._stop.wait(0.5):
            with contextlib.suppress(httpx.HTTPError):
                lines = httpx.get(f"{self._url}/metrics", timeout=30.0).text.splitlines()
                named = (line.rpartition(" ") for line in lines if line.startswith(_COUNTED))
                if found := {name: float(value) for name, _, value in named}:
                    self.values.append(found)

    def stop(self) -> None:
        """End, and check that for Prometheus nothing began anew, nor happened all at once."""
        self._stop.set()
        self._thread.join(60.0)
        for name in _COUNTED:
            values = [found[name] for found in self.values if name in found]
            falls = [(before, after) for before, after in itertools.pairwise(values) if after < before]
            assert not falls, (name, falls)
            most = max(after - before for before, after in itertools.pairwise(values))
            assert most < max(values) / 2, (name, most)
            print(f"{name}: {len(values)} scrapes, {values[0]:.0f} to {values[-1]:.0f}, {most:.0f} at most")


def body_of(which: int, model: str = "m") -> dict[str, Any]:
    return {
        "model": model,
        "prompt": _PROMPTS[which],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def require_ok(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    told = f"{response.status_code}: {response.read().decode(errors='replace')[:300]}"
    if response.status_code == 503 and "not_ready" in told and "Retry-After" in response.headers:
        raise NobodyServes(told)
    raise AssertionError(told)


def answer_to(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0)
    require_ok(response)
    answer: dict[str, Any] = response.json()
    return answer


def ask(url: str, which: int, model: str = "m") -> str:
    answer = answer_to(url, body_of(which, model))
    assert answer["usage"]["completion_tokens"] == _MAX_TOKENS, answer
    return str(answer["choices"][0]["text"])


def ask_for_stream(url: str, which: int) -> str:
    """Return the text of `ask`, read event by event to the last."""
    body = {**body_of(which), "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120.0) as response:
        require_ok(response)
        told = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert told[-1:] == ["[DONE]"], told[-3:]
    events = [json.loads(one) for one in told[:-1]]
    assert all("error" not in event for event in events), events[-1]
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "length", choices[-1]
    assert events[-1]["usage"]["completion_tokens"] == _MAX_TOKENS, events[-1]
    return "".join(choice["text"] for choice in choices)


def wait_drafted(url: str, config: dict[str, Any], load: Load) -> None:
    """Wait until all draft workers are of this configuration, and drafts of theirs are accepted."""
    from cluster.directory_actor import current_members
    from cluster.generation import draft_generation

    parsed = parse_config(config["applications"][0]["args"]["config"])
    (model,) = parsed.served_models()
    until_s = time.monotonic() + 60
    while True:
        members = current_members(parsed.cluster.namespace)
        there = {member.generation for member in members if member.role == "draft"}
        if there == {draft_generation(model.engine)} and num_accepted(url) > 0:
            return
        assert time.monotonic() < until_s, there
        load.check()
        time.sleep(0.25)


def num_accepted(url: str) -> int:
    """How many draft tokens are accepted of one request."""
    answer = answer_to(url, {**body_of(0), "return_metrics": True})
    return int(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])


def scenario(models: Path, url: str, room: int) -> None:
    first = serve_config(models)
    wait_for("RUNNING", deploy(first))
    until_s = time.monotonic() + 60
    while not httpx.get(f"{url}/health").is_success:
        assert time.monotonic() < until_s
        time.sleep(0.25)
    of_target = {which: ask(url, which) for which in range(len(_PROMPTS))}
    load = Load(url)

    drafter = first
    changes = {
        "one more draft token": {"num_speculative_tokens": 3},
        "another draft model": {"model": str(models / "redrafted")},
    }
    for what, values in changes.items():
        began_s = time.monotonic()
        drafter = changed(drafter, "speculative_config", **values)
        wait_for("RUNNING", deploy(drafter), load)
        took_s = time.monotonic() - began_s
        wait_drafted(url, drafter, load)
        answers = load.taken()
        assert {answer == of_target[which] for which, answer in answers} == {True}
        print(f"{what}: {took_s:.1f} s, {len(answers)} answers, 0 failed")
        time.sleep(2.0)  # `wait_for` tells deployments apart by whole seconds

    began_s = time.monotonic()
    scrapes = Scrapes(url)
    other = changed(drafter, "target", model=str(models / "other"))
    wait_for("RUNNING", deploy(other), load)
    took_s = time.monotonic() - began_s
    scrapes.stop()
    answers = load.taken()
    of_other = {which: ask(url, which) for which in range(len(_PROMPTS))}
    assert of_other != of_target
    kinds = Counter(
        "old" if answer == of_target[which] else "new" if answer == of_other[which] else "wrong"
        for which, answer in answers
    )
    assert kinds["wrong"] == 0, kinds
    print(f"target: {took_s:.1f} s, {dict(kinds)}, 0 failed")

    for name in ("damaged", "broken"):
        wrong = changed(other, "target", model=str(models / name))
        message = wait_for("DEPLOY_FAILED", deploy(wrong), load)
        assert name in message, message
        time.sleep(2.0)  # `wait_for` tells deployments apart by whole seconds
    refused = num_groups(url)
    assert refused == 2, "nothing was replaced"
    failing = changed(other, "target", device="cuda")  # which only the workers know that they have not
    wait_for("DEPLOY_FAILED", deploy(failing), load)
    time.sleep(5.0)
    answers = load.taken()
    assert {answer == of_other[which] for which, answer in answers} == {True}
    print(f"a checkpoint that fails: {len(answers)} answers, 0 failed, groups {refused}, {num_groups(url)}")

    wait_for("RUNNING", deploy(other), load)
    answers = load.taken()
    assert {answer == of_other[which] for which, answer in answers} == {True}
    print(f"back again: {len(answers)} answers, 0 failed, groups {num_groups(url)}")

    began_s = time.monotonic()
    two = with_second_model(other, str(models / "target"))
    load.may_be_refused = room == _ROOM_IN_PLACE  # one group at a time leaves nobody, when there is one
    wait_for("RUNNING", deploy(two), load)
    wait_listed(url, ["m", "second"])
    load.may_be_refused = False
    took_s = time.monotonic() - began_s
    assert {which: ask(url, which, "second") for which in of_target} == of_target
    assert {which: ask(url, which) for which in of_other} == of_other
    assert httpx.post(f"{url}/v1/completions", json={"model": "x", "prompt": "a"}).status_code == 404
    load.stop()
    answers = load.taken()
    assert {answer == of_other[which] for which, answer in answers} == {True}
    told = f"{len(answers)} answers, 0 failed, {load.num_refused} refused"
    print(f"a second model beside the first: {took_s:.1f} s, {told}; each answers as itself")


def wait_listed(url: str, wanted: list[str]) -> None:
    """Wait until the door lists these models.

    In place with one group, nobody serves a model for a while. Serve takes the next group for running when it
    has loaded, which is before the door has heard of it.
    """
    until_s = time.monotonic() + 60
    while True:
        listed = [card["id"] for card in httpx.get(f"{url}/v1/models", timeout=30.0).json()["data"]]
        if listed == wanted:
            return
        assert time.monotonic() < until_s, listed
        time.sleep(0.25)


def num_groups(url: str) -> int:
    status = httpx.get(f"{url}/v1/status", timeout=30.0).json()
    return sum(group["is_serving"] for group in status["target_groups"])


@contextlib.contextmanager
def serving(port: int, room: int) -> Iterator[str]:
    """Run Ray, with so many places for workers on one node, and Serve on a port; give its address."""
    temp = Path(tempfile.mkdtemp(prefix="dhru", dir="/tmp"))
    (temp / "ray").mkdir()
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_TMPDIR": str(temp),
    }
    import ray
    from ray import serve

    try:
        ray.init(
            num_cpus=2,
            resources={"place": room},
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _temp_dir=str(temp / "ray"),
        )
        http = {"host": "127.0.0.1", "port": port}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"log_level": "WARNING"})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def main() -> None:
    models, port, room = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with serving(port, room) as url:
        scenario(models, url, room)
        print("updated without a failed request")


if __name__ == "__main__":
    main()
