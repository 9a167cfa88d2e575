"""Runs a coordinator's rounds in a thread, over one engine after another: a lost target costs a pause."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from ray.exceptions import RayError

from cluster.backoff import Attempts
from cluster.desk import RequestDesk
from cluster.series import channel_dropped_series, is_counter
from specdec.core.clock import MonotonicClock
from specdec.core.error_codes import COORDINATOR_CRASHED, COORDINATOR_FAILED
from specdec.core.errors import DrafthouseError, TransportError
from specdec.core.outputs import RequestOutput
from specdec.engine.engine import Engine
from specdec.engine.metrics.status import StatusKeeper
from specdec.transport.base import ChannelCounters
from specdec.transport.status import DraftLinkStatus

logger = logging.getLogger(__name__)

_IDLE_CHECK_S = 0.5
_PUBLISH_INTERVAL_S = 0.25
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_MAX_ATTEMPTS = 8
"""To bring a target back. After so many, in a minute or more, it is this place that cannot have one."""
_SOON_S = 5.0
"""A target that is lost earlier has not come back. One that is killed by chance has served for longer."""
_FORGIVEN_AFTER_S = 60.0
"""A target that is lost later is the first one to be lost."""
_STOP_S = 5.0


class EngineSource(Protocol):
    """Where engines come from. All but `metrics` is called in the loop's thread."""

    def make_engine(self, meanwhile: Callable[[], None]) -> Engine:
        """Return an engine over a live target, replacing the one before.

        The engine calls `meanwhile` in every round while workers are at work.
        """
        ...

    def check_idle(self) -> None:
        """Raise TransportError when the target of the present engine, which is idle, is gone."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Counters that the engine itself does not have."""
        ...

    def draft_links(self) -> tuple[DraftLinkStatus, ...]:
        """The draft workers as the engine's proposer sees them."""
        ...

    def stop(self) -> None:
        """End the target (any thread)."""
        ...


