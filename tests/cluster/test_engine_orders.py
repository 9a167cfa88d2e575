from __future__ import annotations

import msgspec
import pytest

from cluster.crash_policy import MAX_CRASHES
from cluster.desk_stream import DeskStream
from cluster.engine_orders import EngineOrders
from specdec.core.clock import ManualClock
from specdec.core.errors import CapacityError, InputError, TransportError
from specdec.core.ids import Epoch, RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.transport.base import PeerId


class Shop:
    """Orders, the engine that they are for, and who hears of them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.streams: dict[RequestId, DeskStream] = {}
        self.orders = EngineOrders(self.streams, self.clock, self)
        self.has_work = False
        self.fails_with: Exception | None = None
        self.given: list[Request] = []
        self.heard: list[tuple[str, str]] = []

    def add_request(self, request: Request) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.given.append(request)

    def abort(self, request_id: RequestId, epoch: Epoch) -> None:
        """Part of `StreamEngine`."""

    def note_admitted(self, stream: DeskStream) -> None:
        self.heard.append(("admitted", stream.request_id))

    def note_refused(self, stream: DeskStream, error: CapacityError | InputError) -> None:
        del self.streams[stream.request_id]
        self.heard.append(("refused", stream.request_id))

    def note_not_replayed(self, stream: DeskStream, error: InputError) -> None:
        del self.streams[stream.request_id]
        self.heard.append(("not replayed", stream.request_id))

    def submit(self, name: str, *, epoch: int = 0, num_crashes: int = 0) -> DeskStream:
        request = Request(
            request_id=RequestId(name),
            prompt_token_ids=(1,),
            params=SamplingParams(),
            seed=1,
            epoch=Epoch(epoch),
            num_crashes=num_crashes,
        )
        stream = DeskStream.of(request, PeerId("door"), self.clock.now_s(), num_cleared=0)
        self.streams[stream.request_id] = stream
        self.orders.submit(stream)
        return stream

    def carry_out(self) -> list[str]:
        self.given.clear()
        self.orders.carry_out(self)
        return [one.request_id for one in self.given]


def test_orders_are_carried_out_in_turn_and_once() -> None:
    shop = Shop()
    assert not shop.orders.are_there
    streams = [shop.submit(name) for name in "ab"]
    assert shop.orders.num_submitted == 2
    assert shop.carry_out() == ["a", "b"]
    assert shop.heard == [("admitted", "a"), ("admitted", "b")]
    assert all(one.is_admitted and not one.has_begun for one in streams)
    assert shop.carry_out() == []
    assert not shop.orders.are_there


def test_what_is_gone_or_another_attempt_is_not_served() -> None:
    shop = Shop()
    shop.submit("gone")
    shop.submit("again")
    shop.submit("again", epoch=1)
    del shop.streams[RequestId("gone")]
    assert shop.carry_out() == ["again"]
    assert shop.given[0].epoch == 1


@pytest.mark.parametrize("error", [CapacityError("full", retry_after_s=1.0), InputError("no", param=None)])
def test_what_the_engine_refuses_is_told_and_the_next_comes(error: Exception) -> None:
    shop = Shop()
    shop.submit("a")
    shop.fails_with = error
    assert shop.carry_out() == []
    assert shop.heard == [("refused", "a")]
    assert shop.orders.beginning is None
    shop.fails_with = None
    shop.submit("b")
    assert shop.carry_out() == ["b"]


def test_what_was_not_carried_out_stays_ordered() -> None:
    shop = Shop()
    stream = shop.submit("a")
    shop.fails_with = TransportError("the target is lost")
    with pytest.raises(TransportError):
        shop.carry_out()
    assert shop.orders.beginning is stream, "it may be to blame"
    shop.fails_with = None
    shop.orders.begin_anew()
    assert shop.orders.beginning is None
    assert shop.carry_out() == ["a"]


def test_streams_come_back_with_what_is_left_of_them_before_new_ones() -> None:
    shop = Shop()
    first, second = shop.submit("first"), shop.submit("second")
    shop.carry_out()
    first.generated.append(7)
    second.has_begun = True
    shop.orders.abort([first])
    shop.orders.begin_anew()
    assert shop.orders.take_aborted() == [], "the new engine knows nobody"
    assert not second.has_begun
    shop.submit("new")
    assert shop.orders.are_held_up
    shop.fails_with = CapacityError("full", retry_after_s=1.0)
    assert shop.carry_out() == []
    assert shop.orders.are_held_up, "they wait for room"
    shop.fails_with = None
    shop.heard.clear()
    assert shop.carry_out() == ["first", "second", "new"]
    assert [one.delivered_token_ids for one in shop.given] == [(7,), (), ()]
    assert [one.was_admitted for one in shop.given] == [True, True, False]
    assert shop.orders.num_replays == 2
    assert shop.heard == [("admitted", "new")], "the others are admitted already"


def test_what_cannot_come_back_ends() -> None:
    shop = Shop()
    shop.submit("a")
    shop.carry_out()
    shop.orders.begin_anew()
    shop.fails_with = InputError("too long by now", param=None)
    assert shop.carry_out() == []
    assert shop.heard[-1] == ("not replayed", "a")
    assert not shop.orders.are_held_up


def test_suspects_are_given_before_all_others_and_alone() -> None:
    shop = Shop()
    shop.submit("other")
    suspect = shop.submit("suspect", num_crashes=MAX_CRASHES)
    assert shop.carry_out() == ["suspect"]
    assert suspect.has_begun, "its ingress is told at once that it runs"
    assert shop.carry_out() == []
    suspect.request = msgspec.structs.replace(suspect.request, num_crashes=0)
    suspect.num_crashes = 0
    assert shop.carry_out() == ["other"]


def test_what_is_to_be_ended_is_told_once() -> None:
    shop = Shop()
    stream = shop.submit("a", epoch=3)
    shop.orders.abort([stream])
    assert shop.orders.are_there
    assert shop.orders.take_aborted() == [("a", 3)]
    assert shop.orders.take_aborted() == []
