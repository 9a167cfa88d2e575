"""`drafthouse status`: ask a running server what it is doing, and show it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import msgspec
import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from deploy.batch.answers import is_without_route
from deploy.cli.border import report_failure
from deploy.cli.endpoint import API_KEY_VARIABLE, authorization, base_url, not_reached
from deploy.cli.status_view import view_of
from deploy.loopback import direct_mounts
from deploy.status import OBJECT, STATUS_PATH, Status
from specdec.core.errors import UNDECODABLE, DrafthouseError, UserError

_TIMEOUT_S = 10.0
_PIPE_WIDTH = 120


class StatusUnavailable(DrafthouseError):
    """A server is there and cannot say what it is doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """The command line."""

    url: str
    api_key: str | None
    is_any_certificate_taken: bool
    as_json: bool
    interval_s: float | None
    """Seconds between two looks; None: one look."""


def show_status(options: StatusOptions) -> None:
    """Print the status once, or again and again until Ctrl-C.

    Raises:
        UserError: nothing, or something else, is at the URL, or the key is not right.
        StatusUnavailable: the server cannot answer now.
    """
    url = base_url(options.url)
    with httpx.Client(
        headers=authorization(options.api_key),
        timeout=_TIMEOUT_S,
        verify=not options.is_any_certificate_taken,
        mounts=direct_mounts(url),
    ) as client:
        if options.interval_s is None:
            _print(fetch(client, url), url, as_json=options.as_json)
        elif options.as_json:
            _watch_json(client, url, options.interval_s)
        else:
            _watch(client, url, options.interval_s)


def fetch(client: httpx.Client, url: str) -> Status:
    """Return what the server at `url` says.

    Raises:
        UserError, StatusUnavailable: as `show_status`.
    """
    try:
        response = client.get(url + STATUS_PATH)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise UserError(f"{url} is not a URL: write http://HOST:PORT ({error})") from error
    except httpx.TimeoutException as error:
        raise StatusUnavailable(f"{url} did not answer within {_TIMEOUT_S:g} s") from error
    except httpx.TransportError as error:
        advice = "start a server with `drafthouse serve`, or give the URL of one that runs"
        raise not_reached(url, error, advice) from error
    if response.status_code == 401:
        raise UserError(_wrong_key(url, is_given="Authorization" in client.headers))
    if is_without_route(response):
        raise StatusUnavailable(f"{url} is not ready yet: Ray Serve has no route to it so far (status 404)")
    if response.status_code >= 500:
        raise StatusUnavailable(f"{url} cannot say now what it is doing (status {response.status_code})")
    return _decoded(response, url)


def _decoded(response: httpx.Response, url: str) -> Status:
    try:
        if response.status_code == 200:
            status = msgspec.json.decode(response.content, type=Status)
            if status.object == OBJECT:
                return status
    except UNDECODABLE:
        pass
    raise UserError(
        f"what answers at {url} is not Drafthouse, or one without {STATUS_PATH} "
        f"(status {response.status_code}): give the URL that `drafthouse serve` printed"
    )


def _wrong_key(url: str, *, is_given: bool) -> str:
    if is_given:
        return f"{url} does not accept this API key: give one of http.api_keys_file"
    return f"{url} asks for an API key: give --api-key, or set {API_KEY_VARIABLE}"


def _print(status: Status, url: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(status).decode())
        return
    # A pipe or a file has no width of its own.
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False).print(view_of(status, url))


def _looks(client: httpx.Client, url: str, interval_s: float) -> Iterator[Status | DrafthouseError]:
    """Look again and again, and yield what is seen, or why nothing is.

    A server that cannot answer now is waited for, and, once it has been there, one that is away.

    Raises:
        UserError: at the first look, as `fetch`.
    """
    borne: type[DrafthouseError] = StatusUnavailable
    while True:
        try:
            look: Status | DrafthouseError = fetch(client, url)
        except borne as error:
            look = error
        yield look
        borne = DrafthouseError
        time.sleep(interval_s)


def _watch(client: httpx.Client, url: str, interval_s: float) -> None:
    """Show the status in place."""
    looks = _looks(client, url, interval_s)
    first = _view(next(looks), url)
    with Live(first, console=Console(highlight=False), auto_refresh=False) as live:
        for look in looks:
            live.update(_view(look, url), refresh=True)


def _view(look: Status | DrafthouseError, url: str) -> RenderableType:
    if isinstance(look, DrafthouseError):
        return Text(f"{time.strftime('%H:%M:%S')} {look}", style="red")
    return view_of(look, url)


def _watch_json(client: httpx.Client, url: str, interval_s: float) -> None:
    """Print a line for every status, and on standard error why there is none."""
    for look in _looks(client, url, interval_s):
        if isinstance(look, DrafthouseError):
            report_failure(str(look), look)
        else:
            _print(look, url, as_json=True)
