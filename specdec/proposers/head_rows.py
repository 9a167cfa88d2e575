"""The rows that heads draft from: what they make of the target's state before the last committed token.

Heads without layers of their own read that state alone. Others (Hydra++'s prefix layer, parallel heads) have
layers with K/V, which every state of the sequence goes through once. Drafted tokens never do: nothing of
a draft is kept, and nothing has to be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from specdec.core.ids import RequestId
from specdec.core.sequence import SequenceView
from specdec.drafters.base import HeadsDrafter
from specdec.model.batch import SequenceSlice
from specdec.proposers.compiled_drafters import CompiledHeads
from specdec.proposers.draft_sequences import Chunk, DraftReading, DraftSequences
from specdec.proposers.draft_window import DraftWindow
from specdec.proposers.drafter_pool import DrafterPool
from specdec.proposers.hidden import HiddenSource, PrefixStates

Rows = Mapping[RequestId, torch.Tensor]
"""[1, R] each, as `HeadsDrafter.prepare` makes them, on the heads' device."""


class HeadRows(Protocol):
    """Where heads get them from."""

    def read(self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]) -> Rows:
        """Return the rows of the sequences that have a budget; of those alone that can be drafted for now."""
        ...

    @property
    def missing(self) -> Mapping[RequestId, int]:
        """See `proposers.base.ReadsStates`."""
        ...

    def num_unread(self, view: SequenceView) -> int:
        """See `proposers.base.ReadsAlong`."""
        ...

    def has_room(self, owner: str, num_tokens: int) -> bool:
        """See `proposers.base.HasRoom`."""
        ...

    @property
    def memory_held(self) -> float:
        """See `proposers.base.HasRoom`."""
        ...

    @property
    def crowded_out(self) -> Sequence[RequestId]:
        """See `proposers.base.HasRoom`."""
        ...

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget these sequences. Unknown ids are ignored."""
        ...


class StateRows:
    """Implements `HeadRows` for heads without layers: their rows are the target's states."""

    def __init__(self, heads: HeadsDrafter, source: HiddenSource) -> None:
        weight = next(heads.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._source = source

    @property
    def missing(self) -> Mapping[RequestId, int]:
        return {}  # the newest row is enough

    def read(self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]) -> Rows:
        wanted = [one for one in sequences if num_draft_tokens.get(one.request_id) and one.committed_len > 1]
        found = self._source.await_rows(wanted)
        newest: dict[RequestId, torch.Tensor] = {}
        for one in wanted:
            rows = found.get(one.request_id)
            if rows is not None:
                rows.read_from(one.committed_len - 2)
                newest[one.request_id] = rows.since(one.committed_len - 2)[-1:].to(self._device, self._dtype)
        return newest

    def num_unread(self, view: SequenceView) -> int:
        return 0

    def has_room(self, owner: str, num_tokens: int) -> bool:
        return True

    @property
    def memory_held(self) -> float:
        return 0.0

    @property
    def crowded_out(self) -> Sequence[RequestId]:
        return ()

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self._source.release(tuple(request_ids))


