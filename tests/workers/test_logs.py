"""Log lines as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextvars import copy_context

import pytest

from specdec.core.errors import ConfigError
from workers.logs import FORMAT_VARIABLE, JsonFormatter, add_log_context, make_formatter


def line(**options: object) -> logging.LogRecord:
    record = logging.LogRecord("some.logger", logging.WARNING, "f.py", 3, 'a %s\n"line"', ("long",), None)
    record.__dict__.update(options)
    return record


def test_a_line_is_one_object_with_its_ids() -> None:
    def write() -> str:
        add_log_context(request_id="cmpl-1")
        add_log_context(trace_id="abc")
        return JsonFormatter("ingress").format(line(fields={"status": 200}))

    text = copy_context().run(write)
    assert "\n" not in text
    told = json.loads(text)
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "WARNING",
        "process": "ingress",
        "logger": "some.logger",
        "message": 'a long\n"line"',
        "request_id": "cmpl-1",
        "trace_id": "abc",
        "status": 200,
    }
    assert "request_id" not in json.loads(JsonFormatter("ingress").format(line())), "ids are their task's own"


def test_a_traceback_is_a_part_of_its_line() -> None:
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError as error:
        record = line(exc_info=(type(error), error, error.__traceback__))
    assert "ZeroDivisionError: oh" in json.loads(JsonFormatter("x").format(record))["exception"]


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    assert make_formatter("x").format(line()).endswith('WARNING x: a long\n"line"')
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    assert isinstance(make_formatter("x"), JsonFormatter)
    monkeypatch.setenv(FORMAT_VARIABLE, "xml")
    with pytest.raises(ConfigError, match="DRAFTHOUSE_LOG_FORMAT: must be text or json, got 'xml'"):
        make_formatter("x")


def test_imports_of_libraries_say_nothing_to_operators() -> None:
    code = "import workers.logs; workers.logs.mute_imports(); import transformers.quantizers.auto"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert not ran.stdout + ran.stderr
