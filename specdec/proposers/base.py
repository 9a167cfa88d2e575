"""The contract of everything that proposes tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from specdec.core.errors import ConfigError
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome, NoiseStream, Proposal
from specdec.core.sequence import SequenceView
from specdec.verification.base import RuleCapabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerCapabilities:
    """What a proposer needs and gives. Upper layers ask this, never which class it is."""

    name: str
    shape: Literal["chain", "tree"] = "chain"
    tree_levels: tuple[int, ...] = ()
    """Most levels of its trees of 1, 2, ... nodes, where each level is a step of drafting; empty: it drafts
    chains, or takes no steps."""
    sampled: bool = False
    """Whether tokens are sampled from a q (else they are deterministic given the prefix)."""
    noise_stream: NoiseStream = "target"
    """Stream that it samples with, where it samples at all."""
    gives_q_rows: bool = False
    """Whether it attaches `q_rows`, which ratio rules need, to what it samples."""
    kv: Literal["none", "own", "target"] = "none"
    hidden_layers: tuple[int, ...] = ()
    """Hidden states of the target that it reads, in this order; `model.hidden_taps` numbers them."""
    remote: bool = False
    """Whether proposing crosses a process border (and may therefore be late)."""
    max_context: int | None = None
    """Longest prefix it can continue, in tokens; None for no limit."""
    looks_ahead: bool = False
    """Whether it, or whoever is behind it, implements `LooksAhead`."""
    num_rows_beside: int = 0
    """Most rows that it adds to the target's forward for a sequence, beside those of its draft
    (`Proposal.beside`)."""
    at_target: bool = False
    """Whether the target drafts, in the step that verifies (`TargetWork.num_self_drafted`): `propose` is then
    not asked, but see `looks_first`."""
    looks_first: bool = False
    """Whether `propose` may have something for sequences for which the target drafts otherwise."""


def require_verifiable(proposer: ProposerCapabilities, rule: RuleCapabilities) -> None:
    """Check that what a proposer gives is what a rule can work with.

    Raises:
        ConfigError: what is missing.
    """
    if not rule.needs_p_rows:
        return
    if proposer.shape == "tree" and not rule.takes_trees:
        raise ConfigError(
            f"the verification rule {rule.name} takes chains, but {proposer.name} drafts trees: "
            "use sample_and_match or multi_round"
        )
    if not proposer.sampled:
        return
    if proposer.noise_stream != rule.draft_stream:
        raise ConfigError(
            f"the verification rule {rule.name} needs drafts sampled with noise stream "
            f"{rule.draft_stream!r}, but {proposer.name} samples with {proposer.noise_stream!r}: "
            "use sample_and_match"
        )
    if rule.needs_q_rows and not proposer.gives_q_rows:
        raise ConfigError(
            f"the verification rule {rule.name} needs the distributions (q) that drafts were sampled from, "
            f"and {proposer.name} gives none: use sample_and_match"
        )


class Proposer(Protocol):
    """Proposes continuations of committed prefixes. It sees sequences read-only.

    A proposer is stateless towards its caller: `propose` may be called for any sequence at any committed
    length, in any order, after any gap; state kept from earlier calls (K/V, tables) only makes it faster.
    It never raises for one sequence's sake: a sequence it cannot serve simply gets no proposal.
    """

    @property
    def capabilities(self) -> ProposerCapabilities:
        """Constant over the life of the proposer."""
        ...

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Propose at most `num_draft_tokens[id]` tokens for each sequence.

        Sequences with a budget of 0 or without a budget, and those that it has nothing for, are absent
        from the answer (a proposal without tokens has rows beside). The engine passes sequences whose prompt
        the target still reads without a budget, so that a proposer with a cache of its own may read the
        prompt too.
        Each proposal names the committed prefix it continues.
        """
        ...

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget everything about these sequences. Unknown ids are ignored."""
        ...

    def close(self) -> None:
        """Free all resources. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadWish:
    """What to prepare for one sequence while the target verifies a chain behind its committed prefix."""

    view: SequenceView
    pending: tuple[int, ...] = ()
    """The chain that is being verified."""
    num_draft_tokens: int
    """Longest continuation wanted behind an assumed verdict."""
    fan_out: tuple[int, ...] | None
    """One entry more than `pending`. [a]: how many tokens b to prepare for as the target's own, if exactly
    the first a pending tokens stand. None: nothing is assumed, the wish is for what `propose` would give."""

    is_foreign: bool = False
    """Whether `pending` is not the drafter's own (`Proposal.is_fallback`)."""

    @property
    def is_ordinary(self) -> bool:
        """Whether the wish is for what `propose` would give."""
        return self.fan_out is None


