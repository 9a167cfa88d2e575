"""An ingress's streams: where each is served, what was delivered, what happens when a coordinator is lost.

Pure bookkeeping in one thread: messages and time come in by `hear` and `tick`, messages go out by `send`,
outputs by each stream's sink. A stream whose coordinator is lost is submitted again, with the tokens
delivered so far and the next epoch; frames of older epochs are dropped. So every stream ends in exactly one
output with a finish reason, or, before its first output, in one exception.

Crashes that a stream was in flight at are counted here (`crash_policy`): coordinators tell of their targets',
their own are seen from here. Who is silent may be cut off and no more, so that those are taken back from a
coordinator that is heard again, and nobody is ended for them before a lease's time is over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec

from cluster.affinity import Load, PrefixRoutes, Route, RoutingConfig, choose
from cluster.crash_policy import (
    MAX_CLEARED,
    MAX_CRASHES,
    PROBATION_OUTPUTS,
    Crash,
    CrashRecord,
    response_of,
)
from cluster.directory import Member
from cluster.known_coordinators import KnownCoordinator, KnownCoordinators
from cluster.recollection import FailedResponses
from specdec.core.clock import Clock
from specdec.core.description import TargetDescription
from specdec.core.error_codes import (
    COORDINATOR_CRASHED,
    COORDINATOR_FAILED,
    COORDINATOR_LOST,
    DISPLACED,
    FAILED_REPEATEDLY,
    REPLAY_FAILED,
    SHUTTING_DOWN,
)
from specdec.core.errors import (
    CapacityError,
    DrafthouseError,
    InputError,
    LateError,
    NotReadyError,
    RequestFailed,
)
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import FinishReason, RequestOutput
from specdec.core.request import Request
from specdec.kv.caching_allocator import BlockKey
from specdec.transport.base import MAX_MESSAGE_BYTES, Envelope, PeerFound, PeerId, PeerLost
from specdec.transport.messages import (
    Abort,
    Admitted,
    Hello,
    Message,
    OutputFrame,
    Ping,
    Pong,
    Refused,
    SubmitRequest,
    Welcome,
    encode,
)

Sink = Callable[[RequestOutput | DrafthouseError], None]

_RETRY_AFTER_S = 2.0
"""What a client is told when no coordinator is there."""
_MOST_REFUSED_S = 5.0
"""After so long whoever had no room for a stream is asked again, if that has nobody better."""
_TOKEN_BYTES = 5
"""A token id in a message, at most."""
_HEAD_BYTES = 64
"""What the numbers of a submission that change on the way may grow by."""
_MOST_EPOCHS = 3
"""Attempts beyond the first that are told apart in what is counted."""
_FULL_RETRY_AFTER_S = 10.0
"""What it is told when so many wait for one that there would be no room: nobody knows how long that takes."""


@dataclass(slots=True)
class _Stream:
    request: Request
    """As the door gave it; `epoch` and `delivered` below are ahead of it after a loss."""
    sink: Sink
    epoch: Epoch
    delivered: list[int]
    opened_s: float
    crashes: CrashRecord
    """Of its response."""
    coordinator: PeerId | None = None
    model_revision: str | None = None
    was_admitted: bool = False
    is_admitted: bool = False
    """Whether its present coordinator has taken it in."""
    is_in_flight: bool = False
    """Whether that has begun with it."""
    is_alone: bool = False
    """Whether that runs it alone, if it has begun with it."""
    is_told_of: bool = False
    """Whether that says how it is with it, which older ones do not."""
    told: frozenset[Crash] = frozenset()
    """Crashes that its present coordinator was told of: what it may be to blame for."""
    forgiven: frozenset[Crash] = frozenset()
    """Crashes that it is not suspected for any more: it has run alone, and nothing has died of it."""
    num_cleared: int = 0
    held_for: PeerId | None = None
    """A coordinator that was silent while it ran this alone. Nobody else gets it until it is clear whether
    that has crashed."""
    held_until_s: float = 0.0
    num_outputs: int = 0
    """Since its last submission."""
    submitted_before: int = 0
    """Nonce of the first ping sent after the submission."""
    homeless_since_s: float = 0.0
    not_before_s: float = 0.0
    give_up_s: float = math.inf
    """Until when it waits for a first coordinator at least, where none is there."""
    refused_by: set[PeerId] = field(default_factory=set)
    refusal: CapacityError | None = None
    """Of these refusals for want of room, the one that passes first."""
    refused_until_s: float = 0.0
    """While it has a coordinator, nobody else who has refused it is asked again before then."""
    prefix: Sequence[BlockKey] | None = None
    """Names of its prompt's blocks, once anybody has asked."""

    @property
    def suspected_for(self) -> frozenset[Crash]:
        """Crashes that it may be to blame for."""
        return self.crashes.without(self.forgiven)

    def forget_refusals(self) -> None:
        """Whoever had no room for it may be asked again."""
        self.refused_by.clear()
        self.refusal = None

    def clear(self, num_cleared: int) -> None:
        """It has run alone for long enough."""
        self.forgiven = self.forgiven | self.suspected_for
        self.num_cleared = num_cleared
        self.is_alone = False


