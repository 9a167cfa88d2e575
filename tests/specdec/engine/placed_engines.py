"""Engines of a configuration: compiled, over ranks, or over workers on a simulated network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import pytest

from cluster.pool_drafter import capabilities_in_pool, drafter_of_pool
from specdec.core.clock import Clock, ManualClock
from specdec.engine.build import kv_budgets_of
from specdec.engine.build_drafter import build_draft_proposer, build_remote_heads
from specdec.engine.build_target import build_target
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import controller_for, drafters_of
from specdec.engine.draft_pool.hidden_inbox import HiddenInbox
from specdec.engine.draft_pool.hidden_routing import HiddenRouting
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.engine import Engine
from specdec.engine.ranks.follower import follow
from specdec.engine.targets.hidden_sender import HiddenSender
from specdec.engine.targets.remote_target import RemoteTarget
from specdec.engine.targets.target import Target
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.text.tokenizer import build_tokenizer
from specdec.model.parallel.group import RankGroup
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import create_each, create_proposer, with_fallback
from specdec.proposers.target_facts import TargetFacts
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.transport.base import Channel, PeerId
from specdec.transport.memory import MemoryNetwork
from tests.specdec.engine.remote_cluster import PATIENT

_COORDINATOR = PeerId("coordinator")
_TARGET = PeerId("target")
_DRAFTER = PeerId("drafter")


def lead(group: RankGroup, config: EngineConfig, use: Callable[..., Any], *args: Any) -> Any:
    """Rank 0: `use(engine, *args)` of an engine over all ranks; the others follow."""
    if group.rank > 0:
        follow("target", config, group)
        return None
    target = build_target(config, ranks=group)
    facts = _facts_of(config, target)
    with _engine(config, target, lambda one: create_proposer(one, facts)) as engine:
        return use(engine, *args)


@contextmanager
def over_workers(config: EngineConfig) -> Iterator[Engine]:
    """An engine whose target, and what drafts in the draft pool, are elsewhere and take turns with it."""
    network = MemoryNetwork(seed=0, clock=ManualClock())
    with ExitStack() as stack:
        worker, owner = network.open(_TARGET), network.open(PeerId("owner"))
        worker.admit([owner.address])
        tensors = network.open(PeerId("target-tensors"))
        local = stack.enter_context(closing(build_target(config)))
        hidden = None
        if config.speculative_config.has_remote_heads:
            assert local.hidden is not None
            hidden = HiddenSender(tensors, local.hidden)
        server = TargetServer(worker, local, hidden=hidden)
        network.serve(_TARGET, partial(_take_all, server.step))
        target = RemoteTarget(owner, worker.address, incarnation=1, times=PATIENT, clock=network.clock)
        facts = _facts_of(config, target)

        def make(one: SpeculativeConfig) -> Proposer:
            if not one.drafts_in_pool:
                return create_proposer(one, facts)
            channel: Channel = network.open(_COORDINATOR)
            if one.has_remote_heads:
                channel = HiddenRouting(channel, target.send_hidden)
            proposer = RemoteProposer(
                channel,
                capabilities=capabilities_in_pool(one),
                vocab_size=facts.vocab_size,
                clock=network.clock,
            )
            _start_drafter(network, config, proposer, channel, tensors)
            return proposer

        yield stack.enter_context(_engine(config, target, make, network.clock))


def _start_drafter(
    network: MemoryNetwork, config: EngineConfig, proposer: RemoteProposer, asking: Channel, tensors: Channel
) -> None:
    """Start the one draft worker, and say who is there."""
    of_pool = drafter_of_pool(config)
    assert of_pool is not None
    channel = network.open(_DRAFTER)
    channel.admit([asking.address])
    if of_pool.speculative_config.has_remote_heads:
        heads = build_remote_heads(of_pool)
        inbox = HiddenInbox(
            network.open(PeerId("drafter-tensors")),
            layers=heads.hidden_layers,
            width=heads.state_width,
            clock=network.clock,
        )
        inbox.admit([(tensors.address, _COORDINATOR)])
        drafter: Proposer = heads.proposer(inbox)
        assert isinstance(asking, HiddenRouting)
        asking.set_inboxes({_DRAFTER: inbox.address})
    else:
        drafter = build_draft_proposer(of_pool)
    server = DraftServer(channel, drafter, clock=network.clock)
    network.serve(_DRAFTER, partial(_take_all, server.step))
    proposer.set_workers([channel.address])


def _take_all(step: Callable[[float], bool]) -> None:
    while step(0):
        pass


def _facts_of(config: EngineConfig, target: Target) -> TargetFacts:
    description = target.description
    return TargetFacts(
        vocab_size=description.vocab_size,
        dtype=description.dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        model=config.target.model,
        max_model_len=description.max_model_len,
    )


def _engine(
    config: EngineConfig,
    target: Target,
    make: Callable[[SpeculativeConfig], Proposer],
    clock: Clock | None = None,
) -> Engine:
    speculative = config.speculative_config
    proposer = create_each(speculative, make) if speculative.method == "several" else make(speculative)
    return Engine.from_parts(
        target=target,
        proposer=with_fallback(proposer, speculative),
        tokenizer=build_tokenizer(config),
        scheduler=config.scheduler,
        controller=controller_for(config, assumed_profile()),
        clock=clock,
        prefix_caching=config.cache.enable_prefix_caching,
        kv_budgets=kv_budgets_of(speculative),
        drafters=drafters_of(speculative),
    )


def compile_all(engine: Engine) -> None:
    """Skip the test where nothing can be compiled."""
    engine.warm_up()
    states = [work.state for work in engine.idle_work]
    if states[0] == "failed":
        pytest.skip("no compiled forward here")
    assert set(states) == {"ready"}