class PrefixRows:
    """Implements `HeadRows` for heads with layers, whose K/V it keeps.

    The place of a row in the cache is its position: that of token t + 1 is the row of the state at t, which
    gave it. So the first token of a sequence has none. Sequences that are shown without a budget are read
    along.
    """

    def __init__(
        self,
        heads: HeadsDrafter,
        source: HiddenSource,
        pool: DrafterPool,
        *,
        max_read_tokens: int,
        max_context: int | None = None,
        window: DraftWindow | None = None,
        compiled: CompiledHeads | None = None,
    ) -> None:
        """Read with `heads` into `pool`, which is used for nothing else.

        Args:
            heads: what the rows are for.
            source: of the target's states.
            pool: of K/V of the heads' layers.
            max_read_tokens: most tokens that one call reads. A sequence that has more to catch up on than is
                left of it has no row in that call.
            max_context: longest prefix that is read, in tokens; None: what the pool holds.
            window: what of a sequence is kept and attended to; None: everything.
            compiled: the native form of the heads, ready or not.
        """
        self._heads = heads
        self._compiled = compiled
        self._pool = pool
        self._states = PrefixStates(source, heads.hidden_layers)
        self._sequences = DraftSequences(
            pool,
            DraftReading(max_read_tokens=max_read_tokens, prefix_caching=False, window=window),
            max_context=pool.max_model_len if max_context is None else min(pool.max_model_len, max_context),
        )

    @property
    def missing(self) -> Mapping[RequestId, int]:
        return self._states.missing

    @torch.inference_mode()
    def read(self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]) -> Rows:
        awaited = [name for name, budget in num_draft_tokens.items() if budget > 0]
        readable = self._states.begin(sequences, awaited, self._sequences.first_unread)
        in_use = {one.request_id for one in readable}
        draftings = [
            drafting
            for one in self._sequences.in_turns(readable)
            if (
                drafting := self._sequences.open(
                    one, num_draft_tokens.get(one.request_id, 0), in_use, num_behind=0
                )
            )
            and self._states.reach_back_to(one.request_id, drafting.state.num_read)
        ]
        chunks = self._sequences.chunks(draftings)
        while pieces := self._sequences.pieces(chunks):
            self._read(pieces)
            chunks = self._sequences.behind(chunks)
        return self._read(chunks)

    def num_unread(self, view: SequenceView) -> int:
        return self._sequences.num_unread(view)

    def has_room(self, owner: str, num_tokens: int) -> bool:
        return self._sequences.has_room(owner, num_tokens)

    @property
    def memory_held(self) -> float:
        return self._sequences.memory_held

    @property
    def crowded_out(self) -> Sequence[RequestId]:
        return self._sequences.crowded_out

    def release(self, request_ids: Iterable[RequestId]) -> None:
        ids = tuple(request_ids)
        self._sequences.release(ids)
        self._states.release(ids)

    def check_integrity(self) -> None:
        """Assert that all blocks held are held by a sequence known here."""
        self._sequences.check_integrity()

    def _read(self, chunks: Sequence[Chunk]) -> Rows:
        """Run the heads' layers on committed tokens, and note it; return what they make of the last ones."""
        pieces: list[SequenceSlice] = []
        states: list[torch.Tensor] = []
        ends: dict[RequestId, int] = {}
        num_rows = 0
        for drafting, num_tokens, completes in chunks:
            view, state = drafting.view, drafting.state
            first, end = max(1, state.num_read), state.num_read + num_tokens
            if first == end:
                continue
            num_rows += end - first
            pieces.append(
                SequenceSlice(
                    token_ids=view.token_ids[first:end],
                    start=first - 1 - state.table.num_dropped,
                    block_table=state.table.block_ids,
                    num_logit_rows=0,
                    num_dropped=state.table.num_dropped,
                )
            )
            states.append(self._states.before(view.request_id, first, end))
            if completes and drafting.budget > 0:
                ends[view.request_id] = num_rows - 1
        prepared: Rows = {}
        if pieces:
            rows = self._prepare(torch.cat(states).to(self._pool.device, self._pool.dtype), pieces)
            prepared = {request_id: rows[end : end + 1].clone() for request_id, end in ends.items()}
        for chunk in chunks:
            self._sequences.note_read(chunk.drafting, chunk.num_tokens, ())
        return prepared

    def _prepare(self, hidden: torch.Tensor, pieces: Sequence[SequenceSlice]) -> torch.Tensor:
        """Return what the heads read, [T, R], of states [T, F]: valid until the next call."""
        metadata = self._pool.metadata(pieces)
        positions = self._pool.positions(pieces, metadata)
        native = None if self._compiled is None else self._compiled.try_prepare(hidden, positions, metadata)
        if native is not None:
            return native
        return self._heads.prepare(hidden[None], positions[None], self._pool.over(metadata))[0]
