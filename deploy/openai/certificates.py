"""A server's TLS certificate while its files are replaced, as Kubernetes and ACME clients do with them.

What shows it to clients (`bounded_http`) and what tells when it ends (the ingress, at /metrics) are in
different processes. Both read the same files by the same rule: what was read last stays in force until files
that can be used take its place.
"""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from deploy.openai.file_stamp import FileStamp, stamp_of
from specdec.core.clock import Clock, MonotonicClock

LOOK_S = 30.0
"""So often files are looked at."""
_MAX_STEPS = 10
"""Of a handshake in memory, which takes three."""
_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python has no name for."""
_Read = TypeVar("_Read")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """What a server is known by."""

    certificate_file: str
    """PEM file: the server's certificate, then those between it and one that clients trust."""
    key_file: str
    """PEM file: the private key of the first certificate."""
    passphrase: str | None = field(default=None, repr=False)
    """Of the key; None: it has none."""


class FollowedCertificate(Generic[_Read]):
    """What is made of two files, which may change at any time, also by being replaced."""

    look_s = LOOK_S

    def __init__(
        self, files: CertificateFiles, read: Callable[[CertificateFiles], _Read], clock: Clock | None = None
    ) -> None:
        """`read` makes something of the files, or raises OSError (`ssl.SSLError` is one): they are no use."""
        self.files = files
        self._read = read
        self._clock = clock or MonotonicClock()
        self._due_s: float | None = None
        self._seen: tuple[FileStamp, FileStamp] | None = None
        """Of what was read last; None: it has to be read."""
        self._current: _Read | None = None
        self._said: str | None = None
        """Why the files were no use when they were read last, which is said once."""

    def current(self) -> _Read | None:
        """Return what was made of the files when they were of use last; None: they never were.

        Looks at them if that was `look_s` ago: a file that is seen half written is read again then.
        """
        now_s = self._clock.now_s()
        if self._due_s is None or now_s >= self._due_s:
            self._due_s = now_s + self.look_s
            self._look()
        return self._current

    def _look(self) -> None:
        seen = self._stamps()
        if seen is not None and seen == self._seen:
            return
        self._seen = None
        is_first = self._current is None
        try:
            self._current = self._read(self.files)
        except OSError as error:
            self._say(reason_of(error))
            return
        self._seen, self._said = seen, None
        if not is_first:
            logger.info("the TLS certificate was renewed: read again from %s", self.files.certificate_file)

    def _say(self, reason: str) -> None:
        if reason == self._said:
            return
        self._said = reason
        logger.error(
            "the TLS certificate %s with the key %s cannot be used%s: %s",
            self.files.certificate_file,
            self.files.key_file,
            "" if self._current is None else ", so the one from before stays in force",
            reason,
        )

    def _stamps(self) -> tuple[FileStamp, FileStamp] | None:
        certificate, key = stamp_of(self.files.certificate_file), stamp_of(self.files.key_file)
        return None if certificate is None or key is None else (certificate, key)


def reason_of(error: OSError) -> str:
    """Return what is wrong with a file, in few words."""
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error)
    return error.strerror or str(error)


def expiry_timestamp_s(files: CertificateFiles) -> float:
    """Return when the certificate ends that a server with these files shows: seconds of Unix time.

    Raises:
        OSError: no server could use them (`ssl.SSLError`: for what they hold).
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load(server, files)
    client = trusting(files.certificate_file)
    client.verify_flags |= _NO_CHECK_TIME  # of one that has ended it is to be told, too
    shown = greet(server, client).getpeercert()
    assert shown is not None, "a client that verifies has seen a certificate"
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def load(server: ssl.SSLContext, files: CertificateFiles) -> None:
    """Have a server show a certificate.

    Raises:
        OSError: the files are no use (`ssl.SSLError`: for what they hold). The server may be none then.
    """
    server.load_cert_chain(files.certificate_file, files.key_file, files.passphrase or _no_passphrase)


def _no_passphrase() -> str:
    """Called where OpenSSL would ask whoever sits at the terminal, and wait."""
    raise PermissionError(errno.EACCES, "the key needs a passphrase")


def trusting(certificate_file: str) -> ssl.SSLContext:
    """Return what a client needs that trusts this very certificate, whoever signed it and whatever its names.

    Raises:
        OSError: the file cannot be read (`ssl.SSLError`: it is no certificate in PEM form).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the server is told by what it shows
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cafile=certificate_file)
    return context


def greet(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Let a client and a server greet each other in memory, and return the client's end.

    Raises:
        ssl.SSLError: one of them refuses the other.
    """
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    own = client.wrap_bio(down, up)
    ends = [own, server.wrap_bio(up, down, server_side=True)]
    for _ in range(_MAX_STEPS):
        ends = [end for end in ends if not _is_done(end)]
        if not ends:
            break
    return own


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
