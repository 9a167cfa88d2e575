"""Everything that peers say to each other, and how it is put into bytes.

    coordinator -> target worker   Hello, RunStep, StepPart
    target worker -> coordinator   Welcome, StepDone, StepPart, Fenced, Fatal
    coordinator -> draft worker    ProposeRequest, Release
    draft worker -> coordinator    ProposeReply
    ingress -> coordinator         Hello, SubmitRequest, Abort, Ping, MetricsQuery, StatusQuery, Recall
    coordinator -> ingress         Welcome, Admitted, Refused, OutputFrame, Pong, MetricsReply, StatusReply,
                                   Recalled
    ingress -> ingress             DoorReport, DoorTotals
    channel -> channel             LaneOffer, LaneMoved
    coordinator -> target worker   SendHidden
    target worker -> draft worker  HiddenStates, with a tensor

A frame is three bytes (`DH`, protocol version) and a msgpack array whose first element is the message's tag.
Fields may be added at the end of a message without a new version; anything else needs one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from specdec.core.description import TargetDescription
from specdec.core.distributions import TokenDistribution
from specdec.core.errors import UNDECODABLE, ProtocolError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.plan import TargetResult, TargetStep
from specdec.core.proposal import NoiseStream
from specdec.core.request import Request, Resumption
from specdec.core.sampling_params import Grammar, SamplingParams
from specdec.transport.status import TargetGroupStatus

PROTOCOL_VERSION = 1
_MAGIC = b"DH"
_HEADER = _MAGIC + bytes([PROTOCOL_VERSION])


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Opens a conversation. At a target worker it takes possession: older incarnations are fenced off."""

    incarnation: int
    """Grows with every new owner or attempt; a smaller one than the receiver has seen is fenced."""
    failed: tuple[Resumption, ...] = ()
    """Of an ingress: streams that have ended because they kill workers. Who comes back to one is refused."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answer to `Hello`."""

    incarnation: int
    description: TargetDescription | None = None


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The sender of `incarnation` no longer owns the receiver of its messages."""

    incarnation: int
    current: int


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The sender cannot go on and is about to die."""

    reason: str


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """One round for the target."""

    incarnation: int
    sequence: int
    """0, 1, 2, ... within the incarnation: steps run once and in this order, whatever the network does."""
    step: TargetStep


