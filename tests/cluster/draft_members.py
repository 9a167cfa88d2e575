"""Members of a directory by name."""

from __future__ import annotations

from cluster.directory import Member
from specdec.transport.base import PeerAddress, PeerId


def member(name: str, key: str = "k") -> Member:
    address = PeerAddress(peer_id=PeerId(name), endpoint=f"tcp://{name}", public_key=key)
    return Member(address=address, role="draft")


A, B = member("a"), member("b")
