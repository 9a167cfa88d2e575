"""The engine over the toy target: ends of streams, failures, aborts, replay, counters."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

from specdec.core.clock import ManualClock
from specdec.core.errors import CapacityError, ChannelClosed, ChannelTimeout, InputError, LateError
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.proposal import Proposal
from specdec.core.request import LatencyTarget
from specdec.core.sampling_params import Grammar, SamplingDefaults, SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.engine import ABORTED, Engine
from specdec.engine.requests.live_request import LiveRequest
from specdec.engine.targets.toy_target import ToyTarget
from specdec.sampling.grammar import GrammarCompiler
from specdec.sampling.noise import choice_seed
from tests.specdec.engine.toy_engines import (
    GREEDY,
    MODEL,
    SAMPLED,
    VOCAB_SIZE,
    OracleProposer,
    expected_tokens,
    make_proposer,
    request,
    run,
    text_of,
    tokens_of,
    toy_engine,
)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


class TestEndsOfStreams:
    """With an oracle for a drafter the end always comes in the middle of accepted tokens."""

    PROMPT = (1, 2, 3)
    FULL = MODEL.continuation(PROMPT, SAMPLED, 5, 40)

    def outputs(self, params: SamplingParams, proposer: str = "oracle", **target: object):  # type: ignore[no-untyped-def]
        engine = toy_engine(
            make_proposer(proposer),
            target=ToyTarget(MODEL, **target),  # type: ignore[arg-type]
            num_draft_tokens=7,
        )
        outputs = run(engine, request("r", self.PROMPT, params))["r"]
        assert engine.metrics().generation_tokens == len(tokens_of(outputs))
        return outputs

    @pytest.mark.parametrize("proposer", ["none", "oracle"])
    @pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 20])
    def test_max_tokens(self, proposer: str, max_tokens: int) -> None:
        params = replace(SAMPLED, max_tokens=max_tokens, logprobs=1)
        outputs = self.outputs(params, proposer)
        assert tokens_of(outputs) == self.FULL[:max_tokens]
        assert outputs[-1].finish_reason == "length"
        assert text_of(outputs) == letters(self.FULL[:max_tokens])
        logprobs = [one for output in outputs for one in output.logprobs or ()]
        assert [one.token_id for one in logprobs] == self.FULL[:max_tokens]
        assert all(len(one.top) == 1 and one.logprob <= one.top[0][1] for one in logprobs)

    @pytest.mark.parametrize("proposer", ["none", "oracle"])
    def test_eos(self, proposer: str) -> None:
        eos = self.FULL[4]
        end = self.FULL.index(eos) + 1
        outputs = self.outputs(SAMPLED, proposer, eos_token_ids=(eos,))
        assert tokens_of(outputs) == self.FULL[:end]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
        assert text_of(outputs) == letters(self.FULL[: end - 1])

    def test_eos_may_be_ignored(self) -> None:
        params = replace(SAMPLED, ignore_eos=True)
        assert tokens_of(self.outputs(params, eos_token_ids=(self.FULL[4],))) == self.FULL[:20]

    @pytest.mark.parametrize("included", [False, True])
    def test_stop_token(self, included: bool) -> None:
        stop = self.FULL[5]
        end = self.FULL.index(stop) + 1
        params = replace(SAMPLED, stop_token_ids=(stop,), include_stop_str_in_output=included)
        outputs = self.outputs(params)
        assert tokens_of(outputs) == self.FULL[:end]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
        assert text_of(outputs) == letters(self.FULL[: end if included else end - 1])

    @pytest.mark.parametrize("included", [False, True])
    @pytest.mark.parametrize("proposer", ["none", "oracle"])
    def test_stop_string_over_several_tokens(self, proposer: str, included: bool) -> None:
        stop = letters(self.FULL[3:6])
        end = letters(self.FULL).index(stop) + 3
        params = replace(SAMPLED, stop=("never!", stop), include_stop_str_in_output=included)
        outputs = self.outputs(params, proposer)
        assert tokens_of(outputs) == self.FULL[:end]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
        assert text_of(outputs) == letters(self.FULL[: end if included else end - 3])

    def test_nothing_stops_before_min_tokens(self) -> None:
        token = self.FULL[2]
        again = next(index for index in range(6, 40) if self.FULL[index] == token)
        params = SamplingParams(stop=(letters([token]),), min_tokens=6, max_tokens=40)
        outputs = self.outputs(params)
        assert tokens_of(outputs) == self.FULL[: again + 1]
        assert text_of(outputs) == letters(self.FULL[:again])

    def test_held_back_text_is_released_at_the_end(self) -> None:
        params = replace(SAMPLED, stop=(letters(self.FULL[18:20]) + "!",))
        assert text_of(self.outputs(params)) == letters(self.FULL[:20])

    @pytest.mark.parametrize("proposer", ["none", "oracle"])
    def test_context_limit(self, proposer: str) -> None:
        outputs = self.outputs(SamplingParams(), proposer, max_model_len=13)
        assert tokens_of(outputs) == self.FULL[:10]
        assert outputs[-1].finish_reason == "length"

    def test_pool_is_a_context_limit_too(self) -> None:
        outputs = self.outputs(SamplingParams(), num_blocks=5, block_size=3, max_model_len=1000)
        assert len(tokens_of(outputs)) == 4 * 3 - len(self.PROMPT)


class TestBadProposals:
    """Whatever a drafter says, tokens are right; what cannot be used is counted."""

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"committed_len": 3}, "stale"),
            ({"prefix_hash": 1}, "stale"),
            ({"token_ids": (1,) * 9}, "malformed"),
            ({"token_ids": (VOCAB_SIZE,)}, "malformed"),
            ({"token_ids": (-1,)}, "malformed"),
            ({"parents": (-1, -1, 0, 1)}, "malformed"),
        ],
    )
    def test_unusable_proposal_is_dropped(self, change: dict[str, object], reason: str) -> None:
        class Bad(OracleProposer):
            def proposal(self, one: SequenceView, budget: int) -> Proposal:
                return replace(super().proposal(one, budget), **change)  # type: ignore[arg-type]

        engine = toy_engine(Bad())
        one = request(params=SAMPLED)
        assert tokens_of(run(engine, one)["r"]) == expected_tokens(one)
        metrics = engine.metrics()
        assert metrics.proposals_dropped[reason] > 10  # type: ignore[index]
        assert metrics.num_drafts == 0

    def test_unreachable_drafter_costs_only_speed(self) -> None:
        class Unreachable(OracleProposer):
            def propose(
                self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
            ) -> dict[RequestId, Proposal]:
                raise ChannelTimeout("nobody there")

        engine = toy_engine(Unreachable())
        one = request()
        assert tokens_of(run(engine, one)["r"]) == expected_tokens(one)
        assert engine.metrics().proposals_dropped["late"] > 10

    @pytest.mark.parametrize("wrong_from", [0, 1, 3, None])
    def test_accepted_as_far_as_right(self, wrong_from: int | None) -> None:
        engine = toy_engine(OracleProposer(wrong_from=wrong_from))
        one = request(params=SAMPLED)
        outputs = run(engine, one)["r"]
        assert tokens_of(outputs) == expected_tokens(one)
        metrics = engine.metrics()
        accepted = 4 if wrong_from is None else wrong_from
        assert len(outputs[1].token_ids) == 1 + accepted
        assert all(count > 0 for count in metrics.num_accepted_tokens_per_pos[:accepted])
        assert all(count == 0 for count in metrics.num_accepted_tokens_per_pos[accepted:])

    def test_no_speculation_for_those_who_refuse(self) -> None:
        engine = toy_engine(OracleProposer())
        run(engine, request("plain", num_draft_tokens=0), request("two", num_draft_tokens=2))
        assert engine.metrics().num_draft_tokens == sum(
            engine.metrics().num_accepted_tokens_per_pos[position] for position in range(2)
        )
        assert len(engine.metrics().num_accepted_tokens_per_pos) == 2


class TestFailures:
    def test_failing_sequence_ends_alone(self) -> None:
        target = ToyTarget(MODEL)
        engine = toy_engine(OracleProposer(), target=target)
        good, bad = request("good"), request("bad", (3, 4))
        engine.add_request(bad)
        engine.step()
        target.failing_requests.add(bad.request_id)
        outputs = run(engine, good)
        assert [output.error_code for output in outputs["bad"]] == ["non_finite_logits"]
        assert tokens_of(outputs["good"]) == expected_tokens(good)
        assert engine.metrics().finished == {"error": 1, "length": 1}

    def test_failure_is_reported_once_and_frees_blocks(self) -> None:
        target = ToyTarget(MODEL)
        engine = toy_engine(target=target)
        target.failing_requests.add(RequestId("r"))
        (output,) = run(engine, request())["r"]
        assert (output.finish_reason, output.error_code) == ("error", "non_finite_logits")
        assert output.error == "non-finite logits"
        assert engine.metrics().kv_cache_usage == 0.0

    def test_lost_target_ends_everyone_once(self) -> None:
        target = ToyTarget(MODEL)
        engine = toy_engine(target=target, max_num_seqs=2)
        requests = [request(name, params=SAMPLED) for name in "abc"]
        target.num_steps_until_lost = 5
        outputs = run(engine, *requests)
        for one in requests:
            partial = tokens_of(outputs[one.request_id])
            last = outputs[one.request_id][-1]
            assert (last.finish_reason, last.error_code) == ("error", "target_lost")
            assert partial == expected_tokens(one)[: len(partial)]
            replay = replace(one, delivered_token_ids=tuple(partial))
            rest = run(toy_engine(), replay)[one.request_id]
            assert partial + tokens_of(rest) == expected_tokens(one)
        assert engine.is_lost
        with pytest.raises(ChannelClosed):
            engine.add_request(request("d"))

    def test_what_the_next_step_may_work_on_is_known_before(self) -> None:
        engine = toy_engine(max_num_seqs=2)
        for name in "abcd":
            engine.add_request(request(name))
        assert engine.about_to_begin() == ["a", "b"]
        engine.step()
        assert engine.about_to_begin() == [], "there is no place for others"
        engine.add_request(request("urgent", priority=-1))
        assert engine.about_to_begin() == ["urgent"], "it takes the place of one that runs"
        engine.abort(RequestId("urgent"))
        engine.abort(RequestId("a"))
        assert engine.about_to_begin() == ["c"]

    @pytest.mark.parametrize("seed", range(5))
    def test_nobody_begins_of_whom_that_was_not_said(self, seed: int) -> None:
        rng = random.Random(seed)
        engine = toy_engine(max_num_seqs=3)
        said: set[str] = set()
        for number in range(40):
            prompt = tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)))
            engine.add_request(request(f"r{number}", prompt, priority=rng.randint(0, 2)))
            said.update(engine.about_to_begin())
            engine.step()
            assert engine._roster.running.keys() <= said
        assert len(said) < 40

    def test_closed_engine_takes_nothing(self) -> None:
        engine = toy_engine()
        with engine:
            pass
        engine.close()
        with pytest.raises(ChannelClosed):
            engine.add_request(request())


class TestAborts:
    def test_blocks_are_free_at_once(self) -> None:
        target = ToyTarget(MODEL)
        proposer = OracleProposer()
        engine = toy_engine(proposer, target=target)
        engine.add_request(request("a"))
        engine.add_request(request("b"))
        engine.step()
        engine.abort(RequestId("a"))
        engine.abort(RequestId("never seen"))
        engine.check_integrity()
        assert {live.request_id for live in engine._roster} == {"b"}
        assert proposer.released == ["a"]
        (aborted,) = [output for output in engine.step() if output.request_id == "a"]
        assert aborted.finish_reason == "abort"
        assert target.known_requests == {"b"}

    def test_waiting_request(self) -> None:
        engine = toy_engine(max_num_seqs=1)
        engine.add_request(request("a"))
        engine.add_request(request("b"))
        engine.step()
        engine.abort(RequestId("b"))
        assert [output.finish_reason for output in engine.step() if output.request_id == "b"] == ["abort"]

    def test_newer_epoch_replaces_an_older_one(self) -> None:
        engine = toy_engine()
        engine.add_request(request(epoch=1))
        engine.step()
        with pytest.raises(InputError, match="in use"):
            engine.add_request(request(epoch=1))
        engine.add_request(request(epoch=2))
        engine.abort(RequestId("r"), request(epoch=1).epoch)  # comes late, means the older one
        ends = {}
        while engine.has_work:
            ends.update(
                {output.epoch: output.finish_reason for output in engine.step() if output.finish_reason}
            )
        assert ends == {1: "abort", 2: "length"}


class TestReplay:
    @pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("proposer", ["none", "draft_model"])
    def test_every_cut_continues_the_stream(self, params: SamplingParams, proposer: str) -> None:
        stop = replace(params, stop=("zz",))
        one = request(params=stop)
        whole = expected_tokens(one)
        for cut in range(1, len(whole)):
            replay = replace(one, delivered_token_ids=tuple(whole[:cut]))
            outputs = run(toy_engine(make_proposer(proposer)), replay)["r"]
            assert outputs[0].first_index == cut
            assert whole[:cut] + tokens_of(outputs) == whole
            assert outputs[-1].num_generated_tokens == len(whole)
            assert text_of(outputs) == letters(whole[cut:])

    def test_text_goes_on_where_it_was(self) -> None:
        """A part of a stop string that was held back by the first engine is held back by the second."""
        whole = expected_tokens(request())
        stop = letters(whole[5:7]) + "!"
        one = request(params=replace(GREEDY, stop=(stop,)))
        first = toy_engine()
        first.add_request(one)
        outputs = []
        while sum(len(output.token_ids) for output in outputs) < 6:
            outputs += first.step()
        replay = replace(one, delivered_token_ids=tuple(whole[:6]))
        assert text_of(outputs) == letters(whole[:5])
        assert text_of(outputs) + text_of(run(toy_engine(), replay)["r"]) == letters(whole)

    def test_everything_was_delivered(self) -> None:
        whole = expected_tokens(request())
        (output,) = run(toy_engine(), request(delivered=whole))["r"]
        assert (output.finish_reason, output.token_ids) == ("length", ())
        assert output.num_generated_tokens == len(whole)


class TestAdmission:
    def test_prompt_must_fit(self) -> None:
        engine = toy_engine(target=ToyTarget(MODEL, num_blocks=4, block_size=4))
        with pytest.raises(InputError, match="at most 11 fit"):
            engine.add_request(request(prompt=(1,) * 12))
        outputs = run(engine, request(prompt=(1,) * 11))["r"]
        assert len(tokens_of(outputs)) == 1

    def test_full_queue(self) -> None:
        clock = ManualClock()
        engine = toy_engine(max_num_seqs=2, max_num_waiting=1, clock=clock)
        for name in "abc":
            engine.add_request(request(name))
        with pytest.raises(CapacityError) as caught:
            engine.add_request(request("d"))
        assert caught.value.retry_after_s >= 1.0
        while engine.has_work:
            clock.advance(1.0)
            engine.step()
        engine.add_request(request("d"))


class TestOverload:
    def test_an_owner_with_one_request_does_not_wait_behind_the_many_of_another(self) -> None:
        engine = toy_engine(max_num_seqs=1)
        for index in range(6):
            engine.add_request(request(f"many{index}", owner="a"))
        engine.add_request(request("single", owner="b"))
        ended = [output.request_id for output in outputs_of(engine) if output.finish_reason]
        assert ended.index("single") == 1, ended

    def test_an_owners_backlog_says_nothing_of_its_urgent_requests(self) -> None:
        engine = toy_engine(max_num_seqs=1)
        engine.add_request(request("running", owner="b"))
        for index in range(6):
            engine.add_request(request(f"bulk{index}", owner="a", priority=10))
        for index in range(4):
            engine.add_request(request(f"next{index}", owner="b"))
        engine.add_request(request("urgent", owner="a"))
        ended = [output.request_id for output in outputs_of(engine) if output.finish_reason]
        assert ended[:2] == ["running", "urgent"]

    @pytest.mark.parametrize("kind", ["complete", "grammar"])
    def test_an_owner_does_not_pay_for_what_never_ran(self, kind: str) -> None:
        """Replays that are complete already, and grammars that cannot be compiled."""
        params = replace(GREEDY, max_tokens=60)
        never = request("never", params=params, owner="a", delivered=(1,) * 60)
        if kind == "grammar":
            pytest.importorskip("llguidance")
            grammar = Grammar("regex", "a+")  # the tokenizer of toys knows none
            never = request("never", params=replace(params, grammar=grammar), owner="a")
        engine = toy_engine(target=ToyTarget(MODEL, eos_token_ids=(0,)), max_num_seqs=1)
        engine.add_request(request("first", params=params, owner="c"))
        engine.add_request(never)
        outputs = engine.step()
        while not any(output.request_id == "never" for output in outputs):
            outputs += engine.step()
        engine.add_request(request("second", owner="a"))
        engine.add_request(request("third", owner="b"))
        ended = [output.request_id for output in outputs + outputs_of(engine) if output.finish_reason]
        assert ended == ["never", "first", "second", "third"]

    def test_a_full_queue_gives_the_place_of_its_last_to_who_goes_before_it(self) -> None:
        engine = toy_engine(max_num_seqs=1, max_num_waiting=2)
        for index in range(3):
            engine.add_request(request(f"many{index}", owner="a"))
        engine.step()
        for more in (request("more", owner="a"), request("patient", owner="a", priority=1)):
            with pytest.raises(CapacityError):
                engine.add_request(more)
        engine.add_request(request("single", owner="b"))
        engine.add_request(request("urgent", owner="a", priority=-1))
        with pytest.raises(CapacityError):  # nobody is behind it who is not of its owner
            engine.add_request(request("another", owner="b"))
        last = {output.request_id: output for output in outputs_of(engine) if output.finish_reason}
        assert last["many2"].error_code == last["many1"].error_code == "displaced"
        assert last["many2"].retry_after_s is not None
        assert last["many2"].retry_after_s >= 1.0
        assert {last[name].finish_reason for name in ("many0", "single", "urgent")} == {"length"}
        snapshot = engine.metrics().snapshot()
        assert snapshot['requests_refused{reason="displaced"}'] == 2
        assert snapshot['requests_refused{reason="full"}'] == 3

    def test_a_full_queue_gives_the_place_of_a_grammar_that_has_not_begun(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those being compiled stay, and are what a step may be about."""
        pytest.importorskip("llguidance")
        never: Future[Any] = Future()
        monkeypatch.setattr(GrammarCompiler, "check_size", lambda self, grammar: None)
        monkeypatch.setattr(GrammarCompiler, "begin", lambda self, grammar, token_ids=(): never)
        engine = toy_engine(max_num_seqs=1, max_num_waiting=4)
        params = replace(GREEDY, grammar=Grammar("regex", "a+"))
        for index in range(5):
            engine.add_request(request(f"many{index}", owner="a", params=params))
        assert engine.about_to_begin() == ["many0", "many1", "many2", "many3"], (
            "two threads, two to go on with"
        )
        with pytest.raises(CapacityError):
            engine.add_request(request("more", owner="a"))
        engine.add_request(request("single", owner="b"))
        ended = {one.request_id: one.error_code for one in engine.step() if one.finish_reason == "error"}
        assert ended == {"many4": "displaced"}
        with pytest.raises(CapacityError):
            engine.add_request(request("another", owner="c"))
        engine.end_all(ABORTED)

    def test_who_has_begun_keeps_its_place_in_a_full_queue(self) -> None:
        engine = toy_engine(max_num_seqs=1, max_num_waiting=1)
        engine.add_request(request("begun", priority=1))
        engine.step()
        engine.add_request(request("urgent"))
        engine.step()  # it takes the place of the first, which waits now
        with pytest.raises(CapacityError):
            engine.add_request(request("more urgent", priority=-1))
        assert {o.finish_reason for o in outputs_of(engine) if o.finish_reason} == {"length"}

    def test_what_has_begun_elsewhere_is_taken_in_and_goes_before_newcomers(self) -> None:
        engine = toy_engine(max_num_seqs=1, max_num_waiting=1)
        engine.add_request(request("running"))
        engine.step()
        engine.add_request(request("newcomer"))
        whole = expected_tokens(request("begun"))
        engine.add_request(request("begun", delivered=whole[:3]))
        with pytest.raises(CapacityError):  # control
            engine.add_request(request("late"))
        outputs = outputs_of(engine)
        ended = [output.request_id for output in outputs if output.finish_reason]
        assert ended == ["running", "begun", "newcomer"]
        assert [t for o in outputs if o.request_id == "begun" for t in o.token_ids] == whole[3:]

    def test_what_was_taken_in_elsewhere_is_neither_late_nor_displaced(self) -> None:
        clock = ManualClock()
        engine = toy_engine(max_num_seqs=1, max_num_waiting=2, clock=clock)
        engine.add_request(request("slow", owner="a"))
        while engine.has_work:
            clock.advance(100.0)
            engine.step()
        engine.add_request(request("first", owner="a"))
        moved = request("moved", owner="a", timeout_s=20_000.0)
        hurried = replace(moved, slo=LatencyTarget(ttft_ms=1.0))
        with pytest.raises(LateError):  # control
            engine.add_request(hurried)
        engine.add_request(replace(hurried, was_admitted=True))
        engine.add_request(request("other", owner="a"))
        engine.step()
        with pytest.raises(CapacityError):  # the last, "other", is of its owner
            engine.add_request(request("more", owner="a"))
        engine.abort(RequestId("other"))
        engine.step()
        engine.add_request(replace(request("other", owner="a"), was_admitted=True))
        with pytest.raises(CapacityError):  # "other" was promised to be served now
            engine.add_request(request("single", owner="b"))
        ended = {o.request_id: o.finish_reason for o in outputs_of(engine) if o.finish_reason}
        assert ended == {"first": "length", "moved": "length", "other": "length"}

    def test_what_was_taken_in_elsewhere_is_taken_in_by_a_full_queue_and_has_its_turn(self) -> None:
        engine = toy_engine(max_num_seqs=1, max_num_waiting=1)
        for name in ("running", "waiting"):
            engine.add_request(request(name))
        with pytest.raises(CapacityError):  # control
            engine.add_request(request("moved"))
        engine.add_request(replace(request("moved"), was_admitted=True))
        ended = [output.request_id for output in outputs_of(engine) if output.finish_reason]
        assert ended == ["running", "waiting", "moved"]

    def test_a_newer_epoch_takes_the_place_of_the_older_in_a_full_queue(self) -> None:
        engine = toy_engine(max_num_seqs=1, max_num_waiting=1)
        engine.add_request(request("running"))
        engine.add_request(request("waiting"))
        engine.add_request(request("waiting", epoch=1))
        ended = [(o.request_id, o.epoch, o.finish_reason) for o in outputs_of(engine) if o.finish_reason]
        assert sorted(ended) == [("running", 0, "length"), ("waiting", 0, "abort"), ("waiting", 1, "length")]

    def test_a_newer_epoch_that_is_refused_leaves_no_older_one_behind(self) -> None:
        clock = ManualClock()
        engine = toy_engine(max_num_seqs=1, clock=clock)
        engine.add_request(request("slow"))
        while engine.has_work:
            clock.advance(100.0)
            engine.step()
        engine.add_request(request("running"))
        engine.add_request(request("waiting"))
        with pytest.raises(LateError):
            engine.add_request(request("waiting", epoch=1, timeout_s=1.0))
        ended = [(o.request_id, o.finish_reason) for o in outputs_of(engine) if o.finish_reason]
        assert sorted(ended) == [("running", "length"), ("waiting", "abort")]

    def test_what_cannot_be_complete_in_time_is_refused_at_once(self) -> None:
        clock = ManualClock()
        engine = toy_engine(max_num_seqs=1, clock=clock)
        for index in range(12):  # each takes so many seconds as rounds
            engine.add_request(request(f"r{index}"))
        num_finished = 0
        while num_finished < 6:
            clock.advance(1.0)
            num_finished += sum(output.finish_reason is not None for output in engine.step())
        per_request_s = clock.now_s() / 6
        wait_s = engine.metrics().snapshot()["queue_wait_seconds"]
        assert wait_s == pytest.approx(6 * per_request_s, rel=0.3)
        with pytest.raises(LateError, match=r"its time limit .*timeout_s"):
            engine.add_request(request("late", timeout_s=wait_s))
        engine.add_request(request("in time", timeout_s=2.0 * wait_s))
        engine.add_request(request("urgent", timeout_s=3.0 * per_request_s, priority=-1))
        ends: dict[str, RequestOutput] = {}
        while engine.has_work:
            clock.advance(1.0)
            ends |= {output.request_id: output for output in engine.step() if output.finish_reason}
        assert ends["in time"].finish_reason == ends["urgent"].finish_reason == "length"
        assert engine.metrics().snapshot()['requests_refused{reason="late"}'] == 1

    def test_an_engine_that_was_slow_is_given_another_chance(self) -> None:
        clock = ManualClock()
        engine = toy_engine(max_num_seqs=1, clock=clock)
        engine.add_request(request("slow"))
        while engine.has_work:
            clock.advance(100.0)
            engine.step()
        engine.add_request(request("hurried", timeout_s=200.0))
        with pytest.raises(LateError):  # it would have to wait
            engine.add_request(request("behind", timeout_s=200.0))
        assert {o.finish_reason for o in outputs_of(engine) if o.finish_reason} == {"length"}

    def test_nobody_is_refused_for_a_guess(self) -> None:
        engine = toy_engine(max_num_seqs=1)
        for index in range(50):
            engine.add_request(request(f"r{index}", timeout_s=0.5))


