"""Where failures of a command become one readable message and an exit code.

0    done
1    a bug, or something broke on the way (--debug shows the traceback)
2    something that was given is wrong: the message says what, and what would be right
130  interrupted
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, NoReturn, ParamSpec

import typer

from specdec.core.errors import DrafthouseError, UserError

P = ParamSpec("P")
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class _Tracebacks:
    """Whether tracebacks are shown: a switch of the whole process, set while the command line is read."""

    are_shown = False


def _show_tracebacks(is_on: bool) -> bool:
    _Tracebacks.are_shown = _Tracebacks.are_shown or is_on
    return is_on


DebugOption = Annotated[
    bool,
    typer.Option("--debug", help="Show the full traceback of an error.", callback=_show_tracebacks),
]


def readable_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command so that what it raises ends the process with one message and the right code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            report_failure(str(error), error)
            raise typer.Exit(EXIT_USER_ERROR) from None
        except DrafthouseError as error:
            report_failure(str(error), error)
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output has left (drafthouse ... | head): nothing to say, and nobody to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_FAILED) from None
        except typer.Exit:
            raise
        except Exception as error:  # noqa: BLE001 - the border of the process
            report_failure(f"unexpected {type(error).__name__}: {error} (--debug shows where)", error)
            raise typer.Exit(EXIT_FAILED) from None

    return run


def leave_at_once(done: SystemExit) -> NoReturn:
    """End the process as `done` says, without the interpreter's own tidying up."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(done.code if isinstance(done.code, int) else EXIT_FAILED if done.code else 0)


def report_failure(message: str, error: BaseException | None = None) -> None:
    """Say why the command failed, on standard error; with `--debug` where, too."""
    if error is not None and _Tracebacks.are_shown:
        traceback.print_exception(error, file=sys.stderr)
    typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
    typer.echo(message, err=True)
