"""Trees in the engine: the same tokens as without, and K/V of what stands where they belong."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from specdec.core.errors import ConfigError
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.requests.roster import Roster
from specdec.engine.targets.toy_target import ToyTarget
from specdec.proposers.base import Proposer
from specdec.proposers.ngram import NgramProposer
from tests.specdec.engine.judged_engines import judge_of
from tests.specdec.engine.toy_engines import (
    MODEL,
    VOCAB_SIZE,
    OracleProposer,
    WatchedTarget,
    check_streams,
    expected_tokens,
    request,
    requests_of,
    run,
    tokens_of,
    toy_draft_model,
    toy_engine,
)
from tests.specdec.engine.tree_drafters import Bushy


def bushy(drafter: Proposer | None = None, **options: bool) -> Bushy:
    return Bushy(drafter or OracleProposer(wrong_from=3), vocab_size=VOCAB_SIZE, **options)


DRAFTERS = {
    "oracle": lambda: OracleProposer(wrong_from=4),
    "draft model": toy_draft_model,
    "ngram": lambda: NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3),
}


@pytest.mark.parametrize(
    ("drafter", "num_nodes", "prefix_caching"),
    [("oracle", 16, True), ("draft model", 7, False), ("ngram", 3, True)],
)
def test_tokens_are_those_without_trees(drafter: str, num_nodes: int, prefix_caching: bool) -> None:
    engine = toy_engine(bushy(DRAFTERS[drafter]()), num_draft_tokens=num_nodes, prefix_caching=prefix_caching)
    check_streams(engine, requests_of(12))
    metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0
    assert metrics.num_moved_kv > 0
    assert metrics.proposals_dropped.total() == 0


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_nodes", [2, 5, 9, 24])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_tokens_are_those_without_trees_in_every_setting(
    drafter: str, num_nodes: int, prefix_caching: bool
) -> None:
    test_tokens_are_those_without_trees(drafter, num_nodes, prefix_caching)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))])
def test_preemption_and_chunks(seed: int) -> None:
    """Blocks trimmed at a commit are given to others in the very step that moves K/V out of them."""
    target = WatchedTarget(num_blocks=28)
    engine = toy_engine(bushy(), target=target, num_draft_tokens=9, max_num_batched_tokens=24, max_num_seqs=6)
    check_streams(engine, requests_of(14, seed, max_tokens=40))
    assert engine.metrics().num_preemptions > 0
    size = target.description.block_size
    given_away = 0
    for step in target.steps:
        written = {block for work in step.works for block in work.block_ids}
        given_away += sum(move.source // size in written for move in step.moves)
    assert given_away > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))])
def test_who_comes_later_finds_what_ended_with_a_tree(seed: int) -> None:
    """The last round of a request names blocks whose K/V are moved only when somebody else comes."""
    rng = random.Random(seed)
    engine = toy_engine(bushy(OracleProposer()), num_draft_tokens=14, max_num_seqs=1)
    for index in range(6):
        first = request(f"a{index}", rng.choices(range(VOCAB_SIZE), k=5), seed=index)
        check_streams(engine, [first])
        whole = [*first.prompt_token_ids, *expected_tokens(first)]
        hits = engine.metrics().prefix_cache_hits
        check_streams(engine, [request(f"b{index}", whole, seed=index)])
        assert engine.metrics().prefix_cache_hits > hits


@pytest.mark.parametrize("kept", ["none", "first"])
def test_control_moves_left_out_show(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Roster.take_moves
    monkeypatch.setattr(Roster, "take_moves", lambda roster: take(roster)[: int(kept == "first")])
    engine = toy_engine(bushy(), num_draft_tokens=9)
    requests = requests_of(12)
    outputs = run(engine, *requests)
    assert any(tokens_of(outputs[one.request_id]) != expected_tokens(one) for one in requests)


def test_control_moves_one_step_late_show(monkeypatch: pytest.MonkeyPatch) -> None:
    take, kept = Roster.take_moves, [()]

    def late(roster: Roster) -> tuple[object, ...]:
        kept.append(take(roster))
        return kept.pop(0)

    monkeypatch.setattr(Roster, "take_moves", late)
    requests = requests_of(12)
    outputs = run(toy_engine(bushy(), num_draft_tokens=9), *requests)
    assert any(tokens_of(outputs[one.request_id]) != expected_tokens(one) for one in requests)


def test_nothing_is_moved_where_the_path_lies_in_order() -> None:
    """A tree whose likeliest path comes first costs no move as long as that path is the one that stands."""

    class Leaning(OracleProposer):
        capabilities = replace(OracleProposer.capabilities, shape="tree")

        def proposal(self, one: SequenceView, budget: int) -> Proposal:
            chain = super().proposal(one, max(1, budget - 1))
            if budget == 1:
                return chain
            other = (chain.token_ids[0] + 1) % VOCAB_SIZE
            parents = (*range(-1, len(chain.token_ids) - 1), -1)
            return msgspec.structs.replace(chain, token_ids=(*chain.token_ids, other), parents=parents)

    target = WatchedTarget()
    engine = toy_engine(Leaning(), target=target, num_draft_tokens=5)
    check_streams(engine, requests_of(6))
    assert any(work.parents is not None for step in target.steps for work in step.works)
    assert not any(step.moves for step in target.steps)
    assert engine.metrics().num_moved_kv == 0


def test_malformed_trees_are_dropped_and_counted() -> None:
    engine = toy_engine(bushy(is_malformed=True), num_draft_tokens=6)
    check_streams(engine, requests_of(5))
    metrics = engine.metrics()
    assert metrics.proposals_dropped["malformed"] > 0
    assert metrics.num_draft_tokens == 0


def test_trees_of_who_said_to_draft_chains_are_dropped() -> None:
    proposer = bushy()
    proposer.capabilities = replace(proposer.capabilities, shape="chain")
    engine = toy_engine(proposer, num_draft_tokens=6)
    check_streams(engine, requests_of(5))
    assert engine.metrics().proposals_dropped["malformed"] > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_that_cannot_take_trees_refuse_at_start(rule: str) -> None:
    with pytest.raises(ConfigError, match=f"{rule} takes chains, but oracle drafts trees"):
        toy_engine(bushy(), target=ToyTarget(MODEL, judge=judge_of(rule)))


@pytest.mark.parametrize("rule", ["multi_round", "typical"])
def test_rules_that_decide_at_the_target(rule: str) -> None:
    """Greedy requests get the target's tokens; of all others, blocks and text fit together."""
    engine = toy_engine(bushy(), target=ToyTarget(MODEL, judge=judge_of(rule)), num_draft_tokens=8)
    requests = requests_of(10)
    outputs = run(engine, *requests)
    for one in requests:
        if one.params.is_greedy:
            assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
        else:
            assert len(tokens_of(outputs[one.request_id])) == one.params.max_tokens
    assert engine.metrics().num_moved_kv > 0


@pytest.mark.parametrize("rule", ["sample_and_match", "multi_round"])
def test_logprobs_are_those_of_the_path(rule: str) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=24, logprobs=2)
    requests = [request(f"r{n}", [n, 3, 1], params, seed=n) for n in range(6)]
    engine = toy_engine(bushy(), target=ToyTarget(MODEL, judge=judge_of(rule)), num_draft_tokens=9)
    outputs = run(engine, *requests)
    for one in requests:
        tokens = tokens_of(outputs[one.request_id])
        found = [entry for output in outputs[one.request_id] for entry in output.logprobs or ()]
        assert [entry.token_id for entry in found] == tokens
        # One token at a time, each behind the others as delivered: what they should be.
        plain = toy_engine(num_draft_tokens=0)
        for index in (0, 7, 23):
            replay = msgspec.structs.replace(
                one,
                request_id=RequestId(f"{one.request_id}/{index}"),
                prompt_token_ids=(*one.prompt_token_ids, *tokens[:index]),
                params=msgspec.structs.replace(params, max_tokens=1),
            )
            (alone,) = run(plain, replay)[replay.request_id][-1].logprobs or ()
            assert found[index].top == alone.top
