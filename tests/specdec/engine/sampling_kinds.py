"""Sampling parameters by kind: how tokens are drawn, and what changes logits before."""

from __future__ import annotations

import msgspec

from specdec.core.sampling_params import SamplingParams
from tests.specdec.engine.tiny_models import NUM_TOKENS

SAMPLING = {
    "plain": SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=1),
    "cut": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_tokens=NUM_TOKENS, seed=2),
    "hot": SamplingParams(temperature=1.8, min_p=0.02, max_tokens=NUM_TOKENS, seed=-3),
}
SHAPING = {
    "penalties": SamplingParams(
        repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=-0.3, max_tokens=NUM_TOKENS, seed=4
    ),
    "greedy penalties": SamplingParams(temperature=0.0, repetition_penalty=1.6, max_tokens=NUM_TOKENS),
    "bias": SamplingParams(
        logit_bias=((5, 4.0), (6, -100.0), (7, 2.5)), top_p=0.9, max_tokens=NUM_TOKENS, seed=5
    ),
    "bad words": SamplingParams(
        temperature=0.3,
        logit_bias=tuple((token_id, 6.0) for token_id in (5, 6, 7)),
        bad_words=((5, 5), (6, 7), (7, 6, 5), (5, 6, 6), (7, 7, 7)),
        max_tokens=NUM_TOKENS,
        seed=6,
    ),
    "min tokens": SamplingParams(
        logit_bias=((0, 12.0), (9, 12.0)), stop_token_ids=(9,), min_tokens=9, max_tokens=NUM_TOKENS, seed=7
    ),
    "allowed": SamplingParams(
        allowed_token_ids=tuple(range(3, 12)), frequency_penalty=0.8, max_tokens=NUM_TOKENS, seed=8
    ),
}
"""What changes logits; each makes the tiny models say something else (`test_shaping_shows`)."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
KINDS = {"greedy": GREEDY, **SAMPLING, **SHAPING}
UNENDING = {
    kind: msgspec.structs.replace(KINDS[kind], ignore_eos=True)
    for kind in ("greedy", "plain", "cut", "hot", "penalties", "bad words")
}
"""Nothing is drafted in vain behind the end of a text."""
