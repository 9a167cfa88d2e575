"""Ray's own messages, each folded into one line that a person can read."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

_COLOUR = re.compile(r"\x1b\[\d*m")
_MESSAGE = re.compile(r"\((raylet|gcs|autoscaler)[^)]*\) (.+)", re.DOTALL)
_END_OF_SENTENCE = re.compile(r"\.\s|\n")


class RayMessages(io.TextIOBase):
    """Stands in for standard output while Ray is connected.

    Ray prints what happens to its processes there: paragraphs with hexadecimal ids, and the last lines of
    logs. Of each such message the first sentence is shown; everything else that is printed is passed on.
    """

    def __init__(self, show: Callable[[str], None], where: Callable[[], str]) -> None:
        """`show` gets a line at a time; `where` says where the logs are."""
        self._show = show
        self._where = where

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Take in a message, as a whole: `print` writes one in one piece."""
        plain = _COLOUR.sub("", text).rstrip()
        message = _MESSAGE.match(plain)
        if message is not None:
            sentence = _END_OF_SENTENCE.split(message[2], maxsplit=1)[0].rstrip(".")
            self._show(f"Ray: {sentence} (the logs are in {self._where()})")
        elif plain:
            self._show(plain)
        return len(text)
