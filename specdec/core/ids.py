"""Identifier types: plain values on the wire, distinct types in the code."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One generation stream. Choice i of an `n`-choice HTTP request has its own request id."""

Epoch = NewType("Epoch", int)
"""Attempt number of a request, minted by its ingress. Frames of older epochs are dropped."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in one pool."""

_OWNER_END = "/"


def owned_id(owner: str, name: str) -> RequestId:
    """Return the id of what `owner`, whose own id has no slash, calls by a name."""
    return RequestId(f"{owner}{_OWNER_END}{name}")


def owner_of(request_id: RequestId) -> str:
    """Return the owner that `owned_id` was given. Ids of one process's own requests have the owner ""."""
    owner, end, _ = request_id.partition(_OWNER_END)
    return owner if end else ""
