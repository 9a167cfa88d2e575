"""`drafthouse serve`: check everything, start, show what happens, stop without leaving anything behind.

The first SIGINT, SIGTERM or SIGHUP stops gracefully, a second one at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from deploy.cli.border import EXIT_FAILED, report_failure
from deploy.cli.config import summary_of
from deploy.cli.progress import as_typed, shown
from deploy.cli.ray_messages import RayMessages
from deploy.config import DrafthouseConfig, HttpConfig
from deploy.config_file import load_config
from deploy.local_ray import RaySession, session_log_folder
from deploy.preflight import (
    check_address,
    check_endpoint,
    check_exposure,
    check_local_resources,
    check_models,
    check_port,
    check_proxy,
    visible_cpus,
    warning_about_gpus,
    warnings_of,
)
from deploy.proxies import ProxyKind, local_haproxy, proxy_environment
from specdec.core.errors import DrafthouseError, UserError

if TYPE_CHECKING:
    from deploy.deployment import Deployment

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: the terminal was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The command line."""

    config: Path
    host: str | None
    port: int | None
    is_insecure_allowed: bool
    num_cpus: int | None
    address: str | None
    show_logs: bool


class Stopped(BaseException):
    """One of the signals arrived. Not an Exception: nothing on the way may take it for a failure."""


def serve_until_stopped(options: ServeOptions) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    Raises:
        UserError: something that was given is wrong; nothing has been started, or all of it has ended again.
        DrafthouseError: the deployment broke.
    """
    console = Console(stderr=True, highlight=False)
    _raise_on_signals()
    try:
        config = _configured(options)
        _check(config, options, console)
        _serve(config, options, console)
    except Stopped:
        console.print("stopped")


def _configured(options: ServeOptions) -> DrafthouseConfig:
    config = load_config(options.config)
    overrides = {"host": options.host, "port": options.port}
    http = config.http.model_dump(exclude_unset=True) | {
        name: value for name, value in overrides.items() if value is not None
    }
    return config.model_copy(update={"http": HttpConfig.model_validate(http)})


def _check(config: DrafthouseConfig, options: ServeOptions, console: Console) -> None:
    """Check all that can be checked before anything is started."""
    check_endpoint(config.http)
    check_exposure(config.http, is_insecure_allowed=options.is_insecure_allowed)
    check_proxy(config.http, address=options.address)
    if options.address is None:
        check_port(config.http)
    else:
        # The port is the head node's business, and taken where Serve runs there already.
        check_address(options.address)
    with shown(console, f"checking {as_typed(config.target.model)}"):
        for model in config.served_models():
            check_models(model.engine)
        if options.address is None:
            check_local_resources(config, options.num_cpus or visible_cpus())
    for model in config.served_models():
        for text in warnings_of(model.engine):
            console.print(f"warning: {text}", soft_wrap=True, markup=False)


def _serve(config: DrafthouseConfig, options: ServeOptions, console: Console) -> None:
    started_s = time.monotonic()
    answers = sys.stdout
    num_cpus = options.num_cpus or visible_cpus()
    where = f"at {options.address}" if options.address else f"with {num_cpus} CPUs"
    # Ray writes messages of its own to standard output; ours is for the URL alone.
    others = sys.stderr if options.show_logs else RayMessages(_lines_to(console), session_log_folder)
    with contextlib.ExitStack() as stack:
        session = RaySession(
            address=options.address,
            num_cpus=num_cpus,
            show_logs=options.show_logs,
            on_loss=_end_process,
            proxy=stack.enter_context(_proxy_environment(config.http.proxy)),
        )
        stack.enter_context(contextlib.redirect_stdout(others))
        stack.enter_context(_closing(session, console))
        with shown(console, f"starting Ray {where}"):
            session.open()
        _raise_on_signals()  # Ray has put a handler of its own in place
        if (text := warning_about_gpus(config, session.num_gpus)) is not None:
            console.print(f"warning: {text}", soft_wrap=True, markup=False)
        from deploy.deployment import Deployment

        deployment = Deployment(
            config,
            show_logs=options.show_logs,
            environment=None if session.is_local else session.serve_environment,
        )
        with _stopping(deployment, console):
            _start(deployment, console)
            ready_s = time.monotonic() - started_s
            console.print(f"ready after {ready_s:.1f} s: {summary_of(config)}", soft_wrap=True)
            console.print("Ctrl-C stops it")
            typer.echo(_where(config, deployment.url), file=answers)
            for change in deployment.watch():
                console.print(change, soft_wrap=True)


@contextlib.contextmanager
def _proxy_environment(kind: ProxyKind) -> Iterator[dict[str, str]]:
    """What Ray's processes are to know of Serve's proxies, with a folder for the files of theirs."""
    if kind == "python":
        yield proxy_environment(kind)
        return
    # Short: sockets lie in it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="dh-ha-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield local_haproxy(Path(folder))


def _end_process(message: str) -> NoReturn:
    """Called in another thread, while this command's own may hang in Ray."""
    report_failure(f"{message}; the logs are in {session_log_folder()}")
    os._exit(EXIT_FAILED)


def _lines_to(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, soft_wrap=True)


def _start(deployment: Deployment, console: Console) -> None:
    try:
        with shown(console, "placing the workers") as show:
            deployment.start()
            for progress in deployment.wait_ready():
                show(progress)
    except UserError:
        raise
    except DrafthouseError:
        console.print(f"the logs of all processes are in {session_log_folder()}", soft_wrap=True)
        raise


@contextlib.contextmanager
def _closing(session: RaySession, console: Console) -> Iterator[None]:
    try:
        yield
    finally:
        with shown(console, "stopping Ray"), _signals_ignored():
            session.close()


@contextlib.contextmanager
def _stopping(deployment: Deployment, console: Console) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            with shown(console, "serving running requests to their end (Ctrl-C again: stop at once)"):
                deployment.stop()
        except Stopped:
            console.print("stopping at once")


def _raise_on_signals() -> None:
    for number in _SIGNALS:
        # `nohup` has SIGHUP ignored, and means it.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise_stopped)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    before = [signal.signal(number, signal.SIG_IGN) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def _raise_stopped(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:
        _let_go_of_terminal()
    raise Stopped


def _let_go_of_terminal() -> None:
    """Write to nowhere instead of a terminal, which is closed: every attempt would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (sys.__stdout__, sys.__stderr__):
        if output is not None and stat.S_ISCHR(os.fstat(output.fileno()).st_mode):
            os.dup2(nowhere, output.fileno())
    os.close(nowhere)


def _where(config: DrafthouseConfig, url: str) -> str:
    """Return the URL and a command that uses it."""
    http = config.http
    name = http.served_model_name or Path(config.target.model).name
    body = json.dumps({"model": name, "prompt": "def quicksort(", "max_tokens": 64})
    curl = "curl" if http.tls is None else f"curl --cacert {shlex.quote(http.tls.certificate_file)}"
    key = ' -H "Authorization: Bearer $API_KEY"' if http.api_keys_file else ""
    return f"{url}/v1\n{curl} {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
