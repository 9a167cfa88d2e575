"""Which of several drafters a request gets that the controller has no say in: its wish, then shares of all.

Shares go by a hash of the request's id: what a request gets is the same each time it is tried, wherever that
is, and does not depend on what it asks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from specdec.core.ids import RequestId


@dataclass(slots=True, kw_only=True)
class DrafterSet:
    """The drafters that requests of one engine may get."""

    names: tuple[str, ...]
    shares: tuple[float, ...]
    """Of all requests, which get a drafter without a choice; 1 together at most."""
    pick: Callable[[RequestId, str], int] | None = None
    """Picks the drafter of a request of a class that has none of its own; None: it is the first."""

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.shares) > 0, "a share for each drafter"

    def own(self, request_id: RequestId, wanted: str | None) -> int | None:
        """Return the drafter that is not for the controller to choose; None: it is.

        `wanted` is the name of one of them (see `fault`), or None.
        """
        if wanted is not None:
            return self.names.index(wanted)
        place = place_of(request_id, "drafter")
        for index, share in enumerate(self.shares):
            if place < share:
                return index
            place -= share
        return None

    def of(self, own: int | None, request_id: RequestId, class_name: str) -> int:
        """Return the drafter that a request has at present; `own` as `own` said."""
        if own is not None:
            return own
        return 0 if self.pick is None else self.pick(request_id, class_name)

    def fault(self, wanted: str) -> str | None:
        """Say why a request cannot have the drafter that it asks for; None: it can."""
        if wanted in self.names:
            return None
        return f"there is no drafter {wanted!r} here; known are {', '.join(self.names)}"


def place_of(request_id: RequestId, purpose: str) -> float:
    """Return where a request stands among all, from 0 to 1; for each purpose in another order."""
    digest = hashlib.blake2b(f"{purpose}\x00{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64
