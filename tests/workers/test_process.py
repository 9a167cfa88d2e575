from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from specdec.transport.base import PeerId
from specdec.transport.zmq import ZmqOptions
from workers.process import ServingThread, open_tensor_channel, prepare_threads


def test_the_configured_thread_count_overrides_ray_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GOMP_SPINCOUNT", "3")
    assert prepare_threads(2) == 2
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["GOMP_SPINCOUNT"] == "3", "what the user sets stays"
    assert prepare_threads(None) == len(os.sched_getaffinity(0))


def test_threads_reach_torch_when_it_is_loaded_afterwards() -> None:
    code = (
        "import workers.target_worker, workers.draft_worker, sys; assert 'torch' not in sys.modules;"
        "from workers.process import prepare_threads; prepare_threads(1);"
        "import torch; print(torch.get_num_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split()[-1] == "1"


def test_a_serving_thread_serves_until_it_is_stopped() -> None:
    served, closed, woken = threading.Event(), threading.Event(), threading.Event()

    def serve_once() -> None:
        served.set()
        woken.wait(10)

    thread = ServingThread("test", serve_once, closed.set)
    assert served.wait(10)
    assert thread.is_alive
    thread.stop(woken.set)
    assert closed.is_set()
    assert not thread.is_alive


def test_a_serving_thread_does_not_interrupt_who_sends_it_work() -> None:
    policies: list[int] = []
    served = threading.Event()

    def serve_once() -> None:
        policies.append(os.sched_getscheduler(0))
        served.set()

    thread = ServingThread("test", serve_once, lambda: None)
    assert served.wait(10)
    thread.stop(lambda: None)
    assert policies[0] == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the others of the process stay as they are"


def test_a_failing_serving_thread_ends_the_process() -> None:
    code = (
        "import time; from workers.process import ServingThread\n"
        "def fail(): raise ValueError('the model is broken')\n"
        "ServingThread('test', fail, lambda: None); time.sleep(30)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "the model is broken" in done.stderr


def test_tensors_have_the_heartbeats_of_messages() -> None:
    options = ZmqOptions(heartbeat_interval_s=0.3, heartbeat_timeout_s=9.0)
    with contextlib.closing(open_tensor_channel(PeerId("draft-1"), "127.0.0.1", options, None)) as channel:
        assert channel.address.peer_id == "draft-1-tensors"
        assert channel._options.heartbeat_interval_s == 0.3
        assert channel._options.heartbeat_timeout_s == 9.0
