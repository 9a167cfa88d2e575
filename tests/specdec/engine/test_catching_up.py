"""Requests that went without drafts for a while, or moved: what was committed meanwhile has to be read."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from specdec.core.clock import MonotonicClock
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.patience import DraftDeadlineConfig, DraftPatience
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.rounds.timed_controller import TimedController
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.fallback import FallbackProposer
from specdec.proposers.ngram import NgramProposer
from specdec.sampling.sampler import Sampler
from specdec.scheduling.speculation.controller import FixedController, RoundObservation
from specdec.scheduling.state import Schedulable
from specdec.transport.memory import Faults
from tests.specdec.engine import toy_engines
from tests.specdec.engine.draft_pool.scripted_worker import scripted
from tests.specdec.engine.draft_pool.server_bench import Bench, entry
from tests.specdec.engine.draft_pool.wanted_drafts import FreeSequence, budgets, sequence, wish
from tests.specdec.engine.remote_cluster import OTHER_MODEL, VOCAB, Cluster, a_request


def runner(num_blocks: int = 1024) -> ToyRunner:
    return ToyRunner(OTHER_MODEL, num_blocks=num_blocks, max_model_len=2048)


def cluster_of(max_read_tokens: int) -> Cluster:
    def make_drafter() -> DraftModelProposer:
        return DraftModelProposer(
            runner(),
            DraftChoice(sampler=Sampler(), vocab_size=VOCAB),
            reading=DraftReading(max_read_tokens=max_read_tokens),
        )

    return Cluster(Faults(), make_drafter=make_drafter)


def off_for(one: FreeSequence, num_tokens: int) -> None:
    one.commit(tuple(index % VOCAB for index in range(num_tokens)))


def propose(proposer: RemoteProposer, *sequences: FreeSequence) -> Mapping[RequestId, Proposal]:
    return proposer.propose(sequences, budgets(*sequences))


@pytest.mark.parametrize(("requested", "num_asked"), [(None, 4), (0, 0)])
def test_draft_workers_read_on_while_nothing_is_drafted(requested: int | None, num_asked: int) -> None:
    cluster, worker, _ = scripted({"token_ids": ()})
    controller = cluster.engine._parts.controller
    assert isinstance(controller, FixedController)
    controller._num_draft_tokens = 0
    request = a_request("a", random.Random(1))
    params = msgspec.structs.replace(request.params, max_tokens=170)
    cluster.run([msgspec.structs.replace(request, params=params, num_draft_tokens=requested)])
    asked = [entry for message in worker.asked for entry in message.entries]
    assert all(entry.num_draft_tokens == 0 for entry in asked)
    assert [len(entry.token_ids) for entry in asked[1:]] == [48] * (num_asked - 1)
    assert len(asked) == num_asked


def test_who_has_half_as_many_unread_tokens_is_told_of_in_the_same_message() -> None:
    cluster, worker, _ = scripted({"token_ids": ()})
    controller = cluster.engine._parts.controller
    assert isinstance(controller, FixedController)
    controller._num_draft_tokens = 0
    one, other, late = (a_request(name, random.Random(1)) for name in ("a", "b", "c"))
    params = msgspec.structs.replace(one.params, max_tokens=200, temperature=0.0)
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in (one, other, late)}
    for request, num_later in ((one, 15), (other, 25), (late, 30)):
        cluster.engine.add_request(msgspec.structs.replace(request, params=params))
        for _ in range(num_later):
            cluster.step(tokens)
    told = [{entry.request_id: len(entry.token_ids) for entry in message.entries} for message in worker.asked]
    assert [list(names) for names in told] == [["a"], ["a", "b"]], "of the third there is little to tell yet"
    assert told[1]["a"] >= 48 > told[1]["b"] >= 24


def test_a_short_pause_costs_no_round() -> None:
    cluster = cluster_of(512)
    one = sequence("a")
    assert propose(cluster.proposer, one)
    off_for(one, 250)
    assert propose(cluster.proposer, one), "read and drafted for in one go"


def test_after_a_long_pause_it_is_read_while_the_request_and_the_others_go_on() -> None:
    cluster = cluster_of(64)
    one, other = sequence("a"), sequence("b")
    assert len(propose(cluster.proposer, one, other)) == 2
    off_for(one, 400)
    other.commit((1,))
    with_drafts: list[bool] = []
    while not with_drafts or not with_drafts[-1]:
        proposals = propose(cluster.proposer, one, other)
        assert other.request_id in proposals, "one that has read all does not wait for one that has not"
        with_drafts.append(one.request_id in proposals)
        assert len(with_drafts) < 20
        cluster.network.run_for(0.1)
        for each in (one, other):
            each.commit((2,))
    assert not with_drafts[0]
    assert cluster.proposer.counters.get("draft_deadline_misses", 0) == 0


def test_nor_does_looking_ahead_wait_for_it() -> None:
    cluster, worker, proposer = scripted({})
    one = sequence("a")
    assert propose(proposer, one)
    off_for(one, 300)
    proposer.look_ahead([wish(one)])
    cluster.network.run_for(0.1)
    asked = worker.asked[-1].entries[0]
    assert (asked.num_draft_tokens, asked.fan_out, len(asked.token_ids)) == (0, None, 300)


def test_a_worker_says_how_much_it_has_still_to_read() -> None:
    cluster, worker, proposer = scripted({"token_ids": (), "num_unread": 500})
    one = sequence("a", prompt=700)
    for _ in range(3):
        assert not propose(proposer, one)
        cluster.network.run_for(0.1)
        assert worker.asked[-1].entries[0].num_draft_tokens == 0
        one.commit((1,))
    assert not propose(proposer, one)
    cluster.network.run_for(0.1)
    one.commit((1,))
    worker.replies = [{"num_unread": 0}]
    assert not propose(proposer, one), "it has not answered yet"
    cluster.network.run_for(0.1)
    one.commit((1,))
    assert propose(proposer, one)
    assert worker.asked[-1].entries[0].num_draft_tokens == 3


def test_what_takes_longer_than_a_round_is_not_waited_for() -> None:
    patience = DraftPatience(DraftDeadlineConfig())
    assert patience.is_worth_waiting_for(250), "nothing is known"
    patience.measured(0.01, num_entries=1, num_new_tokens=3)
    patience.measured(0.02, num_entries=1, num_new_tokens=100)  # 0.1 ms a token
    assert patience.is_worth_waiting_for(100)
    assert not patience.is_worth_waiting_for(101)


def test_what_reading_takes_is_learnt_where_nothing_else_is_done() -> None:
    """By what was read, in the time that the worker says, whatever else it was asked to read with it."""
    cluster, worker, proposer = scripted({})
    one = sequence("a")
    assert propose(proposer, one)
    (link,) = proposer._registry.links.values()
    off_for(one, 400)
    worker.replies, worker.draft_s = [{"token_ids": (), "num_unread": 100}], 0.6
    assert not propose(proposer, one)
    cluster.network.run_for(0.1)
    one.commit((1,))
    assert not propose(proposer, one)
    assert link.patience._token_s == pytest.approx(0.6 / 300)


def test_of_many_those_with_least_to_read_are_waited_for() -> None:
    cluster = cluster_of(4096)
    sequences = [sequence(f"s{index}") for index in range(4)]
    assert len(propose(cluster.proposer, *sequences)) == 4
    (link,) = cluster.proposer._registry.links.values()
    link.patience = DraftPatience(DraftDeadlineConfig())
    link.patience.measured(0.01, num_entries=1, num_new_tokens=3)
    link.patience.measured(0.02, num_entries=1, num_new_tokens=100)
    for index, one in enumerate(sequences):
        off_for(one, 60 - 10 * index)
    waited_for = propose(cluster.proposer, *sequences).keys()
    assert waited_for == {RequestId("s2"), RequestId("s3")}


def test_a_long_text_is_read_in_turn_with_what_is_quick_and_answered_when_it_is_read() -> None:
    bench = Bench(
        DraftModelProposer(
            runner(),
            DraftChoice(sampler=Sampler(), vocab_size=VOCAB),
            reading=DraftReading(max_read_tokens=64),
        ),
        1,
    )
    long = tuple(index % VOCAB for index in range(200))
    bench.send(0, entry("long", long, num_draft_tokens=0))
    answers: list[list[str]] = []
    for number in range(4):
        quick = (1, *([2] * number))
        bench.send(0, entry(f"quick-{number}", quick))
        answers.append(sorted(answer.request_id for answer in bench.serve()[0]))
    # 199 tokens, 64 at a time.
    assert answers == [["quick-0"], ["quick-1"], ["quick-2"], ["long", "quick-3"]]


def test_a_text_that_finds_no_room_is_answered_at_once() -> None:
    bench = Bench(
        DraftModelProposer(runner(num_blocks=40), DraftChoice(sampler=Sampler(), vocab_size=VOCAB)), 1
    )
    texts = [tuple((index + first) % VOCAB for index in range(100)) for first in range(2)]
    bench.send(0, *(entry(f"s{first}", text, num_draft_tokens=0) for first, text in enumerate(texts)))
    assert sorted((answer.is_full, answer.num_unread) for answer in bench.serve()[0]) == [
        (False, 0),
        (True, 0),
    ]
    assert not bench.server.has_waiting


class _OffAtFirst(FixedController):
    """Drafts nothing for a while, and keeps what it is told of rounds with drafts."""

    def __init__(self, num_rounds_off: int) -> None:
        super().__init__(3)
        self._num_rounds_off = num_rounds_off
        self.heard: list[RoundObservation] = []

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> Sequence[int]:
        chosen = super().choose(decoding, elsewhere)
        self._num_rounds_off -= 1
        return chosen if self._num_rounds_off < 0 else [0] * len(chosen)

    def observe(self, observation: RoundObservation) -> None:
        if observation.budgets:
            self.heard.append(observation)


@pytest.mark.parametrize("stands_in", [False, True], ids=["alone", "with_a_lookup_behind_it"])
def test_a_controller_is_told_how_much_a_draft_model_had_to_read_first(stands_in: bool) -> None:
    drafting = ToyRunner(toy_engines.MODEL, num_blocks=256, max_model_len=512)
    drafter = DraftModelProposer(
        drafting,
        DraftChoice(sampler=Sampler(), vocab_size=toy_engines.VOCAB_SIZE),
        reading=DraftReading(max_read_tokens=64),
    )
    controller = _OffAtFirst(100)
    lookup = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)
    engine = toy_engines.toy_engine(FallbackProposer(drafter, lookup) if stands_in else drafter)
    engine._rounds._controller = TimedController(controller, MonotonicClock())
    params = SamplingParams(temperature=0.0, max_tokens=160)
    for name in ("a", "b"):
        engine.add_request(toy_engines.request(name, (1, 2, 3), params))
    while engine.has_work:
        engine.step()
    behind = [(observation.num_behind, observation.is_behind) for observation in controller.heard]
    # Each reads nearly a hundred tokens, 64 in a call: one after the other.
    assert behind[0][0] == pytest.approx(2 * 96, abs=8)
    assert [is_behind for _, is_behind in behind[:3]] == [True, True, True]
    assert not any(is_behind for _, is_behind in behind[4:])
