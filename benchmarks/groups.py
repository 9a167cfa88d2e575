"""Target and draft model in two processes with cores of their own, and a coordinator here: no Ray.

The same servers, messages and channels as in the cluster; only who starts the processes differs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, Self

from specdec.core.errors import DrafthouseError
from specdec.engine.config import EngineConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.guesses import share_guesses
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.state import Schedulable
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.zmq import KeyPair, ZmqChannel

if TYPE_CHECKING:
    from specdec.engine.draft_pool.server import DraftServer
    from specdec.engine.targets.target_server import TargetServer
    from specdec.model.runner import ModelRunner

Role = Literal["target", "draft"]
SPIN_COUNT = "20000"
"""As in a worker (`workers.process`)."""
_START_S = 180.0
_STOP_S = 10.0
_POLL_S = 0.02
"""How long a group waits for a message before it looks at its orders."""
_TARGET, _DRAFT, _COORDINATOR = PeerId("target"), PeerId("draft"), PeerId("coordinator")


class GroupDied(DrafthouseError):
    """A group's process has ended; its output says why."""


class ChosenController(FixedController):
    """Does what the benchmark says, from the next round on."""

    def __init__(self) -> None:
        super().__init__(0)
        self._num_branches = 8
        self._acceptance = 0.8

    def set(self, num_draft_tokens: int, mode: OverlapMode, num_branches: int, acceptance: float) -> None:
        """Draft so many tokens in this mode; ahead, for so many verdicts, shared out by this acceptance."""
        self._num_draft_tokens = num_draft_tokens
        self._mode = mode
        self._num_branches = num_branches
        self._acceptance = acceptance

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """Prepare for the likeliest verdicts."""
        accepted = (self._acceptance,) * (num_pending + 1)
        return share_guesses(accepted, self._ranks.rates, min(max_branches, self._num_branches))


@dataclass(frozen=True, slots=True)
class BareForwards:
    """An order to a group: time compiled forwards alone, one after the other, again and again."""

    shapes: tuple[tuple[int, int], ...]
    """(sequences, new rows of each) of every forward."""
    context: int
    """Cached tokens of every sequence."""
    for_s: float
    """Seconds to go on for."""