def outputs_of(engine: Engine) -> list[RequestOutput]:
    """Step until nothing is left."""
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


class TestGenerate:
    def test_prompts_may_be_text_or_tokens(self) -> None:
        with toy_engine() as engine:
            first, second, third = engine.generate(["bcd", [1, 2, 3], (1, 2, 3)], GREEDY)
            assert first.token_ids == second.token_ids == third.token_ids
            assert first.text == letters(first.token_ids)
            assert first.prompt_token_ids == (1, 2, 3)
            assert engine.generate("bcd", GREEDY)[0].text == first.text
            assert engine.generate([1, 2, 3], GREEDY)[0].text == first.text
            assert engine.generate([], GREEDY) == []

    def test_without_parameters_sampling_is_as_the_checkpoint_has_it(self) -> None:
        target = ToyTarget(MODEL, max_model_len=24)
        defaults = SamplingDefaults(temperature=0.0)
        target.description = dataclasses.replace(target.description, sampling_defaults=defaults)
        with toy_engine(target=target) as engine:
            by_default = engine.generate("bcd")[0].token_ids
            assert by_default == engine.generate("bcd", SamplingParams(temperature=0.0))[0].token_ids
            said = SamplingParams(seed=3)
            assert engine.generate("bcd", said)[0].token_ids != by_default, "who says something says all"
            few = engine.description.sampling_defaults.params(max_tokens=5)
            assert engine.generate("bcd", few)[0].token_ids == by_default[:5]

    def test_choices_have_seeds_of_their_own(self) -> None:
        params = replace(SAMPLED, n=3, seed=11)
        (result,) = toy_engine().generate("bcd", params)
        for index, choice in enumerate(result.choices):
            expected = MODEL.continuation((1, 2, 3), params, choice_seed(11, index), 20)
            assert list(choice.token_ids) == expected
            assert choice.index == index
        assert len({choice.token_ids for choice in result.choices}) == 3

    def test_parameters_for_each(self) -> None:
        params = [replace(GREEDY, max_tokens=length) for length in (1, 5)]
        assert [len(one.token_ids) for one in toy_engine().generate(["b", "c"], params)] == [1, 5]
        with pytest.raises(InputError, match="1 sampling parameters for 2 prompts"):
            toy_engine().generate(["b", "c"], params[:1])

    def test_more_prompts_than_the_queue_holds(self) -> None:
        seen: list[tuple[int, int]] = []
        engine = toy_engine(max_num_seqs=1, max_num_waiting=1)
        results = engine.generate(["b", "c", "d", "e"], GREEDY, progress=lambda *step: seen.append(step))
        assert len(results) == 4
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def test_nothing_runs_when_one_is_wrong(self) -> None:
        engine = toy_engine()
        with pytest.raises(InputError, match="empty"):
            engine.generate(["b", []], GREEDY)
        assert not engine.has_work

    def test_interruption_leaves_the_engine_empty(self) -> None:
        class Interrupted(Exception):
            pass

        def interrupt(num_finished: int, num_all: int) -> None:
            raise Interrupted

        engine = toy_engine(max_num_seqs=1)
        with pytest.raises(Interrupted):
            engine.generate(["b", "c", "d"], GREEDY, progress=interrupt)
        assert not engine.has_work
        engine.check_integrity()
        assert len(engine.generate(["b", "c"], GREEDY)) == 2

    def test_prints_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        toy_engine().generate("b", GREEDY)
        assert capsys.readouterr() == ("", "")


