"""Facts about a loaded target. They cross the wire, so they live below the transport."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.core.kv_variants import KvVariants
from specdec.core.sampling_params import NO_SAMPLING_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDescription:
    """Facts about a loaded target that schedulers and doors need."""

    model_id: str
    revision: str
    """Hash over config and weights: replay is only allowed onto the same one."""
    dtype: str
    """In which it computes."""
    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    rule: str = "sample_and_match"
    """Name of the verification rule (`specdec.verification`)."""
    kv_variants: KvVariants | None = None
    """Set when K/V depend on the length of a sequence."""
    quantization: str | None = None
    """How its weights are quantized; None: they are not."""
    batch_invariant: bool = False
    """Whether it is promised that what a request gets does not depend on what else is in the batch."""
    drafts_itself: bool = False
    """Whether it takes works with `num_self_drafted`."""
    sampling_defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS
    """What its checkpoint wants requests to be sampled with that say nothing of it."""
    device: str = ""
    """What it runs on (its first rank), in words: what it costs depends on that. Empty: not known."""
    row_buckets: tuple[int, ...] = ()
    """Numbers of rows, rising, to the next of which steps are padded, those of more rows than the last left
    out; empty: none are."""
