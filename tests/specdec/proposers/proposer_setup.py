"""How random heads, and modules that read features, are set up as proposers over made-up hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.kv.config import CacheConfig
from specdec.proposers.compiled_drafters import DrafterCompilation
from specdec.proposers.draft_sampling import SHARED_NOISE, DraftSampling
from specdec.proposers.draft_window import DraftWindow
from specdec.proposers.hidden import HiddenSource
from specdec.sampling.sampler import Sampler
from specdec.tree.growth import TreeShape
from tests.specdec.proposers.made_up_states import MadeUpSource

_BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSetup:
    """The same for both kinds."""

    sampling: DraftSampling = SHARED_NOISE
    shape: TreeShape | None = None
    source: HiddenSource = field(default_factory=MadeUpSource)
    num_blocks: int = 100
    max_model_len: int = 64
    max_read_tokens: int = 512
    window: DraftWindow | None = None
    how: DrafterCompilation | None = None
    """With it there is a native form, once its idle work is done."""
    sampler: Sampler | None = None
    """None: one of its own."""

    @property
    def cache(self) -> CacheConfig:
        return CacheConfig(block_size=_BLOCK_SIZE, num_blocks=self.num_blocks)

    @property
    def max_held_tokens(self) -> int | None:
        window = self.window
        return None if window is None else window.max_held_tokens(self.max_model_len, _BLOCK_SIZE)


USUAL = ProposerSetup()
