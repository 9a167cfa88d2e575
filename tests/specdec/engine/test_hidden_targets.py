"""Hidden states of a real (tiny) target for drafters elsewhere, and of one over several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.core.errors import ConfigError
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.draft_pool.hidden_inbox import HiddenInbox
from specdec.engine.draft_pool.hidden_routing import HiddenRouting
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.engine import Engine
from specdec.engine.ranks.follower import follow_target
from specdec.engine.ranks.leader import LeadingTarget
from specdec.engine.targets.hidden_sender import HiddenSender
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.targets.remote_target import RemoteTarget
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.model.batch import SequenceSlice
from specdec.model.loader import load_model
from specdec.model.parallel.group import RankGroup
from specdec.model.pipeline import StageRunner
from specdec.model.rank_graphs import compile_over_ranks
from specdec.model.runner import ModelRunner
from specdec.proposers.at_target import DraftsAtTarget
from specdec.sampling.parallel import ParallelSampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.transport.base import PeerId, TensorChannel
from specdec.transport.memory import MemoryNetwork
from specdec.transport.torch_dist import TorchDistChannel
from tests.architectures import VOCAB_SIZE, make_tokenizer
from tests.rank_pool import Pools
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.linear_head_engines import HeadSetting, check_seen
from tests.specdec.engine.linear_heads import CAPABILITIES, LAYERS, LinearHeads, Seen
from tests.specdec.engine.ranked_engines import config_of
from tests.specdec.engine.remote_cluster import PATIENT
from tests.specdec.engine.sampling_kinds import KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models
from tests.specdec.transport.gloo_pipe import gloo_lanes

pytestmark = pytest.mark.usefixtures("one_thread")
SETTING = HeadSetting(batch=8, chunk=16, num_blocks=40)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@contextmanager
def stepping(step: Callable[[float], object]) -> Iterator[None]:
    stop = threading.Event()

    def serve() -> None:
        torch.set_num_threads(1)
        while not stop.is_set():
            step(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Remote(NamedTuple):
    engine: Engine
    drafter: LinearHeads
    sender: HiddenSender


@contextmanager
def remotely_drafted(bench: Bench, sending: TensorChannel, receiving: TensorChannel) -> Iterator[Remote]:
    """Coordinator, target worker and draft worker, each in a thread; tensors go by the two channels."""
    network = MemoryNetwork()
    names = ("coordinator", "coordinator-target", "target", "draft")
    coordinator, to_target, at_target, at_draft = (network.open(PeerId(name)) for name in names)
    at_target.admit([to_target.address])
    at_draft.admit([coordinator.address])
    target = LocalTarget(SETTING.runner(bench.models.load("llama"), SETTING.num_blocks), SETTING.sampler())
    assert target.hidden is not None
    sender = HiddenSender(sending, target.hidden)
    inbox = HiddenInbox(receiving, layers=LAYERS, width=64, wait_s=5.0)
    inbox.admit([(sending.address, coordinator.address.peer_id)])
    sending.admit([receiving.address])
    drafter = LinearHeads(inbox, bench.heads("llama"), replace(CAPABILITIES, remote=True))
    with ExitStack() as stack:
        stack.callback(sender.close)
        stack.callback(inbox.close)
        stack.enter_context(stepping(TargetServer(at_target, target, hidden=sender).step))
        stack.enter_context(stepping(DraftServer(at_draft, drafter).step))
        remote_target = RemoteTarget(to_target, at_target.address, incarnation=1, times=PATIENT)
        routing = HiddenRouting(coordinator, remote_target.send_hidden)
        routing.set_inboxes({at_draft.address.peer_id: receiving.address})
        proposer = RemoteProposer(
            routing,
            capabilities=drafter.capabilities,
            vocab_size=VOCAB_SIZE,
            deadlines=DraftDeadlineConfig(min_deadline_s=10.0, max_deadline_s=20.0),
        )
        proposer.set_workers([at_draft.address])
        engine = Engine.from_parts(
            target=remote_target,
            proposer=proposer,
            tokenizer=HuggingFaceTokenizer(make_tokenizer()),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
            controller=FixedController(4),
        )
        yield Remote(engine, drafter, sender)


@pytest.mark.parametrize("kind", ["greedy", "plain"])
@pytest.mark.parametrize(
    "tensors",
    ["memory", pytest.param("gloo", marks=pytest.mark.full), pytest.param("lanes", marks=pytest.mark.full)],
)
def test_a_draft_worker_gets_the_states_of_a_real_target(bench: Bench, kind: str, tensors: str) -> None:
    network = MemoryNetwork()
    channels: list[TensorChannel] = [
        network.open(PeerId(name))
        if tensors == "memory"
        else TorchDistChannel(PeerId(name), lanes=gloo_lanes(name) if tensors == "lanes" else None)
        for name in ("target-tensors", "draft-tensors")
    ]
    with remotely_drafted(bench, *channels) as (engine, drafter, sender):
        results = engine.generate(PROMPTS, KINDS[kind])
        assert [one.token_ids for one in results] == bench.alone("llama", kind)
        metrics = engine.metrics()
        assert metrics.num_accepted_tokens > 20
        assert sender.counters["hidden_rows_missing"] == 0
    check_seen(bench, drafter.seen)


def serve_drafted(
    group: RankGroup,
    config: EngineConfig,
    heads: torch.Tensor,
    kinds: Sequence[SamplingParams],
    compiled: bool,
) -> Any:
    """Rank 0: streams, what its drafter has seen and what was accepted; the others follow."""
    loaded = load_model(config.target, None, group)
    make = ModelRunner if loaded.stage is None else StageRunner
    runner = make(loaded, config.cache, max_num_seqs=6, max_num_batched_tokens=24, hidden_layers=LAYERS)
    if compiled:
        compile_over_ranks(runner, config.target.compile.model_copy(update={"mode": "auto"}))
        assert runner.graphs is not None
        assert runner.graphs.is_ready
    assert loaded.grid is not None
    assert loaded.grid.tensor is not None
    assert loaded.vocab is not None
    sampler = ParallelSampler(loaded.grid.tensor, loaded.vocab)
    if group.rank > 0:
        follow_target(LocalTarget(runner, sampler), group)
        return None
    made: list[LinearHeads] = []

    def make_drafter(source: Any) -> LinearHeads:
        made.append(LinearHeads(source, heads))
        return made[0]

    engine = Engine.from_parts(
        target=LeadingTarget(LocalTarget(runner, sampler, make_drafter=make_drafter), group),
        proposer=DraftsAtTarget(CAPABILITIES),
        tokenizer=HuggingFaceTokenizer(make_tokenizer()),
        scheduler=config.scheduler,
        controller=FixedController(4),
    )
    with engine:
        streams = [[one.token_ids for one in engine.generate(PROMPTS, kind)] for kind in kinds]
        num_accepted = engine.metrics().num_accepted_tokens
    return streams, [tuple(one) for one in made[0].seen], num_accepted


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_rank_0_drafts_for_a_target_over_two_ranks(bench: Bench, rank_pool: Pools, compiled: bool) -> None:
    """Its streams are those of one process but where that hesitates; here, with these seeds, they all are."""
    folder = Path(bench.models.load("llama").path)
    config = config_of(folder, 2, num_blocks=40)
    kinds = ("greedy", "plain")
    answer = rank_pool(2).run(
        serve_drafted, config, bench.heads("llama"), [KINDS[kind] for kind in kinds], compiled
    )[0]
    streams, seen, num_accepted = answer
    for kind, ours in zip(kinds, streams, strict=True):
        assert ours == bench.alone("llama", kind)
    assert num_accepted > 20
    check_seen(bench, [Seen(*one) for one in seen])


def stage_rows(group: RankGroup, config: EngineConfig, token_ids: list[int]) -> Any:
    """Rank 0, of the last stage: rows that it keeps, and what it says of layers that it does not have."""
    loaded = load_model(config.target, None, group)
    assert loaded.stage is not None
    layers = (loaded.stage.plan.layers(loaded.stage.plan.num_stages - 1).start, -1)
    runner = StageRunner(loaded, config.cache, max_num_seqs=6, hidden_layers=layers, micro_batch_tokens=4)
    compile_over_ranks(runner, config.target.compile.model_copy(update={"mode": "auto"}))
    runner.forward([SequenceSlice(token_ids=token_ids, start=0, block_table=[3, 4, 5], num_logit_rows=1)])
    if not loaded.stage.is_last:
        assert runner.hidden is None
        return None
    assert runner.graphs is not None
    assert runner.graphs.is_ready
    assert runner.hidden is not None
    try:
        StageRunner(loaded, config.cache, max_num_seqs=6, hidden_layers=(0, -1))
    except ConfigError as error:
        return layers, runner.hidden.read([3, 4, 5], 0, len(token_ids)), str(error)


def test_the_last_stage_of_a_pipeline_keeps_what_it_computes(bench: Bench, rank_pool: Pools) -> None:
    config = config_of(Path(bench.models.load("llama").path), 2, stages=2)
    token_ids = list(PROMPTS[6][:11])
    layers, rows, refusal = rank_pool(2).run(stage_rows, config, token_ids)[0]
    with torch.inference_mode():
        output = bench.models.reference("llama")(torch.tensor([token_ids]), output_hidden_states=True)
    expected = torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1)
    torch.testing.assert_close(rows, expected, rtol=0, atol=5e-5 * float(expected.abs().max()))
    assert "hidden state 0" in refusal
    assert f"the last stage has those from {layers[0]} on" in refusal
