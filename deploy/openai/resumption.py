"""Where a client is in a stream, as event ids say it, and how a stream goes on from there.

An event id is `RESPONSE:POSITIONS:SECONDS:CHECK`.
- POSITIONS, one per choice. `N`: tokens generated up to and including this event; `Nf`: the event with the
  finish reason is out too; `-`: not even the opening is. `end` stands for all of it when the closing event
  (usage) is out.
- SECONDS: when it was sent, counted from the creation of the response.
- CHECK: a digest of whose request it is (API key, model, body), then one of the tokens of each choice.

A client that repeats its request with the id of the last event that it has (`Last-Event-ID`) gets the rest.
What was delivered is asked of the coordinators; where none knows it any more (it died too), it is generated
again, if the event is not too old, which by the token function gives the same tokens. In either case the
digests in the id decide whether they are the same: a stream goes on exactly, or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from deploy.openai.errors import ApiError
from deploy.openai.keys import Usage
from deploy.openai.requests import PreparedRequest, ResponseIdentity
from deploy.openai.tokenization import DoorTokenizer
from specdec.core.clock import Clock, MonotonicClock
from specdec.core.description import TargetDescription
from specdec.core.error_codes import FAILED_REPEATEDLY
from specdec.core.errors import RequestFailed
from specdec.core.ids import RequestId
from specdec.core.outputs import FinishReason, RequestOutput
from specdec.core.request import Request, Resumption
from specdec.engine.service import GenerationService
from specdec.engine.text.text_stream import StreamLimits, TextStream

HEADER = "Last-Event-ID"
_END = "end"
_MAX_FAILURES = 1024
_EVENT_ID = re.compile(
    r"(?P<response>(?:cmpl|chatcmpl)-[0-9a-f]{32})"
    r":(?P<positions>end|(?:-|\d{1,9}f?)(?:,(?:-|\d{1,9}f?))*)"
    r":(?P<seconds>\d{1,9})"
    r":(?P<owner>[0-9a-f]{8})(?P<checks>(?:\.[0-9a-f]{1,8})*)"
)


@dataclass(slots=True)
class ChoicePosition:
    """How far one choice has come."""

    is_open: bool
    num_tokens: int = 0
    check: int = 0
    """CRC-32 of the tokens."""
    is_finished: bool = False

    def count(self, output: RequestOutput) -> None:
        """Go on by the tokens of one output."""
        self.num_tokens = max(self.num_tokens, output.num_generated_tokens)
        self.check = _extended(self.check, output.token_ids)

    def matches(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens, or the first of them, are those of this position."""
        return len(token_ids) >= self.num_tokens and _extended(0, token_ids[: self.num_tokens]) == self.check

    def __str__(self) -> str:
        return f"{self.num_tokens}{'f' if self.is_finished else ''}" if self.is_open else "-"


