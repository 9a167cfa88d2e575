"""`drafthouse status`: ask a running server what it is doing, and show it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import httpx
import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from deploy.cli.endpoint import API_KEY_VARIABLE, authorization, base_url
from deploy.cli.status_view import view_of
from deploy.loopback import direct_mounts
from deploy.status import OBJECT, STATUS_PATH, Status
from specdec.core.errors import UNDECODABLE, DrafthouseError, UserError

_TIMEOUT_S = 10.0
_PIPE_WIDTH = 120
_NOT_VERIFIED = "CERTIFICATE_VERIFY_FAILED"


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
            while True:
                _print(fetch(client, url), url, as_json=True)
                time.sleep(options.interval_s)
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
        if _NOT_VERIFIED in str(error):
            raise UserError(
                f"the certificate of {url} cannot be verified ({error}): give --insecure where you know who "
                "answers there"
            ) from error
        raise UserError(
            f"nothing answers at {url} ({error}): start a server with `drafthouse serve`, or give the URL of "
            "one that runs"
        ) from error
    if response.status_code == 401:
        raise UserError(_wrong_key(url, is_given="Authorization" in client.headers))
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


def _watch(client: httpx.Client, url: str, interval_s: float) -> None:
    """Show the status in place. A server that is away for a while is waited for, once it has been there."""
    view = view_of(fetch(client, url), url)
    with Live(view, console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                view = view_of(fetch(client, url), url)
            except DrafthouseError as error:
                live.update(Text(f"{time.strftime('%H:%M:%S')} {error}", style="red"), refresh=True)
            else:
                live.update(view, refresh=True)
