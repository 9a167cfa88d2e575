"""A coordinator's streams: who asked for what, what was delivered, and to whom outputs go.

Two threads meet here. The channel's thread hands in messages (`hear`, `tick`); the engine's thread takes
orders out and brings outputs back (`serve`, `deliver`). Nothing here knows Ray, sockets or models.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cluster.crash_policy import MAX_CLEARED, MAX_CRASHES, PROBATION_OUTPUTS, response_of
from cluster.recollection import FailedResponses, Recollection
from cluster.standstill import ORDINARY_PAUSE_S, Standstill
from specdec.core.clock import Clock
from specdec.core.description import TargetDescription
from specdec.core.error_codes import (
    COORDINATOR_CRASHED,
    FAILED_REPEATEDLY,
    OUTPUT_TOO_LARGE,
    SHUTTING_DOWN,
    TARGET_LOST,
)
from specdec.core.errors import CapacityError, InputError, LateError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import MAX_LOGPROBS
from specdec.core.series import name_of
from specdec.transport.base import MAX_MESSAGE_BYTES, Envelope, PeerFound, PeerId, PeerLost
from specdec.transport.messages import (
    Abort,
    Admitted,
    Hello,
    Message,
    MetricsQuery,
    MetricsReply,
    OutputFrame,
    Ping,
    Pong,
    Recall,
    Recalled,
    RefusalKind,
    Refused,
    StatusQuery,
    StatusReply,
    SubmitRequest,
    Welcome,
)
from specdec.transport.parts import in_parts
from specdec.transport.status import TargetGroupStatus

_RELOADED_AFTER_S = 10.0
"""What who is refused is told to wait while a target is loaded: nobody knows how long that takes."""
_RUN_ALONE_AFTER_S = 5.0
"""The same, while requests run alone or come back."""
_OF_THE_MOMENT = frozenset(
    {
        "num_requests_running",
        "queue_wait_seconds",
        "kv_cache_usage_perc",
        "target_utilization",
        "draft_utilization",
        "local_draft_utilization",
        "draft_pool_usage_perc",
        "drafter_num_requests_running",
    }
)
"""Of an engine's metrics, whatever their labels: what is 0 when it is not there any more."""
_HEAD_BYTES = 64
"""Of a frame, before its outputs, and of an output's lists of log-probabilities."""
_SCORE_BYTES = 18
"""Log-probabilities at one position, but for the alternatives, at most: a token id, a float and two lists."""
_ALTERNATIVE_BYTES = 15
"""A pair of token id and log-probability, at most."""


class StreamEngine(Protocol):
    """What the desk needs of an engine."""

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: RequestId, epoch: Epoch) -> None: ...


@dataclass(slots=True)
class _Stream:
    request: Request
    ingress: PeerId
    arrived_s: float
    generated: list[int]
    response: str
    """Its choices share what is counted here."""
    is_admitted: bool = False
    has_begun: bool = False
    """Whether the engine works on it, or is about to, as the ingress has been told."""
    num_crashes: int = 0
    """Those that the ingress knew of, and those here since."""
    losses: tuple[int, ...] = ()
    """Those here, by number."""
    num_cleared: int = 0
    awaits_turn: bool = False
    """Whether it waits to be run alone."""

    @property
    def epoch(self) -> Epoch:
        return self.request.epoch

    @property
    def is_suspect(self) -> bool:
        return self.num_crashes >= MAX_CRASHES

    def rest(self, now_s: float) -> Request:
        return self.request.continued(
            delivered_token_ids=tuple(self.generated), elapsed_s=now_s - self.arrived_s
        )