class EngineLoop:
    """Owns the thread in which a coordinator's rounds run."""

    def __init__(self, desk: RequestDesk, source: EngineSource, channel: ChannelCounters) -> None:
        """`channel` counts what happened on the link to the ingresses."""
        self._desk = desk
        self._source = source
        self._channel = channel
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._publish_due_s = 0.0
        self._status: StatusKeeper
        """Of the present engine."""
        self._held: tuple[Engine, list[RequestOutput]] | None = None
        """Outputs of the last round, for when the workers are busy with the next."""
        self.first_error: BaseException | None = None
        """Why the first engine could not be made, if so; the loop has then ended."""
        self._attempts = Attempts(
            most=_MAX_ATTEMPTS,
            first_s=_FIRST_WAIT_S,
            longest_s=_LONGEST_WAIT_S,
            soon_s=_SOON_S,
            forgiven_after_s=_FORGIVEN_AFTER_S,
        )
        self.num_losses = 0
        self._former: Counter[str] = Counter()
        """What engines before the present one have counted."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Make the first engine and begin."""
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for the first engine, for so long; return whether it is there.

        Raises:
            Exception: whatever making it raised.
        """
        is_ready = self._ready.wait(timeout_s)
        if self.first_error is not None:
            raise self.first_error
        return is_ready

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End after the present round; what is left of the streams is not told anything."""
        self._stopping.set()
        self._desk.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=_STOP_S)
        if self._thread.is_alive():  # it waits for a target: let it wait in vain
            self._source.stop()
            self._thread.join(timeout=_STOP_S)

    def _run(self) -> None:
        try:
            engine = self._source.make_engine(self._deliver_held)
        except BaseException as error:  # noqa: BLE001
            # The border of the thread: `wait_ready` raises it again where somebody listens.
            self.first_error = error
            self._ready.set()
            return
        try:
            while True:
                self._attempts.began(time.monotonic())
                self._serve(engine)
                self._take_over(engine)
                engine.close()
                if self._stopping.is_set():
                    return
                replacement = self._recover()
                if replacement is None:
                    return
                engine = replacement
        except Exception:  # the border of the thread: Serve, which finds it ended, replaces the replica
            logger.exception("the coordinator's loop failed")
            self._desk.end_all("the coordinator failed", COORDINATOR_CRASHED)

    def _serve(self, engine: Engine) -> None:
        """Serve until the target is lost or the loop is to stop."""
        self._status = StatusKeeper(
            MonotonicClock(), max_num_running=engine.max_num_seqs, incarnation=self.num_losses + 1
        )
        self._publish(engine)
        self._desk.begin_replay()
        self._desk.set_target(engine.description)
        self._ready.set()
        try:
            while not self._stopping.is_set():
                self._desk.serve(engine)
                if engine.has_work:
                    if not self._run_round(engine):
                        return
                else:
                    self._desk.wait(_IDLE_CHECK_S)
                    self._source.check_idle()
                if time.monotonic() >= self._publish_due_s:
                    self._publish(engine)
        except TransportError as error:
            logger.warning("the target is lost: %s", error)
        finally:
            self._deliver_held()

    def _take_over(self, engine: Engine) -> None:
        """Keep what an engine has counted that ends: the next begins with nothing."""
        counted = engine.metrics().snapshot().items()
        self._former.update({name: value for name, value in counted if is_counter(name)})
        self._desk.engine_metrics = {**self._desk.engine_metrics, **self._former}

    def _run_round(self, engine: Engine) -> bool:
        """Run a round; return whether the target is still there."""
        self._desk.note_begun(engine.about_to_begin())
        outputs = engine.step(reads_text=False)
        self._deliver_held()
        if engine.has_work and not engine.is_lost:
            self._held = engine, outputs
            return True
        engine.read_texts()
        is_lost = self._desk.deliver(outputs) or engine.is_lost  # which nobody may be there to hear of
        if engine.loss is not None:
            logger.warning("the target is lost: %s", engine.loss)
        return not is_lost

    def _deliver_held(self) -> None:
        """Send on what the last round brought.

        Called while a worker computes: it reads text, and wakes other threads.
        """
        held, self._held = self._held, None
        if held is not None:
            engine, outputs = held
            engine.read_texts()
            self._desk.deliver(outputs)

    def _recover(self) -> Engine | None:
        """Make engines until one lives; None when the loop is to stop first, or that is in vain.

        In vain, the loop ends, and Serve replaces the replica: another place may have what this one lacks.
        """
        lost_s = time.monotonic()
        self.num_losses += 1
        self._desk.engine_metrics = {**self._desk.engine_metrics, "target_losses": self.num_losses}
        self._desk.set_target(None)
        wait_s = self._attempts.lost(lost_s)
        while not self._attempts.are_in_vain:
            if self._stopping.wait(wait_s):
                return None
            try:
                engine = self._source.make_engine(self._deliver_held)
            except (DrafthouseError, RayError, TimeoutError, RuntimeError) as error:
                wait_s = self._attempts.failed(time.monotonic())
                logger.error("the target cannot be brought back, next attempt in %.1f s: %s", wait_s, error)
            else:
                logger.info("the target is back after %.1f s", time.monotonic() - lost_s)
                return engine
        logger.error("the target could not be brought back in %d attempts: it is given up", _MAX_ATTEMPTS)
        self._desk.end_all("the target cannot be brought back", COORDINATOR_FAILED)
        return None

    def _publish(self, engine: Engine) -> None:
        """Tell the desk how things are."""
        self._publish_due_s = time.monotonic() + _PUBLISH_INTERVAL_S
        metrics, of_source = engine.metrics(), self._source.metrics()
        snapshot = metrics.snapshot()
        self._desk.engine_metrics = {
            **snapshot,
            **{name: value + snapshot.get(name, 0.0) for name, value in self._former.items()},
            **of_source,
            "target_losses": self.num_losses,
            **channel_dropped_series("coordinator", self._channel.dropped),
        }
        self._desk.status = self._status.take(metrics, of_source, self._source.draft_links())
