"""Log lines of a process: text for people, or JSON for machines (`DRAFTHOUSE_LOG_FORMAT=json`)."""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Mapping
from contextvars import ContextVar

from specdec.core.errors import ConfigError

FORMAT_VARIABLE = "DRAFTHOUSE_LOG_FORMAT"
LOG_CONTEXT: ContextVar[Mapping[str, str]] = ContextVar("drafthouse_log_context", default={})  # noqa: B039 - never written to
"""What every JSON line of the present task says beside its message: ids, never text of a request."""


def add_log_context(**ids: str) -> None:
    """Have the present task's lines say these, too."""
    LOG_CONTEXT.set({**LOG_CONTEXT.get(), **ids})


def mute_imports() -> None:
    """Have libraries that others import not tell operators of what concerns their developers only.

    transformers imports torchao where it is installed, which reports kernels for GPUs that it cannot load,
    and calls of its own that PyTorch has superseded.
    """
    for noisy in ("torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def make_formatter(process: str) -> logging.Formatter:
    """Return what writes a process's lines, as the environment asks for.

    Raises:
        ConfigError: it asks for a format that there is not.
    """
    kind = os.environ.get(FORMAT_VARIABLE, "text")
    if kind == "json":
        return JsonFormatter(process)
    if kind == "text":
        return logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s")
    raise ConfigError(f"{FORMAT_VARIABLE}: must be text or json, got {kind!r}")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, process, logger, message, and what `LOG_CONTEXT` holds.

    A line may bring a mapping `fields` as `extra`, which goes in as well.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **LOG_CONTEXT.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
