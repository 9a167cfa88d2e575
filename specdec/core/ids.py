"""Identifier types: plain values on the wire, distinct types in the code."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One generation stream. Choice i of an `n`-choice HTTP request has its own request id."""

CoordinatorId = NewType("CoordinatorId", str)
"""One coordinator replica, that is one target group, in one incarnation."""

Epoch = NewType("Epoch", int)
"""Attempt number of a request, minted by its ingress. Frames of older epochs are dropped."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in one pool."""
