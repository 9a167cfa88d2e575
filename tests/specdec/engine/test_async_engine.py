"""The asyncio face: streams, refusals, consumers that leave, shutdown, idle work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
import pytest

from specdec.core.errors import CapacityError, ChannelClosed, InputError
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.engine import async_engine
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget
from tests.specdec.engine.toy_engines import (
    GREEDY,
    MODEL,
    SAMPLED,
    OracleProposer,
    expected_tokens,
    make_proposer,
    request,
    tokens_of,
    toy_engine,
)

LONG = msgspec.structs.replace(GREEDY, max_tokens=200)


class SlowTarget(ToyTarget):
    """Takes a moment per round, so that a test can act in between."""

    def collect(self):  # type: ignore[no-untyped-def]
        time.sleep(0.002)
        return super().collect()


@contextmanager
def serving(engine: Engine, **options: Any):  # type: ignore[no-untyped-def]
    service = AsyncEngine(engine, **options)
    try:
        yield service
    finally:
        service.close()


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))


def test_concurrent_streams() -> None:
    async def main() -> None:
        with serving(toy_engine(make_proposer("draft_model"), max_num_seqs=4)) as service:
            requests = [request(f"r{index}", (1, 2, index), SAMPLED, seed=index) for index in range(16)]
            results = await asyncio.gather(*(collect(service.generate(one)) for one in requests))
            for one, outputs in zip(requests, results, strict=True):
                assert tokens_of(outputs) == expected_tokens(one)
            metrics = await service.metrics()
            assert metrics['request_success{finished_reason="length"}'] == 16
            assert service.description() is not None

    run(main)


def test_refusals_come_before_the_first_output() -> None:
    async def main() -> None:
        target = SlowTarget(MODEL)
        with serving(toy_engine(target=target, max_num_seqs=1, max_num_waiting=0)) as service:
            with pytest.raises(InputError, match="empty"):
                await anext(service.generate(request("wrong", ())))
            async with aclosing(service.generate(request("a", params=LONG))) as stream:
                await anext(stream)
                with pytest.raises(CapacityError):
                    await anext(service.generate(request("b")))
                with pytest.raises(InputError, match="in use"):
                    await anext(service.generate(request("a")))
                assert (await anext(stream)).finish_reason is None  # the refused twin did not end it

    run(main)


def test_leaving_consumer_frees_memory() -> None:
    async def main() -> None:
        engine = toy_engine(target=SlowTarget(MODEL))
        with serving(engine) as service:
            async with aclosing(service.generate(request(params=LONG))) as stream:
                await anext(stream)
            while engine.has_work:
                await asyncio.sleep(0.001)
            assert (await service.metrics())["kv_cache_usage_perc"] == 0.0
            assert (await service.metrics())['request_success{finished_reason="abort"}'] == 1

    run(main)


def test_cancelled_consumer_frees_memory() -> None:
    async def main() -> None:
        engine = toy_engine(target=SlowTarget(MODEL))
        with serving(engine) as service:
            task = asyncio.create_task(collect(service.generate(request(params=LONG))))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engine.has_work:
                await asyncio.sleep(0.001)

    run(main)


def test_abort_ends_the_stream() -> None:
    async def main() -> None:
        with serving(toy_engine(target=SlowTarget(MODEL))) as service:
            outputs = []
            async for output in service.generate(request(params=LONG)):
                outputs.append(output)
                await service.abort(output.request_id)
            tokens_of(outputs)
            assert outputs[-1].finish_reason == "abort"
            await service.abort(request("never seen").request_id)

    run(main)


def test_newer_epoch_takes_over() -> None:
    async def main() -> None:
        with serving(toy_engine(target=SlowTarget(MODEL))) as service:
            async with aclosing(service.generate(request(params=LONG, epoch=1))) as old:
                first = await anext(old)
                replay = request(params=LONG, epoch=2, delivered=first.token_ids)
                new = asyncio.create_task(collect(service.generate(replay)))
                rest = [output async for output in old]
                assert rest[-1].finish_reason == "abort"
            assert [*first.token_ids, *tokens_of(await new)] == expected_tokens(replay)

    run(main)


def test_close_ends_every_stream_once() -> None:
    async def main() -> None:
        service = AsyncEngine(toy_engine(target=SlowTarget(MODEL), max_num_seqs=2))
        tasks = [
            asyncio.create_task(collect(service.generate(request(name, params=LONG)))) for name in "abcd"
        ]
        await asyncio.sleep(0.02)
        await asyncio.to_thread(service.close)
        for outputs in await asyncio.gather(*tasks):
            tokens_of(outputs)
            assert outputs[-1].error_code == "shutting_down"
        assert service.description() is None
        with pytest.raises(ChannelClosed):
            await anext(service.generate(request("late")))
        service.close()

    run(main)


def test_lost_target_ends_every_stream_once() -> None:
    async def main() -> None:
        target = ToyTarget(MODEL)
        target.num_steps_until_lost = 7
        with serving(toy_engine(target=target)) as service:
            results = await asyncio.gather(
                *(collect(service.generate(request(name, params=LONG))) for name in "ab")
            )
            for outputs in results:
                tokens_of(outputs)
                assert outputs[-1].error_code == "target_lost"
            assert service.description() is None
            with pytest.raises(ChannelClosed):
                await anext(service.generate(request("late")))

    run(main)


def test_failing_engine_ends_every_stream(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(OracleProposer):
        num_calls = 0

        def propose(self, *args):  # type: ignore[no-untyped-def]
            self.num_calls += 1
            if self.num_calls == 3:
                raise RuntimeError("a bug")
            return super().propose(*args)

    async def main() -> None:
        with serving(toy_engine(Broken())) as service:
            outputs = await collect(service.generate(request(params=LONG)))
            tokens_of(outputs)
            assert outputs[-1].error_code == "engine_failed"

    run(main)
    assert "a bug" in caplog.text


def test_who_hears_that_the_engine_failed_finds_it_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`drafthouse batch` tells by that whether a failure is one of the request."""

    class Broken(OracleProposer):
        def propose(self, *args):  # type: ignore[no-untyped-def]
            raise RuntimeError("a bug")

    call_soon = async_engine._call_soon

    def stand_still(*arguments: Any) -> bool:
        """Let the consumer have its turn before the engine's thread does anything else."""
        is_open = call_soon(*arguments)
        time.sleep(0.1)
        return is_open

    monkeypatch.setattr(async_engine, "_call_soon", stand_still)

    async def main() -> None:
        with serving(toy_engine(Broken())) as service:
            assert service.description() is not None
            async for output in service.generate(request(params=LONG)):
                if output.finish_reason is not None:
                    assert output.error_code == "engine_failed"
                    assert service.description() is None

    run(main)


