"""How requests fail: what is counted and logged of it, and what their clients and traces are told."""

from __future__ import annotations

import logging
from collections.abc import Callable

from deploy.openai.errors import ApiError, api_error_of, internal_error
from deploy.openai.metrics import DoorMetrics
from deploy.openai.outputs import SLOW_READER
from deploy.openai.tracing import RequestTrace
from specdec.core.error_codes import TIMED_OUT
from specdec.core.errors import RequestFailed

_TURNED_AWAY = 429
_SERVER_FAULT = 500
logger = logging.getLogger(__name__)


class RequestFailures:
    """Takes what ends one request, once it was accepted."""

    def __init__(
        self,
        response_id: str,
        metrics: DoorMetrics,
        on_failure: Callable[[Exception], None],
        *,
        has_own_limit: bool,
        key_name: str | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        """`on_failure` hears of each: nobody else does. `metrics` are those of the door.

        With `has_own_limit` the client gave the request less time than the server does: that this is up is no
        failure of ours.
        """
        self._response_id = response_id
        self._metrics = metrics
        self._on_failure = on_failure
        self._has_own_limit = has_own_limit
        self._key_name = key_name
        self._trace = trace

    def note(self, error: RequestFailed) -> None:
        """Hear of a failure that the response's status tells its client."""
        self._on_failure(error)
        api_error = api_error_of(error)
        assert api_error is not None, "there is an answer for every request that fails"
        if self._is_ours(api_error):
            self._tell(api_error, None)

    def take(self, error: Exception, num_tokens: int | None = None) -> bytes:
        """Count a failure that no status can tell any more, and return what the client is told of it.

        `num_tokens`: delivered before it, where that is known.
        """
        api_error = api_error_of(error)
        if api_error is None:
            logger.error("request %s failed", self._response_id, exc_info=error)
            api_error = internal_error()
        self._on_failure(error)
        code = api_error.detail.code
        if api_error.status >= _SERVER_FAULT and code != SLOW_READER:
            self._metrics.note_failed_stream(code, has_own_limit=self._has_own_limit)
        elif api_error.status == _TURNED_AWAY:
            self._metrics.streams_turned_away.inc()
        if self._is_ours(api_error):
            self._tell(api_error, num_tokens)
        return api_error.body()

    def _is_ours(self, api_error: ApiError) -> bool:
        """Whether it is no client's doing: not to read, or to give too little time, is."""
        code = api_error.detail.code
        is_own_limit = code == TIMED_OUT and self._has_own_limit
        return api_error.status >= _SERVER_FAULT and code != SLOW_READER and not is_own_limit

    def _tell(self, api_error: ApiError, num_tokens: int | None) -> None:
        """Say which request it was: who looks for it has a series that has grown, and nothing else."""
        detail = api_error.detail
        code = str(detail.code)
        if self._trace is not None:
            self._trace.note_failure(code)
        logger.warning(
            "request %s%s failed with %s%s: %s",
            self._response_id,
            "" if self._key_name is None else f" of key {self._key_name}",
            code,
            "" if num_tokens is None else f" after {num_tokens} tokens",
            detail.message,
            extra={"fields": {"code": code, "key": self._key_name, "num_tokens": num_tokens}},
        )
