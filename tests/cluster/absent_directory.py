"""A link to no directory, for doors without Ray."""

from __future__ import annotations


class Directory:
    """A link to no directory at all."""

    def __init__(self, **_: object) -> None:
        self.is_alive = False
        self.silent_s = 0.0
        self.num_lost_ingresses = 0

    def announce(self, member: object) -> None:
        """Part of `DirectoryLink`."""

    def start(self) -> None:
        self.is_alive = True

    def close(self) -> None:
        self.is_alive = False
