"""uvicorn's HTTP/1.1 with bounds on what a connection may hold that has no request at any door, and with
the TLS certificate that its files hold now.

uvicorn appends headers without end, waits for the rest of them for ever, as it does for that of a body that
nobody reads any more, takes any number of requests behind one that is answered, and keeps what a client does
not fetch of a response for as long as that client likes, though it has closed the connection; for none of it
a key is asked for. Of a connection that is lost it tells the last request that came by it, which need not be
the one that is answered. It reads a certificate once, and goes on showing it when it has been renewed, and
has ended. Serve starts uvicorn itself, without a setting for the class: `install` says which one "auto" is.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deploy.openai.certificates import CertificateFiles, FollowedCertificate, load
from deploy.openai.settings import MAX_BODY_BYTES
from deploy.openai.slow_readers import LEAST_BYTES_PER_S

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
LEFTOVER_TIMEOUT_S = 30.0
REST_TIMEOUT_S = 60.0
MAX_PIPELINED = 32
_PER_HEADER = 4
"""Bytes around name and value."""


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    max_head_bytes = MAX_HEAD_BYTES
    """Of request line and headers together; of anything else that is neither them nor a body, too."""
    head_timeout_s = HEAD_TIMEOUT_S
    """From the opening of a connection, or the first byte of a further request, to the end of the headers.
    How long a connection may be idle between two requests is uvicorn's own `timeout_keep_alive`."""
    leftover_timeout_s = LEFTOVER_TIMEOUT_S
    """So often a client that has not fetched all of a response is looked at, once no more of it comes."""
    rest_timeout_s = REST_TIMEOUT_S
    """From the end of a response to that of the request that it answers, which nobody reads any more."""
    max_body_bytes = MAX_BODY_BYTES
    """Of a request that nobody has begun to answer: Serve's proxy takes all that comes, and keeps it until a
    door does, which may be hung, or not there yet."""
    max_pipelined = MAX_PIPELINED
    """Requests that wait for the one before them on their connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _follow_certificate(self.config)  # uvicorn makes a protocol before it greets its client
        self._num_head_bytes = 0
        """Of the message's lines that were parsed."""
        self._num_body_bytes = 0
        self._num_unparsed_bytes = 0
        """At most so many have come since the last border in what was parsed: one line may be endless."""
        self._is_in_head = True
        """Or before it."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._leftover_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        """The last one that was begun with; uvicorn's `cycle` is the last that came."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave nothing behind."""
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self.pipeline.clear()
        for timer in (self._head_timer, self._leftover_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._leftover_timer = self._rest_timer = None

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._num_unparsed_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_unparsed_bytes > self.max_head_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._too_long())
        elif self._is_in_head and self._num_unparsed_bytes:
            self._await_head()  # also where it was an empty line, which ends uvicorn's own timer

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to another protocol."""
        self._end_head()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, or one whose head is too long: the parser tells them no apart."""
        if self._num_body_bytes > self.max_body_bytes:
            self._refuse_body()
        elif self._num_head_bytes > self.max_head_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._too_long())
        else:  # uvicorn's own words would stand in the middle of a response
            self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._num_head_bytes = self._num_body_bytes = 0
        self._num_unparsed_bytes = max(1, self._num_unparsed_bytes)  # if it came with the end of another
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """Take a part of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or one behind a chunked body."""
        self._count(len(name) + len(value) + _PER_HEADER)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to serve."""
        self._num_unparsed_bytes = 0
        self._end_head()
        if len(self.pipeline) >= self.max_pipelined:
            raise _TooManyPipelined
        super().on_headers_complete()
        if len(self.pipeline) == 1:  # who does not read does not see that a client leaves
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, whose length is the application's affair, as long as there is one."""
        self._num_unparsed_bytes = 0
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self.max_body_bytes and self._is_unanswered:
            raise _BodyTooLong  # as below
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Be ready for the next request."""
        self._num_unparsed_bytes = 0
        self._is_in_head = True
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See to it that the client fetches what is left of the response, and ends its own request."""
        super().on_response_complete()
        self._await_fetching()
        if self.cycle.response_complete and not self._is_in_head and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(self.rest_timeout_s, self._rest_is_late)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; what is left of a response is fetched first."""
        super().timeout_keep_alive_handler()
        self._await_fetching()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Callable[..., Any]) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, partial(self._answer, cycle, app))

    async def _answer(self, cycle: RequestResponseCycle, app: Callable[..., Any], *connection: Any) -> None:
        try:
            await app(*connection)
        finally:
            if cycle.response_started and not cycle.response_complete and not cycle.disconnected:
                # uvicorn closes the connection now, which waits until all that was written is fetched.
                self._await_fetching()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.max_head_bytes:
            raise _HeadTooLong  # the parser stops, and `send_400_response` is called

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._is_responding:  # to the request before: some clients send an empty line behind it
            self._await_head()
        elif self._num_unparsed_bytes:
            message = f"The headers were not complete after {self.head_timeout_s:g} s."
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message)
        else:
            self.transport.close()

    def _rest_is_late(self) -> None:
        self._rest_timer = None
        self.transport.close()
        self._await_fetching()

    @property
    def _is_responding(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn says otherwise
        return cycle is not None and not (cycle.response_complete or cycle.disconnected)

    def _refuse_body(self) -> None:
        """Have the application take the client for gone, and tell that why.

        Nothing else is being answered: what comes behind a request waits unread until that is.
        """
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        message = f"The body is longer than {self.max_body_bytes} bytes, the limit of this server."
        self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)

    @property
    def _is_unanswered(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_started

    def _too_long(self) -> str:
        return f"The headers are longer than {self.max_head_bytes} bytes, the limit of this server."

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer in the shape that clients know, if nothing else is being answered, and close."""
        if not self._is_responding:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
        self._await_fetching()

    def _await_fetching(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and self._leftover_timer is None:
            self._leftover_timer = self.loop.call_later(
                self.leftover_timeout_s, self._look_at_leftover, num_bytes
            )

    def _look_at_leftover(self, num_before: int) -> None:
        self._leftover_timer = None
        if self._is_responding and not self.transport.is_closing():  # again, and `SlowReaders` minds it
            return
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and num_bytes > num_before - LEAST_BYTES_PER_S * self.leftover_timeout_s:
            self.transport.abort()
        else:
            self._await_fetching()


class _HeadTooLong(Exception):
    """Raised through the parser."""


class _BodyTooLong(Exception):
    """Raised through the parser."""


class _TooManyPipelined(Exception):
    """Raised through the parser."""


def _follow_certificate(config: uvicorn.Config) -> None:
    """Have a server show the certificate that its files hold now, at every handshake from here on.

    What the files hold is tried in a context of its own: one into which half of a pair was loaded could greet
    nobody. The server's stays what connections come by, and is used while no other is of use.
    """
    if config.ssl is None or not config.ssl_certfile or config.ssl.sni_callback is not None:
        return
    certificate = str(config.ssl_certfile)
    files = CertificateFiles(
        certificate_file=certificate,
        key_file=str(config.ssl_keyfile or certificate),
        passphrase=config.ssl_keyfile_password,
    )
    followed = FollowedCertificate(files, partial(_context_like, config))

    def choose(connection: ssl.SSLObject, name: str | None, own: ssl.SSLContext) -> None:
        connection.context = followed.current() or own

    config.ssl.sni_callback = choose  # called whether or not the client names a server


def _context_like(config: uvicorn.Config, files: CertificateFiles) -> ssl.SSLContext:
    """Return a context with these files that is like the one that uvicorn has made."""
    context = ssl.SSLContext(config.ssl_version)
    load(context, files)
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_ca_certs:
        context.load_verify_locations(config.ssl_ca_certs)
    if config.ssl_ciphers:
        context.set_ciphers(config.ssl_ciphers)
    return context


def install() -> None:
    """Make it the class of every uvicorn that this process starts from now on without naming one."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__qualname__}"
