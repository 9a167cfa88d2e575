"""Whether the masks of a grammar take too long."""

from __future__ import annotations

_FORGIVEN = 4.0
"""A single mask may take so many times as long as is allowed: the CPU time of a virtual machine contains
what its host gave to others meanwhile, and that must not end a request."""


class MaskTimes:
    """What masks of one grammar took: too long is the second one above the bound, or one far above it."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: seconds of a CPU that a mask may take."""
        self._timeout_s = timeout_s
        self._has_been_slow = False

    def is_too_long(self, took_s: float) -> bool:
        """Note what a mask has taken, in seconds of a CPU; return whether that ends it."""
        if took_s <= self._timeout_s:
            return False
        was_slow, self._has_been_slow = self._has_been_slow, True
        return was_slow or took_s > _FORGIVEN * self._timeout_s
