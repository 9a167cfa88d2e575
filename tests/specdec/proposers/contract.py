"""What every proposer promises, as a test suite: subclass `ProposerContract` and say how to make one."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import TokenConstraint
from specdec.proposers.base import Proposer

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_k=12)


@dataclass(frozen=True, slots=True)
class FrozenView:
    """A sequence at one moment. It cannot be written to."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    params: SamplingParams = GREEDY
    seed: int = 7
    num_prompt_tokens: int = 1
    cache_salt: str | None = None
    constraint: TokenConstraint | None = None
    owner: str | None = None
    kv_budget: int = 0

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def prefix_hash(self) -> int:
        return extend_prefix_hash(EMPTY_PREFIX, self.token_ids)


def view(name: str, token_ids: Sequence[int], params: SamplingParams = GREEDY, seed: int = 7) -> FrozenView:
    return FrozenView(RequestId(name), tuple(token_ids), params, seed)


def check(
    proposals: Mapping[RequestId, Proposal], views: Sequence[FrozenView], budgets: Mapping[str, int]
) -> None:
    """Assert what every single answer promises."""
    by_id = {one.request_id: one for one in views}
    for request_id, proposal in proposals.items():
        one = by_id[request_id]
        assert proposal.request_id == request_id
        assert (proposal.committed_len, proposal.prefix_hash) == (one.committed_len, one.prefix_hash)
        assert proposal.num_tokens <= budgets.get(request_id, 0)
        assert proposal.num_tokens >= 1 or proposal.beside is not None
        assert proposal.method


