"""What happens now, on a terminal as a spinner, in a file or pipe as a line per stage."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

_PERCENTAGE = re.compile(r"\d+ %")


@contextlib.contextmanager
def shown(console: Console, stage: str) -> Iterator[Callable[[str], None]]:
    """Show `stage`, and what the function that is yielded is called with afterwards, until the block ends.

    The same stage may be given as often as one likes, and with other percentages; only a terminal shows
    those, and for how long it has lasted.
    """
    if not console.is_terminal:
        yield _lines(console, stage)
        return
    since_s = time.monotonic()
    with console.status(stage) as status:
        yield lambda text: status.update(f"{text} ({time.monotonic() - since_s:.0f} s)")


def _lines(console: Console, stage: str) -> Callable[[str], None]:
    shown_last = ""

    def show(text: str) -> None:
        nonlocal shown_last
        stage = _PERCENTAGE.sub("", text)
        if stage != shown_last:
            shown_last = stage
            console.print(f"{text} ...", soft_wrap=True)

    show(stage)
    return show


def as_typed(folder: str) -> str:
    """Return a folder's path as one would type it here."""
    path, here = Path(folder), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
