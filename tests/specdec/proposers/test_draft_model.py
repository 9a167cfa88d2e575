"""Same-noise drafting: which tokens, how much is read again, and what happens when memory is short."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import EVERYTHING, DraftReading
from specdec.proposers.prefix import SeenPrefix
from specdec.sampling.sampler import Sampler
from tests.specdec.proposers.contract import GREEDY, SAMPLED, FrozenView, ProposerContract, view

VOCAB_SIZE = 24
MODEL = ToyModel(VOCAB_SIZE, seed=3)


class Checked(DraftModelProposer):
    """Checks its books after every call."""

    def propose(self, *args, **options):  # type: ignore[no-untyped-def]
        proposals = super().propose(*args, **options)
        self.check_integrity()
        return proposals

    def release(self, *args):  # type: ignore[no-untyped-def]
        super().release(*args)
        self.check_integrity()


def make(
    runner: ToyRunner | None = None, reading: DraftReading = EVERYTHING, *, vocab_size: int = VOCAB_SIZE
) -> Checked:
    choice = DraftChoice(sampler=Sampler(), vocab_size=vocab_size)
    return Checked(runner or ToyRunner(MODEL), choice, reading=reading)


def propose_one(proposer: Proposer, one: FrozenView, budget: int = 4) -> tuple[int, ...]:
    proposal = proposer.propose([one], {one.request_id: budget}).get(one.request_id)
    return () if proposal is None else proposal.token_ids


class TestDraftModelProposer(ProposerContract):
    vocab_size = VOCAB_SIZE
    always_proposes = True

    def make_proposer(self) -> Proposer:
        return make()


class TestWithTinyBlocksAndPool(ProposerContract):
    """Blocks of one token: every length is a border. The pool holds the suite's five sequences, barely."""

    vocab_size = VOCAB_SIZE

    def make_proposer(self) -> Proposer:
        return make(ToyRunner(MODEL, block_size=1, num_blocks=800))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9)], ids=["greedy", "sampled"])
def test_draft_of_the_target_itself_is_what_the_target_says(params: SamplingParams) -> None:
    prompt = (1, 2, 3, 4, 5)
    expected = MODEL.continuation(prompt, params, 7, 6)
    proposal = make().propose([view("a", prompt, params)], {RequestId("a"): 6})[RequestId("a")]
    assert list(proposal.token_ids) == expected
    assert proposal.noise_stream == "target"
    assert proposal.q_rows is None


def test_seed_and_position_matter() -> None:
    """The negative control of the test above: other noise, other tokens."""
    params = SamplingParams(temperature=2.0)
    prompt = (1, 2, 3, 4, 5)
    drafts = {propose_one(make(), view("a", prompt, params, seed=seed), 8) for seed in range(5)}
    assert len(drafts) == 5


class TestReading:
    """How many tokens go through the model."""

    @pytest.fixture
    def runner(self) -> ToyRunner:
        return ToyRunner(MODEL)

    @pytest.mark.parametrize(("num_kept", "expected"), [(0, 1 + 3), (2, 1 + 3), (3, 1 + 3), (4, 2 + 3)])
    def test_only_what_is_new_is_read(self, runner: ToyRunner, num_kept: int, expected: int) -> None:
        """After a full acceptance the last draft token was never read, otherwise only the correction."""
        proposer = make(runner)
        prompt = (1, 2, 3, 4, 5, 6, 7)
        drafted = propose_one(proposer, view("a", prompt))
        assert runner.num_tokens_read == len(prompt) + 3
        correction = (drafted[num_kept] + 1) % VOCAB_SIZE if num_kept < 4 else 0
        runner.num_tokens_read = 0
        propose_one(proposer, view("a", (*prompt, *drafted[:num_kept], correction)))
        assert runner.num_tokens_read == expected

    def test_long_prompt_is_read_over_several_calls(self, runner: ToyRunner) -> None:
        proposer = make(runner, DraftReading(max_read_tokens=8))
        one = view("a", range(20))
        assert propose_one(proposer, one) == ()
        assert propose_one(proposer, one) == ()
        assert propose_one(proposer, one) == propose_one(make(), one) != ()

    def test_who_is_up_to_date_drafts_beside_who_reads(self, runner: ToyRunner) -> None:
        proposer = make(runner, DraftReading(max_read_tokens=8))
        short, long = view("short", [1, 2]), view("long", range(20))
        budgets = {RequestId("long"): 2, RequestId("short"): 2}
        assert set(proposer.propose([long, short], budgets)) == {"short"}  # reads 2 and 6 tokens
        assert set(proposer.propose([long, short], budgets)) == {"short"}  # 1 and 7
        assert set(proposer.propose([long, short], budgets)) == {"short", "long"}

    def test_prompt_is_read_without_a_budget(self, runner: ToyRunner) -> None:
        proposer = make(runner)
        one = view("a", range(20))
        assert proposer.propose([one], {}) == {}
        assert runner.num_tokens_read == 19
        propose_one(proposer, one, 3)
        assert runner.num_tokens_read == 19 + 3

    def test_one_forward_per_draft_token_for_all(self, runner: ToyRunner) -> None:
        views = [view(f"r{index}", range(index + 1)) for index in range(8)]
        make(runner).propose(views, {one.request_id: 3 for one in views})
        assert runner.num_forwards == 3

    def test_budgets_may_differ(self, runner: ToyRunner) -> None:
        views = [view(f"r{index}", range(index + 1)) for index in range(4)]
        proposals = make(runner).propose(views, {one.request_id: int(one.request_id[1:]) for one in views})
        assert {name: proposal.num_tokens for name, proposal in proposals.items()} == {
            "r1": 1,
            "r2": 2,
            "r3": 3,
        }