class RequestDesk:
    """All streams of one coordinator, across losses of its target."""

    def __init__(
        self,
        send: Callable[[PeerId, Message], None],
        clock: Clock,
        *,
        lease_s: float,
        most_without_target: float = math.inf,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`send` may be called from either thread; an ingress that is silent for `lease_s` is gone.

        While there is no engine, whose queue has its bound, or nothing goes there because requests run alone
        or come back, `most_without_target` streams are taken in.
        `max_message_bytes` is the longest message that can be sent.
        """
        self._send = send
        self._max_output_bytes = max_message_bytes - _HEAD_BYTES
        self._most_without_target = most_without_target
        self._clock = clock
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._ordered = threading.Condition(self._lock)
        self._streams: dict[RequestId, _Stream] = {}
        self._recollection = Recollection(clock)
        self._failed = FailedResponses(clock)
        self._heard_s: dict[PeerId, float] = {}
        self._standstill = Standstill(ordinary_s=ORDINARY_PAUSE_S)
        self._submitted: deque[tuple[RequestId, Epoch]] = deque()
        self._aborted: deque[tuple[RequestId, Epoch]] = deque()
        self._beginning: _Stream | None = None
        """What the engine is being given."""
        self._replays: deque[tuple[RequestId, Epoch]] = deque()
        self._suspects: deque[RequestId] = deque()
        self._alone: _Stream | None = None
        self._probation_left = 0
        self._num_losses = 0
        self._is_draining = False
        self._end_s: float | None = None
        self._woken = False
        self._description: TargetDescription | None = None
        self.engine_metrics: Mapping[str, float] = {}
        """Latest snapshot of the engine's metrics, or of the last engine's; see `metrics`."""
        self.status: TargetGroupStatus | None = None
        """What the engine is doing; None before the first."""
        self.num_replays = 0
        self.num_refused = 0
        """Requests for which there was no room while the target was loaded."""
        self.num_refused_held_up = 0
        """Requests for which there was none while others ran alone, or came back after a loss."""
        self.num_unexpected = 0
        """Messages that are not for a coordinator."""

    @property
    def num_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    @property
    def description(self) -> TargetDescription | None:
        """Facts about the target; None while there is none."""
        return self._description

    def metrics(self) -> dict[str, float]:
        """Return what the engine said last, and what only the desk knows.

        While there is no target, nothing runs, and all that are here wait: no engine is there to say so.
        What the last one said of how things were is over.
        """
        values = {
            **self.engine_metrics,
            "replays": self.num_replays,
            'requests_refused{reason="no_target"}': self.num_refused,
            'requests_refused{reason="held_up"}': self.num_refused_held_up,
            'channel_messages_dropped{reason="unexpected_kind"}': self.num_unexpected,
        }
        if self._description is None:
            at_rest = dict.fromkeys((one for one in values if name_of(one) in _OF_THE_MOMENT), 0.0)
            return {**values, **at_rest, "num_requests_waiting": len(self._streams)}
        num_waiting = values.get("num_requests_waiting", 0) + len(self._submitted)
        return {**values, "num_requests_waiting": num_waiting}

    # -- the channel's thread

    def hear(self, envelope: Envelope) -> None:
        """Take a message of an ingress in, and answer it."""
        sender = envelope.sender
        with self._ordered:
            now_s = self._clock.now_s()
            self._forgive_standstill(now_s)
            self._heard_s[sender] = now_s
            match envelope.message:
                case SubmitRequest(request=request, num_cleared=num_cleared):
                    self._submit(sender, request, num_cleared)
                case Abort(request_id=request_id, epoch=epoch):
                    stream = self._streams.get(request_id)
                    if stream is not None and stream.ingress == sender and stream.epoch <= epoch:
                        self._drop(request_id)
                case Ping(nonce=nonce):
                    self._send(sender, self._pong(nonce, self._active(sender)))
                case MetricsQuery(nonce=nonce):
                    self._send(sender, MetricsReply(nonce, self.metrics()))
                case StatusQuery(nonce=nonce):
                    self._send(sender, StatusReply(nonce, self._status_now()))
                case Recall(nonce=nonce, names=names, proof=proof):
                    has_failed = self._failed.has_any(names, proof)
                    self._send(sender, Recalled(nonce, self._recall(names, proof), has_failed))
                case Hello(incarnation=incarnation, failed=failed):
                    for resumption in failed:
                        self._failed.keep(resumption)
                    self._send(sender, Welcome(incarnation, self._description))
                case PeerLost() | PeerFound():
                    pass  # it is noticed by its silence
                case _:
                    self.num_unexpected += 1

    def tick(self) -> None:
        """Abort the streams of ingresses that are silent for too long; end what outlasts `close_down`."""
        now_s = self._clock.now_s()
        if self._end_s is not None and now_s >= self._end_s:
            self.end_all("the server was shut down before the request was complete", SHUTTING_DOWN)
        with self._ordered:
            self._recollection.forget_old()
            self._failed.forget_old()
            self._forgive_standstill(now_s)
            for ingress in [i for i, heard_s in self._heard_s.items() if now_s - heard_s > self._lease_s]:
                del self._heard_s[ingress]
                for request_id in [r for r, stream in self._streams.items() if stream.ingress == ingress]:
                    self._drop(request_id)

    def _forgive_standstill(self, now_s: float) -> None:
        """Blame no ingress for a time in which nothing was taken in here."""
        forgiven_s = self._standstill.forgiven_s(now_s, self._lease_s)
        if forgiven_s > 0.0:
            self._heard_s = {
                ingress: min(now_s, heard_s + forgiven_s) for ingress, heard_s in self._heard_s.items()
            }

    def drain(self) -> None:
        """Take no more requests from now on; those that are here go on (any thread)."""
        with self._lock:
            self._is_draining = True
            self._tell_state()

    def set_target(self, description: TargetDescription | None) -> None:
        """Note that there is a target, or none any more, which ingresses hear at once (any thread)."""
        with self._lock:
            self._description = description
            self._tell_state()

    def close_down(self, limit_s: float) -> None:
        """As `drain`, because the whole deployment ends: whatever is here after `limit_s` ends in an error.

        The first call counts (any thread).
        """
        with self._lock:
            if self._end_s is None:
                self._is_draining = True
                self._end_s = self._clock.now_s() + limit_s
                self._tell_state()

    def wake(self) -> None:
        """Make `wait` return."""
        with self._ordered:
            self._woken = True
            self._ordered.notify_all()

    # -- the engine's thread

    def wait(self, timeout_s: float) -> None:
        """Wait until there are orders, somebody calls `wake`, or the time is over."""
        with self._ordered:
            self._ordered.wait_for(
                lambda: self._woken or self._submitted or self._aborted or self._suspects, timeout_s
            )
            self._woken = False

    def serve(self, engine: StreamEngine) -> None:
        """Carry out what was ordered: aborts, replays, then new requests.

        Raises:
            TransportError: the target is lost; what was not carried out stays ordered.
        """
        with self._lock:
            aborted = [self._aborted.popleft() for _ in range(len(self._aborted))]
        for request_id, epoch in aborted:
            # The next attempt may be there already: it came while orders before it were carried out.
            engine.abort(request_id, epoch)
        if self._run_suspects(engine) or not self._replay(engine):
            return
        while self._submitted:
            request_id, epoch = self._submitted[0]
            stream = self._streams.get(request_id)
            # Doubled messages may have ordered it twice.
            if stream is not None and stream.epoch == epoch and not stream.is_admitted:
                self._admit(engine, stream)
            self._submitted.popleft()

    def note_begun(self, request_ids: Iterable[RequestId]) -> None:
        """Tell ingresses what the engine is about to work on, as `Engine.about_to_begin` says.

        Were this process to end of it, nobody could tell them apart from those that waited.
        """
        with self._lock:
            for request_id in request_ids:
                stream = self._streams.get(request_id)
                if stream is not None and stream.is_admitted and not stream.has_begun:
                    stream.has_begun = True
                    self._tell(stream)

    def deliver(self, outputs: Iterable[RequestOutput]) -> bool:
        """Send outputs on, one frame per ingress, or as many as it takes where log-probabilities are long.

        Returns:
            Whether they say that the target is lost.
        """
        frames: dict[PeerId, list[RequestOutput]] = defaultdict(list)
        lost: list[RequestOutput] = []
        changed: list[_Stream] = []
        with self._lock:
            for output in outputs:
                if output.error_code == TARGET_LOST:
                    lost.append(output)
                    continue
                stream = self._streams.get(output.request_id)
                if stream is None or stream.epoch != output.epoch:
                    continue
                if self._is_too_large(output):
                    # Sent by itself it would be lost; its door would ask for it again, and again.
                    frames[stream.ingress].append(_failed(stream, _too_large(output), OUTPUT_TOO_LARGE))
                    self._drop(output.request_id)
                    continue
                stream.generated.extend(output.token_ids)
                if output.finish_reason is not None:
                    self._keep(self._streams.pop(output.request_id))
                elif stream is self._alone and stream.is_suspect and stream.num_cleared < MAX_CLEARED:
                    self._probation_left -= 1
                    if self._probation_left == 0:
                        self._alone = None
                        stream.num_crashes = 0
                        stream.num_cleared += 1
                        changed.append(stream)
                frames[stream.ingress].append(output)
            if lost:
                changed.extend(self._note_loss(lost, frames))
            # Under the lock: a Pong that no longer lists a stream must not overtake its last output.
            for ingress, its_outputs in frames.items():
                for part in _divided(its_outputs, self._max_output_bytes):
                    self._send(ingress, OutputFrame(part))
            for stream in changed:
                self._tell(stream)
        return bool(lost)

    def begin_replay(self) -> None:
        """Order every admitted stream to be replayed: the engine is new and empty."""
        with self._lock:
            self._aborted.clear()
            self._alone = self._beginning = None
            for stream in self._streams.values():
                stream.has_begun = False
                stream.awaits_turn = stream.is_suspect
            # Those that came as suspects have not been admitted.
            self._suspects = deque(r for r, stream in self._streams.items() if stream.is_suspect)
            self._replays = deque(
                (r, stream.epoch)
                for r, stream in self._streams.items()
                if stream.is_admitted and not stream.is_suspect
            )

    def end_all(self, message: str, code: str) -> None:
        """End every stream with an error, here and now, and take no more (any thread)."""
        with self._ordered:
            self._is_draining = True
            self._tell_state()  # before the outputs: the streams must not come back
            if code == COORDINATOR_CRASHED and self._beginning is not None:
                self._beginning.has_begun = True  # it may be to blame as much as those that run
                self._tell(self._beginning)
            for stream in self._streams.values():
                self._send(stream.ingress, OutputFrame((_failed(stream, message, code),)))
            self._aborted.extend((r, stream.epoch) for r, stream in self._streams.items())
            self._streams.clear()
            self._ordered.notify_all()

    # -- under the lock

    def _submit(self, sender: PeerId, request: Request, num_cleared: int) -> None:
        stream = self._streams.get(request.request_id)
        if stream is not None and stream.ingress != sender:
            self._refuse(sender, request, "input", "the request id is in use by another ingress")
        elif stream is not None and stream.epoch > request.epoch:
            self._refuse(sender, request, "stale", f"epoch {stream.epoch} of this request is served here")
        elif stream is not None and stream.epoch == request.epoch:
            # What was taken for a crash elsewhere may have been none.
            num_fewer = stream.request.num_crashes - request.num_crashes
            stream.num_crashes = max(0, stream.num_crashes - num_fewer)
            stream.request = msgspec.structs.replace(stream.request, num_crashes=request.num_crashes)
            if stream.is_admitted:
                self._tell(stream)
        elif request.resumption is not None and self._failed.has(
            request.resumption.name, request.resumption.proof
        ):
            message = "this request has ended already, because those that served it were lost each time"
            self._send(sender, OutputFrame((_failure(request, message, FAILED_REPEATEDLY),)))
        elif self._is_draining:
            self._send(sender, self._pong(0, ()))  # before the refusal: whether anybody will replace us
            self._refuse(sender, request, "draining", "this coordinator is shutting down")
        elif (
            (self._description is None or self._is_held_up)
            and not request.delivered_token_ids  # what has begun is not ended for want of room
            and len(self._streams) >= self._most_without_target
        ):
            if self._description is None:
                self.num_refused += 1
                message, wait_s = "the queue is full while the model is loaded anew", _RELOADED_AFTER_S
            else:
                self.num_refused_held_up += 1
                message, wait_s = "the queue is full while others run alone", _RUN_ALONE_AFTER_S
            self._refuse(sender, request, "capacity", message, retry_after_s=wait_s)
        else:
            former = () if stream is None else stream.losses  # which the ingress may not have heard of
            stream = _Stream(
                request,
                sender,
                self._clock.now_s(),
                list(request.delivered_token_ids),
                response_of(request.request_id),
                num_crashes=request.num_crashes,
                losses=former,
                num_cleared=num_cleared,
            )
            self._streams[request.request_id] = stream
            if stream.is_suspect:
                stream.awaits_turn = True
                self._suspects.append(request.request_id)
            else:
                self._submitted.append((request.request_id, request.epoch))
            self._ordered.notify_all()

    @property
    def _is_held_up(self) -> bool:
        """Whether new requests wait here, and not in the engine's queue."""
        return self._alone is not None or bool(self._suspects or self._replays)

    def _tell(self, stream: _Stream) -> None:
        """Tell its ingress how it is with a stream that was taken in."""
        self._send(
            stream.ingress,
            Admitted(
                stream.request.request_id,
                stream.epoch,
                has_begun=stream.has_begun,
                is_alone=stream is self._alone and stream.is_suspect,
                losses=stream.losses,
                num_cleared=stream.num_cleared,
            ),
        )

    def _tell_state(self) -> None:
        """Tell every ingress at once what its next ping would bring."""
        for ingress in self._heard_s:
            self._send(ingress, self._pong(0, ()))

    def _recall(self, names: tuple[str, ...], proof: bytes) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return what is known of these streams, those of ingresses that may be dead included."""
        ended = [(name, token_ids) for name in names if (token_ids := self._recollection.recall(name, proof))]
        live = [
            (resumption.name, tuple(stream.generated))
            for stream in self._streams.values()
            if (resumption := stream.request.resumption) is not None
            and resumption.name in names
            and resumption.proof == proof
        ]
        return (*ended, *live)

    def _keep(self, stream: _Stream) -> None:
        if stream.request.resumption is not None:
            self._recollection.keep(stream.request.resumption, stream.generated)

    def _drop(self, request_id: RequestId) -> None:
        stream = self._streams.pop(request_id)
        self._keep(stream)
        self._aborted.append((request_id, stream.epoch))
        self._ordered.notify_all()

    def _active(self, ingress: PeerId) -> tuple[tuple[RequestId, Epoch], ...]:
        return tuple((r, stream.epoch) for r, stream in self._streams.items() if stream.ingress == ingress)

    def _pong(self, nonce: int, active: tuple[tuple[RequestId, Epoch], ...]) -> Pong:
        metrics = self.metrics()
        return Pong(
            nonce=nonce,
            active=active,
            num_running=int(metrics.get("num_requests_running", 0)),
            num_waiting=int(metrics["num_requests_waiting"]),
            draining=self._is_draining,
            closing=self._end_s is not None,
            without_target=self._description is None,
            max_streams=0 if math.isinf(self._most_without_target) else int(self._most_without_target),
        )

    def _status_now(self) -> TargetGroupStatus | None:
        status = self.status
        if status is None:
            return None
        is_serving = self._description is not None
        num_waiting = status.num_waiting + len(self._submitted) if is_serving else len(self._streams)
        return msgspec.structs.replace(
            status,
            is_serving=is_serving,
            is_draining=self._is_draining,
            num_running=status.num_running if is_serving else 0,
            kv_cache_usage=status.kv_cache_usage if is_serving else 0.0,
            utilization=status.utilization if is_serving else 0.0,
            num_waiting=num_waiting,
            num_continued=sum(stream.epoch > 0 for stream in self._streams.values()),
        )

    def _is_too_large(self, output: RequestOutput) -> bool:
        most_bytes = self._max_output_bytes
        return (
            _are_long((output,), most_bytes)
            and _num_bytes(output) > most_bytes
            and len(msgspec.msgpack.encode(output)) > most_bytes
        )

    def _note_loss(
        self, outputs: Sequence[RequestOutput], frames: dict[PeerId, list[RequestOutput]]
    ) -> list[_Stream]:
        """The target was lost: streams that were in flight are replayed, unless they are to blame.

        Returns:
            Those whose ingress has to be told: what was lost with the target is not counted once more if this
            coordinator is, too, before they have begun again.
        """
        self._num_losses += 1
        begun: list[_Stream] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.epoch == output.epoch and _has_run(output):
                begun.append(stream)
        # Alone means alone, unless what it was suspected for has been taken back meanwhile.
        for stream in [one for one in begun if one is self._alone and one.is_suspect]:
            del self._streams[stream.request.request_id]
            self._failed.keep(stream.request.resumption)
            message = f"the target was lost {stream.num_crashes + 1} times while it ran this request"
            frames[stream.ingress].append(_failed(stream, message, FAILED_REPEATEDLY))
        responses = {(stream.ingress, stream.response) for stream in begun}
        changed: list[_Stream] = []
        for stream in self._streams.values():
            is_counted = (stream.ingress, stream.response) in responses
            if is_counted:
                stream.num_crashes += 1
                stream.losses = (*stream.losses, self._num_losses)
            if stream.is_admitted and (is_counted or stream.has_begun):
                changed.append(stream)
            stream.has_begun = False
        return changed

    # -- without the lock, in the engine's thread

    def _run_suspects(self, engine: StreamEngine) -> bool:
        """Run requests that may be killing the target one at a time; return whether one is under way."""
        while True:
            alone = self._alone
            if alone is not None:
                if alone.is_suspect and self._streams.get(alone.request.request_id) is alone:
                    return True
                self._alone = None  # it has ended, is suspected no more, or its ingress began a new epoch
            if not self._suspects:
                return False
            if engine.has_work:
                return True  # alone means alone: what runs ends first, and nothing new begins
            stream = self._streams.get(self._suspects[0])
            if stream is not None and stream.awaits_turn:
                if stream.is_suspect:
                    self._alone = stream
                    self._probation_left = PROBATION_OUTPUTS
                    self._admit(engine, stream)
                elif stream.is_admitted:
                    self._replays.append((stream.request.request_id, stream.epoch))
                else:
                    self._submitted.append((stream.request.request_id, stream.epoch))
                stream.awaits_turn = False
            self._suspects.popleft()

    def _replay(self, engine: StreamEngine) -> bool:
        """Bring back streams of the engine before; return whether all are back."""
        while self._replays:
            request_id, epoch = self._replays[0]
            stream = self._streams.get(request_id)
            # The next attempt has come as a suspect, perhaps, and run before.
            if stream is not None and stream.epoch == epoch and stream.is_admitted:
                self._beginning = stream
                try:
                    rest = stream.rest(self._clock.now_s())
                    engine.add_request(msgspec.structs.replace(rest, was_admitted=True))
                except CapacityError:
                    self._beginning = None
                    return False
                except InputError as error:
                    self._end(stream, f"it cannot be replayed: {error}", "replay_failed")
                else:
                    self.num_replays += 1
                self._beginning = None
            self._replays.popleft()
        return True

    def _admit(self, engine: StreamEngine, stream: _Stream) -> None:
        request = stream.request
        self._beginning = stream
        try:
            engine.add_request(stream.rest(self._clock.now_s()))
        except CapacityError as error:
            kind: RefusalKind = "late" if isinstance(error, LateError) else "capacity"
            self._refuse(stream.ingress, request, kind, str(error), retry_after_s=error.retry_after_s)
            self._remove(stream)
        except InputError as error:
            self._refuse(stream.ingress, request, "input", str(error), param=error.param)
            self._remove(stream)
        else:
            stream.is_admitted = True
            stream.has_begun = stream is self._alone
            self._tell(stream)
        self._beginning = None

    def _end(self, stream: _Stream, message: str, code: str) -> None:
        self._send(stream.ingress, OutputFrame((_failed(stream, message, code),)))
        self._remove(stream)

    def _remove(self, stream: _Stream) -> None:
        with self._lock:
            if self._streams.get(stream.request.request_id) is stream:
                del self._streams[stream.request.request_id]

    def _refuse(
        self,
        ingress: PeerId,
        request: Request,
        kind: RefusalKind,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        refusal = Refused(request.request_id, request.epoch, kind, message, param, retry_after_s)
        self._send(ingress, refusal)


def _has_run(output: RequestOutput) -> bool:
    """Whether a request that ended with its target was ever given to it; who does not say may have been."""
    return output.stats is None or output.stats.first_scheduled_s is not None


def _failed(stream: _Stream, message: str, code: str) -> RequestOutput:
    """The last output of a stream that ends here and now."""
    return _failure(stream.request, message, code, num_generated=len(stream.generated))


def _failure(request: Request, message: str, code: str, *, num_generated: int | None = None) -> RequestOutput:
    """The last output of a request that has so many tokens (None: those that it came with)."""
    num_generated = len(request.delivered_token_ids) if num_generated is None else num_generated
    return RequestOutput(
        request_id=request.request_id,
        epoch=request.epoch,
        first_index=num_generated,
        token_ids=(),
        text="",
        finish_reason="error",
        error=message,
        error_code=code,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generated_tokens=num_generated,
    )


def _too_large(output: RequestOutput) -> str:
    num_scored = len(output.prompt_logprobs or ())
    return (
        f"the log-probabilities of {num_scored} prompt tokens are too long to be sent: ask for fewer "
        f"alternatives (prompt_logprobs, or logprobs with echo), or send a shorter prompt"
    )


def _divided(outputs: Sequence[RequestOutput], most_bytes: int) -> Iterator[tuple[RequestOutput, ...]]:
    """Return the outputs of one frame after the other."""
    if not _are_long(outputs, most_bytes):
        return iter((tuple(outputs),))
    return in_parts(((output, _num_bytes(output)) for output in outputs), most_bytes)


def _are_long(outputs: Iterable[RequestOutput], most_bytes: int) -> bool:
    """Return whether log-probabilities may take half of a frame; nothing else is long."""
    num_scores = sum(len(output.prompt_logprobs or ()) + len(output.logprobs or ()) for output in outputs)
    return num_scores * (_SCORE_BYTES + MAX_LOGPROBS * _ALTERNATIVE_BYTES) > most_bytes // 2


def _num_bytes(output: RequestOutput) -> int:
    """Return how long an output is when it is encoded, or a little more."""
    rest = msgspec.structs.replace(output, logprobs=None, prompt_logprobs=None)
    return (
        len(msgspec.msgpack.encode(rest))
        + _HEAD_BYTES
        + sum(
            _SCORE_BYTES + _ALTERNATIVE_BYTES * len(scores.top)
            for scores in (*(output.prompt_logprobs or ()), *(output.logprobs or ()))
        )
    )
