"""The other ranks of a model: they do what rank 0 does, until it lets them go.

    python -m specdec.engine.ranks.follower < place.json

is how an engine that holds a model over several processes of one machine starts them (`launch`); in a
cluster, actors call `follow`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Literal

import msgspec

from specdec.core.ids import RequestId, owner_of
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build_drafter import build_draft_grammars, build_draft_part
from specdec.engine.build_target import build_target_part
from specdec.engine.config import EngineConfig
from specdec.engine.draft_pool.grammar import DraftGrammars
from specdec.engine.ranks.commands import (
    AheadEntry,
    DraftEntry,
    ReleaseDrafts,
    RunAhead,
    RunDraft,
    RunTarget,
    SequenceOpening,
    Stop,
    decode,
)
from specdec.engine.targets.local_target import LocalTarget
from specdec.model.parallel.group import RankGroup, RankSpec
from specdec.model.parallel.heartbeat import beating
from specdec.proposers.base import AheadWish, LooksAhead, Proposer

logger = logging.getLogger(__name__)

Role = Literal["target", "draft"]


class FollowerPlace(msgspec.Struct, frozen=True):
    """What a follower's process is told when it starts."""

    role: Role
    spec: RankSpec
    device: str
    config_json: str
    """`EngineConfig` as JSON."""


def follow(role: Role, config: EngineConfig, group: RankGroup) -> None:
    """Load this rank's part of the target or the draft model, and serve rank 0 until it says stop.

    Raises:
        UserError: the model cannot be loaded (rank 0 raises the same).
        TransportError: another rank is gone.
    """
    if role == "target":
        target = build_target_part(config, group)
        with beating(group):  # not while loading: reading a file may keep everything else from running
            follow_target(target, group)
    else:
        proposer = build_draft_part(config, group)
        with beating(group), closing(build_draft_grammars(config)) as grammars:
            follow_drafter(proposer, group, grammars)


def follow_target(target: LocalTarget, group: RankGroup) -> None:
    """Run the rounds of rank 0 on this rank's part of the target."""
    while True:
        match decode(group.receive_command()):
            case RunTarget(step=step):
                target.run(step)
            case Stop():
                target.close()
                return
            case other:
                raise AssertionError(f"{type(other).__name__} for a target")


def follow_drafter(proposer: Proposer, group: RankGroup, grammars: DraftGrammars) -> None:
    """Draft with rank 0 on this rank's part of the draft model.

    A rank whose grammar is not compiled yet, when those of others are, does not part from them: all choose
    from the same candidates, those of this rank being as good as without a grammar.
    """
    sequences: dict[RequestId, _Followed] = {}
    while True:
        match decode(group.receive_command()):
            case RunDraft(entries=entries):
                views = [_update(sequences, entry, grammars) for entry in entries]
                budgets = {one.request_id: one.budget for one in entries if one.budget is not None}
                proposer.propose(views, budgets)
            case RunAhead(entries=wishes):
                assert isinstance(proposer, LooksAhead), "rank 0 asks it to"
                proposer.propose_ahead([_wish(sequences, one, grammars) for one in wishes])
            case ReleaseDrafts(request_ids=request_ids):
                for request_id in request_ids:
                    _drop(sequences, request_id)
                proposer.release(request_ids)
            case Stop():
                proposer.close()
                return
            case other:
                raise AssertionError(f"{type(other).__name__} for a drafter")


class _Followed:
    """A sequence as rank 0 knows it. Satisfies `SequenceView`."""

    def __init__(self, request_id: RequestId, opening: SequenceOpening, grammars: DraftGrammars) -> None:
        self.request_id = request_id
        self.params: SamplingParams = opening.params
        self.seed = opening.seed
        self.cache_salt = opening.cache_salt
        self.owner: str | None = None
        self.num_prompt_tokens = opening.num_prompt_tokens
        self.token_ids: list[int] = []
        self.prefix_hash = EMPTY_PREFIX
        self.kv_budget = 0
        self.constraint = grammars.follow(
            opening.grammar, self.token_ids, opening.num_prompt_tokens, owner_of(request_id)
        )

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.prefix_hash = extend_prefix_hash(self.prefix_hash, token_ids)


def _drop(sequences: dict[RequestId, _Followed], request_id: RequestId) -> None:
    sequence = sequences.pop(request_id, None)
    if sequence is not None and sequence.constraint is not None:
        sequence.constraint.close()


def _update(sequences: dict[RequestId, _Followed], entry: DraftEntry, grammars: DraftGrammars) -> _Followed:
    if entry.opening is not None:
        _drop(sequences, entry.request_id)
        sequences[entry.request_id] = _Followed(entry.request_id, entry.opening, grammars)
    sequence = sequences[entry.request_id]
    assert sequence.committed_len == entry.base_len, "rank 0 and this one disagree about a sequence"
    sequence.extend(entry.token_ids)
    sequence.kv_budget = entry.kv_budget
    return sequence


def _wish(sequences: dict[RequestId, _Followed], entry: AheadEntry, grammars: DraftGrammars) -> AheadWish:
    view, budget = _update(sequences, entry.sequence, grammars), entry.sequence.budget
    assert budget is not None, "a wish says how much it wants"
    return AheadWish(view=view, pending=entry.pending, num_draft_tokens=budget, fan_out=entry.fan_out)


def main() -> None:
    """Be the follower that standard input describes."""
    import torch

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s rank: %(message)s", stream=sys.stderr)
    place = msgspec.json.decode(sys.stdin.buffer.read(), type=FollowerPlace)
    group = RankGroup.join(place.spec, torch.device(place.device))
    follow(place.role, EngineConfig.model_validate_json(place.config_json), group)


if __name__ == "__main__":
    main()