class TestMemory:
    """A pool of 7 blocks of 4 tokens."""

    @pytest.fixture
    def proposer(self) -> Iterator[Checked]:
        made = make(ToyRunner(MODEL, num_blocks=8, block_size=4))
        yield made
        made.close()

    def test_longest_unused_sequence_makes_room(self, proposer: Checked) -> None:
        views = {name: view(name, range(first, first + 8)) for first, name in enumerate("abc")}
        for one in views.values():
            assert propose_one(proposer, one, 3)  # 11 tokens: 3 blocks each
        assert proposer.sequences.known == {"b", "c"}
        assert propose_one(proposer, views["a"], 3) == propose_one(make(), views["a"], 3)

    def test_who_does_not_fit_beside_the_others_gets_nothing(self, proposer: Checked) -> None:
        views = [view(name, range(first, first + 8)) for first, name in enumerate("abc")]
        for _ in range(3):  # and holds nothing, so that the others can go on
            proposals = proposer.propose(views, {one.request_id: 3 for one in views})
            assert set(proposals) == {"a", "b"}

    def test_a_common_beginning_takes_its_blocks_once(self, proposer: Checked) -> None:
        for name in "abcd":  # two full blocks in common, one each for the draft
            assert propose_one(proposer, view(name, range(9)), 3) == propose_one(
                make(), view(name, range(9)), 3
            )
        assert proposer.sequences.known == set("abcd")
        assert proposer.sequences.num_held_blocks == 2 + 4

    def test_context_limit(self) -> None:
        proposer = make(reading=DraftReading(max_context=10))
        assert proposer.capabilities.max_context == 10
        assert len(propose_one(proposer, view("a", range(7)), 8)) == 3
        assert propose_one(proposer, view("a", range(10)), 8) == ()
        assert propose_one(proposer, view("a", range(11)), 8) == ()

    def test_release_frees_blocks(self, proposer: Checked) -> None:
        propose_one(proposer, view("a", range(8)))
        assert proposer.sequences.num_held_blocks == 3
        proposer.release([RequestId("a")])
        assert proposer.sequences.num_held_blocks == 0


