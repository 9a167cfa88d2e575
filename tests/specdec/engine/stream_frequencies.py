"""How often an engine under a rule generates what, against the target's distribution by enumeration."""

from __future__ import annotations

from collections import Counter
from itertools import product

import msgspec
import numpy as np
from scipy import stats

from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.toy_target import ToyModel, slot_value
from specdec.proposers.base import Proposer
from specdec.sampling.noise import MASK_64
from tests.specdec.engine.judged_engines import engine_of
from tests.specdec.engine.toy_engines import request

TINY = ToyModel(4, seed=2, sharpness=1.0)
TINY_DRAFT = ToyModel(4, seed=3, sharpness=1.0)
PROMPT = (1, 2)
LENGTH = 3


def probabilities(model: ToyModel, temperature: float) -> dict[tuple[int, ...], float]:
    """Of every continuation of the prompt by `LENGTH` tokens, without an engine."""
    found = {}
    for tokens in product(range(model.vocab_size), repeat=LENGTH):
        probability, total = 1.0, 0
        sequence = (*PROMPT, *tokens)
        for position, token_id in enumerate(sequence):
            if position >= len(PROMPT):
                logits = model.logits(sequence[position - 1], total) / temperature
                weights = np.exp(logits - logits.max())
                probability *= float(weights[token_id] / weights.sum())
            total = (total + slot_value(total, position, token_id)) & MASK_64
        found[tokens] = probability
    return found


def p_value(
    rule: str,
    proposer: Proposer,
    *,
    num_streams: int = 6_000,
    temperature: float = 0.8,
    num_draft_tokens: int = 2,
    num_more: int = 0,
    num_times: int = 1,
) -> float:
    """Chi-square of what an engine generates over seeds, all in one batch after the other, against p.

    With `num_more` tokens behind those that are looked at, drafts of as many are of use. With `num_times`
    each request is sent as often, one after the other, and the last answer counts.
    """
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH + num_more)
    engine = engine_of(rule, TINY, proposer, num_draft_tokens=num_draft_tokens, max_num_seqs=16)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, num_streams, 500):
        tokens: dict[RequestId, list[int]] = {}
        for time in range(num_times):
            requests = [
                msgspec.structs.replace(
                    request(f"r{seed}-{time}", PROMPT, params, seed=seed), cache_salt=str(seed)
                )
                for seed in range(first, first + 500)
            ]
            for one in requests:
                engine.add_request(one)
            tokens = {one.request_id: [] for one in requests}
            while engine.has_work:
                for output in engine.step():
                    tokens[output.request_id].extend(output.token_ids)
        counts.update(tuple(its[:LENGTH]) for its in tokens.values())
    metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0.1 * metrics.num_draft_tokens > 0
    assert not metrics.proposals_dropped
    expected = probabilities(TINY, temperature)
    return float(
        stats.chisquare(
            [counts[tokens] for tokens in expected], [p * num_streams for p in expected.values()]
        ).pvalue
    )