class ProposerContract(ABC):
    """The suite. Answers are compared with those of a fresh proposer: history must not show."""

    vocab_size = 24
    always_proposes = False
    """Whether it has something for every sequence."""
    remembers = False
    """Whether it learns from sequences that were released: what it then proposes is its own affair."""

    @abstractmethod
    def make_proposer(self) -> Proposer:
        """Return a proposer with room for everything that the suite asks of it."""

    @pytest.fixture
    def proposer(self) -> Iterator[Proposer]:
        made = self.make_proposer()
        yield made
        made.close()

    def ask(
        self, proposer: Proposer, views: Sequence[FrozenView], budget: int = 4
    ) -> dict[RequestId, Proposal]:
        budgets = {one.request_id: budget for one in views}
        proposals = proposer.propose(views, budgets)
        check(proposals, views, budgets)
        return proposals

    def tokens(self, proposer: Proposer, one: FrozenView, budget: int = 4) -> tuple[int, ...]:
        proposal = self.ask(proposer, [one], budget).get(one.request_id)
        return () if proposal is None else proposal.token_ids

    def fresh_tokens(self, one: FrozenView, budget: int = 4) -> tuple[int, ...]:
        proposer = self.make_proposer()
        tokens = self.tokens(proposer, one, budget)
        proposer.close()
        return tokens

    def random_tokens(self, generator: random.Random, length: int) -> list[int]:
        """Repetitive, so that a look-up finds something."""
        phrase = generator.choices(range(self.vocab_size), k=5)
        return [
            phrase[index % 5] if generator.random() < 0.8 else generator.randrange(self.vocab_size)
            for index in range(length)
        ]

    def test_capabilities_are_constant_and_named(self, proposer: Proposer) -> None:
        before = proposer.capabilities
        self.ask(proposer, [view("a", [1, 2, 3, 1, 2])])
        assert proposer.capabilities == before
        assert before.name

    def test_nothing_is_proposed_without_a_budget(self, proposer: Proposer) -> None:
        views = [view(name, [1, 2, 3, 1, 2, 3, 1]) for name in "abc"]
        proposals = proposer.propose(views, {RequestId("a"): 0, RequestId("c"): 2})
        assert set(proposals) <= {"c"}
        assert proposer.propose([], {}) == {}

    @pytest.mark.parametrize("budget", [1, 2, 3, 7])
    def test_budget_is_kept_and_tokens_are_known(self, proposer: Proposer, budget: int) -> None:
        one = view("a", [1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
        tokens = self.tokens(proposer, one, budget)
        assert len(tokens) <= budget
        if self.always_proposes:
            assert len(tokens) == budget
        assert all(0 <= token < self.vocab_size for token in tokens)

    @pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_same_question_same_answer(self, proposer: Proposer, params: SamplingParams) -> None:
        one = view("a", [5, 6, 7, 5, 6], params)
        assert self.tokens(proposer, one) == self.tokens(proposer, one) == self.fresh_tokens(one)

    def test_answer_does_not_depend_on_company(self, proposer: Proposer) -> None:
        generator = random.Random(3)
        views = [view(f"r{i}", self.random_tokens(generator, 3 + 4 * i), SAMPLED, seed=i) for i in range(6)]
        together = self.ask(proposer, views)
        for one in views:
            proposal = together.get(one.request_id)
            assert (proposal.token_ids if proposal else ()) == self.fresh_tokens(one)

    def test_gap(self, proposer: Proposer) -> None:
        """Many tokens were committed since it was asked last."""
        tokens = self.random_tokens(random.Random(4), 40)
        self.tokens(proposer, view("a", tokens[:6]))
        assert self.tokens(proposer, view("a", tokens)) == self.fresh_tokens(view("a", tokens))

    def test_rollback(self, proposer: Proposer) -> None:
        """It is asked about a shorter prefix, then about another continuation of it."""
        tokens = self.random_tokens(random.Random(5), 30)
        self.tokens(proposer, view("a", tokens))
        for other in (tokens[:11], [*tokens[:11], 3, 1, 4, 1, 5], [9, *tokens[1:20]], tokens):
            assert self.tokens(proposer, view("a", other)) == self.fresh_tokens(view("a", other))

    def test_rejected_and_accepted_drafts(self, proposer: Proposer) -> None:
        """Continuations that keep all, some or none of the draft, as verification does."""
        generator = random.Random(6)
        tokens = self.random_tokens(generator, 8)
        for _ in range(25):
            one = view("a", tokens, SAMPLED)
            drafted = self.tokens(proposer, one)
            assert drafted == self.fresh_tokens(one)
            kept = drafted[: generator.randint(0, len(drafted))]
            tokens = [*tokens, *kept, generator.randrange(self.vocab_size)]

    def test_random_interleavings(self, proposer: Proposer) -> None:
        generator = random.Random(8)
        sequences = {f"r{index}": self.random_tokens(generator, 6) for index in range(5)}
        for _ in range(40):
            names = generator.sample(sorted(sequences), generator.randint(1, 5))
            views = [view(name, sequences[name], SAMPLED, seed=int(name[1:])) for name in names]
            budgets = {one.request_id: generator.randint(0, 5) for one in views}
            proposals = proposer.propose(views, budgets)
            check(proposals, views, budgets)
            one = generator.choice(views)
            proposal = proposals.get(one.request_id)
            if not self.remembers:
                expected = self.fresh_tokens(one, budgets[one.request_id])
                assert (proposal.token_ids if proposal else ()) == expected
            for name in names:
                if generator.random() < 0.2:
                    proposer.release([RequestId(name)])
                if generator.random() < 0.1:
                    sequences[name] = self.random_tokens(generator, 6)  # the name is used again
                else:
                    sequences[name] += generator.choices(range(self.vocab_size), k=generator.randint(1, 4))

    def test_release(self, proposer: Proposer) -> None:
        one = view("a", [1, 2, 3, 1, 2, 3, 1])
        self.tokens(proposer, one)
        proposer.release([one.request_id, RequestId("never seen")])
        proposer.release([one.request_id])
        other = view("a", [14, 15, 16, 14, 15])  # nothing that was learnt says what follows
        assert self.tokens(proposer, other) == self.fresh_tokens(other)

    def test_shortest_prefix(self, proposer: Proposer) -> None:
        assert self.tokens(proposer, view("a", [1])) == self.fresh_tokens(view("a", [1]))

    def test_close_is_idempotent(self) -> None:
        proposer = self.make_proposer()
        self.ask(proposer, [view("a", [1, 2, 1])])
        proposer.close()
        proposer.close()