class StepPart(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A part of the frame of a `RunStep`, or of the `StepDone` to it, that is too long for one message."""

    incarnation: int
    sequence: int
    """Of the step."""
    index: int
    count: int
    """How many parts there are."""
    content: bytes


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Answer to `RunStep`."""

    incarnation: int
    sequence: int
    result: TargetResult
    counts: dict[str, int] | None = None
    """What the target worker has counted since its start, by metric name without prefix."""


class DraftOpening(msgspec.Struct, frozen=True, array_like=True):
    """What a draft worker must know once about a sequence."""

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    cache_salt: str | None = None
    grammar: Grammar | None = None
    """What the output must look like, in full (`params` has it without its text)."""
    owner: str | None = None
    """Whose text it is, as `Request.owner`."""


class ProposeEntry(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's turn. (request_id, epoch, committed_len, prefix_hash) names the prefix to continue."""

    request_id: RequestId
    epoch: int
    """Attempt number of this sequence at this draft worker, counted by the coordinator."""
    committed_len: int
    prefix_hash: int
    num_draft_tokens: int
    base_len: int
    """Tokens that the draft worker has already; 0 with `opening`."""
    token_ids: tuple[int, ...]
    """Committed tokens base_len .. committed_len - 1."""
    opening: DraftOpening | None = None
    pending: tuple[int, ...] = ()
    """Chain that the target verifies behind the committed tokens, when `fan_out` is given."""
    fan_out: tuple[int, ...] | None = None
    """As in `proposers.base.AheadWish`, one entry more than `pending`; None: an ordinary proposal."""
    kv_budget: int = 0
    """Tokens that drafts may attend to; 0: as the draft worker is configured."""


class ProposeRequest(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """One round's wishes to one draft worker."""

    round_id: int
    entries: tuple[ProposeEntry, ...]


class DraftBranch(msgspec.Struct, frozen=True, array_like=True):
    """Proposed tokens for a prefix that may come to be committed; (committed_len, prefix_hash) name it."""

    committed_len: int
    prefix_hash: int
    token_ids: tuple[int, ...]
    q_rows: tuple[TokenDistribution, ...] | None = None
    """As in `ProposeAnswer`."""


class ProposeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Proposed tokens (perhaps none) for exactly the prefix named, or a plea for all tokens from 0."""

    request_id: RequestId
    epoch: int
    committed_len: int
    prefix_hash: int
    token_ids: tuple[int, ...]
    noise_stream: NoiseStream | None = None
    parents: tuple[int, ...] | None = None
    needs_start: bool = False
    q_rows: tuple[TokenDistribution, ...] | None = None
    """What each token was sampled from, for verification rules that need it."""
    branches: tuple[DraftBranch, ...] = ()
    """Of an entry with `fan_out`, the most promising first; all of them of `noise_stream`."""
    is_full: bool = False
    """The draft worker has no place for this sequence, or none any more, and knows nothing of it."""
    num_unread: int = 0
    """Tokens of the prefix that have to be read before anything can be drafted behind it."""
    rows_from: int = -1
    """Hidden states of the prefix from this row on have been lost: they should be sent again. -1: none."""
    lacks_memory: bool = False
    """Of one that `is_full`: what is short is memory for so many tokens, and not places."""


class ProposeReply(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Answers to some or all entries of one round."""

    round_id: int
    answers: tuple[ProposeAnswer, ...]
    draft_s: float = 0.0
    """Seconds the draft worker spent on them."""
    counts: dict[str, int] | None = None
    """What the draft worker counted since it last told any coordinator, by metric name without prefix."""
    num_sequences: int = 0
    """Of all coordinators, at this draft worker."""
    max_sequences: int = 0
    """How many it takes; 0: it does not say."""
    num_places: int = 0
    """How many more of the receiver it takes now."""
    sent_s: float | None = None
    """When it was sent, by the draft worker's own clock: of use beside other replies of the same worker."""
    max_length: int = 0
    """Longest prefix that it continues, in tokens; 0: it does not say."""


class Release(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The draft worker may forget these sequences, up to and including these epochs."""

    sequences: tuple[tuple[RequestId, int], ...]
    have_ended: bool = False
    """Nothing more will come of them, here or elsewhere."""


class SubmitRequest(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """An ingress asks for a stream.

    Sending the same (request, epoch) again changes nothing, but for `Request.num_crashes`: what was taken for
    a crash may turn out to be none.
    """

    request: Request
    num_cleared: int = 0
    """How often it has run alone for long enough not to be suspected of killing workers."""


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """The stream will be served, and will end in exactly one output with a finish reason.

    Sent again whenever something below changes: the ingress has to know it if the sender dies.
    """

    request_id: RequestId
    epoch: Epoch
    has_begun: bool = True
    """Whether it is worked on, or is about to be; else it waits. (Who says nothing of this says so once.)"""
    is_alone: bool | None = None
    """Whether it runs alone, because it is suspected of killing workers. None: the sender does not say."""
    losses: tuple[int, ...] = ()
    """At which losses of the sender's target, in its own numbers, a choice of its response was in flight."""
    num_cleared: int = 0
    """As in `SubmitRequest`, as of now."""


RefusalKind = Literal["capacity", "late", "input", "draining", "stale"]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """The stream will not be served."""

    request_id: RequestId
    epoch: Epoch
    kind: RefusalKind
    """capacity: try again later; late: it would be served too late; input: never; draining: try another;
    stale: a newer epoch is known here."""
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    holds_s: float = 0.0
    """For so long others that want as much need not ask."""


class OutputFrame(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Outputs of one round for one ingress: all of them, or as many as a message holds."""

    outputs: tuple[RequestOutput, ...]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Nobody waits for this stream any more. Applies to this epoch and older ones."""

    request_id: RequestId
    epoch: Epoch


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """An ingress is alive."""

    nonce: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """Answer to `Ping`: what the coordinator is serving for this ingress.

    Links may lose messages when they break; by comparing, both sides find streams that the other lost.
    An unasked one has nonce 0, which is no ping's: it tells of a change of state, and nothing of streams.
    """

    nonce: int
    active: tuple[tuple[RequestId, Epoch], ...]
    num_running: int = 0
    num_waiting: int = 0
    draining: bool = False
    """It takes no more requests."""
    closing: bool = False
    """The whole deployment ends, not this coordinator alone: nobody will replace it."""
    without_target: bool = False
    """Its target was lost, and there is no other yet: what it has waits."""
    max_streams: int = 0
    """How many streams it takes in, running and waiting together; 0: it does not say."""


class MetricsQuery(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """Asks for current metrics."""

    nonce: int


class MetricsReply(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """Counters and gauges by name, without prefix."""

    nonce: int
    values: dict[str, float]


class StatusQuery(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """Asks what the target group is doing."""

    nonce: int


class StatusReply(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """What the target group is doing; None: it has not begun."""

    nonce: int
    status: TargetGroupStatus | None


class Recall(msgspec.Struct, frozen=True, array_like=True, tag=46):
    """Asks for the tokens of streams whose client has come back (`core.request.Resumption`)."""

    nonce: int
    names: tuple[str, ...]
    proof: bytes


class Recalled(msgspec.Struct, frozen=True, array_like=True, tag=47):
    """Answer to `Recall`: the generated tokens of those that are known, once per attempt at them."""

    nonce: int
    streams: tuple[tuple[str, tuple[int, ...]], ...]
    has_failed: bool = False
    """Whether their response has ended because it kills workers."""


class DoorReport(msgspec.Struct, frozen=True, array_like=True, tag=48):
    """What one ingress has counted, by name, for the ingress that adds up what all have."""

    counters: dict[str, float]
    gauges: dict[str, float]
    told: dict[str, float] = {}
    """The sums that its sender was told last, where it was told by another than the receiver."""


class DoorTotals(msgspec.Struct, frozen=True, array_like=True, tag=49):
    """What all ingresses and target groups have counted, and how they are, by name."""

    counters: dict[str, float]
    gauges: dict[str, float]


class LaneOffer(msgspec.Struct, frozen=True, array_like=True, tag=50):
    """A channel listens on a Unix socket for the peer that it has linked to (see `transport.lane`)."""

    name: str
    """In the abstract name space."""
    secret: bytes
    """To be shown by whoever connects."""


class LaneMoved(msgspec.Struct, frozen=True, array_like=True, tag=51):
    """The last frame by ZeroMQ: all that follows comes by the lane of this name."""

    name: str


class HiddenWish(msgspec.Struct, frozen=True, array_like=True):
    """Hidden states that a draft worker needs to continue a prefix, named as in its `ProposeEntry`.

    The row of the token at position s is what the target made of it: it gave token s + 1. The last committed
    token has none yet, so the rows wanted are first_row .. committed_len - 2.
    """

    request_id: RequestId
    epoch: int
    committed_len: int
    prefix_hash: int
    first_row: int


class SendHidden(msgspec.Struct, frozen=True, array_like=True, tag=60):
    """The target worker shall send rows to a draft worker, directly, as soon as it has computed them.

    A later wish for the same sequence and draft worker takes the place of an earlier one that still waits,
    and includes its rows.
    """

    incarnation: int
    coordinator: str
    """Name by which the draft worker knows the coordinator."""
    receiver: str
    """Name of the draft worker's tensor channel; `endpoint` and `public_key` are the rest of its address."""
    endpoint: str
    public_key: str
    wishes: tuple[HiddenWish, ...]


class HiddenRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of one sequence, up to row committed_len - 2; fewer than wished if lost.

    Where that is too much for one message, several bring them, one after the other.
    """

    request_id: RequestId
    epoch: int
    committed_len: int
    prefix_hash: int
    first_row: int
    num_rows: int


class HiddenStates(msgspec.Struct, frozen=True, array_like=True, tag=61):
    """Comes with a tensor `hidden` [rows of all runs one after the other, len(layers) * hidden size]."""

    coordinator: str
    layers: tuple[int, ...]
    """Target layers, in the order in which their hidden states are side by side in a row."""
    runs: tuple[HiddenRun, ...]


Message = (
    Hello
    | Welcome
    | Fenced
    | Fatal
    | RunStep
    | StepPart
    | StepDone
    | ProposeRequest
    | ProposeReply
    | Release
    | SubmitRequest
    | Admitted
    | Refused
    | OutputFrame
    | Abort
    | Ping
    | Pong
    | MetricsQuery
    | MetricsReply
    | StatusQuery
    | StatusReply
    | Recall
    | Recalled
    | DoorReport
    | DoorTotals
    | LaneOffer
    | LaneMoved
    | SendHidden
    | HiddenStates
)

_SHORT_ARRAY = 0x90
"""The first byte of a msgpack array of up to 15 elements is this and their number."""
_CHANNEL_TAGS = frozenset({LaneOffer.__struct_config__.tag, LaneMoved.__struct_config__.tag})

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class WrongVersion(ProtocolError):
    """The peer speaks another protocol version."""


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    buffer = bytearray(_HEADER)
    _encoder.encode_into(message, buffer, len(_HEADER))
    return bytes(buffer)


def is_frame(content: bytes) -> bool:
    """Whether bytes are meant as a message alone; else they may be one with tensors (`transport.parcels`)."""
    return content[: len(_MAGIC)] == _MAGIC


def is_of_channels(frame: bytes | memoryview) -> bool:
    """Whether a frame is, by its tag, what channels say to each other: that cannot wait to be read."""
    tag_at = len(_HEADER) + 1
    return len(frame) > tag_at and frame[tag_at] in _CHANNEL_TAGS and frame[tag_at - 1] & 0xF0 == _SHORT_ARRAY


def decode(frame: bytes | memoryview) -> Message:
    """Return the message in a frame.

    Raises:
        WrongVersion: the frame is of another protocol version.
        ProtocolError: the frame is not one of ours, or its content is not a valid message.
    """
    header = bytes(frame[: len(_HEADER)])
    if len(header) < len(_HEADER) or header[:2] != _MAGIC:
        raise ProtocolError("not a Drafthouse frame")
    if header != _HEADER:
        raise WrongVersion(f"protocol version {header[2]}, expected {PROTOCOL_VERSION}")
    try:
        return _decoder.decode(memoryview(frame)[len(_HEADER) :])
    except UNDECODABLE as error:
        raise ProtocolError(f"malformed message: {error}") from error
