"""Rounds of proposing for sequences of different lengths that grow, and what is drafted in them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.proposers.base import Proposer
from tests.specdec.proposers.contract import FrozenView, view
from tests.specdec.proposers.made_up_states import VOCAB

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
)
SHAPED = SamplingParams(temperature=0.0, repetition_penalty=2.5)
ROUNDS = 5
Round = tuple[Sequence[FrozenView], Mapping[RequestId, int]]


def rounds(seed: int, params: Sequence[SamplingParams] = PARAMS) -> Iterator[Round]:
    """Three sequences of different lengths that grow by a few tokens each; now and then one rests."""
    generator = random.Random(seed)
    texts = [[generator.randrange(2, VOCAB) for _ in range(length)] for length in (9, 4, 6)]
    for number in range(ROUNDS):
        views = [
            view(str(index), text, params[index % len(params)], seed=index)
            for index, text in enumerate(texts)
            if index != number - 2
        ]
        yield views, {one.request_id: generator.choice((1, 3, 6)) for one in views}
        for text in texts:
            text += [generator.randrange(2, VOCAB) for _ in range(generator.randrange(1, 4))]


def drafted(proposer: Proposer, seed: int, **more: Any) -> list[dict[RequestId, Proposal]]:
    with torch.inference_mode():
        found = [dict(proposer.propose(views, budgets)) for views, budgets in rounds(seed, **more)]
    proposer.close()
    assert sum(map(len, found)) > 2 * ROUNDS
    return found
