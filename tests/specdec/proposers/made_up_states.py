"""Made-up hidden states: a row is drawn from the hash of the prefix that it ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch

from specdec.core.ids import RequestId, owned_id
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import Proposer, ReadsStates
from specdec.proposers.hidden import HiddenRows, HiddenSource, ReceivedRows
from tests.specdec.drafters.conftest import HIDDEN
from tests.specdec.proposers.contract import view

VOCAB = 24


class MadeUpRows:
    first_row = 0

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.end_row = len(token_ids) - 1

    def since(self, row: int, end: int | None = None) -> torch.Tensor:
        places = range(row, self.end_row if end is None else end)
        rows = [made_up_row(self._token_ids[: at + 1]) for at in places]
        return torch.stack(rows) if rows else torch.empty(0, HIDDEN)

    def read_from(self, row: int) -> None:
        """Nothing is kept."""


def made_up_row(token_ids: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(extend_prefix_hash(EMPTY_PREFIX, token_ids) >> 1)
    return torch.randn(HIDDEN, generator=generator)


class MadeUpSource:
    def __init__(self, missing: Sequence[str] = ()) -> None:
        self._missing = missing

    def await_rows(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None = None
    ) -> Mapping[RequestId, HiddenRows]:
        return {
            one.request_id: MadeUpRows(one.token_ids)
            for one in sequences
            if one.request_id not in self._missing
        }

    def release(self, request_ids: Sequence[RequestId]) -> None:
        """Nothing is kept."""


class SentSource(MadeUpSource):
    """Keeps what has not been read, as what has come from another process; sends again what is missed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[RequestId, ReceivedRows] = {}

    def await_rows(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None = None
    ) -> Mapping[RequestId, HiddenRows]:
        for one in sequences:
            rows = self.kept.setdefault(one.request_id, ReceivedRows(0))
            if rows.end_row < one.committed_len - 1:
                rows.append(MadeUpRows(one.token_ids).since(rows.end_row))
        return {one.request_id: self.kept[one.request_id] for one in sequences}

    def send_again(self, request_id: RequestId) -> None:
        assert self.kept.pop(request_id).are_missed, "what nobody misses would be dropped"


class ReadingProposer(ReadsStates, Proposer, Protocol):
    """A proposer that reads hidden states."""


def check_displaced(make_over: Callable[[HiddenSource], ReadingProposer]) -> None:
    """One of a call that gives way to another of it, and then finds room after all, is read anew later."""
    generator = random.Random(4)
    text = {name: generator.choices(range(VOCAB), k=40) for name in ("a", "b", "c")}
    names = {name: owned_id("one" if name == "a" else "two", name) for name in text}

    def ask_for(proposer: ReadingProposer, **lengths: int) -> dict[str, Proposal]:
        views = [view(names[name], text[name][:length]) for name, length in lengths.items()]
        found = proposer.propose(views, {one.request_id: 3 for one in views})
        return {name: found[names[name]] for name in lengths if names[name] in found}

    source = SentSource()
    proposer = make_over(source)
    assert sorted(ask_for(proposer, b=9, c=25)) == ["b", "c"]
    # a takes the room of b; c has then too little to grow, and leaves b what it had.
    found = ask_for(proposer, a=13, c=35, b=10)
    assert found == ask_for(make_over(SentSource()), a=13)
    assert proposer.missing_states == {names["b"]: 0}
    source.send_again(names["b"])
    assert ask_for(proposer, b=11) == ask_for(make_over(SentSource()), b=11) != {}
    assert proposer.missing_states == {}
