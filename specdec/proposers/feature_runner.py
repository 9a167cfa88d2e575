"""Runs a drafter that has K/V of its own and reads the target's states: EAGLE, EAGLE-3, MTP.

To whoever drafts it is a model like others. The place of a token in its cache is one less than the token's
position: its rows pair the target's state at position t with the token at t + 1, so that the first token of
a sequence has none. What a window has left out (`SequenceSlice.num_dropped`) counts in positions that the
drafter is given. Of committed tokens it is given the target's states before them; of tokens that it has
drafted itself it has the features that it made of their parents, which it keeps for every slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.attention.base import AttentionBackend
from specdec.attention.metadata import slots_of
from specdec.core.plan import SlotMove
from specdec.core.proposal import NoiseStream
from specdec.drafters.base import FeatureDrafter
from specdec.kv.config import CacheConfig
from specdec.kv.hidden_pool import HiddenPool
from specdec.model.batch import Generated, NativeChooser, PositionShift, SequenceSlice
from specdec.model.config import CompileConfig
from specdec.model.cuda_graphs import CudaForward, recording_bytes
from specdec.model.graph_recorder import Recorder
from specdec.model.runner import ForwardInputs
from specdec.proposers.compiled_drafters import CompiledFeatures, DrafterCompilation, FeatureBatch
from specdec.proposers.draft_graph import GraphedDraftLoop, loop_bytes
from specdec.proposers.draft_loop import ChainStart
from specdec.proposers.drafter_pool import DrafterPool
from specdec.proposers.feature_model import FeatureModel
from specdec.tree.topology import ROOT

_BACK_BY_ONE = PositionShift(offset=-1, end=1 << 62)


class FeatureRunner:
    """Implements `model.batch.GeneratingRunner` on a `FeatureDrafter`. Not thread-safe."""

    can_be_native = True
    """Whether `compile`, `record` and `record_loop` may be called."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        cache: CacheConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        backend: AttentionBackend,
        num_kept: int = 1,
        max_held_tokens: int | None = None,
    ) -> None:
        """Allocate the pool, of a size that `cache` gives, for so many sequences of such a length.

        `num_kept` rows of features are kept for every slot; `max_held_tokens` is as in `DrafterPool`.

        Raises:
            ResourceError: the memory does not hold a single block.
        """
        weight = next(drafter.parameters())
        row = weight.new_zeros(1, 1, len(drafter.hidden_layers) * drafter.target.hidden_size)
        with torch.inference_mode():
            width = num_kept * drafter.fuse(row).shape[-1]
        self._drafter = drafter
        self.num_kept = num_kept
        self._pool = pool = DrafterPool(
            drafter,
            drafter.attention_layers,
            cache,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            backend=backend,
            row_bytes=width * weight.dtype.itemsize,
            max_held_tokens=max_held_tokens,
        )
        self.vocab_size, self.max_model_len = pool.vocab_size, pool.max_model_len
        self.num_blocks, self.block_size = pool.num_blocks, pool.block_size
        self._features = HiddenPool(
            width,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            dtype=pool.dtype,
            device=pool.device,
        )
        self._compiled: CompiledFeatures | None = None
        self._graphs: CudaForward | None = None
        self._model = FeatureModel(
            type(drafter).__name__, drafter, pool, self._features, num_carried=max_num_seqs
        )

    @property
    def device(self) -> torch.device:
        """Where the drafter is."""
        return self._pool.device

    def record(
        self, config: CompileConfig, *, takes_trees: bool, recorder: Recorder | None = None
    ) -> CudaForward:
        """Return the work of recording steps on a GPU: they run eagerly until that is done.

        `takes_trees`: whether rows of a sequence may be a tree; `recorder`: None takes CUDA's own.
        """
        self._graphs = CudaForward(self._model, config, recorder, takes_trees=takes_trees)
        return self._graphs

    def record_loop(
        self,
        config: CompileConfig,
        *,
        vocab_size: int,
        num_draft_tokens: int,
        max_num_seqs: int,
        stream: NoiseStream,
        recorder: Recorder | None = None,
    ) -> GraphedDraftLoop:
        """Return the work of recording whole chains on a GPU; the arguments are those of the loop."""
        return GraphedDraftLoop(
            self._model,
            config,
            vocab_size=vocab_size,
            num_draft_tokens=num_draft_tokens,
            max_num_seqs=max_num_seqs,
            # What was drafted and stands is read once more, with the target's states.
            max_read=num_draft_tokens + 1,
            stream=stream,
            place=placed_start,
            recorder=recorder,
        )

    def recording_bytes(self, config: CompileConfig, max_num_seqs: int) -> int:
        """Return about how much memory recorded steps and chains are going to take."""
        loaded = self._model.loaded
        return recording_bytes(loaded, config) + loop_bytes(loaded, config, max_num_seqs)

    def compile(self, how: DrafterCompilation) -> CompiledFeatures:
        """Return the work of making the drafter native; it runs eagerly until that is done."""
        self._compiled = CompiledFeatures(self._drafter, self._pool, how)
        return self._compiled

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return self._features.num_bytes + self._pool.kv.num_bytes

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """See `Runner.forward`; slices without `states` are of tokens whose parents have been run before."""
        pieces = [piece for piece in map(placed, slices) if piece.token_ids]
        if not pieces:
            return torch.empty(0, self.vocab_size, device=self._pool.device)
        inputs = self._model.packed(pieces, self._inputs(pieces))
        logits = None
        if self._compiled is not None:
            logits = self._try_native(self._compiled, inputs)
        elif self._graphs is not None:
            logits = self._graphs.try_run(inputs)
        return self._model.forward_eager(inputs).float() if logits is None else logits

    def _try_native(self, compiled: CompiledFeatures, inputs: ForwardInputs) -> torch.Tensor | None:
        metadata, features = inputs.metadata, inputs.incoming
        assert features is not None
        token_ids, wanted = inputs.input_ids[0], inputs.logit_rows
        batch = FeatureBatch(token_ids, inputs.position_ids, wanted, metadata, features[0])
        logits = compiled.try_run(batch)
        if logits is not None:
            self._features.write(metadata.slot_mapping, compiled.features(len(token_ids)))
        return logits

    @torch.inference_mode()
    def try_generate(
        self, slices: Sequence[SequenceSlice], num_more: Sequence[int], chooser: NativeChooser
    ) -> Generated | None:
        """See `GeneratingRunner.try_generate`: None until it is compiled, and for a first token alone.

        Features of the further tokens are handed on, not kept: a chain is not drafted behind twice.
        """
        if self._compiled is None or not self._compiled.is_ready:
            return None
        pieces = [placed(piece) for piece in slices]
        if not all(piece.token_ids for piece in pieces):
            return None
        generated = self._compiled.try_generate(
            list(map(_told_of_shift, pieces)), num_more, chooser, self._inputs(pieces)
        )
        if generated is not None and not any(num_more):
            slots = slots_of(pieces, block_size=self.block_size)
            self._features.write(slots, self._compiled.features(len(slots)))
        return generated

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """See `Runner.copy_blocks`."""
        self._pool.kv.copy_blocks(sources, destinations)
        self._features.copy_blocks(sources, destinations)

    @torch.inference_mode()
    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """See `Runner.move_slots`."""
        self._pool.kv.move_slots(moves)
        self._features.move_slots(moves)

    def _inputs(self, pieces: Sequence[SequenceSlice]) -> torch.Tensor:
        """Return what the drafter reads beside the tokens of all pieces, [T, H], contiguous."""
        states = [piece.states for piece in pieces if piece.states is not None]
        if len(states) == len(pieces):
            return self._fuse(torch.cat(states).to(self._pool.device, self._pool.dtype))
        assert not states, "committed tokens are read first"
        return self._features.read_slots([slot for piece in pieces for slot in self._parent_slots(piece)])

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        return self._drafter.fuse(states) if self._compiled is None else self._compiled.fuse(states)

    def _parent_slots(self, piece: SequenceSlice) -> list[int]:
        """Return where the features lie that were made of the parents of drafted tokens."""
        parents = piece.parents
        if parents is None:
            assert len(piece.token_ids) == 1, "of a chain, one token at a time is drafted behind"
            parents = (ROOT,)
        first, size, table = piece.start - piece.num_known, self.block_size, piece.block_table
        places = [first + parent for parent in parents[piece.num_known :]]
        return [table[place // size] * size + place % size for place in places]


def placed(piece: SequenceSlice) -> SequenceSlice:
    """Return a slice with places in the drafter's cache for positions; the first token has none."""
    if piece.start > 0:
        return replace(piece, start=piece.start - 1)
    assert piece.parents is None, "nothing is drafted behind nothing"
    return replace(piece, token_ids=piece.token_ids[1:])


def placed_start(start: ChainStart) -> ChainStart | None:
    """Return a start with places as `placed` gives them; None: it has a token without states."""
    if start.start == 0 or start.states is None or start.shift is not None:
        return None
    return start._replace(start=start.start - 1)


def _told_of_shift(piece: SequenceSlice) -> SequenceSlice:
    """Return a slice in places of the drafter's cache, for who chooses tokens behind it.

    They stand one further on in the sequence; what the drafter is given as positions are places, those that
    were left out included.
    """
    assert piece.shift is None
    return replace(piece, num_dropped=piece.num_dropped + 1, shift=_BACK_BY_ONE)
