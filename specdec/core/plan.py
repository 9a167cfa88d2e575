"""What the target is asked to do in one round, and what it answers. These cross the wire as they are.

One round is one forward over a flat batch. Each `TargetWork` feeds `token_ids` at consecutive
positions from `start`; prefill, prefill chunk, decode and chain verification differ only in numbers:

    prefill chunk      num_sampled_rows 0
    last chunk         num_sampled_rows 1
    decode             1 token,      num_sampled_rows 1
    verification       1 + k tokens, num_sampled_rows 1 + k   (the last committed token, then the draft)
    of a tree          1 + n tokens, num_sampled_rows 1 + n   (then its n nodes, with `parents`)
    self-speculation   1 token,      num_sampled_rows 1, num_self_drafted k

Any work whose last committed token is sampled may have rows beside: they come behind all these.

K/V of a work's rows go to consecutive places of its block table, so those of the path that stands in a tree
may lie apart. Whoever commits that path says in the next step where they belong (`TargetStep.moves`).

Under the rule sample_and_match the target answers with its own token at every sampled row, to be compared
with the draft by whoever has it. Any other rule looks at distributions, which stay with the target: it
decides, and answers with the draft tokens that stand and the one that follows them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from specdec.core.distributions import TokenDistribution
from specdec.core.ids import RequestId
from specdec.core.outputs import TokenLogprobs
from specdec.core.proposal import NoiseStream
from specdec.core.rows_beside import RowsBeside
from specdec.core.sampling_params import SamplingParams

ErrorCode = Literal["non_finite_logits", "no_token_allowed"]
"""Why nothing was chosen at a row (`specdec.core.error_codes`)."""


class AdmittedSequence(msgspec.Struct, frozen=True, array_like=True):
    """Registers a sequence with the target, once, before its first work."""

    request_id: RequestId
    seed: int
    params: SamplingParams
    num_prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    """Tokens committed so far; only where `params` make the choice depend on them, or what drafts at the
    target reads them."""
    kv_variant: int = 0
    """Which K/V it has (`core.kv_variants`)."""
    cache_salt: str | None = None
    """Only sequences of one salt may share what is kept of them; with `token_ids`."""


class TargetWork(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence to run through the target."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    """Absolute position of `token_ids[0]`: K/V of everything before it are in the cache."""
    num_sampled_rows: int
    """The last so many rows are sampled. The row of the token at absolute position s gives token s + 1."""
    table_start: int
    """Entries of the target's block table for this sequence from here on are replaced by `block_ids`."""
    block_ids: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    """Tree verification: parent row (within this work) of every draft row; None for a chain."""
    noise_stream: NoiseStream | None = None
    """Stream that the draft was sampled with, for rules that decide at the target; None: deterministic."""
    q_rows: tuple[TokenDistribution, ...] | None = None
    """What each draft token was sampled from, for rules that need it."""
    masks: tuple[bytes, ...] | None = None
    """What a grammar allows at each sampled row: bit t (byte t // 8, from the low end) for token t."""
    scored_token_ids: tuple[int, ...] = ()
    """Prompt tokens behind the first rows, one each, whose log-probabilities are wanted."""
    num_self_drafted: int = 0
    """So many tokens, at most, the target shall draft itself behind these, and verify in the same step; the
    block table has room for them. One row is sampled beside them."""
    kv_budget: int = 0
    """Tokens that drafts of the sequence may attend to, now and in further works; 0: as is configured."""
    beside: RowsBeside | None = None
    """Rows behind those of `token_ids`, of no draft; their K/V go to the places behind."""
    drafter: int = 0
    """Which of the drafters at the target it has, counted among these: who reads it, and drafts for it; -1:
    none of several."""

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return len(self.token_ids) + (0 if self.beside is None else self.beside.num_rows)


class SlotMove(NamedTuple):
    """K and V of one token, in all layers, go from one slot of the pool to another.

    Slot block * block_size + offset is place `offset` of a block.
    """

    source: int
    destination: int


class TargetStep(msgspec.Struct, frozen=True, array_like=True):
    """One round for the target."""

    step_id: int
    works: tuple[TargetWork, ...]
    admitted: tuple[AdmittedSequence, ...] = ()
    released: tuple[RequestId, ...] = ()
    """Sequences whose state the target forgets, before the step. A preempted sequence is released and
    admitted anew."""
    moves: tuple[SlotMove, ...] = ()
    """Of K/V that former steps have computed: before anything of this step is written, and all at once (what
    one of them reads is what was there before any). Their blocks may be others' by now."""


class WorkResult(msgspec.Struct, frozen=True, array_like=True):
    """What the target says to one work."""

    token_ids: tuple[int, ...]
    """Its own tokens at the sampled rows, in row order; where it has verified a draft itself, the draft
    tokens that stand and one more: the tokens of as many first rows."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, when the request asked for them."""
    error: str | None = None
    """Set when a sampled row has non-finite logits, or forbids every token; `token_ids` then ends before it.

    When it is the first row, the sequence cannot go on. Behind a draft token it matters only if that token is
    right, and then the next round meets it as its first row.
    """
    error_code: ErrorCode | None = None
    """Set with `error`."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per scored token, where there are any."""
    drafted: tuple[int, ...] = ()
    """What the target has drafted itself; `token_ids` then has one token more, but for a rule that has
    verified it there."""
    drafted_parents: tuple[int, ...] | None = None
    """Of a drafted tree, as `Proposal.parents`."""
    beside: tuple[int, ...] = ()
    """Tokens at the answered ones of `TargetWork.beside`; none where one was not finite, or `token_ids` come
    from a second run without those rows."""


class TargetResult(msgspec.Struct, frozen=True, array_like=True):
    """Answer to one `TargetStep`, works in the same order."""

    step_id: int
    results: tuple[WorkResult, ...]
    forward_s: float = 0.0
    """Seconds in the model's forward."""
    sample_s: float = 0.0
    """Seconds in sampling."""
    kv_generation: int = 0
    """Changes when K/V computed from this step on differ, in their last bits, from those of the same tokens
    computed before: the forward has been compiled. Cached prefixes of the former generation are stale."""
    draft_s: float = 0.0
    """Seconds in which the target drafted itself, before the forward."""
    drafters_s: tuple[float, ...] = ()
    """Of these, what each of several drafters took that are at the target; empty where there is one."""
