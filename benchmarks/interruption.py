"""A benchmark that is told to end, by `timeout` say, ends as after Ctrl-C: with all that it has started."""

from __future__ import annotations

import signal
from types import FrameType


def end_on_sigterm() -> None:
    """Have the first SIGTERM raise KeyboardInterrupt. To be called in the main thread.

    The ones after it are ignored: what is being ended and written is ended and written.
    """
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
