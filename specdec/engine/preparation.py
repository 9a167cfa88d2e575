"""Requests that wait for their grammar to be compiled, before they wait for their turn."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from specdec.core.errors import InputError, RequestFailed
from specdec.core.ids import RequestId
from specdec.core.sampling_params import Grammar
from specdec.engine.live_request import LiveRequest
from specdec.sampling.grammar import GrammarCompiler, GrammarState


class _Entry(NamedTuple):
    live: LiveRequest
    compiled: Future[GrammarState]


class Preparation:
    """Compiles in threads; the engine asks each round who is ready, and never waits while it has work."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._entries: dict[RequestId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter([entry.live for entry in self._entries.values()])

    def get(self, request_id: RequestId) -> LiveRequest | None:
        """Return a request that is prepared here."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.live

    def add(self, live: LiveRequest, grammar: Grammar) -> None:
        """Begin to compile a request's grammar."""
        compiled = self._compiler.begin(grammar, live.request.delivered_token_ids)
        self._entries[live.request_id] = _Entry(live, compiled)

    def remove(self, request_id: RequestId) -> LiveRequest | None:
        """Take a request out; None when it is not here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        entry.compiled.cancel()
        return entry.live

    def take_ready(self, patience_s: float) -> list[tuple[LiveRequest, InputError | RequestFailed | None]]:
        """Take out who is ready, with its grammar, or will never be, with the reason.

        Args:
            patience_s: how long to wait for the first of them.
        """
        wait([entry.compiled for entry in self._entries.values()], patience_s, FIRST_COMPLETED)
        ready = [entry for entry in self._entries.values() if entry.compiled.done()]
        for entry in ready:
            del self._entries[entry.live.request_id]
        return [(entry.live, self._finish(entry)) for entry in ready]

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.close()

    def _finish(self, entry: _Entry) -> InputError | RequestFailed | None:
        try:
            entry.live.grammar = entry.compiled.result()
        except (InputError, RequestFailed) as error:
            return error
        return None
