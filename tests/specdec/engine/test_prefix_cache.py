"""The prefix cache in the engine, over a target whose K/V are real: it saves work and changes no token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from specdec.core.error_codes import NO_TOKEN_ALLOWED, NON_FINITE_LOGITS
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.plan import ErrorCode, TargetStep
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget
from specdec.kv.caching_allocator import CachingBlockAllocator
from specdec.kv.prefix_cache import PrefixCache, PrefixTrail
from tests.pairwise import mostly_full
from tests.specdec.engine.toy_engines import (
    MODEL,
    VOCAB_SIZE,
    OracleProposer,
    expected_tokens,
    make_proposer,
    request,
    run,
    tokens_of,
    toy_engine,
)

SHORT = SamplingParams(temperature=0.0, max_tokens=6)
SYSTEM = tuple(random.Random(7).choices(range(VOCAB_SIZE), k=24))


class WatchedTarget(ToyTarget):
    """Counts the rows that it is given, and notes which positions were computed for whom."""

    def __init__(self, **options: int) -> None:
        super().__init__(MODEL, **options)  # type: ignore[arg-type]
        self.num_rows = 0
        self.starts: dict[RequestId, int] = {}
        self.generation = 0
        self.failure_code: ErrorCode | None = None
        """Of `failing_requests`."""

    def submit(self, step: TargetStep) -> None:
        for work in step.works:
            self.num_rows += len(work.token_ids)
            self.starts.setdefault(work.request_id, work.start)
        super().submit(step)
        result = self._results.pop()
        results = tuple(
            one if one.error is None else msgspec.structs.replace(one, error_code=self.failure_code)
            for one in result.results
        )
        self._results.append(msgspec.structs.replace(result, results=results, kv_generation=self.generation))


def stats_of(outputs: Sequence[RequestOutput]) -> int:
    assert outputs[-1].stats is not None
    return outputs[-1].stats.num_cached_prompt_tokens


def test_a_second_request_computes_only_what_is_new() -> None:
    target = WatchedTarget()
    with toy_engine(target=target) as engine:
        run(engine, request("a", (*SYSTEM, 1), SHORT))
        assert target.num_rows == 25 + 5
        outputs = run(engine, one := request("b", (*SYSTEM, 2, 3), SHORT))["b"]
        assert tokens_of(outputs) == expected_tokens(one)
        assert target.num_rows == 30 + 2 + 5
        assert stats_of(outputs) == 24
        metrics = engine.metrics()
        assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (25 + 26, 24)
        assert engine.metrics().kv_cache_usage == 0.0


def test_generated_tokens_are_found_too() -> None:
    """The next turn of a conversation: prompt, answer, and something new."""
    target = WatchedTarget()
    with toy_engine(make_proposer("oracle"), target=target) as engine:
        first = request("a", SYSTEM, SamplingParams(temperature=1.0, max_tokens=17))
        answer = tokens_of(run(engine, first)["a"])
        outputs = run(engine, one := request("b", (*SYSTEM, *answer, 4, 5), SHORT))["b"]
        assert tokens_of(outputs) == expected_tokens(one)
        assert stats_of(outputs) == 40, "24 + 17 tokens, the last of which was never read"


def test_tokens_behind_the_end_are_never_found() -> None:
    """Accepted drafts behind max_tokens were computed, but were not part of the stream."""
    with toy_engine(
        make_proposer("oracle"), num_draft_tokens=8, target=WatchedTarget(block_size=2)
    ) as engine:
        first = request("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=5))
        tokens = expected_tokens(msgspec.structs.replace(first, params=SHORT))
        run(engine, first)
        outputs = run(engine, request("b", (1, 2, 3, *tokens, 1, 1), SHORT))["b"]
        assert stats_of(outputs) == 6


def test_rejected_drafts_are_never_found() -> None:
    with toy_engine(
        OracleProposer(wrong_from=1), num_draft_tokens=6, target=WatchedTarget(block_size=1)
    ) as engine:
        prompt = (1, 2, 3)
        first = request("a", prompt, SamplingParams(temperature=0.0, max_tokens=4))
        right = expected_tokens(first)
        run(engine, first)
        wrong = (right[1] + 1) % VOCAB_SIZE  # what was drafted and rejected behind the first token
        outputs = run(engine, one := request("b", (*prompt, right[0], wrong, 5), SHORT))["b"]
        assert tokens_of(outputs) == expected_tokens(one)
        assert stats_of(outputs) == 4


def test_many_that_come_at_once_with_one_beginning_pay_for_it_once() -> None:
    target = WatchedTarget()
    with toy_engine(target=target, max_num_batched_tokens=16) as engine:
        requests = [request(f"r{n}", (*SYSTEM, n, n + 1), SHORT) for n in range(6)]
        outputs = run(engine, *requests)
        for one in requests:
            assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
        assert target.num_rows == 24 + 6 * (2 + 5)
        assert engine.metrics().prefix_cache_hits == 5 * 24


def test_one_that_begins_otherwise_does_not_wait_for_them() -> None:
    target = WatchedTarget()
    with toy_engine(target=target, max_num_batched_tokens=32) as engine:
        requests = [request(name, (*SYSTEM, 1), SHORT) for name in "ab"]
        for one in (*requests, request("c", (5, 6), SHORT)):
            engine.add_request(one)
        for expected in ({"a", "c"}, {"a", "b", "c"}):
            assert {output.request_id for output in engine.step()} == expected


def test_salted_requests_share_with_their_own_kind_only() -> None:
    with toy_engine(target=WatchedTarget()) as engine:
        cached = []
        for number, salt in enumerate((None, "x", "x", "y", None)):
            one = msgspec.structs.replace(request(f"r{number}", (*SYSTEM, 1), SHORT), cache_salt=salt)
            outputs = run(engine, one)[one.request_id]
            assert tokens_of(outputs) == expected_tokens(one)
            cached.append(stats_of(outputs))
        assert cached == [0, 0, 24, 0, 24]


def test_switched_off_it_remembers_nothing() -> None:
    target = WatchedTarget()
    with toy_engine(target=target, prefix_caching=False) as engine:
        for name in "ab":
            assert stats_of(run(engine, request(name, (*SYSTEM, 1), SHORT))[name]) == 0
        assert target.num_rows == 2 * 30
        assert engine.metrics().prefix_cache_queries == 0


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    target = WatchedTarget(num_blocks=14)
    with toy_engine(target=target) as engine:
        params = SamplingParams(temperature=1.0, max_tokens=20)
        requests = [request(name, SYSTEM[:12] if name == "a" else SYSTEM[8:20], params) for name in "ab"]
        outputs = run(engine, *requests)
        for one in requests:
            assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
        metrics = engine.metrics()
        assert metrics.num_preemptions > 0
        uncached = sum(12 + 19 for _ in requests)
        assert target.num_rows == uncached + metrics.num_recomputed_tokens
        assert metrics.num_recomputed_tokens < 19, "most of it was still there"


def test_blocks_of_a_request_that_failed_are_not_used() -> None:
    target = WatchedTarget()
    target.failing_requests.add(RequestId("bad"))
    with toy_engine(target=target, max_num_batched_tokens=8) as engine:
        assert run(engine, request("bad", (*SYSTEM, 1), SHORT))["bad"][-1].error is not None
        assert stats_of(run(engine, request("b", (*SYSTEM, 1), SHORT))["b"]) == 0


@pytest.mark.parametrize(
    ("code", "num_found"), [(NON_FINITE_LOGITS, 0), (None, 0), (NO_TOKEN_ALLOWED, 24)], ids=str
)
def test_blocks_that_others_share_are_lost_only_where_they_may_be_wrong(
    code: ErrorCode | None, num_found: int
) -> None:
    """Whoever asks for the impossible does not take a prompt from all that begin alike."""
    target = WatchedTarget()
    target.failing_requests.add(RequestId("bad"))
    target.failure_code = code
    with toy_engine(target=target) as engine:
        run(engine, request("a", (*SYSTEM, 1), SHORT))
        assert run(engine, request("bad", (*SYSTEM, 2), SHORT))["bad"][-1].error is not None
        assert stats_of(run(engine, request("c", (*SYSTEM, 3), SHORT))["c"]) == num_found


def test_nothing_computed_before_the_forward_changed_is_used_after_it() -> None:
    target = WatchedTarget()
    with toy_engine(target=target) as engine:
        run(engine, request("a", (*SYSTEM, 1), SHORT))
        engine.add_request(request("across", (1, *SYSTEM), SHORT))
        engine.step()
        target.generation = 1
        run(engine)
        for name, tokens, expected in (("b", (*SYSTEM, 2), 0), ("c", (1, *SYSTEM, 2), 0)):
            assert stats_of(run(engine, request(name, tokens, SHORT))[name]) == expected
        assert stats_of(run(engine, request("d", (*SYSTEM, 3), SHORT))["d"]) == 24


def test_a_new_target_begins_with_an_empty_cache() -> None:
    """A replay after the loss of a worker: its K/V are gone, and so is what was known about them."""
    first = WatchedTarget()
    first.num_steps_until_lost = 3
    one = request("a", (*SYSTEM, 1), SamplingParams(temperature=1.0, max_tokens=12))
    with toy_engine(target=first) as engine:
        outputs = run(engine, one)["a"]
        assert outputs[-1].error_code == "target_lost"
    delivered = [token for output in outputs for token in output.token_ids]
    second = WatchedTarget()
    with toy_engine(target=second) as engine:
        replay = msgspec.structs.replace(one, delivered_token_ids=tuple(delivered))
        tokens = tokens_of(run(engine, replay)["a"])
        assert second.starts["a"] == 0  # type: ignore[index]
        assert (*delivered, *tokens) == tuple(expected_tokens(one))


class Workload:
    """Requests whose prompts branch off each other, submitted and aborted at random moments."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.seed = seed
        self.block_size = generator.choice([1, 2, 4])
        self.num_blocks = 1 + generator.choice([48, 64, 120]) // self.block_size
        self.proposer = generator.choice(["none", "ngram", "draft_model", "oracle"])
        self.num_draft_tokens = generator.randint(1, 6)
        self.max_num_seqs = generator.randint(1, 6)
        self.num_rows = generator.randint(self.max_num_seqs, 24)
        longest = (self.num_blocks - 1) * self.block_size
        stems = [generator.choices(range(VOCAB_SIZE), k=32) for _ in range(2)]
        self.requests: list[tuple[int, Request]] = []
        for number in range(24):
            stem = generator.choice(stems)[: generator.randint(0, 32)]
            prompt = [*stem, *generator.choices(range(VOCAB_SIZE), k=generator.randint(1, 4))]
            room = longest - len(prompt)
            params = SamplingParams(
                temperature=generator.choice([0.0, 1.0]), max_tokens=generator.randint(1, min(room, 24))
            )
            arrival = generator.randint(0, 30)
            one = request(f"r{number}", prompt, params, seed=number, priority=generator.choice([-1, 0, 0, 1]))
            self.requests.append((arrival, one))

    def engine(self, *, prefix_caching: bool = True) -> Engine:
        return toy_engine(
            make_proposer(self.proposer),
            target=ToyTarget(MODEL, num_blocks=self.num_blocks, block_size=self.block_size),
            num_draft_tokens=self.num_draft_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.num_rows,
            prefix_caching=prefix_caching,
        )

    def streams(self, engine: Engine) -> dict[str, list[int]]:
        outputs: dict[str, list[RequestOutput]] = {one.request_id: [] for _, one in self.requests}
        pending = sorted(self.requests, key=lambda pair: pair[0])
        step = 0
        while engine.has_work or pending:
            while pending and pending[0][0] <= step:
                engine.add_request(pending.pop(0)[1])
            for output in engine.step():
                outputs[output.request_id].append(output)
            engine.check_integrity()
            step += 1
        return {name: tokens_of(its) for name, its in outputs.items()}


