"""How commands name a server and their key."""

from __future__ import annotations

API_KEY_VARIABLE = "DRAFTHOUSE_API_KEY"


def base_url(typed: str) -> str:
    """Return the URL without path: `serve` prints one that ends in /v1, and people leave out the scheme."""
    url = typed if "://" in typed else f"http://{typed}"
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the headers that carry the key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
