"""A drafter that lives on the target's hidden states, behind a bad network: tokens are those of the model."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.engine.draft_pool.hidden_inbox import HiddenInbox
from specdec.engine.draft_pool.hidden_routing import HiddenRouting
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.engine import Engine
from specdec.engine.targets.hidden_sender import HiddenSender
from specdec.engine.targets.remote_target import RemoteTarget
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.targets.toy_target import ToyTokenizer
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.memory import Faults, MemoryNetwork
from tests.pairwise import mostly_full
from tests.specdec.engine.hidden_toy import CAPABILITIES, LAYERS, WIDTH, HiddenToyDrafter, HiddenToyTarget
from tests.specdec.engine.random_schedules import random_faults
from tests.specdec.engine.remote_cluster import PATIENT, TARGET, VOCAB, a_request, expected

COORDINATOR = PeerId("coordinator-draft")


class HiddenCluster:
    """One coordinator's engine, a target worker with taps, draft workers with inboxes, a bad network."""

    def __init__(self, faults: Faults, seed: int = 0, *, num_drafters: int = 1, num_blocks: int = 64) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(seed=seed, clock=self.clock)
        self.inboxes: dict[PeerId, HiddenInbox] = {}
        self.addresses: dict[PeerId, PeerAddress] = {}
        self.num_started = 0
        self.target = HiddenToyTarget(num_blocks)
        worker, coordinator = self.network.open(TARGET), self.network.open(PeerId("coordinator"))
        worker.admit([coordinator.address])
        tensors = self.network.open(PeerId("target-tensors"))
        self.tensor_address = tensors.address
        self.sender = HiddenSender(tensors, self.target)
        server = TargetServer(worker, self.target, hidden=self.sender)
        self.serve(TARGET, server.step)
        self.remote = RemoteTarget(
            coordinator, worker.address, incarnation=1, times=PATIENT, clock=self.clock
        )
        self.routing = HiddenRouting(self.network.open(COORDINATOR), self.remote.send_hidden)
        self.proposer = RemoteProposer(
            self.routing, capabilities=CAPABILITIES, vocab_size=VOCAB, clock=self.clock
        )
        for _ in range(num_drafters):
            self.start_drafter()
        self.network.faults = faults
        self.engine = Engine.from_parts(
            target=self.remote,
            proposer=self.proposer,
            tokenizer=ToyTokenizer.of_letters(VOCAB),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
            clock=self.clock,
        )

    def start_drafter(self) -> PeerId:
        self.num_started += 1
        name = PeerId(f"draft-{self.num_started}")
        channel = self.network.open(name)
        channel.admit([self.routing.address])
        inbox = self.inboxes[name] = HiddenInbox(
            self.network.open(PeerId(f"{name}-tensors")), layers=LAYERS, width=WIDTH, clock=self.clock
        )
        inbox.admit([(self.tensor_address, COORDINATOR)])
        server = DraftServer(channel, HiddenToyDrafter(inbox), hidden=inbox, clock=self.clock)
        self.serve(name, server.step)
        self.addresses[name] = channel.address
        self.tell_members()
        return name

    def serve(self, name: PeerId, step: Callable[[float], bool]) -> None:
        def serve_all() -> None:
            while step(0):  # while it waited for tensors, something else may have come
                pass

        self.network.serve(name, serve_all)

    def stop_drafter(self, name: PeerId, *, told: bool) -> None:
        self.network.kill(name)
        self.network.kill(self.inboxes.pop(name).address.peer_id)
        del self.addresses[name]
        if told:
            self.tell_members()

    def tell_members(self) -> None:
        self.proposer.set_workers(list(self.addresses.values()))
        self.routing.set_inboxes({name: inbox.address for name, inbox in self.inboxes.items()})

    def step(self, tokens: dict[RequestId, list[int]]) -> None:
        for output in self.engine.step():
            assert output.error is None, output.error
            assert output.first_index == len(tokens[output.request_id])
            tokens[output.request_id].extend(output.token_ids)
        self.engine.check_integrity()


