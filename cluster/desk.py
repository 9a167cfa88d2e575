"""A coordinator's streams: who asked for what, what was delivered, and to whom outputs go.

Two threads meet here. The channel's thread hands in messages (`hear`, `tick`); the engine's thread takes
orders out and brings outputs back (`serve`, `deliver`). Nothing here knows Ray, sockets or models.

The life of a request, in the order of the methods:

1. `hear`: it is turned away, or taken in and ordered.
2. `serve`: the engine admits it, or refuses it (`engine_orders`). Who is suspected of killing targets waits
   for a turn of its own (`quarantine`).
3. `note_begun`, `deliver`: its ingress hears that it runs, and what each round has brought, until it ends.
4. `begin_replay`: the target was lost. What is left of it is ordered anew, and brought back by `serve`.
5. `_drop`, `end_all`: its ingress has left it, or is gone; or nobody serves here any more.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from cluster.desk_report import Situation
from cluster.desk_stream import DeskStream, failure_of
from cluster.engine_orders import EngineOrders, StreamEngine
from cluster.ingress_leases import IngressLeases
from cluster.output_frames import OutputFrames, too_large
from cluster.recollection import FailedResponses, Recollection
from cluster.series import channel_dropped_series
from specdec.core.clock import Clock
from specdec.core.description import TargetDescription
from specdec.core.error_codes import (
    COORDINATOR_CRASHED,
    FAILED_REPEATEDLY,
    OUTPUT_TOO_LARGE,
    REPLAY_FAILED,
    SHUTTING_DOWN,
    TARGET_LOST,
)
from specdec.core.errors import CapacityError, InputError, LateError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
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
from specdec.transport.status import TargetGroupStatus

_RELOADED_AFTER_S = 10.0
"""What who is refused is told to wait while a target is loaded: nobody knows how long that takes."""
_STALLED_S = 2.0
"""A round that takes longer is taken for one that may not end."""
_RUN_ALONE_AFTER_S = 5.0
"""The same, while requests run alone or come back."""


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
        self._frames = OutputFrames(max_message_bytes)
        self._most_without_target = most_without_target
        self._clock = clock
        self._lock = threading.Lock()
        self._ordered = threading.Condition(self._lock)
        self._streams: dict[RequestId, DeskStream] = {}
        self._recollection = Recollection(clock)
        self._failed = FailedResponses(clock)
        self._ingresses = IngressLeases(lease_s)
        self._orders = EngineOrders(self._streams, clock, self)
        self._quarantine = self._orders.quarantine
        self._is_draining = False
        self._end_s: float | None = None
        self._woken = False
        self._description: TargetDescription | None = None
        self._without_s = 0.0
        """Without a target, since there was one first; but for the present loss."""
        self._lost_s: float | None = None
        self.engine_metrics: Mapping[str, float] = {}
        """Latest snapshot of the engine's metrics, or of the last engine's; see `metrics`."""
        self.status: TargetGroupStatus | None = None
        """What the engine is doing; None before the first."""
        self._served_s = clock.now_s()
        """When the engine was given last what was ordered."""
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
        """Return what the engine said last, and what only the desk knows."""
        return self._situation.metrics(
            {
                **self.engine_metrics,
                "target_recovery_seconds": self._recovery_s(),
                "replays": self._orders.num_replays,
                'requests_refused{reason="no_target"}': self.num_refused,
                'requests_refused{reason="held_up"}': self.num_refused_held_up,
                **channel_dropped_series("coordinator", {"unexpected_kind": self.num_unexpected}),
            }
        )

    def _recovery_s(self) -> float:
        lost_s = self._lost_s  # once: another thread may set it
        return self._without_s + (0.0 if lost_s is None else self._clock.now_s() - lost_s)

    @property
    def _situation(self) -> Situation:
        return Situation(
            has_target=self._description is not None,
            is_draining=self._is_draining,
            is_closing=self._end_s is not None,
            num_streams=len(self._streams),
            num_submitted=self._orders.num_submitted,
            most_without_target=self._most_without_target,
        )

    # -- the channel's thread

    def hear(self, envelope: Envelope) -> None:
        """Take a message of an ingress in, and answer it."""
        sender = envelope.sender
        with self._ordered:
            self._ingresses.hear(sender, self._clock.now_s())
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
            for ingress in self._ingresses.take_silent(now_s):
                for request_id in [r for r, stream in self._streams.items() if stream.ingress == ingress]:
                    self._drop(request_id, is_door_silent=True)

    # -- the engine's thread

    def wait(self, timeout_s: float) -> None:
        """Wait until there are orders, somebody calls `wake`, or the time is over."""
        with self._ordered:
            self._ordered.wait_for(lambda: self._woken or self._orders.are_there, timeout_s)
            self._woken = False

    def serve(self, engine: StreamEngine) -> None:
        """Carry out what was ordered: aborts, replays, then new requests.

        Raises:
            TransportError: the target is lost; what was not carried out stays ordered.
        """
        with self._lock:
            aborted = self._orders.take_aborted()
        for request_id, epoch in aborted:
            # The next attempt may be there already: it came while orders before it were carried out.
            engine.abort(request_id, epoch)
        self._orders.carry_out(engine)
        self._served_s = self._clock.now_s()

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
        changed: list[DeskStream] = []
        with self._lock:
            for output in outputs:
                if output.error_code == TARGET_LOST:
                    lost.append(output)
                    continue
                stream = self._streams.get(output.request_id)
                if stream is None or stream.epoch != output.epoch:
                    continue
                if not self._frames.holds(output):
                    # Sent by itself it would be lost; its door would ask for it again, and again.
                    frames[stream.ingress].append(stream.failed(too_large(output), OUTPUT_TOO_LARGE))
                    self._drop(output.request_id)
                    continue
                stream.generated.extend(output.token_ids)
                if output.finish_reason is not None:
                    self._keep(self._streams.pop(output.request_id))
                elif self._quarantine.clears(stream):
                    changed.append(stream)
                frames[stream.ingress].append(output)
            if lost:
                changed.extend(self._note_loss(lost, frames))
            # Under the lock: a Pong that no longer lists a stream must not overtake its last output.
            for ingress, its_outputs in frames.items():
                for part in self._frames.divided(its_outputs):
                    self._send(ingress, OutputFrame(part))
            for stream in changed:
                self._tell(stream)
        return bool(lost)

    def begin_replay(self) -> None:
        """Order every admitted stream to be replayed: the engine is new and empty."""
        with self._lock:
            self._orders.begin_anew()

    # -- any thread

    def drain(self) -> None:
        """Take no more requests from now on; those that are here go on."""
        with self._lock:
            self._is_draining = True
            self._tell_state()

    def set_target(self, description: TargetDescription | None) -> None:
        """Note that there is a target, or none any more, which ingresses hear at once."""
        with self._lock:
            if description is not None:
                self._without_s, self._lost_s = self._recovery_s(), None
            elif self._description is not None:
                self._lost_s = self._clock.now_s()
            self._description = description
            self._tell_state()

    def close_down(self, limit_s: float) -> None:
        """As `drain`, because the whole deployment ends: whatever is here after `limit_s` ends in an error.

        The first call counts.
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

    def end_all(self, message: str, code: str) -> None:
        """End every stream with an error, here and now, and take no more."""
        with self._ordered:
            self._is_draining = True
            self._tell_state()  # before the outputs: the streams must not come back
            beginning = self._orders.beginning
            if code == COORDINATOR_CRASHED and beginning is not None:
                beginning.has_begun = True  # it may be to blame as much as those that run
                self._tell(beginning)
            for stream in self._streams.values():
                self._send(stream.ingress, OutputFrame((stream.failed(message, code),)))
            self._orders.abort(self._streams.values())
            self._streams.clear()
            self._ordered.notify_all()

    # -- under the lock

    def _submit(self, sender: PeerId, request: Request, num_cleared: int) -> None:
        stream = self._streams.get(request.request_id)
        if self._is_turned_away(sender, request, stream):
            return
        if stream is not None and stream.epoch == request.epoch:
            # What was taken for a crash elsewhere may have been none.
            num_fewer = stream.request.num_crashes - request.num_crashes
            stream.num_crashes = max(0, stream.num_crashes - num_fewer)
            stream.request = msgspec.structs.replace(stream.request, num_crashes=request.num_crashes)
            if stream.is_admitted:
                self._tell(stream)
            return
        former = () if stream is None else stream.losses  # which the ingress may not have heard of
        if stream is not None:
            self._orders.abort((stream,))  # the next attempt may have to wait until nothing runs
        stream = DeskStream.of(request, sender, self._clock.now_s(), num_cleared=num_cleared)
        stream.losses = former
        self._streams[request.request_id] = stream
        self._orders.submit(stream)
        self._ordered.notify_all()

    def _is_turned_away(self, sender: PeerId, request: Request, stream: DeskStream | None) -> bool:
        """Whether a request is not to be served here, of which its ingress is told. `stream` is what is
        known by its name.
        """
        if stream is not None and stream.ingress != sender:
            self._refuse(sender, request, "input", "the request id is in use by another ingress")
        elif stream is not None and stream.epoch > request.epoch:
            self._refuse(sender, request, "stale", f"epoch {stream.epoch} of this request is served here")
        elif stream is not None and stream.epoch == request.epoch:
            return False
        elif request.resumption is not None and self._failed.has(
            request.resumption.name, request.resumption.proof
        ):
            message = "this request has ended already, because those that served it were lost each time"
            self._send(sender, OutputFrame((failure_of(request, message, FAILED_REPEATEDLY),)))
        elif self._is_draining:
            self._send(sender, self._pong(0, ()))  # before the refusal: whether anybody will replace us
            self._refuse(sender, request, "draining", "this coordinator is shutting down")
        elif (
            not request.goes_on  # what was promised to be served is not kept out for want of room
            and self._is_full
        ):
            if self._description is None:
                self.num_refused += 1
                message, wait_s = "the queue is full while the model is loaded anew", _RELOADED_AFTER_S
            elif not self._orders.are_held_up:
                self.num_refused += 1
                message, wait_s = "the queue is full while a round takes very long", _RELOADED_AFTER_S
            else:
                self.num_refused_held_up += 1
                message, wait_s = "the queue is full while others run alone", _RUN_ALONE_AFTER_S
            self._refuse(sender, request, "capacity", message, retry_after_s=wait_s)
        else:
            return False
        return True

    @property
    def _is_full(self) -> bool:
        """Whether as many are here as the engine takes in, while it takes none in: else it says who is too
        many. It takes none either while a round does not end, because a rank hangs, say.
        """
        if self._description is None or self._orders.are_held_up:
            return len(self._streams) >= self._most_without_target
        is_stalled = self._clock.now_s() - self._served_s > _STALLED_S
        return is_stalled and self._orders.num_submitted >= self._most_without_target

    def _tell(self, stream: DeskStream) -> None:
        """Tell its ingress how it is with a stream that was taken in."""
        self._send(
            stream.ingress,
            Admitted(
                stream.request_id,
                stream.epoch,
                has_begun=stream.has_begun,
                is_alone=self._quarantine.is_alone(stream),
                losses=stream.losses,
                num_cleared=stream.num_cleared,
            ),
        )

    def _tell_state(self) -> None:
        """Tell every ingress at once what its next ping would bring."""
        for ingress in self._ingresses:
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

    def _keep(self, stream: DeskStream, *, is_door_silent: bool = False) -> None:
        resumption = stream.request.resumption
        if resumption is not None:
            self._recollection.keep(resumption, stream.generated, is_door_silent=is_door_silent)

    def _drop(self, request_id: RequestId, *, is_door_silent: bool = False) -> None:
        stream = self._streams.pop(request_id)
        self._keep(stream, is_door_silent=is_door_silent)
        self._orders.abort((stream,))
        self._ordered.notify_all()

    def _active(self, ingress: PeerId) -> tuple[tuple[RequestId, Epoch], ...]:
        return tuple(stream.attempt for stream in self._streams.values() if stream.ingress == ingress)

    def _pong(self, nonce: int, active: tuple[tuple[RequestId, Epoch], ...]) -> Pong:
        return self._situation.pong(nonce, active, self.metrics())

    def _status_now(self) -> TargetGroupStatus | None:
        if self.status is None:
            return None
        num_continued = sum(stream.epoch > 0 for stream in self._streams.values())
        return self._situation.status(self.status, num_continued)

    def _note_loss(
        self, outputs: Sequence[RequestOutput], frames: dict[PeerId, list[RequestOutput]]
    ) -> list[DeskStream]:
        """The target was lost: streams that were in flight are replayed, unless they are to blame.

        Returns:
            Those whose ingress has to be told.
        """
        begun: list[DeskStream] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.epoch == output.epoch and _has_run(output):
                begun.append(stream)
        for stream in self._quarantine.guilty(begun):
            del self._streams[stream.request_id]
            self._failed.keep(stream.request.resumption)
            message = f"the target was lost {stream.num_crashes + 1} times while it ran this request"
            frames[stream.ingress].append(stream.failed(message, FAILED_REPEATEDLY))
        return self._quarantine.note_loss(begun)

    # -- what became of orders, in the engine's thread, without the lock

    def note_admitted(self, stream: DeskStream) -> None:
        """See `engine_orders.Outcomes`."""
        self._tell(stream)

    def note_refused(self, stream: DeskStream, error: CapacityError | InputError) -> None:
        """See `engine_orders.Outcomes`."""
        if isinstance(error, CapacityError):
            kind: RefusalKind = "late" if isinstance(error, LateError) else "capacity"
            self._refuse(
                stream.ingress,
                stream.request,
                kind,
                str(error),
                retry_after_s=error.retry_after_s,
                holds_s=error.holds_s,
            )
        else:
            self._refuse(stream.ingress, stream.request, "input", str(error), param=error.param)
        self._remove(stream)

    def note_not_replayed(self, stream: DeskStream, error: InputError) -> None:
        """See `engine_orders.Outcomes`."""
        last = stream.failed(f"it cannot be replayed: {error}", REPLAY_FAILED)
        self._send(stream.ingress, OutputFrame((last,)))
        self._remove(stream)

    def _remove(self, stream: DeskStream) -> None:
        with self._lock:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]

    def _refuse(
        self,
        ingress: PeerId,
        request: Request,
        kind: RefusalKind,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        holds_s: float = 0.0,
    ) -> None:
        refusal = Refused(request.request_id, request.epoch, kind, message, param, retry_after_s, holds_s)
        self._send(ingress, refusal)


def _has_run(output: RequestOutput) -> bool:
    """Whether a request that ended with its target was ever given to it; who does not say may have been."""
    return output.stats is None or output.stats.first_scheduled_s is not None