class TestStatistics:
    def test_times_and_counts_of_a_request(self) -> None:
        clock = ManualClock(100.0)
        engine = toy_engine(OracleProposer(wrong_from=2), clock=clock, max_num_batched_tokens=8)
        engine.add_request(request(prompt=(1,) * 20))
        outputs = []
        while engine.has_work:
            clock.advance(1.0)
            outputs += engine.step()
        stats = outputs[-1].stats
        assert stats is not None
        assert all(output.stats is None for output in outputs[:-1])
        assert (stats.arrival_s, stats.first_scheduled_s, stats.first_token_s) == (100.0, 101.0, 103.0)
        assert stats.finished_s == clock.now_s()
        assert stats.num_delivered_tokens == 0
        speculation = stats.speculation
        assert speculation.num_drafts == len(speculation.per_step_drafted) == len(outputs) - 2
        assert speculation.per_step_accepted[0] == 2
        assert speculation.mean_acceptance_length > 2.5

    def test_what_an_earlier_epoch_delivered_is_told_apart(self) -> None:
        engine = toy_engine()
        engine.add_request(request(delivered=(2, 3, 4)))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        last = outputs[-1]
        assert last.stats is not None
        assert last.stats.num_delivered_tokens == 3
        assert last.num_generated_tokens == 3 + sum(len(output.token_ids) for output in outputs)

    def test_snapshot_uses_the_names_of_the_field(self) -> None:
        engine = toy_engine(OracleProposer())
        run(engine, request())
        snapshot = engine.metrics().snapshot()
        assert snapshot["generation_tokens"] == 20
        assert snapshot["prompt_tokens"] == 3
        assert snapshot['spec_decode_num_accepted_tokens_per_pos{position="0"}'] == 4
        assert snapshot['request_success{finished_reason="length"}'] == 1
        assert snapshot["num_requests_running"] == snapshot["num_requests_waiting"] == 0
        assert snapshot["kv_cache_usage_perc"] == 0.0

    def test_gauges(self) -> None:
        engine = toy_engine(max_num_seqs=1)
        for name in "abc":
            engine.add_request(request(name))
        engine.step()
        metrics = engine.metrics()
        assert (metrics.num_running, metrics.num_waiting) == (1, 2)
        assert metrics.kv_cache_usage == pytest.approx(1 / 255)

    def test_requests_may_leave_while_metrics_are_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By another thread than that of the rounds; here one leaves as soon as somebody is looked at."""
        engine = toy_engine()
        for name in "abc":
            engine.add_request(request(name))
        engine.step()
        num_expected = LiveRequest.num_expected_tokens

        def looked_at(live: LiveRequest) -> int:
            engine.abort(RequestId("b"))
            return num_expected.__get__(live)  # type: ignore[attr-defined]

        monkeypatch.setattr(LiveRequest, "num_expected_tokens", property(looked_at))
        engine.metrics()
        assert engine.metrics().num_running == 2


@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed: int) -> None:
    """Add, abort and step at random over a small pool: books balance, every request ends exactly once."""
    generator = random.Random(seed)
    target = ToyTarget(MODEL, num_blocks=generator.randint(8, 30), block_size=generator.choice([1, 2, 4]))
    max_num_seqs = generator.randint(1, 6)
    engine = toy_engine(
        make_proposer(generator.choice(["none", "ngram", "draft_model", "oracle"])),
        target=target,
        num_draft_tokens=generator.randint(1, 6),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=generator.randint(max_num_seqs, 20),
    )
    longest = engine.max_sequence_len
    requests, outputs = {}, {}  # type: ignore[var-annotated]
    aborted: set[str] = set()

    def step() -> None:
        for output in engine.step():
            outputs[output.request_id].append(output)

    for number in range(120):
        operation = generator.choice(["add", "step", "step", "step", "abort"])
        if operation == "add":
            length = generator.randint(1, longest - 1)
            params = SamplingParams(
                temperature=generator.choice([0.0, 1.0]), max_tokens=generator.randint(1, longest - length)
            )
            prompt = generator.choices(range(VOCAB_SIZE), k=length)
            one = request(f"r{number}", prompt, params, seed=number, priority=generator.choice([0, 0, 1]))
            engine.add_request(one)
            requests[one.request_id], outputs[one.request_id] = one, []
        elif operation == "abort" and requests:
            victim = generator.choice(sorted(requests))
            aborted.add(victim)
            engine.abort(RequestId(victim))
        else:
            step()
        engine.check_integrity()
    while engine.has_work:
        step()
        engine.check_integrity()
    for name, one in requests.items():
        tokens, expected = tokens_of(outputs[name]), expected_tokens(one)
        if outputs[name][-1].finish_reason == "abort":
            assert name in aborted
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    engine.add_request(request("last", (1,), replace(GREEDY, max_tokens=1)))
    engine.step()
    assert target.known_requests == {"last"}
    assert engine.metrics().kv_cache_usage == 0.0