def _extended(check: int, token_ids: Sequence[int]) -> int:
    return zlib.crc32(array("I", token_ids), check)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """What a client shows to go on."""

    text: str
    """All of it."""
    response_id: str
    positions: tuple[ChoicePosition, ...]
    is_ended: bool
    sent_s: int
    """Unix time."""
    owner: str

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Read an id that `format_event_id` made.

        Raises:
            ApiError: it is none.
        """
        match = _EVENT_ID.fullmatch(text)
        checks = [int(check, 16) for check in match["checks"].split(".")[1:]] if match else []
        positions = match["positions"].split(",") if match and match["positions"] != _END else []
        if match is None or len(checks) != len(positions):
            raise _refusal(400, f"{text[:80]!r} is not the id of an event of this server.", "invalid")
        return cls(
            text=text,
            response_id=match["response"],
            positions=tuple(map(_position, positions, checks)),
            is_ended=match["positions"] == _END,
            sent_s=ResponseIdentity.of(match["response"]).created_s + int(match["seconds"]),
            owner=match["owner"],
        )


def _position(text: str, check: int) -> ChoicePosition:
    if text == "-":
        return ChoicePosition(is_open=False)
    return ChoicePosition(True, int(text.removesuffix("f")), check, text.endswith("f"))


def format_event_id(
    prepared: PreparedRequest, positions: Sequence[ChoicePosition], *, is_ended: bool = False
) -> bytes:
    """Return the id of an event that is sent now."""
    where = _END if is_ended else ",".join(map(str, positions))
    checks = "" if is_ended else "".join(f".{position.check:x}" for position in positions)
    seconds = max(0, int(time.time()) - prepared.created_s)
    return f"{prepared.response_id}:{where}:{seconds}:{prepared.proof.hex()[:8]}{checks}".encode()


def proved(
    prepared: PreparedRequest,
    api_key_digest: bytes | None,
    window_s: float,
    *,
    replay_window_s: float = 0.0,
) -> PreparedRequest:
    """Say of a request whose it is, so that its client, and nobody else, can come back to it.

    `window_s` and `replay_window_s` are those of its `Resumption`; without the first there is none.
    """
    body = prepared.body
    # Each once: choices share them, and may be hundreds.
    distinct = {id(request.params): request.params for request in prepared.requests}
    digests = {key: _digest(msgspec.msgpack.encode(params)) for key, params in distinct.items()}
    described = msgspec.msgpack.encode(
        (
            api_key_digest,
            prepared.model,
            prepared.system_fingerprint,
            type(body).__name__,
            # Each once, too: a prompt may be as long as a body.
            [request.prompt_token_ids for request in prepared.requests[:: body.num_streams]],
            [digests[id(request.params)] for request in prepared.requests],
            str(body.seed),
        )
    )
    proof = _digest(described)
    if window_s <= 0 or not body.wants_event_ids:
        return replace(prepared, proof=proof)
    return replace(
        prepared,
        proof=proof,
        has_event_ids=True,
        requests=tuple(
            msgspec.structs.replace(
                request,
                resumption=Resumption(
                    name=request.request_id,
                    proof=proof,
                    window_s=window_s,
                    replay_window_s=replay_window_s,
                ),
            )
            for request in prepared.requests
        ),
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class Comeback:
    """A client that has come back with the id of the last event that it has."""

    def __init__(
        self, event_id: EventId, prepared: PreparedRequest, replay_window_s: float, max_model_len: int
    ) -> None:
        """Check that both belong together; `prepared` is the repeated request, `proved`.

        For `replay_window_s` after its last event a stream that nobody remembers is generated again; 0:
        nothing is resumed here.

        What the id says of positions is the client's word: none beyond what the request may have is taken.

        Raises:
            ApiError: they do not, or nothing can be resumed here.
        """
        if not prepared.body.stream:
            raise _refusal(400, "Only streams can be resumed: give stream: true, as before.", "invalid")
        if replay_window_s <= 0:
            raise _refusal(400, "This server does not resume streams (http.resume_window_s is 0).", "invalid")
        is_possible = event_id.is_ended or (
            len(event_id.positions) == len(prepared.requests)
            and all(
                position.num_tokens <= _most_tokens(request, max_model_len)
                for position, request in zip(event_id.positions, prepared.requests, strict=True)
            )
        )
        if event_id.owner != prepared.proof.hex()[:8] or not is_possible:
            raise _refusal(
                400,
                "The event id belongs to another request, API key or model: to resume a stream, send the "
                "same request again, with the same key.",
                "mismatch",
            )
        self._event_id = event_id
        self._prepared = prepared
        self._replay_window_s = replay_window_s

    @property
    def event_id(self) -> str:
        """The id that it came back with."""
        return self._event_id.text

    @property
    def is_ended(self) -> bool:
        """Whether all but `[DONE]` has been delivered."""
        return self._event_id.is_ended

    @property
    def positions(self) -> tuple[ChoicePosition, ...]:
        """How far each choice has come; those of an ended response are finished."""
        if self.is_ended:
            return tuple(ChoicePosition(True, is_finished=True) for _ in self._prepared.requests)
        return self._event_id.positions

    async def resume(self, service: GenerationService, usage: Usage) -> PreparedRequest:
        """Return the request with the tokens that were delivered, under request ids of their own.

        What has to be generated again is charged to `usage`: it is work like any other.

        Raises:
            ApiError: they are not known any more, and cannot be found again.
            CapacityError, RequestFailed, NotReadyError, TransportError: not now.
        """
        wanted = [
            index
            for index, position in enumerate(self.positions)
            if position.num_tokens and not position.is_finished
        ]
        requests = [_renamed(request) for request in self._prepared.requests]
        known = await self._recall(service, wanted)
        missing = [index for index in wanted if index not in known]
        if missing:
            if time.time() - self._event_id.sent_s > self._replay_window_s:
                raise _refusal(
                    410,
                    f"The event was sent more than {self._replay_window_s:g} s ago, and its stream is "
                    f"forgotten. Send the request again without {HEADER}.",
                    "expired",
                )
            with usage:
                replayed = await _replay_all(
                    service, [(requests[i], self.positions[i].num_tokens) for i in missing], usage
                )
            for index, token_ids in zip(missing, replayed, strict=True):
                if not self.positions[index].matches(token_ids):
                    raise _refusal(
                        410,
                        "What was delivered of the stream is not known any more, and could not be generated "
                        f"again token for token. Send the request again without {HEADER}.",
                        "lost",
                    )
                known[index] = token_ids
        for index in wanted:
            delivered = tuple(known[index][: self.positions[index].num_tokens])
            requests[index] = msgspec.structs.replace(requests[index], delivered_token_ids=delivered)
        return replace(self._prepared, requests=tuple(requests))

    def running(self, prepared: PreparedRequest) -> tuple[Request, ...]:
        """Return the requests that are not finished."""
        pairs = zip(prepared.requests, self.positions, strict=True)
        return tuple(request for request, position in pairs if not position.is_finished)

    def delivered(
        self, prepared: PreparedRequest, tokenizer: DoorTokenizer, description: TargetDescription
    ) -> dict[int, Delivered]:
        """Return what the client has of choices that go on; `prepared` is what `resume` returned."""
        return {
            index: _delivered_of(request, tokenizer, description)
            for index, request in enumerate(prepared.requests)
            if request.delivered_token_ids
        }

    async def _recall(self, service: GenerationService, wanted: Sequence[int]) -> dict[int, tuple[int, ...]]:
        if not wanted:
            return {}
        index_of = {str(self._prepared.requests[index].request_id): index for index in wanted}
        told = await service.recall(tuple(index_of), self._prepared.proof)
        return {
            index_of[name]: token_ids
            for name, token_ids in told
            if name in index_of and self.positions[index_of[name]].matches(token_ids)
        }


def _renamed(request: Request) -> Request:
    """Its predecessor may live on for a while, be it at an ingress that is cut off."""
    return msgspec.structs.replace(
        request, request_id=RequestId(f"{request.request_id}~{secrets.token_hex(4)}")
    )


def _most_tokens(request: Request, max_model_len: int) -> int:
    max_tokens = request.params.max_tokens
    return max_model_len - len(request.prompt_token_ids) if max_tokens is None else max_tokens


async def _replay_all(
    service: GenerationService, streams: Sequence[tuple[Request, int]], usage: Usage
) -> list[tuple[int, ...]]:
    """Generate the first tokens of each stream again; where one fails, the others are ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_replay(service, request, num_tokens, usage))
                for request, num_tokens in streams
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _replay(
    service: GenerationService, request: Request, num_tokens: int, usage: Usage
) -> tuple[int, ...]:
    """Generate the first tokens of a stream again."""
    params = msgspec.structs.replace(
        request.params,
        max_tokens=num_tokens,
        min_tokens=min(request.params.min_tokens, num_tokens),
        logprobs=None,
        prompt_logprobs=None,
    )
    again = msgspec.structs.replace(_renamed(request), params=params, resumption=None)
    token_ids: list[int] = []
    async for output in service.generate(again):
        if output.finish_reason in ("error", "abort"):
            raise RequestFailed(
                output.error or "The request was aborted by the server.",
                code=output.error_code or f"request_{output.finish_reason}",
            )
        usage.charge(len(output.token_ids))
        token_ids.extend(output.token_ids)
    return tuple(token_ids)


