"""Sequences, and what a coordinator wants for them of a draft worker: budgets, and drafts made ahead."""

from __future__ import annotations

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import Sequence, TokenConstraint
from specdec.proposers.base import AheadWish
from tests.specdec.engine.remote_cluster import VOCAB


class FreeSequence(Sequence):
    """Without a grammar."""

    constraint: TokenConstraint | None = None
    kv_budget: int = 0


def sequence(name: str, prompt: int = 6) -> FreeSequence:
    return FreeSequence(
        Request(
            request_id=RequestId(name),
            prompt_token_ids=tuple(index % VOCAB for index in range(prompt)),
            params=SamplingParams(temperature=0.0),
            seed=1,
        )
    )


def budgets(*sequences: Sequence, k: int = 3) -> dict[RequestId, int]:
    return {one.request_id: k for one in sequences}


def wish(one: FreeSequence, pending: tuple[int, ...] = (1, 2, 3), k: int = 3) -> AheadWish:
    fan_out = (*(1 for _ in pending), 4)
    return AheadWish(view=one, pending=pending, num_draft_tokens=k, fan_out=fan_out)