@pytest.mark.parametrize("seed", mostly_full(range(40), range(12)))
def test_a_hit_never_changes_a_token(seed: int) -> None:
    """Shared beginnings, preemption, chunks, speculation at random: with the cache, without, by the model."""
    workload = Workload(seed)
    with workload.engine() as engine, workload.engine(prefix_caching=False) as plain:
        streams = workload.streams(engine)
        assert streams == workload.streams(plain)
        assert engine.metrics().prefix_cache_hits > 0
    for _, one in workload.requests:
        assert streams[one.request_id] == expected_tokens(one)


def check_all() -> None:
    for seed in range(40):
        test_a_hit_never_changes_a_token(seed)


def test_the_workloads_preempt_and_speculate() -> None:
    """What the test above is about does happen in it."""
    num_preemptions = num_accepted = 0
    for seed in range(40):
        workload = Workload(seed)
        with workload.engine() as engine:
            workload.streams(engine)
            num_preemptions += engine.metrics().num_preemptions
            num_accepted += engine.metrics().num_accepted_tokens
    assert num_preemptions > 20
    assert num_accepted > 200


def test_blocks_named_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: names for blocks whose last slot is not computed yet."""
    offer = PrefixCache.offer

    def too_early(self, trail, table, token_ids, num_computed):  # type: ignore[no-untyped-def]
        offer(self, trail, table, token_ids, min(len(token_ids), num_computed + 1))

    monkeypatch.setattr(PrefixCache, "offer", too_early)
    with pytest.raises(AssertionError):
        check_all()


def test_colliding_names_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: names that say the tokens of one block only."""

    def of_block_only(self, token_ids, num_tokens, block_size):  # type: ignore[no-untyped-def]
        ends = range(block_size, num_tokens + 1, block_size)
        return [bytes(token_ids[end - block_size : end]) for end in ends]

    monkeypatch.setattr(PrefixTrail, "keys", of_block_only)
    with pytest.raises(AssertionError):
        check_all()


def test_evicted_blocks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a block that is handed out again keeps its name."""
    allocate = CachingBlockAllocator.allocate

    def keeps_names(self, num_blocks):  # type: ignore[no-untyped-def]
        names = dict(self._block_by_key)
        blocks = allocate(self, num_blocks)
        self._block_by_key.update(names)
        self._key_by_block.update({block: key for key, block in names.items()})
        return blocks

    monkeypatch.setattr(CachingBlockAllocator, "allocate", keeps_names)
    with pytest.raises((AssertionError, KeyError)):
        check_all()
