"""Requests that wait for their grammar to be compiled, before they wait for their turn.

They do so in order of service, by which owners take turns: of a thousand grammars of one key, somebody else's
waits for those that are being compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from specdec.core.errors import InputError, RequestFailed
from specdec.core.ids import RequestId
from specdec.core.sampling_params import Grammar
from specdec.engine.requests.live_request import LiveRequest
from specdec.sampling.grammar import GrammarCompiler, GrammarState


class _Entry(NamedTuple):
    live: LiveRequest
    compiled: Future[GrammarState]


class Preparation:
    """Compiles in threads; the engine asks each round who is ready, and never waits while it has work."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        # One more for each thread: what comes next is not waited for until the engine asks again.
        self._most_begun = 2 * compiler.num_threads
        self._entries: dict[RequestId, _Entry] = {}
        """Those that have begun."""
        self._compiling: list[Future[GrammarState]] = []
        """Of these, and of requests that have left: what a thread does is not to be stopped."""
        self._waiting: dict[RequestId, tuple[LiveRequest, Grammar]] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._waiting)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter([*self.begun, *(live for live, _ in self._waiting.values())])

    @property
    def begun(self) -> list[LiveRequest]:
        """Those whose grammar is being compiled, or is about to be."""
        return [entry.live for entry in self._entries.values()]

    @property
    def last(self) -> LiveRequest | None:
        """Who is served last of those that have not begun."""
        waiting = [live for live, _ in self._waiting.values()]
        return max(waiting, key=lambda live: live.service_key, default=None)

    def get(self, request_id: RequestId) -> LiveRequest | None:
        """Return a request that is prepared here."""
        entry = self._entries.get(request_id)
        if entry is not None:
            return entry.live
        waiting = self._waiting.get(request_id)
        return None if waiting is None else waiting[0]

    def add(self, live: LiveRequest, grammar: Grammar) -> None:
        """Compile a request's grammar in its turn."""
        self._waiting[live.request_id] = live, grammar
        self._begin_more()

    def remove(self, request_id: RequestId) -> LiveRequest | None:
        """Take a request out; None when it is not here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            return waiting[0]
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        entry.compiled.cancel()
        self._begin_more()
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
        self._begin_more()
        return [(entry.live, self._finish(entry)) for entry in ready]

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.close()

    def _begin_more(self) -> None:
        self._compiling = [compiled for compiled in self._compiling if not compiled.done()]
        while self._waiting and len(self._compiling) < self._most_begun:
            first = min(self._waiting.values(), key=lambda waiting: waiting[0].service_key)
            live, grammar = self._waiting.pop(first[0].request_id)
            compiled = self._compiler.begin(grammar, live.request.delivered_token_ids)
            self._entries[live.request_id] = _Entry(live, compiled)
            self._compiling.append(compiled)

    def _finish(self, entry: _Entry) -> InputError | RequestFailed | None:
        try:
            entry.live.grammar = entry.compiled.result()
        except (InputError, RequestFailed) as error:
            return error
        return None
