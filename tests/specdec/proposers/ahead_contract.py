"""What every proposer that looks ahead promises: subclass `AheadContract` and say how to make one.

Everything is compared with what a fresh proposer gives for the prefix that was assumed, once it is committed.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from specdec.core.ids import RequestId
from specdec.core.prefix_hash import extend_prefix_hash
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import TokenConstraint
from specdec.proposers.base import AheadWish
from specdec.proposers.draft_model import DraftModelProposer
from tests.pairwise import mostly_full
from tests.specdec.proposers.contract import GREEDY, SAMPLED, FrozenView, view

VOCAB_SIZE = 24
EOS = 5
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02, max_tokens=40),
)
SHAPING = (
    SamplingParams(temperature=0.8, repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=3.0),
    SamplingParams(temperature=1.0, logit_bias=((3, 4.0), (EOS, 6.0)), min_tokens=12),
    SamplingParams(temperature=1.2, bad_words=((1, 2), (7,), (4, 4, 4)), allowed_token_ids=tuple(range(18))),
)


class Alternating:
    """A grammar: behind an output token t only tokens of the other parity may come, but never 0."""

    grammar = None

    def __init__(self, one: FrozenView | Stream) -> None:
        self._one = one

    def allowed_after(self, drafted: Sequence[int]) -> bytes | None:
        output = [*self._one.token_ids[self._one.num_prompt_tokens :], *drafted]
        if 0 in drafted or any((x - y) % 2 == 0 for x, y in pairwise(output)):
            return None
        allowed = [t for t in range(1, VOCAB_SIZE) if not output or (t - output[-1]) % 2]
        return sum(1 << t for t in allowed).to_bytes(-(-VOCAB_SIZE // 8), "little")


@dataclass
class Stream:
    """A sequence that lives on."""

    name: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    has_grammar: bool = False
    pending: tuple[int, ...] = ()
    prepared: list[Proposal] = field(default_factory=list)

    def view(self, extra: Sequence[int] = ()) -> FrozenView:
        one = FrozenView(
            RequestId(self.name),
            (*self.token_ids, *extra),
            self.params,
            self.seed,
            self.num_prompt_tokens,
        )
        constraint: TokenConstraint | None = Alternating(one) if self.has_grammar else None  # type: ignore[assignment]
        return replace(one, constraint=constraint)


def assumed_of(
    proposal: Proposal, one: FrozenView, pending: tuple[int, ...], vocab_size: int = VOCAB_SIZE
) -> tuple[int, ...]:
    """Find out by the hash which verdict a proposal assumes."""
    a = proposal.committed_len - one.committed_len - 1
    assert 0 <= a <= len(pending)
    for token_id in range(vocab_size):
        assumed = (*pending[:a], token_id)
        if extend_prefix_hash(one.prefix_hash, assumed) == proposal.prefix_hash:
            assert token_id not in pending[a : a + 1], "that would be an acceptance"
            return assumed
    raise AssertionError("a proposal for another prefix")


class AheadContract(ABC):
    """The suite."""

    has_room: bool | None = True
    """Whether everything that is wished for fits; None: who knows."""
    params: Sequence[SamplingParams] = PARAMS
    num_steps = 40
    straight_share = 0.0
    """Of wishes, those for the one verdict that all is accepted and the drafter's own token follows."""

    @abstractmethod
    def make(self) -> DraftModelProposer:
        """Return a proposer over a model of `VOCAB_SIZE` tokens, with `EOS`."""

    @pytest.fixture
    def fresh(self) -> Callable[[FrozenView, int], Proposal | None]:
        made = self.make()

        def propose(one: FrozenView, budget: int) -> Proposal | None:
            renamed = replace(one, request_id=RequestId("fresh"))
            proposal = made.propose([renamed], {renamed.request_id: budget}).get(renamed.request_id)
            made.release([renamed.request_id])
            return proposal

        return propose

    def check(
        self, proposals: Sequence[Proposal], wish: AheadWish, stream: Stream, fresh: Fresh
    ) -> list[tuple[int, ...]]:
        """Assert what the answer to one wish promises; return what is assumed."""
        one = wish.view
        assert isinstance(one, FrozenView)
        if wish.fan_out is None:
            (proposal,) = proposals
            self.check_equal(proposal, fresh(one, wish.num_draft_tokens))
            return []
        found = [assumed_of(proposal, one, wish.pending) for proposal in proposals]
        assert len(set(found)) == len(found), "a verdict is prepared for twice"
        ends = one.params.stop_ids([EOS])
        for proposal, assumed in zip(proposals, found, strict=True):
            assert proposal.request_id == one.request_id
            assert not ends & set(assumed), "nothing comes behind the end"
            self.check_equal(proposal, fresh(stream.view(assumed), wish.num_draft_tokens))
        for a, fan_out in enumerate(wish.fan_out):
            assert sum(len(assumed) == a + 1 for assumed in found) <= fan_out
        return found

    @staticmethod
    def check_equal(proposal: Proposal, expected: Proposal | None) -> None:
        assert expected is not None
        assert (proposal.committed_len, proposal.prefix_hash) == (
            expected.committed_len,
            expected.prefix_hash,
        )
        assert proposal.token_ids == expected.token_ids
        assert proposal.noise_stream == expected.noise_stream
        assert proposal.q_rows == expected.q_rows
        assert proposal.method == expected.method

    @pytest.mark.parametrize("seed", mostly_full(range(3), [0]))
    def test_random_life(self, seed: int, fresh: Fresh) -> None:
        """Wishes of all kinds, verdicts of all kinds, names that are released and used again."""
        rng = random.Random(seed)
        proposer = self.make()
        streams = [self.new_stream(rng, f"r{index}") for index in range(5)]
        num_found = num_hits = 0
        for _ in range(self.num_steps):
            asked = rng.sample(streams, rng.randint(1, len(streams)))
            if rng.random() < 0.25:
                self.ask_as_ever(proposer, rng, asked, fresh)
            else:
                num_found += self.look_ahead(proposer, rng, asked, fresh)
            for stream in asked:
                num_hits += self.go_on(proposer, rng, stream)
        assert num_found > self.num_steps
        assert num_hits > self.num_steps / 4
        counters = proposer.counters
        assert counters["draft_ahead_branches"] == num_found
        assert counters["draft_ahead_branches_true"] > 0
        if self.has_room is not None:
            assert (counters["draft_ahead_branches_left_out"] == 0) == self.has_room
        proposer.release([RequestId(stream.name) for stream in streams])
        proposer.check_integrity()
        assert proposer.sequences.num_held_blocks == 0

    def new_stream(self, rng: random.Random, name: str) -> Stream:
        tokens = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 14))
        return Stream(
            name,
            [token for token in tokens if token != EOS] or [1],
            rng.choice(self.params),
            rng.getrandbits(64),
            rng.randint(1, len([token for token in tokens if token != EOS] or [1])),
            has_grammar=self.params is SHAPING and rng.random() < 0.3,
        )

    def ask_as_ever(
        self, proposer: DraftModelProposer, rng: random.Random, asked: Sequence[Stream], fresh: Fresh
    ) -> None:
        views = [stream.view() for stream in asked]
        budgets = {one.request_id: rng.randint(0, 5) for one in views}
        proposals = proposer.propose(views, budgets)
        proposer.check_integrity()
        for stream, one in zip(asked, views, strict=True):
            stream.prepared = []
            proposal = proposals.get(one.request_id)
            stream.pending = () if proposal is None else proposal.token_ids
            if proposal is not None:
                self.check_equal(proposal, fresh(one, budgets[one.request_id]))

    def look_ahead(
        self, proposer: DraftModelProposer, rng: random.Random, asked: Sequence[Stream], fresh: Fresh
    ) -> int:
        wishes = [self.new_wish(rng, stream) for stream in asked]
        answers = proposer.propose_ahead(wishes)
        proposer.check_integrity()
        num_found = 0
        assert set(answers) <= {wish.view.request_id for wish in wishes}
        for stream, wish in zip(asked, wishes, strict=True):
            stream.prepared = answers.get(wish.view.request_id, [])
            if stream.prepared:
                num_found += len(self.check(stream.prepared, wish, stream, fresh))
            if wish.fan_out is None:
                stream.pending = stream.prepared[0].token_ids if stream.prepared else ()
                stream.prepared = []
        return num_found

    def new_wish(self, rng: random.Random, stream: Stream) -> AheadWish:
        if rng.random() < 0.2:
            return AheadWish(view=stream.view(), num_draft_tokens=rng.randint(0, 5), fan_out=None)
        pending = stream.pending
        if rng.random() < 0.2:  # of another drafter
            pending = tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(0, 4)))
        stream.pending = pending
        fan_out = tuple([rng.choice([0, 1, 1, 2, 4]) for _ in range(len(pending) + 1)])
        if self.straight_share and rng.random() < self.straight_share:
            fan_out = (*([0] * len(pending)), 1)
        return AheadWish(
            view=stream.view(),
            pending=pending,
            num_draft_tokens=rng.randint(0, 5) if rng.random() < 0.2 else rng.randint(1, 5),
            fan_out=fan_out,
        )

    def go_on(self, proposer: DraftModelProposer, rng: random.Random, stream: Stream) -> bool:
        """Decide what the target has made of what was pending; return whether it was prepared for."""
        fate = rng.random()
        if fate < 0.06:
            proposer.release([RequestId(stream.name)])
            proposer.check_integrity()
        if fate < 0.1 or len(stream.token_ids) > 60:  # the name is used again, even unreleased
            stream.__dict__.update(self.new_stream(rng, stream.name).__dict__)
            return False
        if fate < 0.2:
            return False  # no verdict yet
        if stream.prepared and fate < 0.65:
            proposal = rng.choice(stream.prepared)
            assumed = assumed_of(proposal, stream.view(), stream.pending)
            stream.token_ids += assumed
            stream.pending, stream.prepared = proposal.token_ids, []
            if rng.random() < 0.2:  # and further, before anybody asks
                stream.token_ids += proposal.token_ids[: rng.randint(0, 3)]
                stream.token_ids += [rng.randrange(EOS)]
                stream.pending = ()
            return True
        kept = stream.pending[: rng.randint(0, len(stream.pending))]
        stream.token_ids += [token for token in kept if token != EOS]
        stream.token_ids += [rng.randrange(EOS)]
        stream.pending, stream.prepared = (), []
        return False


Fresh = Callable[[FrozenView, int], Proposal | None]


def wish(
    tokens: Sequence[int],
    pending: Sequence[int] = (),
    fan_out: Sequence[int] = (2,),
    *,
    name: str = "a",
    params: SamplingParams = SAMPLED,
    num_draft_tokens: int = 4,
) -> AheadWish:
    return AheadWish(
        view=view(name, tokens, params),
        pending=tuple(pending),
        num_draft_tokens=num_draft_tokens,
        fan_out=tuple(fan_out),
    )