class FailedForGood:
    """Streams that ended because their request took workers down again and again.

    A client that comes back to one is told so again: going on with it would take the next workers down. It is
    what this door knows; where the door has gone too, coordinators may.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._failures: OrderedDict[str, tuple[float, RequestFailed]] = OrderedDict()

    def note(self, response_id: str, error: Exception, window_s: float) -> None:
        """Remember how a stream ended, if it is of this kind, for as long as its client may come back."""
        if not isinstance(error, RequestFailed) or error.code != FAILED_REPEATEDLY or window_s <= 0:
            return
        self._failures[response_id] = (self._clock.now_s() + window_s, error)
        self._failures.move_to_end(response_id)
        if len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def check(self, response_id: str) -> None:
        """Raise what such a stream ended with."""
        until_s, error = self._failures.get(response_id, (0.0, None))
        if error is None:
            return
        if until_s <= self._clock.now_s():
            del self._failures[response_id]
            return
        raise RequestFailed(str(error), code=error.code, param=error.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What a client has of one choice."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """Of what is complete: nothing but this is missing. None: more is."""


def _delivered_of(request: Request, tokenizer: DoorTokenizer, description: TargetDescription) -> Delivered:
    """Return what its delivered tokens have come to, as text."""
    limits = StreamLimits(
        max_sequence_len=description.max_model_len, eos_token_ids=tuple(description.eos_token_ids)
    )
    stream = TextStream(request, tokenizer, limits)
    for index, token_id in enumerate(request.delivered_token_ids):
        if stream.finish is None:
            stream.advance(token_id, index + 1)
    return Delivered(
        token_ids=request.delivered_token_ids,
        text=stream.take(),
        finish_reason=None if stream.finish is None else stream.finish.reason,
    )


def _refusal(status: int, message: str, reason: str) -> ApiError:
    return ApiError(status, message, param=HEADER, code=f"resume_{reason}")
