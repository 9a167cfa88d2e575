"""How a draft model draws its tokens under a verification rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from specdec.core.proposal import NoiseStream
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.sampling.noise import round_seed
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.tree.growth import TreeShape
from specdec.verification.base import RuleCapabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSampling:
    """By default with the target's own noise, on the target's own transforms of the drafter's logits."""

    noise_stream: NoiseStream = "target"
    gives_q_rows: bool = False
    """Whether proposals tell what they were drawn from."""
    top_k: int | None = None
    """Draw among so many most likely tokens at most, so that q rows stay short. Any q is as exact as any
    other, as long as it is the one that was drawn from."""
    is_deterministic: bool = False
    """Whether nothing is drawn: what is likeliest is taken."""

    @staticmethod
    def under(rule: RuleCapabilities, top_k: int | None = None) -> DraftSampling:
        """Return how to draw for this rule; `top_k` matters where q rows are needed."""
        return DraftSampling(
            noise_stream=rule.draft_stream,
            gives_q_rows=rule.needs_q_rows,
            top_k=top_k if rule.needs_q_rows else None,
        )

    def for_trees(self, shape: TreeShape) -> DraftSampling:
        """Return how the children of a node are to be chosen in trees of this shape.

        Draws of its own noise have to be shown whatever they are: a shape that looks at them would select.
        Rules that know the noise from nobody take the likeliest tokens then.
        """
        if self.shares_noise or (self.gives_q_rows and not shape.uses_confidence):
            return self
        return replace(self, gives_q_rows=False, top_k=None, is_deterministic=True)

    @property
    def shares_noise(self) -> bool:
        """Whether tokens are the token function's of the drafter's distribution."""
        return self.noise_stream == "target"

    def of(self, sequence: SequenceView, num_assumed: int = 0) -> SequenceSampling:
        """Return what decides the next draft of a sequence, beside logits.

        `num_assumed` tokens are taken to be committed beside those that are.
        """
        if self.shares_noise:
            return SequenceSampling(sequence.params, sequence.seed)
        committed_len = sequence.committed_len + num_assumed
        return SequenceSampling(self._cut(sequence.params), round_seed(sequence.seed, committed_len))

    def stream_of(self, params: SamplingParams) -> NoiseStream | None:
        """Return the stream to report for a draft: without temperature none matters to rules that ask."""
        if self.is_deterministic:
            return None
        return self.noise_stream if self.shares_noise or not params.is_greedy else None

    def _cut(self, params: SamplingParams) -> SamplingParams:
        if self.top_k is None or (params.top_k is not None and params.top_k <= self.top_k):
            return params
        return msgspec.structs.replace(params, top_k=self.top_k)


SHARED_NOISE = DraftSampling()