@runtime_checkable
class LooksAhead(Protocol):
    """A proposer that prepares continuations for verdicts that are not known yet.

    It changes nothing about what `propose` answers, and what it answers is, for each assumed prefix, what
    `propose` would answer once that prefix is committed.
    """

    def propose_ahead(self, wishes: Sequence[AheadWish]) -> dict[RequestId, list[Proposal]]:
        """Continue assumed prefixes, those of one sequence with the most promising first.

        Each proposal names the prefix that it assumes: the committed tokens, a of the pending ones and a
        token b. That is never the next pending one, and never a token that ends the text. There may be fewer
        proposals than asked for: where memory is short, where the request has no room for more tokens, and
        where the draft model has not caught up with the committed tokens there are fewer, or none at all.
        Ordinary wishes are answered by one proposal at most, as by `propose`.

        Whatever is asked next about a sequence ends what was prepared for it: what has turned out true is
        kept as its own, the rest is forgotten.
        """
        ...


@runtime_checkable
class AsksAhead(Protocol):
    """A proposer whose drafting goes on elsewhere while the target verifies."""

    def look_ahead(self, wishes: Sequence[AheadWish]) -> None:
        """Have continuations prepared for what the round in flight may bring; do not wait for them.

        The next `propose` finds the right one for each sequence, or nothing: it does not ask again then.
        """
        ...

    def take_ahead_outcomes(self) -> Sequence[AheadOutcome]:
        """Return what became of the continuations that the last `propose` has looked among, once."""
        ...

    @property
    def ready_s(self) -> float | None:
        """Seconds from asking for what the last `propose` has looked through to the last answer, waited for
        or not; None: nothing was asked for, or somebody has not answered.
        """
        ...

    def take_drafting_s(self) -> float:
        """Return the seconds of drafting that the answers heard by the last `propose` took, once.

        The longest, where several drafted at a time; 0 when nothing was heard.
        """
        ...


@runtime_checkable
class AsksOthers(Protocol):
    """A proposer that has others draft, and waits for them."""

    def take_asking_s(self) -> float:
        """Return the seconds of the last `propose` that were no waiting for drafts, once.

        It wrote down what it asks, and read the answers: that is its caller's own time.
        """
        ...


@runtime_checkable
class HearsBeside(Protocol):
    """A proposer that has the target compute rows of its own (`ProposerCapabilities.num_rows_beside`)."""

    def hear_beside(self, proposal: Proposal, token_ids: Sequence[int]) -> None:
        """Take what the target says at the answered rows beside a proposal.

        Not every proposal's rows are computed, or answered. What is heard changes what is proposed, as time
        goes on, but is not needed for it.
        """
        ...


@runtime_checkable
class HasRoom(Protocol):
    """A proposer whose memory may be too small for what is asked of it."""

    def has_room(self, owner: str, num_tokens: int) -> bool:
        """Whether one more sequence of so many tokens is worth beginning.

        Somebody who has less than an equal share of the memory has room: it is taken from those who have
        more. `owner` as by `core.ids.owner_of`.
        """
        ...

    @property
    def memory_held(self) -> float:
        """Share of its memory that sequences hold, 0 to 1."""
        ...

    @property
    def crowded_out(self) -> Sequence[RequestId]:
        """Sequences that had no room in the last call: nothing is known of them any more.

        Their owners had all of their share: asking again soon is of no use.
        """
        ...


@runtime_checkable
class ReadsAlong(Protocol):
    """A proposer that has to read what was committed before it can draft; much of it, a part at a time."""

    def num_unread(self, view: SequenceView) -> int:
        """Return how many committed tokens, the last one aside, it has not read."""
        ...


@runtime_checkable
class ReadsStates(Protocol):
    """A proposer that reads hidden states of the target, which may get lost on their way to it."""

    @property
    def missing_states(self) -> Mapping[RequestId, int]:
        """Sequences of the last call that have none to be read, because earlier ones were lost.

        With the position from which on they have to come once more. Those that are late are not among them.
        """
        ...


@runtime_checkable
class HasCounters(Protocol):
    """A proposer that counts something worth exporting."""

    @property
    def counters(self) -> Mapping[str, float]:
        """Counters since the start, by metric name without prefix."""
        ...


def counters_of(proposer: Proposer) -> Mapping[str, float]:
    """Return what a proposer counts."""
    return proposer.counters if isinstance(proposer, HasCounters) else {}
