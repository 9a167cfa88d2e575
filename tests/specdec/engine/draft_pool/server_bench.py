"""A draft server over a toy model, and coordinators played by the test that ask it to look ahead."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from specdec.core.clock import ManualClock
from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel
from specdec.proposers.base import AheadWish, Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.sampling.sampler import Sampler
from specdec.transport.base import MAX_MESSAGE_BYTES, PeerId
from specdec.transport.memory import MemoryNetwork
from specdec.transport.messages import (
    DraftBranch,
    DraftOpening,
    ProposeAnswer,
    ProposeEntry,
    ProposeReply,
    ProposeRequest,
)
from tests.specdec.proposers.contract import FrozenView

VOCAB = 24
MODEL = ToyModel(VOCAB, seed=3)
PARAMS = SamplingParams(temperature=0.9)
TOKENS = (1, 2, 3, 4, 5, 6)


def draft_model(runner: ToyRunner | None = None) -> DraftModelProposer:
    return DraftModelProposer(runner or ToyRunner(MODEL), DraftChoice(sampler=Sampler(), vocab_size=VOCAB))


class Bench:
    """A draft server, and coordinators played by the test."""

    def __init__(
        self,
        proposer: Proposer,
        num_coordinators: int = 2,
        shares: DraftShareConfig | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.network = MemoryNetwork(seed=0, clock=ManualClock())
        channel = self.network.open(PeerId("draft"), max_message_bytes=max_message_bytes)
        self.server = DraftServer(
            channel,
            proposer,
            shares=shares,
            clock=self.network.clock,
            max_message_bytes=max_message_bytes,
        )
        self.replies: list[ProposeReply] = []
        self.channels = [self.network.open(PeerId(f"c{index}")) for index in range(num_coordinators)]
        channel.admit([one.address for one in self.channels])
        for one in self.channels:
            one.connect(channel.address)

    def send(self, coordinator: int, *entries: ProposeEntry) -> None:
        self.channels[coordinator].send(PeerId("draft"), ProposeRequest(1, entries))

    def serve(self) -> list[list[ProposeAnswer]]:
        """Let the server take all that was sent; return the answers of each coordinator."""
        self.network.run_for(0.1)
        assert self.server.step(0)
        self.network.run_for(0.1)
        answers: list[list[ProposeAnswer]] = []
        for channel in self.channels:
            answers.append([])
            with suppress(ChannelTimeout):
                while True:
                    message = channel.receive(0).message
                    assert isinstance(message, ProposeReply)
                    answers[-1] += message.answers
                    self.replies.append(message)
        return answers


def entry(
    name: str,
    tokens: Sequence[int] = TOKENS,
    *,
    base_len: int = 0,
    pending: Sequence[int] = (),
    fan_out: Sequence[int] | None = None,
    num_draft_tokens: int = 3,
) -> ProposeEntry:
    return ProposeEntry(
        request_id=RequestId(name),
        epoch=1,
        committed_len=len(tokens),
        prefix_hash=extend_prefix_hash(EMPTY_PREFIX, tokens),
        num_draft_tokens=num_draft_tokens,
        base_len=base_len,
        token_ids=tuple(tokens[base_len:]),
        opening=DraftOpening(PARAMS, 7, 1) if base_len == 0 else None,
        pending=tuple(pending),
        fan_out=None if fan_out is None else tuple(fan_out),
    )


def expected(asked: ProposeEntry, tokens: Sequence[int] = TOKENS) -> tuple[DraftBranch, ...]:
    one = FrozenView(asked.request_id, tuple(tokens), PARAMS, 7)
    wish = AheadWish(
        view=one, pending=asked.pending, num_draft_tokens=asked.num_draft_tokens, fan_out=asked.fan_out
    )
    return tuple(
        DraftBranch(proposal.committed_len, proposal.prefix_hash, proposal.token_ids)
        for proposal in draft_model().propose_ahead([wish])[one.request_id]
    )
