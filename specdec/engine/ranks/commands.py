"""What rank 0 of a model tells the other ranks to do, and how it is put into bytes.

Every rank holds the same engine parts over its own part of the weights, and does the same with them: rank 0
hands on the round before it runs it. So the host's bookkeeping (sequences, block tables, what a draft model
has read) needs no synchronisation of its own, and only tensors travel within a forward. Commands are msgspec
structs: nothing is unpickled.
"""

from __future__ import annotations

import msgspec

from specdec.core.errors import UNDECODABLE, ProtocolError
from specdec.core.ids import RequestId
from specdec.core.plan import TargetStep
from specdec.core.sampling_params import Grammar, SamplingParams


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The model is not needed any more."""


class RunTarget(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Run one round of the target."""

    step: TargetStep


class SequenceOpening(msgspec.Struct, frozen=True, array_like=True):
    """What must be known once about a sequence that is drafted for."""

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    cache_salt: str | None = None
    grammar: Grammar | None = None
    """In full (`params` has it without its text)."""


class DraftEntry(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of a call of `Proposer.propose`."""

    request_id: RequestId
    base_len: int
    """Tokens known already; 0 with `opening`."""
    token_ids: tuple[int, ...]
    """Committed tokens from `base_len` on."""
    budget: int | None
    """None: the sequence is passed without one."""
    opening: SequenceOpening | None = None
    kv_budget: int = 0
    """As `SequenceView.kv_budget`."""


class RunDraft(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Call `Proposer.propose`."""

    entries: tuple[DraftEntry, ...]


class ReleaseDrafts(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Call `Proposer.release`."""

    request_ids: tuple[RequestId, ...]


class AheadEntry(msgspec.Struct, frozen=True, array_like=True):
    """One wish of a call of `LooksAhead.propose_ahead`."""

    sequence: DraftEntry
    """Its budget is the longest continuation wanted."""
    pending: tuple[int, ...]
    fan_out: tuple[int, ...] | None


class RunAhead(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Call `LooksAhead.propose_ahead`."""

    entries: tuple[AheadEntry, ...]


Command = Stop | RunTarget | RunDraft | ReleaseDrafts | RunAhead

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """Return a command as bytes."""
    return _encoder.encode(command)


def decode(payload: bytes) -> Command:
    """Return the command in `payload`.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _decoder.decode(payload)
    except UNDECODABLE as error:
        raise ProtocolError(f"malformed command from rank 0: {error}") from error
