"""The exception tree of the engine.

    DrafthouseError
    |-- UserError                 something a user gave us is wrong; the text is meant for them
    |   |-- ConfigError           a configuration key or a command-line value
    |   |-- CheckpointError       a model folder: missing, corrupt, of an unsupported kind
    |   |-- InputError            a request: names the parameter at fault
    |   `-- ResourceError         not enough devices, memory or ports for what was asked
    |-- CapacityError             the server is full right now; try again later
    |   `-- LateError             it would not be served in the time that the request gives
    |-- NotReadyError             nothing takes requests: the model is being loaded, replaced or shut down
    |-- RequestFailed             one request cannot go on; everything else can
    `-- TransportError            a peer cannot be reached or speaks nonsense
        |-- ChannelClosed
        |-- ChannelTimeout
        `-- ProtocolError         malformed, wrong version, or foreign message

Programmer errors are assertions, not members of this tree.
"""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises at bytes that it cannot read: they may be no text, or nested too deep."""


class DrafthouseError(Exception):
    """Root of all errors that this project raises on purpose."""


class UserError(DrafthouseError):
    """Something a user gave is wrong. The text names what, why, and what would be right."""


class ConfigError(UserError):
    """A configuration key or a command-line value is wrong."""


class CheckpointError(UserError):
    """A model folder is missing, corrupt, or of a kind that is not supported."""


class ResourceError(UserError):
    """The machine or cluster lacks what the configuration asks for."""


class InputError(UserError):
    """A request is wrong.

    `param` is the name of the request field at fault, as the client wrote it, or None when the
    request as a whole is at fault.
    """

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(DrafthouseError):
    """The server cannot take the request now. `retry_after_s` says when to try again.

    For `holds_s` from now on another that asks for as much need not ask (0: who knows).
    """

    def __init__(self, message: str, *, retry_after_s: float, holds_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.holds_s = holds_s


class LateError(CapacityError):
    """The server would take the request, but not serve it in the time that the request gives."""


class NotReadyError(DrafthouseError):
    """Nothing can take the request now: the model is being loaded, replaced or shut down."""


class RequestFailed(DrafthouseError):
    """One request cannot go on.

    `code` is a stable machine-readable reason; `param` names the request field at fault, if one is.
    """

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class TransportError(DrafthouseError):
    """A peer cannot be reached or speaks nonsense."""


class ChannelClosed(TransportError):
    """The channel was closed at this end or the other."""


class ChannelTimeout(TransportError):
    """Nothing arrived in time."""


class ProtocolError(TransportError):
    """A message is malformed, of another protocol version, or not for this receiver."""


class MessageTooLong(ProtocolError):
    """A message is longer than the channel takes: what can be cut is to be sent in parts."""

    def __init__(self, num_bytes: int, most_bytes: int) -> None:
        super().__init__(f"a message of {num_bytes} bytes exceeds {most_bytes}")
        self.most_bytes = most_bytes