def run_to_the_end(cluster: HiddenCluster, rng: random.Random, *, is_adverse: bool) -> float:
    """Run five requests; return which part of what was drafted was accepted."""
    requests = [a_request(f"r{index}", rng) for index in range(5)]
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or cluster.engine.has_work:
        if waiting and (rng.random() < 0.3 or not cluster.engine.has_work):
            cluster.engine.add_request(waiting.pop())
        fate = rng.random() if is_adverse else 1.0
        if fate < 0.05 and cluster.inboxes:
            cluster.stop_drafter(rng.choice(list(cluster.inboxes)), told=rng.random() < 0.5)
        elif fate < 0.1:
            cluster.start_drafter()
        elif fate < 0.15:
            cluster.network.faults = random_faults(rng)
        cluster.step(tokens)
    for request in requests:
        assert tokens[request.request_id] == expected(request), request
    metrics = cluster.engine.metrics()
    return metrics.num_accepted_tokens / max(1, metrics.num_draft_tokens)


def run_random_schedule(seed: int) -> HiddenCluster:
    rng = random.Random(seed)
    cluster = HiddenCluster(
        random_faults(rng), seed, num_drafters=rng.randint(0, 3), num_blocks=rng.choice([14, 24, 64])
    )
    run_to_the_end(cluster, rng, is_adverse=True)
    return cluster


def test_with_hidden_states_every_draft_is_right() -> None:
    cluster = HiddenCluster(Faults(delay_s=(0.0, 0.001)))
    assert run_to_the_end(cluster, random.Random(1), is_adverse=False) == 1.0
    assert cluster.engine.metrics().num_accepted_tokens > 30
    (inbox,) = cluster.inboxes.values()
    assert inbox.counters["hidden_rows_received"] > 50
    assert not any(count for name, count in inbox.counters.items() if name.endswith("_dropped"))


def test_with_other_hidden_states_drafts_are_wrong_and_tokens_right() -> None:
    """Negative control: the drafter has nothing else to go by."""
    cluster = HiddenCluster(Faults())
    cluster.target.is_corrupt = True
    assert run_to_the_end(cluster, random.Random(1), is_adverse=False) < 0.8


def test_rows_that_are_no_longer_kept_cost_nothing_but_themselves() -> None:
    cluster = HiddenCluster(Faults())
    cluster.target.max_kept = 6
    assert run_to_the_end(cluster, random.Random(2), is_adverse=False) == 1.0
    assert cluster.sender.counters["hidden_rows_missing"] > 0


def test_what_is_dropped_of_hidden_states_is_exported() -> None:
    cluster = HiddenCluster(Faults())
    run_to_the_end(cluster, random.Random(1), is_adverse=False)
    (inbox,) = (one.address.peer_id for one in cluster.inboxes.values())
    at_target = cluster.tensor_address.peer_id
    for _ in range(2):
        cluster.network._channels[at_target].inject(inbox, b"rubbish")
    cluster.network._channels[inbox].inject(at_target, b"rubbish")
    run_to_the_end(cluster, random.Random(2), is_adverse=False)
    exported = {**cluster.proposer.counters, **cluster.remote.messages_dropped}
    assert {series: count for series, count in exported.items() if 'channel="hidden"' in series} == {
        'worker_messages_dropped{channel="hidden",dropped_by="draft_worker",reason="malformed"}': 2,
        'worker_messages_dropped{channel="hidden",dropped_by="target_worker",reason="malformed"}': 1,
    }


@pytest.mark.parametrize("block", mostly_full(range(4), range(2)))
def test_random_schedules_never_change_a_token_and_leave_nothing(block: int) -> None:
    num_accepted = 0
    for seed in range(25 * block, 25 * block + 25):
        cluster = run_random_schedule(seed)
        num_accepted += cluster.engine.metrics().num_accepted_tokens
        assert_nothing_is_left(cluster)
    assert num_accepted > 100, "the drafters hardly ever helped: these schedules prove nothing"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("block", range(4, 64))
def test_many_more_random_schedules(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        assert_nothing_is_left(run_random_schedule(seed))


def assert_nothing_is_left(cluster: HiddenCluster) -> None:
    """Once what was in flight has landed and a last request without faults has gone through."""
    cluster.network.faults = Faults()
    cluster.network.run_for(10.0)
    request = a_request("last", random.Random(0))
    tokens: dict[RequestId, list[int]] = {request.request_id: []}
    cluster.engine.add_request(request)
    while cluster.engine.has_work:
        cluster.step(tokens)
    assert tokens["last"] == expected(request)
    assert cluster.sender.num_waiting == 0
    assert set(cluster.target.kept) <= {RequestId("last")}
