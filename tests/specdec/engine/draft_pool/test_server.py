"""A draft worker that looks ahead: for several coordinators at once, and within bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch

from specdec.core.distributions import TokenDistribution
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.draft_pool.message_lengths import divided_answers
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.kv.selection import KvSelectionConfig
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_window import DraftWindow
from specdec.proposers.ngram import NgramProposer
from specdec.sampling.sampler import Sampler
from specdec.transport.base import PeerId
from specdec.transport.messages import DraftBranch, DraftOpening, ProposeAnswer, Release, encode
from tests.specdec.engine.draft_pool.server_bench import (
    MODEL,
    PARAMS,
    TOKENS,
    VOCAB,
    Bench,
    draft_model,
    entry,
    expected,
)
from tests.specdec.proposers.contract import FrozenView


def test_branches_of_all_coordinators_and_ordinary_drafts_are_made_together() -> None:
    runner = ToyRunner(MODEL)
    bench = Bench(draft_model(runner))
    ahead = [entry("a", pending=(9, 8), fan_out=(2, 1, 2)), entry("a", (4, 3, 2), fan_out=(3,))]
    bench.send(0, ahead[0], entry("plain"))
    bench.send(1, ahead[1])
    (first, plain), (second,) = bench.serve()
    assert runner.num_forwards == 1 + 3
    assert first.branches == expected(ahead[0])
    assert len(first.branches) == 5
    assert second.branches == expected(ahead[1], (4, 3, 2))
    assert (first.token_ids, first.noise_stream) == ((), "target")
    assert (first.committed_len, first.prefix_hash) == (ahead[0].committed_len, ahead[0].prefix_hash)
    one = FrozenView(RequestId("x"), TOKENS, PARAMS, 7)
    assert plain.token_ids == draft_model().propose([one], {one.request_id: 3})[one.request_id].token_ids
    assert plain.branches == ()
    assert bench.server.counters["ahead_entries"] == 2
    assert bench.server.counters["entries"] == 3
    assert bench.server.counters["rounds"] == 1


def test_a_hit_goes_on_from_the_branch() -> None:
    proposer = draft_model()
    bench = Bench(proposer)
    bench.send(0, entry("a", fan_out=(2,)))
    branch = bench.serve()[0][0].branches[1]
    token_id = next(t for t in range(VOCAB) if entry("a", (*TOKENS, t)).prefix_hash == branch.prefix_hash)
    tokens = (*TOKENS, token_id)
    asked = entry("a", tokens, base_len=len(TOKENS), pending=branch.token_ids, fan_out=(1, 1, 1, 1))
    bench.send(0, asked)
    assert bench.serve()[0][0].branches == expected(asked, tokens)
    assert bench.server.counters["draft_ahead_branches"] == 6
    assert bench.server.counters["draft_ahead_branches_true"] == 1
    bench.channels[0].send(PeerId("draft"), Release(((RequestId("a"), 1),)))
    bench.serve()
    assert proposer.sequences.num_held_blocks == 0


@pytest.mark.parametrize(
    ("pending", "fan_out"),
    [
        ((9,), (1,)),
        ((), ()),
        ((9,), (1, -1)),
        ((-9,), (1, 1)),
        ((), (257,)),
        ((9,) * 65, (1,) * 66),
    ],
    ids=["too short", "empty", "less than none", "no token", "too many branches", "too long a chain"],
)
def test_what_makes_no_sense_is_dropped_and_counted(
    pending: tuple[int, ...], fan_out: tuple[int, ...]
) -> None:
    bench = Bench(draft_model())
    bench.send(0, entry("bad", pending=pending, fan_out=fan_out), entry("good", fan_out=(1,)))
    ((answer,), _) = bench.serve()
    assert answer.request_id == "good"
    assert bench.server.counters["invalid_entries"] == 1


BEYOND = 1 << 63


@pytest.mark.parametrize(
    ("seed", "fields"),
    [
        (-1, {}),
        (-(1 << 63), {}),
        (7, {"logit_bias": ((BEYOND, 1.0),)}),
        (7, {"logit_bias": ((1 << 31, 1.0),)}),
        (7, {"logit_bias": ((-1, 1.0),)}),
        (7, {"allowed_token_ids": (BEYOND,)}),
        (7, {"bad_words": ((1, BEYOND),)}),
        (7, {"stop_token_ids": (BEYOND,), "min_tokens": 2}),
        (7, {"temperature": -1.0}),
    ],
)
def test_an_opening_that_makes_no_sense_is_dropped_and_counted(seed: int, fields: dict[str, Any]) -> None:
    bench = Bench(draft_model())
    opening = DraftOpening(SamplingParams(**fields), seed, 1)
    largest = DraftOpening(SamplingParams(logit_bias=(((1 << 31) - 1, 1.0),)), (1 << 64) - 1, 1)
    bench.send(
        0,
        msgspec.structs.replace(entry("bad"), opening=opening),
        msgspec.structs.replace(entry("good"), opening=largest),
    )
    ((answer,), _) = bench.serve()
    assert answer.request_id == "good"
    assert len(answer.token_ids) == 3
    assert bench.server.counters["invalid_entries"] == 1


@pytest.mark.parametrize("budget", [1 << 31, 1 << 32, (1 << 64) - 1])
def test_a_kv_budget_beyond_all_texts_keeps_everything(budget: int) -> None:
    """Doors cut what clients ask for to 2^32 tokens; configurations may say any number."""
    config = KvSelectionConfig(policy="streaming", budget=12)
    tokens = tuple(token % VOCAB for token in range(50))
    held: list[int] = []
    for its_budget in (budget, 1000, 0):
        window = DraftWindow(selection=config.make(4), num_piece_tokens=8, num_draft_tokens=7)
        proposer = DraftModelProposer(
            ToyRunner(MODEL),
            DraftChoice(sampler=Sampler(), vocab_size=VOCAB),
            reading=DraftReading(window=window),
        )
        bench = Bench(proposer)
        bench.send(0, msgspec.structs.replace(entry("a", tokens), kv_budget=its_budget))
        ((answer,), _) = bench.serve()
        assert len(answer.token_ids) == 3
        assert bench.server.counters["invalid_entries"] == 0
        held.append(proposer.sequences.num_held_blocks)
    assert held[0] == held[1] > held[2]


def test_a_proposer_that_cannot_look_ahead_says_nothing() -> None:
    bench = Bench(NgramProposer(prompt_lookup_min=1, prompt_lookup_max=2))
    tokens = (1, 2, 3, 1, 2)
    bench.send(0, entry("ahead", tokens, fan_out=(1,)), entry("plain", tokens))
    ((ahead, plain), _) = bench.serve()
    assert (ahead.token_ids, ahead.branches) == ((), ())
    assert plain.token_ids == (3, 1, 2)
    assert bench.server.counters["unsupported_entries"] == 1
    assert bench.server.counters["ahead_entries"] == 0


def test_a_sequence_that_is_not_known_is_asked_for() -> None:
    bench = Bench(draft_model())
    bench.send(0, entry("a", base_len=3, fan_out=(1,)))
    ((answer,), _) = bench.serve()
    assert answer.needs_start
    assert answer.branches == ()


def test_who_waits_for_a_sequence_that_gives_way_is_told_so() -> None:
    """A whole round waits for each of its drafts: up to its deadline for one that nobody will make."""
    bench = Bench(draft_model(), shares=DraftShareConfig(max_sequences=3))
    asked = entry("a")
    bench.send(0, asked, entry("b"), entry("c"))
    bench.network.run_for(0.01)
    bench.send(1, entry("other"))
    first, second = bench.serve()
    assert {answer.request_id: answer.is_full for answer in first} == {"a": True, "b": False, "c": False}
    (refused,) = [answer for answer in first if answer.is_full]
    assert (refused.committed_len, refused.prefix_hash) == (asked.committed_len, asked.prefix_hash)
    assert refused.token_ids == ()
    assert [answer.token_ids != () for answer in second] == [True]
    assert bench.server.counters["displaced_sequences"] == 1
    assert bench.server.num_sequences == 3


def test_who_is_refused_is_told_whether_it_is_for_want_of_a_place_or_of_memory() -> None:
    for its_entry, shares, num_blocks, lacks_memory in (
        (entry("late"), DraftShareConfig(max_sequences=1), 256, False),
        (entry("late", TOKENS * 4), DraftShareConfig(max_sequences=9), 8, True),
        (entry("late", TOKENS * 4), None, 8, True),
    ):
        bench = Bench(draft_model(ToyRunner(MODEL, num_blocks=num_blocks)), 1, shares=shares)
        bench.send(0, entry("first"))
        bench.serve()
        bench.send(0, its_entry)
        ((answer,),) = bench.serve()
        assert (answer.request_id, answer.is_full) == ("late", True)
        assert answer.lacks_memory == lacks_memory
        assert bench.server.counters["refused_entries"] == 1


def test_one_that_has_outgrown_its_share_is_told_so() -> None:
    """Both are let in before either is read."""
    bench = Bench(draft_model(ToyRunner(MODEL, num_blocks=8)), 1)
    bench.send(0, entry("a", TOKENS * 3), entry("b", TOKENS * 3))
    ((first, second),) = bench.serve()
    assert (first.is_full, first.lacks_memory) == (False, False)
    assert (second.is_full, second.lacks_memory) == (True, True)
    assert bench.server.counters["outgrown_sequences"] == 1


def test_nobody_looks_at_the_tokens_of_what_finds_no_place() -> None:
    """They may be as many as a text can have, and come again and again."""
    bench = Bench(draft_model(), shares=DraftShareConfig(max_sequences=2))
    senseless = msgspec.structs.replace(entry("late", (1, 2)), token_ids=(1, -2))
    bench.send(0, entry("first"), entry("second"))
    bench.serve()
    bench.send(0, senseless)
    ((answer,), _) = bench.serve()
    assert answer.is_full
    assert bench.server.counters["invalid_entries"] == 0
    bench.send(1, senseless)
    bench.serve()
    assert bench.server.counters["invalid_entries"] == 1, "it would have a place of its own"
    assert bench.server.counters["displaced_sequences"] == 0, "but nobody gives way to nonsense"
    assert bench.server.num_sequences == 2


def test_only_the_newest_wish_of_a_sequence_is_granted() -> None:
    bench = Bench(draft_model())
    bench.send(0, entry("a", fan_out=(2,)))
    bench.send(0, entry("a", (*TOKENS, 7), base_len=len(TOKENS), fan_out=(1,)))
    bench.send(0, entry("a", fan_out=(2,)))
    ((answer,), _) = bench.serve()
    assert answer.committed_len == len(TOKENS) + 1
    assert len(answer.branches) == 1
    assert bench.server.counters["stale_entries"] == 1


def test_what_is_to_be_done_does_not_wait_for_somebody_to_ask() -> None:
    bench = Bench(draft_model())
    done: list[str] = []
    bench.server.before_next(lambda: done.append("before a wait"))
    assert not bench.server.step(0)
    assert done == ["before a wait"]
    bench.network.schedule(1.0, lambda: bench.server.before_next(lambda: done.append("during one")))
    assert not bench.server.step(3600.0)
    assert bench.network.clock.now_s() < 10.0, "it was woken"
    assert not bench.server.step(0)
    assert done == ["before a wait", "during one"]


def test_who_is_gone_is_forgotten_though_nobody_says_anything() -> None:
    bench = Bench(draft_model())
    bench.send(0, entry("a"))
    bench.serve()
    assert bench.server.num_sequences == 1
    bench.network.schedule(1.0, lambda: bench.server.retain([PeerId("c1")]))
    assert not bench.server.step(3600.0)
    assert bench.network.clock.now_s() < 10.0, "it was woken"
    assert not bench.server.step(0)
    assert bench.server.num_sequences == 0


class Wide(NgramProposer):
    """Drafts tokens that come with rows as wide as those of large vocabularies."""

    capabilities = ProposerCapabilities(name="wide", sampled=True, noise_stream="draft", gives_q_rows=True)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        row = TokenDistribution(bytes(4 * 1000), bytes(4 * 1000))
        return {
            one.request_id: Proposal(
                request_id=one.request_id,
                committed_len=one.committed_len,
                prefix_hash=one.prefix_hash,
                token_ids=(1,) * k,
                noise_stream="draft",
                q_rows=(row,) * k,
                method="wide",
            )
            for one in sequences
            if (k := num_draft_tokens.get(one.request_id, 0)) > 0
        }


def test_answers_that_are_too_long_for_a_message_come_in_several() -> None:
    """One message too long would end the worker, and the next one that is asked the same."""
    most = 1 << 16
    bench = Bench(Wide(prompt_lookup_min=1, prompt_lookup_max=3), 1, max_message_bytes=most)
    lengths = {"one": 3, "two": 4, "three": 3, "far too long": 12, "none": 0}
    bench.send(0, *(entry(name, num_draft_tokens=k) for name, k in lengths.items()))
    (answers,) = bench.serve()
    found = {answer.request_id: len(answer.token_ids) for answer in answers}
    assert found == {**lengths, "far too long": 7}, "of 8 kB each"
    assert all(answer.noise_stream is None for answer in answers if not answer.token_ids)
    assert len(bench.replies) > 1
    assert {reply.round_id for reply in bench.replies} == {1}
    assert all(len(encode(reply)) <= most for reply in bench.replies)
    assert [reply.counts is not None for reply in bench.replies][1:] == [False] * (len(bench.replies) - 1)


def test_whether_a_token_stays_does_not_depend_on_what_it_is() -> None:
    """Rows behind a token are as wide as it makes them: ratio rules would sample something else."""
    wide, narrow = (TokenDistribution(bytes(4 * n), bytes(4 * n)) for n in (10_000, 2))
    asked = entry("one")
    answer = ProposeAnswer(asked.request_id, 1, asked.committed_len, asked.prefix_hash, (), "draft")
    kept = []
    for token, behind in ((0, wide), (1, narrow)):
        drafted = {"token_ids": (token, 5), "q_rows": (narrow, behind)}
        branches = (DraftBranch(1, 2, (token, 5), (narrow, behind)), DraftBranch(1, 3, (9,), (narrow,)))
        for change in (drafted, {"branches": branches}):
            ((found,),) = divided_answers([msgspec.structs.replace(answer, **change)], 1 << 16)
            first = found if "token_ids" in change else found.branches[0]
            assert len(first.q_rows or ()) == len(first.token_ids)
            kept.append((first.token_ids[0], len(first.token_ids), len(found.branches)))
    assert kept == [(0, 1, 0), (0, 1, 2), (1, 2, 0), (1, 2, 2)]


def test_leases_end_though_nobody_says_anything_any_more() -> None:
    """Whoever waits for messages for ever is to wake for them, and sleeps on once nothing is held."""
    proposer = draft_model()
    bench = Bench(proposer, shares=DraftShareConfig(lease_s=60.0))
    bench.send(0, entry("lost"))
    bench.serve()
    assert bench.server.num_sequences == 1
    for _ in range(12):
        with contextlib.suppress(AssertionError):
            assert not bench.server.step(None)
    with pytest.raises(AssertionError, match="nothing can ever arrive"):
        bench.server.step(None)
    assert bench.server.num_sequences == 0
    assert 60.0 < bench.network.clock.now_s() < 80.0
    assert proposer.sequences.num_held_blocks == 0


def test_how_long_a_batch_is_at_work_can_be_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose thread hangs in it answers otherwise as if it served."""
    runner = ToyRunner(MODEL)
    bench = Bench(draft_model(runner))
    forward, seen = runner.forward, []

    def slow(*args: Any) -> torch.Tensor:
        bench.network.clock.advance(130.0)
        seen.append(bench.server.at_work_s)
        return forward(*args)

    monkeypatch.setattr(runner, "forward", slow)
    assert bench.server.at_work_s == 0.0
    bench.send(0, entry("a"))
    bench.serve()
    assert seen[0] == 130.0
    bench.network.clock.advance(130.0)
    assert bench.server.at_work_s == 0.0
