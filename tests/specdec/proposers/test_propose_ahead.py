"""Drafting behind verdicts that are not known: the right tokens, the right blocks, nothing left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from specdec.core.ids import RequestId
from specdec.core.kv_variants import KvVariants
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel
from specdec.model.batch import SequenceSlice
from specdec.model.rotary import RotaryRule
from specdec.proposers.base import AheadWish, LooksAhead
from specdec.proposers.bonus import BonusBy
from specdec.proposers.branches import BranchStore
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import ChainStart
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.draft_sequences import EVERYTHING, Chunk, DraftReading
from specdec.sampling.noise import gumbel
from specdec.sampling.sampler import Sampler
from specdec.verification.registry import capabilities_of
from tests.pairwise import mostly_full
from tests.specdec.proposers.ahead_contract import (
    EOS,
    SHAPING,
    VOCAB_SIZE,
    AheadContract,
    assumed_of,
    wish,
)
from tests.specdec.proposers.contract import GREEDY, view

MODEL = ToyModel(VOCAB_SIZE, seed=3, sharpness=1.5)
ENDLESS = SamplingParams(temperature=1.0, ignore_eos=True)


CHOICE = DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


def make(
    runner: ToyRunner | None = None, choice: DraftChoice = CHOICE, *, reading: DraftReading = EVERYTHING
) -> DraftModelProposer:
    return DraftModelProposer(runner or ToyRunner(MODEL), choice, reading=reading)


@pytest.mark.parametrize("block_size", mostly_full([1, 2, 4, 7, 64], [1, 7, 64]))
class TestBlocks(AheadContract):
    """Borders of blocks in all places."""

    @pytest.fixture(autouse=True)
    def _parts(self, block_size: int) -> None:
        self.block_size = block_size

    def make(self) -> DraftModelProposer:
        return make(ToyRunner(MODEL, block_size=self.block_size, num_blocks=256 + 4096 // self.block_size))


class TestWithoutPrefixCache(AheadContract):
    def make(self) -> DraftModelProposer:
        return make(ToyRunner(MODEL, num_blocks=1024), reading=DraftReading(prefix_caching=False))


class TestShaped(AheadContract):
    """Penalties, bias, what is forbidden, and a grammar: each branch with its own prefix."""

    params = SHAPING

    def make(self) -> DraftModelProposer:
        return make(ToyRunner(MODEL, num_blocks=1024))


class TestRatioRule(AheadContract):
    """Drafts with noise of their own, and q rows."""

    def make(self) -> DraftModelProposer:
        sampling = DraftSampling.under(capabilities_of("block"), top_k=8)
        return make(ToyRunner(MODEL, num_blocks=1024), dataclasses.replace(CHOICE, sampling=sampling))


class TestTightPool(AheadContract):
    """Room for the sequences and a few branches."""

    has_room = False

    def make(self) -> DraftModelProposer:
        return make(ToyRunner(MODEL, block_size=4, num_blocks=90))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
class TestRotary(AheadContract):
    """K/V that change with the length of the sequence, or that depend on that of the prompt."""

    @pytest.fixture(autouse=True)
    def _parts(self, kind: str) -> None:
        self.kind = kind

    def make(self) -> DraftModelProposer:
        variants = KvVariants(
            original_len=8 if self.kind == "dynamic" else 20, by_prompt=self.kind == "dynamic"
        )
        rule = RotaryRule(kind=self.kind, variants=variants, stride=1000)  # type: ignore[arg-type]
        return make(ToyRunner(MODEL, num_blocks=1024), reading=DraftReading(rotary=rule))


def noisy_order(tokens: Sequence[int], params: SamplingParams, seed: int, *, noise: bool = True) -> list[int]:
    """All tokens by what the token function compares behind `tokens`, from the definitions."""
    runner = ToyRunner(MODEL)
    (logits,) = runner.forward(
        [SequenceSlice(token_ids=tokens, start=0, block_table=range(1, 30), num_logit_rows=1)]
    )
    scores = logits.double() / (params.temperature or 1.0)
    if noise and not params.is_greedy:
        scores += torch.tensor([gumbel(seed, len(tokens), one, "target") for one in range(VOCAB_SIZE)])
    return [int(one) for one in scores.argsort(descending=True)]


class TestGuesses:
    """Which tokens are prepared for."""

    TOKENS = (1, 2, 3, 4)
    PENDING = (9, 0, 11)

    @pytest.mark.parametrize("by", ["noise", "probability"])
    @pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
    def test_the_most_promising_tokens_that_are_no_acceptance(self, temperature: float, by: BonusBy) -> None:
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        fan_out = (3, 0, 1, 5)
        proposer = make(choice=dataclasses.replace(CHOICE, bonus_by=by))
        asked = wish(self.TOKENS, self.PENDING, fan_out, params=params)
        (proposals,) = proposer.propose_ahead([asked]).values()
        found = [assumed_of(one, asked.view, self.PENDING) for one in proposals]  # type: ignore[arg-type]
        for a, num in enumerate(fan_out):
            behind = self.PENDING[:a]
            order = noisy_order((*self.TOKENS, *behind), params, asked.view.seed, noise=by == "noise")
            expected = [one for one in order if one not in self.PENDING[a : a + 1]][:num]
            assert [assumed[-1] for assumed in found if len(assumed) == a + 1] == expected

    def test_the_two_orders_differ(self) -> None:
        """The negative control of the test above."""
        params = SamplingParams(temperature=1.5, ignore_eos=True)
        orders = [noisy_order(self.TOKENS, params, 7, noise=noise)[:5] for noise in (False, True)]
        assert orders[0] != orders[1]

    def test_the_first_of_each_come_before_the_second_of_any(self) -> None:
        asked = wish(self.TOKENS, self.PENDING, (2, 1, 1, 2), params=GREEDY)
        (proposals,) = make().propose_ahead([asked]).values()
        assert [one.committed_len - 5 for one in proposals] == [3, 0, 1, 2, 3, 0]

    def test_cut_tokens_come_after_all_others(self) -> None:
        """The target may cut elsewhere: with top-k 1 its token is another one whenever the guess is wrong."""
        asked = wish(self.TOKENS, (), (4,), params=SamplingParams(temperature=0.9, top_k=2, ignore_eos=True))
        (proposals,) = make().propose_ahead([asked]).values()
        first = [assumed_of(one, asked.view, ())[0] for one in proposals]  # type: ignore[arg-type]
        order = noisy_order(self.TOKENS, asked.view.params, asked.view.seed)
        kept = noisy_order(self.TOKENS, GREEDY, 0)[:2]
        assert first[:2] == [one for one in order if one in kept]
        assert first[2:] == [one for one in order if one not in kept][:2]

    def test_forbidden_tokens_are_not_prepared_for(self) -> None:
        params = SamplingParams(temperature=0.9, allowed_token_ids=(3, 8, 9))
        asked = wish(self.TOKENS, (8,), (10, 10), params=params)
        (proposals,) = make().propose_ahead([asked]).values()
        found = {assumed_of(one, asked.view, (8,)) for one in proposals}  # type: ignore[arg-type]
        assert found == {(3,), (9,), (8, 3), (8, 8), (8, 9)}

    def test_nothing_comes_behind_the_end(self) -> None:
        """Neither behind EOS nor behind the last token that is wanted."""
        asked = wish(self.TOKENS, (7, EOS, 8), (30, 30, 30, 30), params=GREEDY)
        (proposals,) = make(ToyRunner(MODEL, num_blocks=500)).propose_ahead([asked]).values()
        assert {one.committed_len for one in proposals} == {5, 6}
        assert len(proposals) == (VOCAB_SIZE - 2) + (VOCAB_SIZE - 1)
        limited = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        asked = wish(self.TOKENS, (7, 6, 8), (1, 1, 1, 1), params=limited)  # 3 are generated already
        (proposals,) = make().propose_ahead([asked]).values()
        assert {one.committed_len for one in proposals} == {5}

    def test_context_limit(self) -> None:
        proposer = make(reading=DraftReading(max_context=8))
        (proposals,) = proposer.propose_ahead([wish(range(6, 11), (1, 2, 3), (1, 1, 1, 1))]).values()
        assert sorted((one.committed_len, one.num_tokens) for one in proposals) == [(6, 2), (7, 1)]
        assert proposer.propose_ahead([wish(range(8), (), (1,))]) == {}
        assert proposer.propose_ahead([wish(range(9), (), (1,))]) == {}

    def test_pending_tokens_that_the_draft_model_lacks(self) -> None:
        asked = wish(self.TOKENS, (7, VOCAB_SIZE + 2, 8), (1, 1, 1, 1), params=GREEDY)
        choice = dataclasses.replace(CHOICE, vocab_size=VOCAB_SIZE + 9)
        (proposals,) = make(choice=choice).propose_ahead([asked]).values()
        assert {one.committed_len for one in proposals} == {5, 6}

    def test_logits_that_are_not_finite_have_no_branches(self) -> None:
        class Broken(ToyRunner):
            def forward(self, slices):  # type: ignore[no-untyped-def]
                logits = super().forward(slices)
                if self.num_forwards == 1:
                    logits[1] = torch.nan
                return logits

        asked = wish(self.TOKENS, (7, 8), (1, 1, 1), params=GREEDY)
        (proposals,) = make(Broken(MODEL)).propose_ahead([asked]).values()
        assert {one.committed_len for one in proposals} == {5, 7}


class TestReading:
    """How many tokens go through the model."""

    TOKENS = tuple(range(6, 17))

    def test_one_forward_for_the_guesses_and_one_per_draft_token(self) -> None:
        runner = ToyRunner(MODEL)
        proposer = make(runner)
        wishes = [wish(range(6, 8 + one), (1, 2), (2, 1, 2), name=f"r{one}") for one in range(5)]
        wishes.append(AheadWish(view=view("plain", (1, 2)), num_draft_tokens=4, fan_out=None))
        answers = proposer.propose_ahead(wishes)
        assert runner.num_forwards == 1 + 4
        assert {name: len(proposals) for name, proposals in answers.items()} == {
            **{f"r{one}": 5 for one in range(5)},
            "plain": 1,
        }

    @pytest.mark.parametrize("block_size", [1, 4, 64])
    def test_after_a_hit_only_rows_that_are_needed_are_read(self, block_size: int) -> None:
        runner = ToyRunner(MODEL, block_size=block_size)
        proposer = make(runner)
        pending = (1, 2, 3)
        tokens = self.TOKENS
        (proposals,) = proposer.propose_ahead([wish(tokens, pending, (1, 1, 1, 1))]).values()
        for _ in range(3):
            proposal = proposals[1]
            tokens = (*tokens, *assumed_of(proposal, view("a", tokens), pending))
            pending = proposal.token_ids
            runner.num_tokens_read = 0
            (proposals,) = proposer.propose_ahead([wish(tokens, pending, (1, 1, 1, 1, 1))]).values()
            # The rows behind the committed prefix and behind each pending token, then b and what follows it.
            assert runner.num_tokens_read == 1 + 4 + 5 * 4
        assert proposer.counters["draft_ahead_branches_true"] == 3

    def test_after_a_hit_an_ordinary_draft_reads_the_last_token(self) -> None:
        runner = ToyRunner(MODEL)
        proposer = make(runner)
        (proposals,) = proposer.propose_ahead([wish(self.TOKENS, (1, 2), (0, 1, 0))]).values()
        assumed = assumed_of(proposals[0], view("a", self.TOKENS), (1, 2))
        runner.num_tokens_read = 0
        one = wish((*self.TOKENS, *assumed)).view
        again = proposer.propose([one], {one.request_id: 4})[one.request_id]
        assert again.token_ids == proposals[0].token_ids
        assert runner.num_tokens_read == 4

    @pytest.mark.parametrize("block_size", [1, 4, 64])
    def test_after_a_hit_nothing_is_read_twice_if_only_a_full_acceptance_is_prepared_for(
        self, block_size: int
    ) -> None:
        runner = ToyRunner(MODEL, block_size=block_size)
        proposer, fresh = make(runner), make()
        tokens, pending = self.TOKENS, (1, 2, 3)
        (proposals,) = proposer.propose_ahead([wish(tokens, pending, (0, 0, 0, 1), params=ENDLESS)]).values()
        for _ in range(3):
            tokens = (*tokens, *assumed_of(proposals[0], view("a", tokens), pending))
            pending = proposals[0].token_ids
            runner.num_tokens_read = 0
            asked = wish(tokens, pending, (0, 0, 0, 0, 1), params=ENDLESS)
            (proposals,) = proposer.propose_ahead([asked]).values()
            assert runner.num_tokens_read == 1 + 4  # the last pending token, then b and what follows it
            assert fresh.propose_ahead([asked])["a"] == proposals
            fresh.release([RequestId("a")])

    def test_after_a_miss_what_stands_of_the_pending_tokens_is_kept(self) -> None:
        runner = ToyRunner(MODEL)
        proposer = make(runner)
        proposer.propose_ahead([wish(self.TOKENS, (1, 2, 3), (1, 1, 1, 1))])
        runner.num_tokens_read = 0
        proposer.propose_ahead([wish((*self.TOKENS, 1, 2, 4), (), (1,))])
        assert runner.num_tokens_read == 1 + 4
        assert proposer.counters["draft_ahead_branches_true"] == 0

    def test_rows_behind_which_nothing_is_wanted_give_no_logits(self) -> None:
        rows = []

        class Watched(ToyRunner):
            def forward(self, slices):  # type: ignore[no-untyped-def]
                logits = super().forward(slices)
                rows.append(len(logits))
                return logits

        make(Watched(MODEL)).propose_ahead([wish(self.TOKENS, (1, 2, 3, 4), (0, 1, 1, 0, 0))])
        assert rows == [2, 2, 2, 2, 2]

    def test_what_cannot_be_caught_up_with_has_no_answer(self) -> None:
        proposer = make(reading=DraftReading(max_read_tokens=8))
        long, short = wish(range(6, 24), name="long"), wish((1, 2), (3,), (1, 1), name="short")
        assert set(proposer.propose_ahead([long, short])) == {"short"}
        assert set(proposer.propose_ahead([long, short])) == {"short"}
        assert set(proposer.propose_ahead([long, short])) == {"short", "long"}

    @pytest.mark.parametrize("fan_out", [(0,), (0, 0, 0)])
    def test_without_a_fan_out_the_prefix_is_read_and_no_more(self, fan_out: tuple[int, ...]) -> None:
        runner = ToyRunner(MODEL)
        assert make(runner).propose_ahead([wish(self.TOKENS, (1, 2)[: len(fan_out) - 1], fan_out)]) == {}
        assert runner.num_tokens_read == len(self.TOKENS) - 1

    def test_nothing_is_wished(self) -> None:
        runner = ToyRunner(MODEL)
        proposer = make(runner)
        assert proposer.propose_ahead([]) == {}
        assert proposer.propose_ahead([wish(self.TOKENS, (), (3,), num_draft_tokens=0)]) == {}
        assert runner.num_forwards == 1


class TestMemory:
    """A pool of 16 blocks of 4 tokens: branches may hold 4 of their own."""

    @staticmethod
    def proposer() -> DraftModelProposer:
        return make(ToyRunner(MODEL, num_blocks=17, block_size=4))

    def test_the_least_promising_are_left_out(self) -> None:
        proposer = self.proposer()
        everything = make().propose_ahead([wish(range(8), (1, 2), (3, 3, 3), params=GREEDY)])
        some = proposer.propose_ahead([wish(range(8), (1, 2), (3, 3, 3), params=GREEDY)])
        # Two blocks of the first; one behind the committed tokens, whose end is the end of a block.
        assert some["a"] == [everything["a"][index] for index in (0, 1, 4)]
        assert proposer.counters["draft_ahead_branches_left_out"] == 6
        assert proposer.counters["draft_ahead_branches"] == 3

    def test_branches_make_room_before_any_sequence(self) -> None:
        proposer = self.proposer()
        proposer.propose_ahead([wish(range(8), (1, 2), (1, 1, 1), name="a")])
        proposer.propose_ahead([wish(range(9), (1, 2), (1, 1, 1), name="b")])
        assert proposer.sequences.num_held_blocks == 3 + 2 + 4, "one block in common, the rest branches"
        large = view("c", [7] * 35)
        assert proposer.propose([large], {large.request_id: 1})
        proposer.check_integrity()
        assert proposer.sequences.known == {"a", "b", "c"}

    def test_sequences_never_make_room_for_branches(self) -> None:
        proposer = self.proposer()
        fillers = [view(name, range(first, first + 14)) for first, name in enumerate("xyz")]
        proposer.propose(fillers, {one.request_id: 2 for one in fillers})
        assert proposer.sequences.num_held_blocks == 12
        answers = proposer.propose_ahead([wish(range(8, 20), (1,), (4, 4), params=GREEDY)])
        assert proposer.sequences.known == {"x", "y", "z", "a"}
        assert answers == {}
        assert proposer.counters["draft_ahead_branches_left_out"] == 8

    def test_branches_of_a_sequence_that_nobody_asks_about_make_room(self) -> None:
        """A coordinator that has gone silent keeps nobody else from looking ahead."""
        proposer = self.proposer()
        asked = wish(range(8), (1, 2), (3, 3, 3), name="a", params=GREEDY)
        silent = proposer.propose_ahead([asked])["a"]
        others = proposer.propose_ahead([dataclasses.replace(asked, view=view("b", range(8)))])["b"]
        assert [one.token_ids for one in others] == [one.token_ids for one in silent]
        proposer.check_integrity()

    def test_release_and_close_give_everything_back(self) -> None:
        proposer = self.proposer()
        proposer.propose_ahead([wish(range(8), (1, 2), (1, 1, 1), name=name) for name in "ab"])
        assert proposer.sequences.num_held_blocks > 0
        proposer.release([RequestId("a")])
        proposer.check_integrity()
        proposer.close()
        proposer.check_integrity()
        assert proposer.sequences.num_held_blocks == 0

    def test_a_failing_draft_leaks_nothing(self) -> None:
        class Failing(ToyRunner):
            has_failed = False

            def forward(self, slices):  # type: ignore[no-untyped-def]
                if self.num_forwards == 2 and not self.has_failed:
                    self.has_failed = True
                    raise RuntimeError("out of order")
                return super().forward(slices)

        proposer = make(Failing(MODEL, num_blocks=17))
        with pytest.raises(RuntimeError, match="out of order"):
            proposer.propose_ahead([wish(range(8), (1, 2), (20, 20, 20), params=GREEDY)])
        proposer.check_integrity()
        true = view("a", (*range(8), 1, 2, *range(3, 6)))  # nothing is taken from what was not read
        assert proposer.propose([true], {true.request_id: 3}) == make().propose([true], {true.request_id: 3})
        assert proposer.counters["draft_ahead_branches_true"] == 0
        proposer.release([RequestId("a")])
        assert proposer.sequences.num_held_blocks == 0


def test_capability() -> None:
    proposer = make()
    assert proposer.capabilities.looks_ahead
    assert isinstance(proposer, LooksAhead)


class TestStraightOn(AheadContract):
    """Most wishes are for one guess, which is drafted in one go with what follows it."""

    straight_share = 0.7
    num_steps = 80

    def make(self) -> DraftModelProposer:
        return make()

    def test_a_wrong_guess_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Negative control: what was pending is not read."""
        start = DraftModelProposer._start

        def careless(self: DraftModelProposer, chunk: Chunk) -> ChainStart:
            found = start(self, chunk)
            if chunk.drafting.outlook is None or len(found.token_ids) < 2:
                return found
            return found._replace(token_ids=(*found.token_ids[:-1], found.token_ids[-1] ^ 1))

        monkeypatch.setattr(DraftModelProposer, "_start", careless)
        fresh = AheadContract.fresh.__wrapped__(self)  # type: ignore[attr-defined]
        with pytest.raises(AssertionError):
            self.test_random_life(0, fresh)


class TestNegativeControls:
    """The suite sees what can go wrong."""

    @staticmethod
    def run_suite() -> None:
        suite = TestWithoutPrefixCache()
        suite.test_random_life(0, AheadContract.fresh.__wrapped__(suite))  # type: ignore[attr-defined]

    def test_the_suite_passes(self) -> None:
        self.run_suite()

    def test_a_block_that_is_not_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ToyRunner, "copy_blocks", lambda *_: None)
        with pytest.raises(AssertionError):
            self.run_suite()

    def test_a_branch_that_is_taken_for_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        take = BranchStore.take

        def careless(self: BranchStore, request_id: RequestId, committed: Sequence[int] | None) -> object:
            found = next((held for held in self._held.get(request_id, ())), None)
            return take(self, request_id, None if found is None else found.branch.assumed)

        monkeypatch.setattr(BranchStore, "take", careless)
        with pytest.raises(AssertionError):
            self.run_suite()
