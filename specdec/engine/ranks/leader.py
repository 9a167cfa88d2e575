"""Rank 0 of a model that several ranks hold: a target, or a proposer, that takes the others along."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from specdec.core.description import TargetDescription
from specdec.core.errors import TransportError
from specdec.core.idle_work import IdleWork
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.ranks.commands import (
    AheadEntry,
    Command,
    DraftEntry,
    ReleaseDrafts,
    RunAhead,
    RunDraft,
    RunTarget,
    SequenceOpening,
    Stop,
    encode,
)
from specdec.engine.targets.kept_rows import KeptRows
from specdec.engine.targets.local_target import LocalTarget, run_to_the_end
from specdec.model.batch import Runner
from specdec.model.parallel.group import RankGroup
from specdec.model.runner import ModelRunner
from specdec.proposers.base import AheadWish, ProposerCapabilities
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.prefix import SeenPrefix


class Followers(Protocol):
    """The processes of the other ranks, where rank 0 has started them."""

    def close(self) -> None:
        """Wait for their end, or end them."""
        ...


class _Leader:
    """Commands the other ranks, and lets them go."""

    def __init__(self, group: RankGroup, followers: Followers | None) -> None:
        self._group = group
        self._followers = followers
        self._is_closed = False

    def tell(self, command: Command) -> None:
        self._group.send_command(encode(command))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(TransportError):  # whoever is gone needs not be told
            self.tell(Stop())
        if self._followers is not None:
            self._followers.close()


class LeadingTarget:
    """Implements `engine.target.Target`: hands each round to the other ranks, and runs it with them.

    After a TransportError (a rank has died) the group is of no use: start all ranks anew.
    """

    def __init__(self, target: LocalTarget, group: RankGroup, followers: Followers | None = None) -> None:
        """Lead with `target`, rank 0's part; `followers` are closed with it."""
        self._target = target
        self._leader = _Leader(group, followers)
        self._pending: deque[TargetStep] = deque()

    @property
    def idle_work(self) -> Sequence[IdleWork]:
        """None: what one rank does alone would leave the others waiting."""
        return ()

    @property
    def description(self) -> TargetDescription:
        """Facts about the model."""
        return self._target.description

    @property
    def hidden(self) -> KeptRows | None:
        """Hidden states of its sequences, where some are kept: rank 0 has them in full."""
        return self._target.hidden

    @property
    def runner(self) -> ModelRunner:
        """Rank 0's part of the model. A forward needs all ranks: do not call it by itself."""
        return self._target.runner

    @property
    def is_elsewhere(self) -> bool:
        """No: `collect` runs this rank's part."""
        return False

    def submit(self, step: TargetStep) -> None:
        """Queue a round."""
        self._pending.append(step)

    def collect(self) -> TargetResult:
        """Run the oldest queued round on all ranks and return its answer.

        Raises:
            TransportError: a rank is gone.
        """
        return run_to_the_end(self._run, self._pending.popleft())

    def _run(self, step: TargetStep) -> TargetResult:
        drafted = self._target.begin(step)
        self._leader.tell(RunTarget(drafted.step))
        return self._target.run_drafted(drafted)

    def close(self) -> None:
        """Forget everything and let the other ranks end. Idempotent."""
        self._pending.clear()
        self._leader.close()
        self._target.close()


class LeadingProposer:
    """Implements `Proposer` and `LooksAhead` over a draft model that several ranks hold."""

    def __init__(
        self, proposer: DraftModelProposer, group: RankGroup, followers: Followers | None = None
    ) -> None:
        """Lead with `proposer`, over rank 0's part of the draft model; `followers` are closed with it."""
        self._proposer = proposer
        self._leader = _Leader(group, followers)
        self._seen: dict[RequestId, SeenPrefix] = {}

    @property
    def capabilities(self) -> ProposerCapabilities:
        """Those of the draft model."""
        return self._proposer.capabilities

    @property
    def idle_work(self) -> Sequence[IdleWork]:
        """None: what one rank does alone would leave the others waiting."""
        return ()

    @property
    def counters(self) -> Mapping[str, int]:
        """Those of rank 0's part of the draft model: the others count the same."""
        return self._proposer.counters

    @property
    def runner(self) -> Runner:
        """Rank 0's part of the draft model. A forward needs all ranks: do not call it by itself."""
        return self._proposer.runner

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Propose with all ranks.

        Raises:
            TransportError: a rank is gone.
        """
        entries = tuple(self._entry(one, num_draft_tokens.get(one.request_id)) for one in sequences)
        self._leader.tell(RunDraft(entries))
        return self._proposer.propose(sequences, num_draft_tokens)

    def propose_ahead(self, wishes: Sequence[AheadWish]) -> dict[RequestId, list[Proposal]]:
        """Look ahead with all ranks.

        Raises:
            TransportError: a rank is gone.
        """
        entries = tuple(
            AheadEntry(self._entry(wish.view, wish.num_draft_tokens), wish.pending, wish.fan_out)
            for wish in wishes
        )
        self._leader.tell(RunAhead(entries))
        return self._proposer.propose_ahead(wishes)

    def num_unread(self, view: SequenceView) -> int:
        """As rank 0's part has it: all read the same."""
        return self._proposer.num_unread(view)

    def has_room(self, owner: str, num_tokens: int) -> bool:
        """As rank 0's part has it: the others have as many blocks."""
        return self._proposer.has_room(owner, num_tokens)

    @property
    def memory_held(self) -> float:
        """That of rank 0's part, as of all."""
        return self._proposer.memory_held

    @property
    def crowded_out(self) -> Sequence[RequestId]:
        """Those of rank 0's part: the others have no room for them either."""
        return self._proposer.crowded_out

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget these sequences in all ranks, and here where one is gone: who asks for drafts is told."""
        known = tuple(one for one in request_ids if self._seen.pop(one, None) is not None)
        if known:
            self._proposer.release(known)
            with suppress(TransportError):
                self._leader.tell(ReleaseDrafts(known))

    def close(self) -> None:
        """Forget everything and let the other ranks end. Idempotent."""
        self._seen.clear()
        self._leader.close()
        self._proposer.close()

    def _entry(self, sequence: SequenceView, budget: int | None) -> DraftEntry:
        seen = self._seen.get(sequence.request_id)
        opening: SequenceOpening | None = None
        if seen is None or not seen.continues_in(sequence):
            seen = self._seen[sequence.request_id] = SeenPrefix()
            opening = SequenceOpening(
                sequence.params,
                sequence.seed,
                sequence.num_prompt_tokens,
                sequence.cache_salt,
                None if sequence.constraint is None else sequence.constraint.grammar,
            )
        base_len = seen.length
        seen.update(sequence)
        return DraftEntry(
            request_id=sequence.request_id,
            base_len=base_len,
            token_ids=tuple(sequence.token_ids[base_len:]),
            budget=budget,
            opening=opening,
            kv_budget=sequence.kv_budget,
        )