class Group:
    """One process, its cores, and the pipe that it gets its orders by."""

    def __init__(self, role: Role, config: EngineConfig, cores: Sequence[int]) -> None:
        here, there = multiprocessing.Pipe()
        # Not forked: OpenMP and ZeroMQ have threads here.
        context = multiprocessing.get_context("spawn")
        arguments = (role, config.model_dump_json(), tuple(cores), there)
        self.process = context.Process(target=_run_group, args=arguments, daemon=True)
        # OpenMP reads its settings when torch is loaded, which is before anything of ours runs there.
        with _environment(OMP_NUM_THREADS=str(len(cores)), GOMP_SPINCOUNT=SPIN_COUNT):
            self.process.start()
        self._pipe = here
        self._role = role

    def order(self, order: Any) -> None:
        """Send an order."""
        self._pipe.send(order)

    def answer(self, timeout_s: float = _START_S) -> Any:
        """Wait for the answer to the oldest order.

        Raises:
            GroupDied: the process has ended, or does not answer.
        """
        if not self._pipe.poll(timeout_s):
            raise GroupDied(f"the {self._role} group does not answer")
        try:
            return self._pipe.recv()
        except EOFError:
            raise GroupDied(f"the {self._role} group has ended") from None

    def stop(self) -> None:
        """End the process."""
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join(_STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class TwoGroups:
    """A target group, a draft group, and an engine over both."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        target_cores: Sequence[int],
        draft_cores: Sequence[int],
        controller: SpeculationController | None = None,
    ) -> None:
        """Start both processes and connect; takes as long as loading and compiling both models.

        `controller` takes the place of `self.controller`.

        Raises:
            GroupDied: a process ended instead.
        """
        from specdec.engine.draft_pool.remote_proposer import RemoteProposer
        from specdec.engine.engine import Engine
        from specdec.engine.synthetic import SyntheticTarget
        from specdec.engine.targets.remote_target import RemoteTarget
        from specdec.engine.text.tokenizer import build_tokenizer
        from specdec.proposers.base import ProposerCapabilities

        self.controller = ChosenController()
        self.groups = {
            "target": Group("target", config, target_cores),
            "draft": Group("draft", config, draft_cores),
        }
        addresses: dict[str, PeerAddress] = {name: group.answer() for name, group in self.groups.items()}
        keys = KeyPair.generate()
        channels = {name: ZmqChannel(_COORDINATOR, keys=keys) for name in self.groups}
        for name, group in self.groups.items():
            group.order(channels[name].address)
            group.answer()
        target = RemoteTarget(channels["target"], addresses["target"], incarnation=1)
        made_up = config.speculative_config.synthetic_acceptance
        self.target = target
        self.synthetic = None if made_up is None else SyntheticTarget(target, made_up)
        """Decides what is accepted, where that is made up."""
        self.proposer = RemoteProposer(
            channels["draft"],
            capabilities=ProposerCapabilities(
                name="draft_model", sampled=True, kv="own", remote=True, looks_ahead=True
            ),
            vocab_size=target.description.vocab_size,
            meanwhile=self._read_texts,
        )
        self.proposer.set_workers([addresses["draft"]])
        self.engine = Engine.from_parts(
            target=self.synthetic or target,
            proposer=self.proposer,
            tokenizer=build_tokenizer(config),
            scheduler=config.scheduler,
            controller=controller or self.controller,
            max_branches=32,
            meanwhile=self._read_texts,
            prefix_caching=config.cache.enable_prefix_caching,
        )

    def bare_s(self, orders: Mapping[Role, BareForwards]) -> dict[Role, list[float]]:
        """Have groups run bare forwards at the same time; return seconds of each."""
        for role, order in orders.items():
            self.groups[role].order(order)
        return {role: self.groups[role].answer() for role in orders}

    def _read_texts(self) -> None:
        """Do in the next round what a coordinator does there (`cluster.engine_loop`), but send nothing."""
        self.engine.read_texts()

    def close(self) -> None:
        """End both processes."""
        self.engine.close()
        for group in self.groups.values():
            group.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _environment(**settings: str) -> Iterator[None]:
    """Start processes with these settings."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_group(role: Role, config_json: str, cores: Sequence[int], pipe: Connection) -> None:
    """Serve until told to stop: what a worker actor does, in a process of the benchmark."""
    os.sched_setaffinity(0, cores)
    from workers.process import give_way, prepare_logging, settle_memory

    prepare_logging(role)
    give_way()
    server, runner, channel = _make_server(role, EngineConfig.model_validate_json(config_json))
    settle_memory()
    pipe.send(channel.address)
    while True:
        while pipe.poll():
            order = pipe.recv()
            if order is None:
                channel.close()
                return
            if isinstance(order, PeerAddress):
                channel.admit([order])
                pipe.send(None)
            else:
                pipe.send(_bare_forwards(runner, order))
        server.step(_POLL_S)


def _make_server(
    role: Role, config: EngineConfig
) -> tuple[TargetServer | DraftServer, ModelRunner, ZmqChannel]:
    from specdec.core.idle_work import idle_work_of
    from specdec.engine.build_drafter import build_draft_proposer
    from specdec.engine.build_target import build_target
    from specdec.engine.draft_pool.server import DraftServer
    from specdec.engine.targets.local_target import LocalTarget
    from specdec.engine.targets.target_server import TargetServer
    from specdec.model.runner import ModelRunner
    from specdec.proposers.draft_model import DraftModelProposer

    channel = ZmqChannel(_TARGET if role == "target" else _DRAFT)
    if role == "target":
        target = build_target(config)
        assert isinstance(target, LocalTarget)
        _finish(idle_work_of(target))
        return TargetServer(channel, target), target.runner, channel
    proposer = build_draft_proposer(config)
    assert isinstance(proposer, DraftModelProposer)
    assert isinstance(proposer.runner, ModelRunner)
    _finish(idle_work_of(proposer))
    return DraftServer(channel, proposer), proposer.runner, channel


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        while work.pending():
            work.run_next()


def _bare_forwards(runner: ModelRunner, order: BareForwards) -> list[float]:
    """Return the seconds of every pass, but for the first quarter of them."""
    from benchmarks.in_process import bare_inputs

    inputs = [
        bare_inputs(runner, batch=batch, rows=rows, context=order.context) for batch, rows in order.shapes
    ]
    seconds = []
    end_s = time.perf_counter() + order.for_s
    while (started_s := time.perf_counter()) < end_s:
        for one in inputs:
            runner.forward_packed(one)
        seconds.append(time.perf_counter() - started_s)
    return seconds[len(seconds) // 4 :]