class TestPrefixCache:
    """What was read of one sequence is not read again for another, nor for the same one later."""

    def test_only_the_rest_is_read(self) -> None:
        runner = ToyRunner(MODEL, block_size=4)
        proposer = make(runner)
        propose_one(proposer, view("a", range(20)), 1)
        num_read = runner.num_tokens_read
        propose_one(proposer, view("b", (*range(16), 3, 2, 1)), 1)
        assert runner.num_tokens_read - num_read == 3
        assert (
            proposer.counters["draft_prefix_cache_queries"],
            proposer.counters["draft_prefix_cache_hits"],
        ) == (39, 16)

    def test_a_released_sequence_is_found_again(self) -> None:
        runner = ToyRunner(MODEL, block_size=4)
        proposer = make(runner)
        propose_one(proposer, view("a", range(20)), 1)
        proposer.release([RequestId("a")])
        num_read = runner.num_tokens_read
        assert propose_one(proposer, view("a", range(21)), 2) == propose_one(make(), view("a", range(21)), 2)
        assert runner.num_tokens_read - num_read == 21 - 16 + 1  # and one for the second draft token

    def test_rejected_drafts_are_never_found(self) -> None:
        """The draft fills blocks with tokens that were not committed: nobody else may get them."""
        runner = ToyRunner(MODEL, block_size=2)
        proposer = make(runner)
        first = view("a", range(3))
        drafted = propose_one(proposer, first, 8)
        wrong = (drafted[0] + 1) % VOCAB_SIZE
        propose_one(proposer, view("a", (*first.token_ids, wrong)), 8)
        proposer.release([RequestId("a")])
        for tokens in ((*first.token_ids, *drafted), (*first.token_ids, wrong, *drafted)):
            assert propose_one(proposer, view("b", tokens)) == propose_one(make(), view("b", tokens))
            proposer.release([RequestId("b")])

    @pytest.mark.parametrize("prefix_caching", [False, True], ids=["off", "other salt"])
    def test_nothing_is_shared(self, prefix_caching: bool) -> None:
        proposer = make(reading=DraftReading(prefix_caching=prefix_caching))
        propose_one(proposer, view("a", range(20)))
        propose_one(proposer, dataclasses.replace(view("b", range(20)), cache_salt="x"))
        assert proposer.counters["draft_prefix_cache_hits"] == 0

    def test_a_prefix_that_changes_is_written_into_other_blocks(self) -> None:
        """The blocks of the former prefix may be in others' hands by then."""
        proposer = make(ToyRunner(MODEL, block_size=2))
        propose_one(proposer, view("a", range(9)))
        kept = propose_one(proposer, view("b", range(9)))
        propose_one(proposer, view("a", range(5, 14)))
        assert propose_one(proposer, view("b", range(9))) == kept


def test_tokens_that_the_target_lacks_are_never_proposed() -> None:
    small = make(vocab_size=5)
    for seed in range(20):
        tokens = propose_one(small, view("a", [1, 2], SAMPLED, seed=seed), 5)
        assert len(tokens) == 5
        assert max(tokens) < 5


class TestVocabularies:
    """Models of one tokenizer whose embeddings are padded differently."""

    FOREIGN = VOCAB_SIZE + 3

    @staticmethod
    def strict_runner() -> ToyRunner:
        class Strict(ToyRunner):
            """Raises for ids beyond its vocabulary, as an embedding does."""

            def forward(self, slices):  # type: ignore[no-untyped-def]
                if any(token_id >= VOCAB_SIZE for one in slices for token_id in one.token_ids):
                    raise IndexError("index out of range in self")
                return super().forward(slices)

        return Strict(MODEL)

    def test_tokens_that_the_draft_model_lacks_end_drafting_for_their_sequence_only(self) -> None:
        proposer = make(self.strict_runner(), vocab_size=VOCAB_SIZE + 8)
        foreign, good = view("foreign", [1, self.FOREIGN, 2]), view("good", [1, 2, 3])
        for _ in range(2):
            budgets = {one.request_id: 4 for one in (foreign, good)}
            assert set(proposer.propose([foreign, good], budgets)) == {"good"}
            foreign = view("foreign", (*foreign.token_ids, 5))
        assert proposer.sequences.num_held_blocks == 2, "those of the good one"

    def test_one_that_comes_later_ends_drafting_until_it_is_taken_back(self) -> None:
        proposer = make(self.strict_runner(), vocab_size=VOCAB_SIZE + 8)
        assert propose_one(proposer, view("a", [1, 2, 3]))
        assert propose_one(proposer, view("a", [1, 2, 3, self.FOREIGN])) == ()
        assert propose_one(proposer, view("a", [1, 2, 3, self.FOREIGN, 4])) == ()
        assert propose_one(proposer, view("a", [1, 2, 3, 4])) == propose_one(make(), view("a", [1, 2, 3, 4]))

    def test_foreign_prompt_that_is_only_read(self) -> None:
        assert make(self.strict_runner()).propose([view("a", [self.FOREIGN, 1, 2])], {}) == {}


def test_non_finite_logits_end_the_draft_not_the_round() -> None:
    class Broken(ToyRunner):
        def forward(self, slices):  # type: ignore[no-untyped-def]
            logits = super().forward(slices)
            if self.num_forwards == 2:
                logits[0] = torch.nan
            return logits

    views = [view("a", [1, 2]), view("b", [3, 4])]
    proposals = make(Broken(MODEL)).propose(views, {one.request_id: 3 for one in views})
    assert [proposals[one.request_id].num_tokens for one in views] == [1, 3]


def test_contract_notices_kept_rubbish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the contract suite: a proposer that trusts lengths fails it."""
    suite = TestDraftModelProposer()
    suite.test_rollback(suite.make_proposer())
    monkeypatch.setattr(SeenPrefix, "continues_in", lambda self, sequence: True)
    with pytest.raises(AssertionError):
        suite.test_rollback(suite.make_proposer())
