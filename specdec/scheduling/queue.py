"""Requests that wait to run, in order of service."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from specdec.core.ids import RequestId
from specdec.scheduling.state import Schedulable, ServiceKey

RequestT = TypeVar("RequestT", bound=Schedulable)


def _service_key(request: Schedulable) -> ServiceKey:
    return request.service_key


class WaitingQueue(Generic[RequestT]):
    """A queue by priority, then turn among owners, then arrival.

    A preempted request comes back with the key it had, and so goes before everyone of its priority who
    arrived later: to the head, where admission leaves nobody out.
    """

    __slots__ = ("_by_id", "_ordered")

    def __init__(self) -> None:
        self._ordered: list[RequestT] = []
        self._by_id: dict[RequestId, RequestT] = {}

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[RequestT]:
        """Iterate in order of service."""
        return iter(self._ordered)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._by_id

    @property
    def last(self) -> RequestT | None:
        """Who is served last; None when nobody waits."""
        return self._ordered[-1] if self._ordered else None

    def num_before(self, key: ServiceKey) -> int:
        """Return how many are served before a request of this key."""
        return bisect_left(self._ordered, key, key=_service_key)

    def get(self, request_id: RequestId) -> RequestT | None:
        """Return a request; None when it does not wait."""
        return self._by_id.get(request_id)

    def push(self, request: RequestT) -> None:
        """Add a request that is not in the queue."""
        assert request.request_id not in self._by_id, f"{request.request_id} waits already"
        insort(self._ordered, request, key=_service_key)
        self._by_id[request.request_id] = request

    def remove(self, request_id: RequestId) -> RequestT | None:
        """Take a request out; None when it does not wait."""
        request = self._by_id.pop(request_id, None)
        if request is not None:
            del self._ordered[bisect_left(self._ordered, request.service_key, key=_service_key)]
        return request

    def check_integrity(self) -> None:
        """Assert that the order holds and both views agree."""
        keys = [request.service_key for request in self._ordered]
        assert keys == sorted(set(keys)), "the queue is out of order"
        assert {request.request_id for request in self._ordered} == set(self._by_id)
