"""What Ray is told before it starts."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import ray

from deploy.local_ray import RayNotStarted, RaySession, _end
from deploy.ray_guard import is_alive


@pytest.mark.parametrize(("address", "is_set"), [(None, True), ("auto", False)])
def test_only_a_cluster_of_our_own_is_run_without_ray_s_memory_monitor(
    monkeypatch: pytest.MonkeyPatch, address: str | None, is_set: bool
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(ray, "init", lambda *_args, **_options: None)
    RaySession(address=address, num_cpus=1, show_logs=False).open()
    assert environment.get("RAY_memory_monitor_refresh_ms") == ("0" if is_set else None)
    assert environment["RAY_worker_niceness"] == "0"


@pytest.mark.parametrize(
    ("address", "said", "mode"),
    [
        pytest.param(None, None, "token", id="own"),
        pytest.param(None, "disabled", "disabled", id="own-as-told"),
        pytest.param("auto", None, None, id="of-others"),
    ],
)
def test_only_a_cluster_of_our_own_is_told_to_ask_for_its_token(
    monkeypatch: pytest.MonkeyPatch, address: str | None, said: str | None, mode: str | None
) -> None:
    environment = {"RAY_AUTH_TOKEN": "a"} | ({} if said is None else {"RAY_AUTH_MODE": said})
    told: list[str | None] = []
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(ray, "init", lambda *_args, **_options: told.append(environment.get("RAY_AUTH_MODE")))
    RaySession(address=address, num_cpus=1, show_logs=False).open()
    assert told == [mode]


@pytest.mark.parametrize("is_home_usable", [True, False])
def test_without_a_home_folder_the_token_is_made_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_home_usable: bool
) -> None:
    environment = {"HOME": str(tmp_path if is_home_usable else tmp_path / "nowhere")}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(ray, "init", lambda *_args, **_options: None)
    RaySession(address=None, num_cpus=1, show_logs=False).open()
    assert len(environment.get("RAY_AUTH_TOKEN", "")) == (0 if is_home_usable else 64)


def test_a_cluster_that_does_not_come_up_is_one_readable_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(ray, "init", time_out)
    with pytest.raises(RayNotStarted, match="timed out"):
        RaySession(address=None, num_cpus=1, show_logs=False).open()


def test_no_second_cluster_is_started_by_late_calls() -> None:
    """Serve's threads outlive the connection, and Ray connects anew at any call if it is let."""
    script = """
        from deploy.local_ray import RaySession
        RaySession._connect = lambda _: None
        RaySession(address=None, num_cpus=1, show_logs=False).open()
        import ray
        from ray._private.auto_init_hook import auto_init_ray
        auto_init_ray()
        assert not ray.is_initialized()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_that_serve_polls_on_after_the_end_is_no_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop_logger = logging.getLogger("asyncio")
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(loop_logger, "filters", [])
    RaySession(address="auto", num_cpus=None, show_logs=False).close()
    loop_logger.error("Exception in callback %s", "LongPollClient._process_update.<locals>.chained()")
    loop_logger.error("Exception in callback %s", "somebody_else()")
    assert [record.getMessage() for record in caplog.records] == ["Exception in callback somebody_else()"]


def test_who_has_lost_its_parents_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As HAProxy, which a proxy's process has started that is gone."""
    monkeypatch.setattr(ray, "init", lambda *_args, **_options: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr("deploy.local_ray._GRACE_S", 0.1)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    # The children of this process are those of other tests, the Ray cluster that they share among them.
    monkeypatch.setattr(psutil.Process, "children", lambda *_args, **_options: [])
    session, other = (RaySession(address=None, num_cpus=1, show_logs=False) for _ in range(2))
    start = (
        "import subprocess as s, sys\n"
        "print(s.Popen([sys.executable, '-c', 'input()'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    )
    with contextlib.ExitStack() as left_over:
        reader, writer = os.pipe()
        left_over.callback(os.close, writer)  # an orphan that is not ended ends with this test
        orphans = []
        for one in (session, other):
            one.open()
            started = subprocess.run(
                [sys.executable, "-c", start], stdin=reader, capture_output=True, check=True, env=os.environ
            )
            orphans.append(psutil.Process(int(started.stdout)))
        os.close(reader)
        session.close()
        assert [is_alive(one) for one in orphans] == [False, True]
        other.close()
        assert not is_alive(orphans[1])


def test_an_ended_process_that_nobody_reaps_is_not_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        zombie = psutil.Process(child.pid)
        while zombie.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        before_s = time.monotonic()
        _end([zombie])
        assert time.monotonic() - before_s < 4.0, "it sat out the grace of five seconds"


def test_a_process_that_does_not_end_by_itself_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.local_ray._GRACE_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as child:
        _end([psutil.Process(child.pid)])
        assert child.wait(1) == -9
