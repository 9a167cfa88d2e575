"""A benchmark that is told to end writes what it has."""

from __future__ import annotations

import signal

import pytest

from benchmarks.interruption import end_on_sigterm


def test_only_the_first_sigterm_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        end_on_sigterm()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
