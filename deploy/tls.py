"""HTTPS at the endpoint: its files, checked before anything is started, and how a server is known by them."""

from __future__ import annotations

import ssl
from pathlib import Path

from deploy.config import TlsConfig
from deploy.openai.certificates import greet, reason_of, trusting
from specdec.core.errors import ConfigError


def check_tls(tls: TlsConfig) -> None:
    """Check that the files make a server that a client, who trusts its certificate, speaks with today.

    Raises:
        ConfigError: naming key and file, and what is wrong with it.
    """
    server = _server_context(tls)
    _shake_hands(server, own_context(tls), tls)


def own_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return what a client needs that trusts this very certificate, whoever signed it and whatever its names.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    _readable("certificate_file", tls.certificate_file)
    try:
        return trusting(tls.certificate_file)
    except ssl.SSLError as error:
        raise _not_pem("certificate_file", tls.certificate_file, "CERTIFICATE") from error


def _server_context(tls: TlsConfig) -> ssl.SSLContext:
    for key in ("certificate_file", "key_file"):
        _readable(key, getattr(tls, key))
    certificate, key = tls.certificate_file, tls.key_file
    if "-----BEGIN" not in _text(certificate):
        raise _not_pem("certificate_file", certificate, "CERTIFICATE")
    if "PRIVATE KEY-----" not in _text(key):
        raise _not_pem("key_file", key, "PRIVATE KEY")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except _PassphraseAsked:
        raise ConfigError(
            f"http.tls.key_file: {key} needs a passphrase, which nobody can type here; "
            "write the key without one: openssl pkey -in KEY -out PLAIN_KEY"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"http.tls.key_file: {key} is not the key of the first certificate in {certificate} "
                "(http.tls.certificate_file); the server's own certificate has to come first there"
            ) from error
        raise ConfigError(
            f"http.tls: {certificate} (certificate_file) and {key} (key_file) cannot be used: "
            f"{reason_of(error)}"
        ) from error
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, tls: TlsConfig) -> None:
    """Let a client and a server greet each other in memory: a certificate that has expired shows here."""
    try:
        greet(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"http.tls.certificate_file: clients would refuse {tls.certificate_file}: {error.verify_message}"
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(
            f"http.tls: no client could speak with a server that has {tls.certificate_file}: "
            f"{reason_of(error)}"
        ) from error


class _PassphraseAsked(Exception):
    """Raised through OpenSSL's question for a passphrase."""


def _refuse_passphrase() -> str:
    raise _PassphraseAsked


def _readable(key: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"http.tls.{key}: {file} cannot be read: {error.strerror}") from None


def _text(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")


def _not_pem(key: str, file: str, kind: str) -> ConfigError:
    return ConfigError(
        f"http.tls.{key}: {file} is not in PEM form: it should hold a line -----BEGIN {kind}-----"
    )
