from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import ray
import torch

from specdec.core.control_groups import usable_cpus
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.zmq import ZmqOptions
from workers import draft_worker, rank_worker, target_worker
from workers.draft_worker import DraftWorkerProcess
from workers.process import ServingThread, open_tensor_channel, prepare_threads, require_own_gpus_used
from workers.rank_worker import RankWorkerProcess
from workers.target_worker import TargetWorkerProcess


def test_the_configured_thread_count_overrides_ray_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GOMP_SPINCOUNT", "3")
    assert prepare_threads(2) == 2
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["GOMP_SPINCOUNT"] == "3", "what the user sets stays"
    assert prepare_threads(None) == usable_cpus()


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


ENGINE = EngineConfig.model_validate(
    {"target": {"model": "/t"}, "speculative_config": {"method": "draft_model", "model": "/d"}}
)
OWNER = PeerAddress(peer_id=PeerId("coordinator"), endpoint="tcp://127.0.0.1:1", public_key="")
STARTS: dict[str, Callable[[], object]] = {
    "target": lambda: TargetWorkerProcess(ENGINE, PeerId("target"), "127.0.0.1", OWNER, ZmqOptions()),
    "draft": lambda: DraftWorkerProcess(
        ENGINE, PeerId("draft"), "127.0.0.1", ZmqOptions(), DraftShareConfig()
    ),
    "rank of a target": lambda: RankWorkerProcess("target", ENGINE, 1, 2, ("127.0.0.1", 1)),
    "rank of a draft model": lambda: RankWorkerProcess("draft", ENGINE, 1, 2, ("127.0.0.1", 1)),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_worker_that_was_given_a_gpu_does_not_compute_on_the_cpu_without_a_word(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [0])
    for module in (target_worker, draft_worker, rank_worker):
        monkeypatch.setattr(module, "prepare_logging", lambda name: None)
        monkeypatch.setattr(module, "prepare_threads", lambda number: 1)
    with pytest.raises(ResourceError, match="sees no GPU: this worker was given 1"):
        start()


def test_a_worker_without_gpus_of_its_own_may_take_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ray, "get_gpu_ids", list)
    require_own_gpus_used("auto")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [0])
    require_own_gpus_used("cpu")