class StreamBook:
    """All streams of one ingress."""

    def __init__(
        self,
        send: Callable[[PeerId, Message], None],
        clock: Clock,
        *,
        lease_s: float,
        failover_timeout_s: float,
        routing: RoutingConfig | None = None,
        may_be_none: bool = False,
        max_groups: int = 1,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """With `may_be_none`, streams wait for a coordinator where there is none: one is started for them.

        Elsewhere new ones wait, too, but only while there is doubt (`KnownCoordinators`). No more of them
        wait than `max_groups` coordinators would take in, by what the last that was heard has said.
        `max_message_bytes` is the longest message that can be sent.
        """
        self._max_message_bytes = max_message_bytes
        self._routing = routing or RoutingConfig()
        self._routes = PrefixRoutes(self._routing)
        self._send = send
        self._clock = clock
        self._lease_s = lease_s
        self._failover_timeout_s = failover_timeout_s
        self._max_groups = max_groups
        self._room_of_one: float = math.inf
        """Streams that one coordinator takes in; older ones do not say."""
        self._coordinators = KnownCoordinators(clock, lease_s=lease_s, may_be_none=may_be_none)
        self._may_be_none = may_be_none
        self._streams: dict[RequestId, _Stream] = {}
        self._records: WeakValueDictionary[str, CrashRecord] = WeakValueDictionary()
        """By response, as long as one of its choices has not ended."""
        self._silent: dict[PeerId, int] = {}
        """Coordinators whose silence counts as a crash, and the nonce of the first ping that they had not
        been sent by then: who answers it, or a later one, has not crashed."""
        self._failed = FailedResponses(clock)
        self._num_at: Counter[PeerId] = Counter()
        """Streams by coordinator."""
        self._next_nonce = 1
        self.counters: Counter[str] = Counter({_epoch_series(epoch): 0 for epoch in range(_MOST_EPOCHS + 1)})
        """request_epochs, failovers, stale_frames_dropped, lost_streams, unexpected_messages_dropped, and
        what became of choosing a group: routed_requests by reason, routed_prefix_tokens."""

    @property
    def description(self) -> TargetDescription | None:
        """Facts about the target of a coordinator that takes requests, or would be started for one; None when
        there is none."""
        return self._coordinators.description

    @property
    def has_homeless(self) -> bool:
        """Whether a stream waits for a coordinator."""
        return self.num_homeless > 0

    @property
    def num_homeless(self) -> int:
        """Streams that wait for a coordinator."""
        return len(self._streams) - self._num_at.total()

    @property
    def is_deserted(self) -> bool:
        """Whether there is no coordinator that takes requests."""
        return not self._coordinators.takers

    @property
    def coordinators(self) -> tuple[PeerId, ...]:
        """Coordinators that can be reached."""
        return tuple(one.peer_id for one in self._coordinators if one.is_reachable)

    @property
    def num_serving(self) -> int:
        """Coordinators that can be reached and have a target."""
        return self._coordinators.num_serving

    @property
    def num_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    def set_coordinators(self, members: Iterable[Member]) -> None:
        """Use exactly these coordinators; the caller has connected to them."""
        gone, new = self._coordinators.replace(members)
        for peer_id in gone:
            self._routes.forget(peer_id)
            self._lose(peer_id)
        for peer_id in new:
            self._send(peer_id, Hello(0, self._failed.kept()))
        self._place_homeless()

    def open(self, request: Request, sink: Sink) -> None:
        """Begin a stream.

        Raises:
            NotReadyError: no coordinator is there that takes requests.
            CapacityError: none is, and those who wait for one are too many already.
            RequestFailed: it has ended as `request_failed_repeatedly`, and its client has come back.
            InputError: the request id is in use, or the request is too long to be sent to a coordinator.
        """
        if request.request_id in self._streams:
            raise InputError(f"request id {request.request_id} is in use", param="request_id")
        self._require_room(request)
        resumption = request.resumption
        if resumption is not None and self.has_failed([resumption.name], resumption.proof):
            raise ended_before()
        response = response_of(request.request_id)
        stream = _Stream(
            request,
            sink,
            request.epoch,
            list(request.delivered_token_ids),
            self._clock.now_s(),
            self._records.setdefault(response, CrashRecord()),
        )
        route = self._route(stream)
        if route is None and not self._coordinators.may_wait:
            raise self._not_ready()
        has_begun = bool(request.delivered_token_ids)
        if route is None and not has_begun and self.num_homeless >= self._max_groups * self._room_of_one:
            raise CapacityError(
                "the queue is full while no model is ready", retry_after_s=_FULL_RETRY_AFTER_S
            )
        self._streams[request.request_id] = stream
        stream.homeless_since_s = self._clock.now_s()
        if route is None:
            if not self._may_be_none:
                stream.give_up_s = self._coordinators.doubtful_until_s
        else:
            self._submit(stream, route)

    def _require_room(self, request: Request) -> None:
        """Check that a request can be sent now, and with all of its tokens if it has to go on elsewhere."""
        num_tokens = request.params.max_tokens
        if self.description is not None:
            longest = self.description.max_model_len
            num_tokens = longest if num_tokens is None else min(num_tokens, longest)
        num_bytes = len(encode(SubmitRequest(request))) + _TOKEN_BYTES * (num_tokens or 0) + _HEAD_BYTES
        if num_bytes > self._max_message_bytes:
            raise InputError(
                f"the request takes {num_bytes} bytes with the tokens that it may generate, and no more than "
                f"{self._max_message_bytes} can be sent to those who serve it "
                "(cluster.channels.max_message_bytes): send a shorter one",
                param=None,
            )

    def has_failed(self, names: Iterable[str], proof: bytes) -> bool:
        """Whether the response of any of these streams is known to have killed who served it."""
        return self._failed.has_any(names, proof)

    def close(self, request_id: RequestId) -> None:
        """Nobody waits for this stream any more. Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.coordinator is not None:
            self._send(stream.coordinator, Abort(request_id, stream.epoch))
        self._forget(stream)

    def abort(self, request_id: RequestId) -> None:
        """End a stream with finish reason "abort". Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self.close(request_id)
            stream.sink(_last_output(stream, "abort"))

    def end_all(self) -> None:
        """End every stream: this ingress is closed."""
        for request_id, stream in list(self._streams.items()):
            self.close(request_id)
            self._give_up(stream)

    def hear(self, envelope: Envelope) -> None:
        """Take a message of a coordinator in."""
        coordinator = self._coordinators.get(envelope.sender)
        if coordinator is None:
            self.counters["stale_frames_dropped"] += isinstance(envelope.message, OutputFrame)
            return
        if isinstance(envelope.message, PeerLost):
            self._give_up_on(coordinator)
            return
        if isinstance(envelope.message, PeerFound):
            return  # whether it works is for its own words to say
        is_back = self._coordinators.hear(coordinator)
        match envelope.message:
            case OutputFrame(outputs=outputs):
                for output in outputs:
                    self._take_output(envelope.sender, output)
            case Pong() as pong:
                self._reconcile(coordinator, pong)
            case Admitted() as admitted:
                self._take_admission(envelope.sender, admitted)
            case Refused() as refused:
                self._take_refusal(coordinator, refused)
            case Welcome(description=description):
                self._coordinators.welcome(coordinator, description)
            case _:
                self.counters["unexpected_messages_dropped"] += 1
        if is_back:
            self._send(envelope.sender, Hello(0))
            self._place_homeless()

    def tick(self, *, directory_silent_s: float = 0.0) -> None:
        """Ping coordinators, notice silent ones, see to homeless streams. Call every second or so.

        `directory_silent_s`: how long ago the directory has last answered.
        """
        now_s = self._clock.now_s()
        self._coordinators.directory_heard_s = now_s - directory_silent_s
        for coordinator in self._coordinators.silent():
            self._give_up_on(coordinator)
        for coordinator in self._coordinators:
            self._send(coordinator.peer_id, Ping(self._next_nonce))
            if coordinator.description is None:
                self._send(coordinator.peer_id, Hello(0))
        self._next_nonce += 1
        self._forget_silent()
        self._place_homeless()
        for stream in list(self._streams.values()):
            if stream.coordinator is not None:
                continue
            if stream.held_for is not None and now_s >= stream.held_until_s:
                self._blame(stream)
            elif now_s >= stream.give_up_s and not self._coordinators.may_wait:
                self._reject(stream, self._not_ready())
            elif now_s - stream.homeless_since_s > self._failover_timeout_s:
                self.counters["lost_streams"] += 1
                if not stream.was_admitted:
                    self._reject(stream, self._not_ready())
                    continue
                message = f"the model was lost and did not come back within {self._failover_timeout_s:g} s"
                self._finish(stream, _last_output(stream, "error", message, COORDINATOR_LOST))

    def _current(self, request_id: RequestId, epoch: Epoch) -> _Stream | None:
        stream = self._streams.get(request_id)
        return stream if stream is not None and stream.epoch == epoch else None

    def _take_output(self, sender: PeerId, output: RequestOutput) -> None:
        stream = self._current(output.request_id, output.epoch)
        if stream is None or stream.coordinator != sender or output.first_index < len(stream.delivered):
            self.counters["stale_frames_dropped"] += 1
        elif output.first_index > len(stream.delivered) or output.error_code == COORDINATOR_FAILED:
            self._evict_lost(stream)
        elif output.error_code == COORDINATOR_CRASHED:
            self._note_crash(stream, Crash.of_loop(sender))
        elif output.error_code == DISPLACED:
            message = output.error or "the queue is full"
            refusal = CapacityError(message, retry_after_s=output.retry_after_s or _RETRY_AFTER_S)
            stream.was_admitted = False  # nobody has promised anything any more
            self._take_full(stream, sender, refusal, goes_on=False)
        else:
            stream.was_admitted = stream.is_admitted = stream.is_in_flight = True
            stream.delivered.extend(output.token_ids)
            stream.num_outputs += 1
            if (
                stream.num_outputs == PROBATION_OUTPUTS
                and stream.is_alone
                and not stream.is_told_of
                and stream.num_cleared < MAX_CLEARED
            ):
                stream.clear(stream.num_cleared + 1)
            if output.finish_reason is not None:
                self._finish(stream, output)
            else:
                stream.sink(output)

    def _take_admission(self, sender: PeerId, admitted: Admitted) -> None:
        stream = self._current(admitted.request_id, admitted.epoch)
        if stream is None or stream.coordinator != sender:
            return
        stream.was_admitted = stream.is_admitted = True
        for number in admitted.losses:
            stream.crashes.note(Crash.of_target(sender, number))
        if admitted.num_cleared < stream.num_cleared:
            return  # an older one came later
        stream.is_in_flight = admitted.has_begun
        if admitted.is_alone is not None:
            stream.is_alone, stream.is_told_of = admitted.is_alone, True
        if admitted.num_cleared > stream.num_cleared:
            stream.clear(admitted.num_cleared)

    def _take_refusal(self, coordinator: KnownCoordinator, refused: Refused) -> None:
        if refused.kind == "draining":
            self._coordinators.drains(coordinator)
        stream = self._current(refused.request_id, refused.epoch)
        if stream is None:
            return
        is_replay = stream.was_admitted
        if refused.kind == "input":
            if is_replay:
                message = f"the request could not be continued elsewhere: {refused.message}"
                self._finish(stream, _last_output(stream, "error", message, REPLAY_FAILED))
            else:
                self._reject(stream, InputError(refused.message, param=refused.param))
            return
        if refused.kind == "draining" and not is_replay and self._route(stream) is None:
            if not self._coordinators.may_wait:
                self._reject(stream, self._not_ready())
                return
            if not self._may_be_none:
                stream.give_up_s = self._coordinators.doubtful_until_s
        if refused.kind in ("capacity", "late"):
            kind = LateError if refused.kind == "late" else CapacityError
            refusal = kind(
                refused.message,
                retry_after_s=refused.retry_after_s or _RETRY_AFTER_S,
                holds_s=refused.holds_s,
            )
            self._take_full(stream, coordinator.peer_id, refusal, goes_on=is_replay)
        else:
            self._evict(stream)

    def _take_full(
        self, stream: _Stream, coordinator: PeerId, refusal: CapacityError, *, goes_on: bool
    ) -> None:
        """A coordinator has no room for a stream: try another. One that goes on waits as long as it takes."""
        stream.refused_by.add(coordinator)
        stream.refused_until_s = self._clock.now_s() + min(refusal.retry_after_s, _MOST_REFUSED_S)
        if stream.refusal is not None:  # the first of them that could take it ends all of it
            holds_s = min(refusal.holds_s, stream.refusal.holds_s)
            refusal = min(refusal, stream.refusal, key=lambda one: one.retry_after_s)
            refusal.holds_s = holds_s
        stream.refusal = refusal
        if goes_on:
            stream.forget_refusals()
            stream.not_before_s = stream.refused_until_s
        elif self._route(stream) is None:
            self._reject(stream, stream.refusal)
            return
        since_s = stream.homeless_since_s
        was_served = stream.is_admitted
        self._evict(stream)
        if not was_served:  # to be refused is no end of waiting
            stream.homeless_since_s = since_s

    def _reconcile(self, coordinator: KnownCoordinator, pong: Pong) -> None:
        """Find streams that one side believes in and the other does not: a broken link loses messages."""
        peer_id = coordinator.peer_id
        self._coordinators.take_state(coordinator, pong)
        if pong.max_streams:
            self._room_of_one = pong.max_streams
        if pong.nonce >= self._silent.get(peer_id, math.inf):
            self._take_back_crash(peer_id)
        active = dict(pong.active)
        for request_id, epoch in pong.active:
            stream = self._streams.get(request_id)
            if stream is None or stream.coordinator != peer_id or stream.epoch > epoch:
                self._send(peer_id, Abort(request_id, epoch))
        for request_id, stream in list(self._streams.items()):
            if (
                stream.coordinator == peer_id
                and stream.submitted_before <= pong.nonce
                and active.get(request_id) != stream.epoch
            ):
                self._evict_lost(stream)
        if pong.without_target:
            self._leave(coordinator)

    def _give_up_on(self, coordinator: KnownCoordinator) -> None:
        if self._coordinators.give_up(coordinator):
            self._lose(coordinator.peer_id)

    def _leave(self, coordinator: KnownCoordinator) -> None:
        """Its target is lost, and the next may take minutes to load: streams go on elsewhere, if they can."""
        for stream in list(self._streams.values()):
            if stream.coordinator != coordinator.peer_id:
                continue
            if stream.was_admitted or self._clock.now_s() >= stream.refused_until_s:
                stream.forget_refusals()
            others = self._coordinators.fitting(stream.model_revision, stream.refused_by)
            if any(one.has_target for one in others):
                # Whoever tells of its losses has done so: then nothing is in flight there.
                self._note_crash(stream, Crash.of_target(coordinator.peer_id))

    def _lose(self, peer_id: PeerId) -> None:
        for stream in list(self._streams.values()):
            if stream.coordinator == peer_id:
                self._silent[peer_id] = self._next_nonce
                self._note_crash(stream, Crash.of_link(peer_id))

    def _note_crash(self, stream: _Stream, crash: Crash) -> None:
        """Who served it is lost: it is submitted again, unless it seems to be to blame."""
        if stream.is_in_flight:
            stream.crashes.note(crash)
        if stream.is_in_flight and stream.is_alone:
            if crash != Crash.of_link(crash.coordinator):
                self._blame(stream)
                return
            stream.held_for = crash.coordinator
            stream.held_until_s = self._clock.now_s() + self._lease_s
        self._evict_lost(stream)

    def _blame(self, stream: _Stream) -> None:
        """End a stream that ran alone when who served it was lost."""
        num_crashes = len(stream.suspected_for)
        message = f"who served this request was lost {num_crashes} times while it ran"
        self._take_back(stream)
        self._finish(stream, _last_output(stream, "error", message, FAILED_REPEATEDLY))

    def _take_back_crash(self, peer_id: PeerId) -> None:
        """Who was silent is heard again: it has not crashed, nor is anybody to blame for it."""
        del self._silent[peer_id]
        crash = Crash.of_link(peer_id)
        for stream in list(self._streams.values()):
            if crash in stream.crashes:
                stream.crashes.take_back(crash)
            if crash in stream.told and stream.coordinator is not None:
                stream.told = stream.told - {crash}
                self._send(stream.coordinator, self._submission(stream))
            if stream.held_for == peer_id:
                stream.held_for = None
                self._place(stream)

    def _forget_silent(self) -> None:
        """Forget the silence of those that nobody is suspected for: who has crashed never comes back."""
        if self._silent:
            crashes = {crash for stream in self._streams.values() for crash in stream.suspected_for}
            waited_for = {stream.held_for for stream in self._streams.values()}
            self._silent = {
                peer_id: nonce
                for peer_id, nonce in self._silent.items()
                if Crash.of_link(peer_id) in crashes or peer_id in waited_for
            }

    def _evict_lost(self, stream: _Stream) -> None:
        """Its coordinator has lost it: it may go where there was no room for it, too."""
        stream.forget_refusals()
        self._evict(stream)

    def _evict(self, stream: _Stream) -> None:
        """Take a stream from its coordinator and submit it again, there or elsewhere."""
        self._take_back(stream)
        stream.epoch = Epoch(stream.epoch + 1)
        stream.homeless_since_s = self._clock.now_s()
        self.counters["failovers"] += stream.is_admitted
        stream.is_admitted = stream.is_in_flight = False
        self._place(stream)

    def _take_back(self, stream: _Stream) -> None:
        coordinator = self._coordinators.get(stream.coordinator)
        if coordinator is not None:
            self._send(coordinator.peer_id, Abort(stream.request.request_id, stream.epoch))
        self._assign(stream, None)

    def _assign(self, stream: _Stream, peer_id: PeerId | None) -> None:
        """Note who has a stream; None: nobody."""
        former, stream.coordinator = stream.coordinator, peer_id
        if former is not None:
            self._num_at[former] -= 1
            if not self._num_at[former]:
                del self._num_at[former]
        if peer_id is not None:
            self._num_at[peer_id] += 1

    def _forget(self, stream: _Stream) -> None:
        """Take a stream out of the book."""
        self._assign(stream, None)
        del self._streams[stream.request.request_id]

    def _place_homeless(self) -> None:
        for stream in list(self._streams.values()):
            if stream.coordinator is None:
                self._place(stream)

    def _place(self, stream: _Stream) -> None:
        if self._clock.now_s() < stream.not_before_s or stream.held_for is not None:
            return
        route = self._route(stream)
        if route is not None:
            self._submit(stream, route)
        elif self._coordinators.is_closing:
            self._forget(stream)
            self._give_up(stream)

    def _give_up(self, stream: _Stream) -> None:
        """Tell the sink of a stream that is not in the book any more that nobody will serve it on."""
        if stream.was_admitted:
            message = "the server was shut down before the request was complete"
            stream.sink(_last_output(stream, "error", message, SHUTTING_DOWN))
        else:
            stream.sink(self._not_ready())

    def _not_ready(self) -> NotReadyError:
        return NotReadyError(
            "the server is shutting down" if self._coordinators.is_closing else "no model is ready to serve"
        )

    def _route(self, stream: _Stream) -> Route | None:
        """The target group that should serve this stream now, of those that may."""
        fitting = self._coordinators.fitting(stream.model_revision, stream.refused_by)
        if not fitting:
            return None
        loads = [
            Load(one.peer_id, max(one.reported_load, self._num_at[one.peer_id]) / max(1, one.member.capacity))
            for one in fitting
        ]
        return choose(loads, self._routes.known(self._prefix(stream)), self._routing.imbalance)

    def _prefix(self, stream: _Stream) -> Sequence[BlockKey]:
        if not self._goes_by_prefix:
            return ()
        if stream.prefix is None:
            stream.prefix = self._routes.names(stream.request)
        return stream.prefix

    @property
    def _goes_by_prefix(self) -> bool:
        return self._routing.prefix_affinity and len(self._coordinators) > 1

    def _submit(self, stream: _Stream, route: Route) -> None:
        if self._goes_by_prefix:
            self._routes.note(self._prefix(stream), route.group)
            self.counters[f'routed_requests{{reason="{route.reason}"}}'] += 1
            self.counters["routed_prefix_tokens"] += route.num_known_blocks * self._routing.block_tokens
        self.counters[_epoch_series(stream.epoch - stream.request.epoch)] += 1
        coordinator = self._coordinators.get(route.group)
        assert coordinator is not None, "it was chosen from those that are there"
        self._assign(stream, route.group)
        stream.give_up_s = math.inf
        stream.model_revision = coordinator.member.model_revision
        stream.submitted_before = self._next_nonce
        stream.is_admitted = stream.is_in_flight = stream.is_told_of = False
        stream.num_outputs = 0
        stream.told = stream.suspected_for
        stream.is_alone = len(stream.told) >= MAX_CRASHES
        self._send(route.group, self._submission(stream))

    def _submission(self, stream: _Stream) -> SubmitRequest:
        """What its coordinator is told of a stream."""
        rest = stream.request.continued(
            delivered_token_ids=tuple(stream.delivered), elapsed_s=self._clock.now_s() - stream.opened_s
        )
        request = msgspec.structs.replace(
            rest, epoch=stream.epoch, num_crashes=len(stream.told), was_admitted=stream.was_admitted
        )
        return SubmitRequest(request, stream.num_cleared)

    def _finish(self, stream: _Stream, output: RequestOutput) -> None:
        self._forget(stream)
        resumption = stream.request.resumption
        if output.error_code == FAILED_REPEATEDLY and resumption is not None:
            self._failed.keep(resumption)
            for coordinator in self._coordinators:  # its client may come back through another door
                self._send(coordinator.peer_id, Hello(0, (resumption,)))
        stream.sink(output)

    def _reject(self, stream: _Stream, error: DrafthouseError) -> None:
        self._forget(stream)
        stream.sink(error)


def _epoch_series(num_former: int) -> str:
    """Return the key of the counter of attempts that so many have gone before."""
    return f'request_epochs{{epoch="{num_former if num_former < _MOST_EPOCHS else f"{_MOST_EPOCHS}+"}"}}'


def ended_before() -> RequestFailed:
    """What a client is told that comes back to a request which has killed who served it."""
    message = "this request has ended already, because those that served it were lost each time"
    return RequestFailed(message, code=FAILED_REPEATEDLY)


def _last_output(
    stream: _Stream, reason: FinishReason, error: str | None = None, error_code: str | None = None
) -> RequestOutput:
    return RequestOutput(
        request_id=stream.request.request_id,
        epoch=stream.epoch,
        first_index=len(stream.delivered),
        token_ids=(),
        text="",
        finish_reason=reason,
        error=error,
        error_code=error_code,
        num_prompt_tokens=len(stream.request.prompt_token_ids),
        num_generated_tokens=len(stream.delivered),
    )