def test_consumer_whose_loop_is_gone() -> None:
    engine = toy_engine(target=SlowTarget(MODEL))
    with serving(engine) as service:
        loop = asyncio.new_event_loop()
        stream = service.generate(request(params=LONG))
        loop.run_until_complete(anext(stream))
        loop.close()
        deadline = time.monotonic() + 10
        while engine.has_work:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        one = request("other")
        assert tokens_of(asyncio.run(collect(service.generate(one)))) == expected_tokens(one)


class TestIdleWork:
    class Pieces:
        """Five pieces of work."""

        def __init__(self, engine: Engine) -> None:
            self.engine = engine
            self.num_done = 0
            self.finished = threading.Event()
            self.threads: set[str] = set()

        def pending(self) -> bool:
            return self.num_done < 5

        def run_next(self) -> None:
            assert not self.engine.has_work, "idle work while a request is present"
            self.threads.add(threading.current_thread().name)
            self.num_done += 1
            if not self.pending():
                self.finished.set()

    def test_is_done_while_nothing_waits(self) -> None:
        engine = toy_engine()
        work = self.Pieces(engine)
        with serving(engine, idle_work=[work]):
            assert work.finished.wait(10)
        assert work.threads == {"engine"}

    def test_that_of_target_and_proposer_is_done_unasked(self) -> None:
        target, proposer = ToyTarget(MODEL), OracleProposer()
        engine = toy_engine(proposer, target=target)
        works = [self.Pieces(engine), self.Pieces(engine)]
        target.idle_work, proposer.idle_work = works[:1], works[1:]  # type: ignore[attr-defined]
        engine = toy_engine(proposer, target=target)
        assert list(engine.idle_work) == works
        with serving(engine):
            assert all(work.finished.wait(10) for work in works)

    def test_may_be_done_at_once(self) -> None:
        target = ToyTarget(MODEL)
        work = self.Pieces(toy_engine())
        target.idle_work = [work]  # type: ignore[attr-defined]
        toy_engine(target=target).warm_up()
        assert work.num_done == 5

    def test_is_not_done_while_a_request_is_present(self) -> None:
        async def main() -> None:
            engine = toy_engine(target=SlowTarget(MODEL))
            work = self.Pieces(engine)
            work.num_done = 5
            with serving(engine, idle_work=[work]) as service:
                outputs: list[RequestOutput] = []
                async for output in service.generate(request(params=LONG)):
                    work.num_done = 0  # now there would be something to do
                    outputs.append(output)
                    assert output.finish_reason is not None or work.num_done == 0
                tokens_of(outputs)
                assert await asyncio.to_thread(work.finished.wait, 10)

        run(main)


def test_satisfies_the_contract() -> None:
    from specdec.engine.service import GenerationService

    with serving(toy_engine()) as engine:
        service: GenerationService = engine
        stream: AsyncIterator[RequestOutput] = service.generate(request())
        assert isinstance(request(), Request)
        assert tokens_of(asyncio.run(collect(stream))) == expected_tokens(request())
