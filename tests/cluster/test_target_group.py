"""What a target group leaves behind where no engine comes of it, without Ray."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from cluster import target_group
from cluster.config import ClusterConfig
from cluster.directory import Member
from cluster.target_group import TargetGroup
from specdec.core.errors import TransportError
from specdec.engine.config import EngineConfig
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.proposers.none import NoProposer
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.config import ChannelConfig
from specdec.transport.zmq import KeyPair, ZmqChannel
from workers.target_worker import TargetWorkerProcess

VOCAB = 9


class Target(ToyTarget):
    """A target over a channel that it owns, as the remote one does."""

    def __init__(self, channel: ZmqChannel, worker: object, **_: object) -> None:
        super().__init__(ToyModel(VOCAB, seed=3))
        self._channel = channel

    def close(self) -> None:
        self._channel.close()


class Proposer(NoProposer):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Group(TargetGroup):
    """Its parts are toys; `failing` is the method that fails."""

    def __init__(self, failing: str) -> None:
        config = EngineConfig.model_validate(
            {"target": {"model": "/models/target"}, "speculative_config": {"method": "none"}}
        )
        cluster = ClusterConfig(channels=ChannelConfig(bind="loopback"))
        super().__init__(config, cluster, PeerId("me"), KeyPair.generate())
        self._tokenizer = ToyTokenizer.of_letters(VOCAB)
        self._failing = failing
        self.proposer = Proposer()
        self.started = 0

    def _fail(self, method: str) -> None:
        if method == self._failing:
            raise TransportError("the target worker died")

    def _start_worker(self, owner: object) -> Any:
        self.started += 1
        self._fail("start")
        return SimpleNamespace(
            await_address=lambda timeout_s: None, compile_state=lambda: "ready", tensor_address=lambda: None
        )

    def _require_same_model(self, description: object) -> None:
        self._fail("require_same_model")

    def _make_proposer(self, target: object, meanwhile: object) -> Any:
        self._fail("make_proposer")
        return self.proposer

    def _costs(self, target: Any, proposer: Any) -> Any:
        self._fail("costs")
        return super()._costs(target, proposer)


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[ZmqChannel]:
    """All that are opened."""
    opened: list[ZmqChannel] = []

    def open_one(*arguments: Any, **options: Any) -> ZmqChannel:
        opened.append(ZmqChannel(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(target_group, "ZmqChannel", open_one)
    monkeypatch.setattr(target_group, "RemoteTarget", Target)
    return opened


@pytest.mark.parametrize("failing", ["start", "require_same_model", "make_proposer", "costs"])
def test_nothing_stays_open_where_no_engine_comes_of_it(failing: str, channels: list[ZmqChannel]) -> None:
    """It is tried eight times: each would have left a socket with its thread."""
    group = Group(failing)
    with pytest.raises(TransportError):
        group.make_engine(lambda: None)
    (channel,) = channels
    assert channel._closed
    assert group.started == 1
    assert group.proposer.is_closed == (failing == "costs")


def test_an_engine_closes_what_it_was_made_of(channels: list[ZmqChannel]) -> None:
    group = Group("")
    engine = group.make_engine(lambda: None)
    (channel,) = channels
    assert not channel._closed
    assert not group.proposer.is_closed
    engine.close()
    assert channel._closed
    assert group.proposer.is_closed


def test_the_worker_is_told_how_long_a_rank_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def remote(*args: object) -> None:
        given.update(inspect.signature(TargetWorkerProcess.__init__).bind(None, *args).arguments)

    monkeypatch.setattr(target_group, "worker_options", lambda *args: {})
    monkeypatch.setattr(target_group, "rank_options", lambda *args: [{}])
    monkeypatch.setattr(target_group, "TargetWorker", SimpleNamespace(options=lambda: Remote(remote)))
    monkeypatch.setattr(target_group, "WorkerHandle", lambda actor, name: None)
    config = EngineConfig.model_validate({"target": {"model": "/models/target"}})
    cluster = ClusterConfig.model_validate(
        {"channels": {"bind": "loopback"}, "target_groups": {"rank_silence_s": 7}}
    )
    keys = KeyPair.generate()
    owner = PeerAddress(peer_id=PeerId("me"), endpoint="tcp://127.0.0.1:1", public_key="")
    TargetGroup(config, cluster, PeerId("me"), keys)._start_worker(owner)
    assert given["rank_silence_s"] == 7.0


class Remote:
    """An actor class that calls this instead of starting an actor."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.remote = call


@pytest.mark.parametrize("silence_s", [0.0, 2.9, 3601.0])
def test_a_silence_that_would_end_healthy_ranks_or_none_is_refused(silence_s: float) -> None:
    with pytest.raises(ValidationError, match="rank_silence_s"):
        ClusterConfig.model_validate({"target_groups": {"rank_silence_s": silence_s}})


def test_attempts_grow_though_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft workers would take those of the next engine for old ones, and draft no more."""
    first_epochs: list[int] = []

    class Drafter(Proposer):
        def __init__(self, channel: ZmqChannel, *, first_epoch: int, **_: object) -> None:
            super().__init__()
            channel.close()
            first_epochs.append(first_epoch)

        def set_workers(self, workers: object) -> None: ...

    monkeypatch.setattr(target_group, "RemoteProposer", Drafter)
    config = EngineConfig.model_validate(
        {
            "target": {"model": "/models/target"},
            "speculative_config": {"method": "draft_model", "model": "/models/draft"},
        }
    )
    cluster = ClusterConfig(channels=ChannelConfig(bind="loopback"))
    group = TargetGroup(config, cluster, PeerId("me"), KeyPair.generate())
    target: Any = ToyTarget(ToyModel(VOCAB, seed=3))
    for now_ns in (2_000_000_000_000_000_000, 1_000_000_000_000_000_000):
        monkeypatch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
        group._make_proposer(target, lambda: None)
    assert first_epochs[0] < first_epochs[1]


class SlowToHear(Proposer):
    """Stands still in the first call until it is let go."""

    def __init__(self) -> None:
        self.heard: list[list[PeerId]] = []
        self.is_called, self.may_go = threading.Event(), threading.Event()

    def set_workers(self, workers: Sequence[PeerAddress]) -> None:
        names = [one.peer_id for one in workers]
        if not self.is_called.is_set():
            self.is_called.set()
            assert self.may_go.wait(20)
        self.heard.append(names)


def test_the_latest_draft_workers_are_told_last() -> None:
    """The engine's thread tells of them, and the directory's; an older list would stand."""
    group, proposer = Group(""), SlowToHear()
    group._proposer = proposer  # type: ignore[assignment]
    first = threading.Thread(target=group._tell_drafters)
    first.start()
    assert proposer.is_called.wait(20)
    address = PeerAddress(peer_id=PeerId("draft"), endpoint="", public_key="")
    member = Member(address=address, role="draft", capacity=4, model_revision="toy")
    second = threading.Thread(target=group.set_drafters, args=([member],))
    second.start()
    second.join(0.2)
    proposer.may_go.set()
    first.join(20)
    second.join(20)
    assert proposer.heard == [[], [PeerId("draft")]]


def test_coordinators_and_ingresses_need_no_pytorch() -> None:
    code = (
        "import cluster.coordinator, cluster.target_group, deploy.ingress, sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", "2 s of a processor at each start, and 200 MB"
