"""A draft worker with little memory, and coordinators played by the test that share it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from specdec.core.clock import ManualClock
from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.engine.draft_pool.grammar import DraftGrammars
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.sampling.sampler import Sampler
from specdec.transport.base import PeerId
from specdec.transport.memory import MemoryChannel, MemoryNetwork
from specdec.transport.messages import DraftOpening, ProposeAnswer, ProposeEntry, ProposeReply, ProposeRequest
from tests.specdec.engine.draft_pool.server_bench import MODEL, PARAMS, VOCAB

DRAFT = PeerId("draft")
SHARES = DraftShareConfig(max_sequences=16, max_batch_entries=8, max_batch_rows=256, max_batch_branches=64)


class Pool:
    """A draft worker over a toy model with little memory, and coordinators played by the test."""

    def __init__(
        self,
        names: Sequence[str] = ("good", "bad"),
        shares: DraftShareConfig = SHARES,
        num_blocks: int = 256,
        grammars: DraftGrammars | None = None,
        max_draft_tokens: int = MAX_DRAFT_TOKENS,
    ) -> None:
        self.network = MemoryNetwork(seed=0, clock=ManualClock())
        channel = self.network.open(DRAFT)
        self.runner = ToyRunner(MODEL, num_blocks=num_blocks)
        self.proposer = DraftModelProposer(
            self.runner,
            DraftChoice(sampler=Sampler(), vocab_size=VOCAB),
            reading=DraftReading(max_read_tokens=64),
        )
        self.server = DraftServer(
            channel,
            self.proposer,
            grammars=grammars,
            shares=shares,
            clock=self.network.clock,
            max_draft_tokens=max_draft_tokens,
        )
        self.channels: dict[str, MemoryChannel] = {}
        for name in names:
            self.channels[name] = self.network.open(PeerId(name))
            self.channels[name].connect(channel.address)
        channel.admit([one.address for one in self.channels.values()])

    def send(self, name: str, *entries: ProposeEntry, round_id: int = 1) -> None:
        self.channels[name].send(DRAFT, ProposeRequest(round_id, entries))

    def deliver(self) -> None:
        self.network.run_for(1e-3)

    def answers(self, name: str) -> list[ProposeAnswer]:
        self.deliver()
        found: list[ProposeAnswer] = []
        with suppress(ChannelTimeout):
            while True:
                message = self.channels[name].receive(0).message
                assert isinstance(message, ProposeReply)
                found += message.answers
        return found

    def serve_all(self) -> None:
        self.deliver()
        self.server.step(0)
        while self.server.has_waiting:
            self.server.step(0)
        self.proposer.check_integrity()


def an_entry(name: str, tokens: Sequence[int], *, base_len: int = 0, **fields: object) -> ProposeEntry:
    entry = ProposeEntry(
        request_id=RequestId(name),
        epoch=1,
        committed_len=len(tokens),
        prefix_hash=extend_prefix_hash(EMPTY_PREFIX, tokens),
        num_draft_tokens=3,
        base_len=base_len,
        token_ids=tuple(tokens[base_len:]),
        opening=DraftOpening(PARAMS, 7, 1) if base_len == 0 else None,
    )
    return msgspec.structs.replace(entry, **fields)
