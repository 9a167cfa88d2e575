"""How commands name a server and their key."""

from __future__ import annotations

import httpx

from specdec.core.errors import UserError

API_KEY_VARIABLE = "DRAFTHOUSE_API_KEY"
_NOT_TRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""In the errors of all clients: what OpenSSL says."""


def base_url(typed: str) -> str:
    """Return the URL without path: `serve` prints one that ends in /v1, and people leave out the scheme.

    Raises:
        UserError: it is no URL.
    """
    url = typed if "://" in typed else f"http://{typed}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url} is not a URL: write http://HOST:PORT ({error})") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url} is not a URL: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the headers that carry the key, without the line end that one from a file has.

    Raises:
        UserError: it cannot be one. It is not repeated: it may be a secret all the same.
    """
    if api_key is None:
        return {}
    key = api_key.strip()
    if not key or any(not "!" <= character <= "~" for character in key):
        raise UserError(
            f"the API key (--api-key or {API_KEY_VARIABLE}) is empty or has a blank or a letter beyond ASCII "
            "in it: give it as `drafthouse keys new` has printed it"
        )
    return {"Authorization": f"Bearer {key}"}


def not_reached(url: str, error: Exception, advice: str) -> UserError:
    """Return why nobody could be asked at `url`; `advice` is for where nothing answers."""
    reason = str(error) or type(error).__name__
    if _NOT_TRUSTED in reason:
        return UserError(
            f"the certificate of {url} cannot be verified, so it is not trusted ({reason}): name the "
            "authority that signed it (SSL_CERT_FILE=ca.pem), or give --insecure where you know who answers "
            "there"
        )
    return UserError(f"nothing answers at {url} ({reason}): {advice}")
