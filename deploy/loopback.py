"""What only this machine reaches, and asking it without a proxy: a proxy would look for it on its own."""

from __future__ import annotations

import ipaddress

import httpx


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def direct_mounts(url: str) -> dict[str, None]:
    """Return `mounts` for an httpx client of `url`: on loopback no proxy of the environment counts.

    Everything else that the environment says (certificates) does.
    """
    host = httpx.URL(url).host
    if not is_loopback(host):
        return {}
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None}
