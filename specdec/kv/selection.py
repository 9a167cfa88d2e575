"""KV selection: which blocks of a sequence a draft reads, so that its attention costs less than the target's.

A selection changes what is proposed, never what is committed: the target verifies with all blocks. What is
selected is a block table of its own over the same pages. Cache indices run over the selected tokens, without
gaps; K in pages is rotated by absolute positions already, and new rows are given theirs by the offset
`Selection.num_dropped` (see `model.batch.SequenceSlice`).

`streaming` is the attention sink and recent window of StreamingLLM (Xiao et al., arXiv 2309.17453), as the
drafts of MagicDec (Chen et al., arXiv 2408.11049) use it. Being chosen anew from the length each time, the
window rolls by itself.

`snapkv` and `verified` take blocks from between sink and window, by scores of their own
(`kv.block_scores`), as many as `streaming` takes at that length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema, model_validator

from specdec.core.config import StrictConfig
from specdec.core.ids import RequestId
from specdec.kv.block_scores import BlockScores, RunningScores, WindowScores
from specdec.kv.block_table import num_blocks_for

KvPolicyName = Literal["full", "streaming", "snapkv", "verified"]
_SNAPKV_INTERVAL = 32
_TOKENS_OF_OWN_KV = 512
"""Budget where none is given, of drafters that keep K/V of their own."""


class Selection(NamedTuple):
    """Blocks of one sequence, and how its cache indices compare with positions."""

    blocks: Sequence[int]
    """Indices into the sequence's block table, increasing; the block of the last cached token is the last of
    them. Blocks behind it, for tokens to come, always belong to the selection too."""
    num_dropped: int
    """Tokens before the last one that are not selected: whole blocks. Position = cache index + num_dropped
    from the last gap on; this is `SequenceSlice.num_dropped`."""

    def table(self, block_table: Sequence[int]) -> list[int]:
        """Return the selected entries of a sequence's block table, with all those behind them."""
        first_new = self.blocks[-1] + 1 if self.blocks else 0
        return [*(block_table[index] for index in self.blocks), *block_table[first_new:]]


class KvSelection(Protocol):
    """A policy. Pure: the same length, scores and budget give the same selection."""

    def select(self, num_tokens: int, scores: BlockScores | None = None, budget: int = 0) -> Selection:
        """Select from the blocks of a sequence with `num_tokens` cached tokens, at positions from 0 on.

        `scores` are the sequence's, from `make_scores`. Up to `budget` tokens; 0: as configured.
        """
        ...

    def make_scores(self) -> BlockScores | None:
        """Return the scores of a new sequence; None: the length is all that counts."""
        ...


class FullSelection:
    """Everything."""

    def __init__(self, block_size: int) -> None:
        """Select from blocks of `block_size` tokens."""
        self._block_size = block_size

    def select(self, num_tokens: int, scores: BlockScores | None = None, budget: int = 0) -> Selection:
        """See `KvSelection`."""
        return Selection(range(num_blocks_for(num_tokens, self._block_size)), 0)

    def make_scores(self) -> None:
        """See `KvSelection`."""


class StreamingSelection:
    """The first tokens (the sink), and the last ones (the window), in whole blocks.

    At least `min(num_tokens, budget)` tokens are selected, and fewer than `budget + 2 * block_size`: both
    parts are rounded up to whole blocks.
    """

    def __init__(self, budget: TokenBudget, *, sink_tokens: int, block_size: int) -> None:
        """Select `sink_tokens` tokens and what `budget` leaves for the window."""
        self._budget = budget
        self._sink_tokens = sink_tokens
        self._num_sink_blocks = num_blocks_for(sink_tokens, block_size)
        self._block_size = block_size

    @property
    def num_sink_blocks(self) -> int:
        """Blocks of the sink."""
        return self._num_sink_blocks

    def make_scores(self) -> None:
        """See `KvSelection`."""

    def select(self, num_tokens: int, scores: BlockScores | None = None, budget: int = 0) -> Selection:
        """See `KvSelection`."""
        num_blocks = num_blocks_for(num_tokens, self._block_size)
        num_recent = (budget or self._budget.tokens(num_tokens)) - self._sink_tokens
        first_recent = max(0, num_tokens - num_recent) // self._block_size
        num_gap_blocks = min(first_recent, num_blocks - 1) - self._num_sink_blocks
        if num_gap_blocks <= 0:
            return Selection(range(num_blocks), 0)
        sink = range(self._num_sink_blocks)
        window = range(self._num_sink_blocks + num_gap_blocks, num_blocks)
        return Selection((*sink, *window), num_gap_blocks * self._block_size)


class ScoredSelection:
    """The sink, a small window of the last tokens, and between them the blocks of the highest scores.

    As many blocks as `StreamingSelection` selects at that length, and these themselves as long as nothing is
    known of the sequence. Blocks too young to have a score come before all that have one, ties go to the
    later block.
    """

    RECENT_SHARE = 4
    """One in so many of the blocks behind the sink is of the window, and two at least."""

    def __init__(self, streaming: StreamingSelection, make_scores: Callable[[], BlockScores]) -> None:
        """Select what `streaming` would, as far as `make_scores` knows nothing better."""
        self._streaming = streaming
        self._make_scores = make_scores

    def make_scores(self) -> BlockScores:
        """See `KvSelection`."""
        return self._make_scores()

    def select(self, num_tokens: int, scores: BlockScores | None = None, budget: int = 0) -> Selection:
        """See `KvSelection`."""
        streamed = self._streaming.select(num_tokens, None, budget)
        values = None if scores is None else scores.values
        if values is None or streamed.num_dropped == 0:
            return streamed
        num_blocks, num_sink = streamed.blocks[-1] + 1, self._streaming.num_sink_blocks
        num_others = len(streamed.blocks) - num_sink
        num_recent = min(num_others, max(2, num_others // self.RECENT_SHARE))
        first_recent = num_blocks - num_recent
        chosen = _highest(values, num_sink, first_recent, num_others - num_recent)
        return Selection((*range(num_sink), *chosen, *range(first_recent, num_blocks)), streamed.num_dropped)


def _highest(values: NDArray[np.float32], first: int, end: int, count: int) -> list[int]:
    """Return, in order, the `count` indices from `first` to `end - 1` of the highest values."""
    candidates = np.full(end - first, np.inf, np.float32)
    known = values[first:end]
    candidates[: len(known)] = known
    # Stable, so that all ranks of a model choose alike.
    order = np.argsort(candidates, kind="stable")
    chosen: list[int] = (np.sort(order[len(order) - count :]) + first).tolist()
    return chosen


BudgetAmount = int | float
"""An int: tokens. A float: share of the length."""
WrittenBudget = BudgetAmount | str
"""One as people write it: a share may be a percentage, too, such as "5%"."""
_ALL_TOKENS = 1 << 32
"""More than any text has: a larger budget is as good as this, which every message can hold."""


class TokenBudget(Protocol):
    """Says how many tokens of a sequence are selected, by its length."""

    def tokens(self, num_tokens: int) -> int:
        """Return the budget of a sequence of `num_tokens` tokens, which may be more than that."""
        ...

    @property
    def smallest(self) -> int:
        """Budget of the shortest sequence, tokens."""
        ...

    def capped(self, most: int | None) -> TokenBudget:
        """Return the same with shares of at most so many tokens; None: however many."""
        ...


class KvBudget(NamedTuple):
    """How many tokens a draft may attend to."""

    amount: BudgetAmount
    """An int: tokens. A float: share of the length, at least `floor` tokens."""
    floor: int
    most: int | None = None
    """Where it is a share: never more tokens than this; None: however many."""

    def tokens(self, num_tokens: int) -> int:
        """Return the budget of a sequence of `num_tokens` tokens, which may be more than that."""
        if isinstance(self.amount, int):
            return min(self.amount, _ALL_TOKENS)
        wanted = min(max(self.floor, math.ceil(self.amount * num_tokens)), _ALL_TOKENS)
        return wanted if self.most is None else min(wanted, self.most)

    @property
    def smallest(self) -> int:
        """Budget of the shortest sequence, tokens."""
        return self.amount if isinstance(self.amount, int) else self.floor

    def capped(self, most: int | None) -> KvBudget:
        """See `TokenBudget`."""
        return self._replace(most=most)

    @property
    def least_setting(self) -> Literal["budget", "floor"]:
        """The setting of `kv` that says so."""
        return "budget" if isinstance(self.amount, int) else "floor"


class LargestBudget(NamedTuple):
    """Of several budgets, whichever is most at a length: tokens for short texts, shares for long ones."""

    budgets: tuple[KvBudget, ...]

    def tokens(self, num_tokens: int) -> int:
        """See `TokenBudget`."""
        return max(budget.tokens(num_tokens) for budget in self.budgets)

    @property
    def smallest(self) -> int:
        """See `TokenBudget`."""
        return max(budget.smallest for budget in self.budgets)

    def capped(self, most: int | None) -> LargestBudget:
        """See `TokenBudget`."""
        return LargestBudget(tuple(budget.capped(most) for budget in self.budgets))


def read_percentage(text: str) -> float:
    """Return the share that a text such as "5%" says.

    Raises:
        ValueError: it says none.
    """
    if text.strip().endswith("%"):
        with suppress(ValueError):
            return float(text.strip().removesuffix("%")) / 100
    raise ValueError(f'{text!r} is not a number of tokens, nor a share such as "5%" or 0.05')


def read_budget(value: object) -> BudgetAmount:
    """Return a budget as it is written: a number of tokens, or a share, as a number or a percentage.

    Raises:
        ValueError: it is none.
    """
    amount = read_percentage(value) if isinstance(value, str) else value
    fault = budget_fault(amount)
    if fault is not None:
        raise ValueError(fault)
    assert isinstance(amount, int | float)
    return min(amount, _ALL_TOKENS)


def budget_fault(amount: object) -> str | None:
    """Say what is wrong with a budget by itself; None: nothing."""
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        return 'must be a number of tokens, or a share such as "5%" or 0.05'
    if isinstance(amount, float) and not 0.0 < amount <= 1.0:
        return f"{amount} is no share of the length (above 0, at most 1); write an integer for tokens"
    if isinstance(amount, int) and amount < 1:
        return f"{amount} tokens are none"
    return None


_AMOUNT_SCHEMA = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^\s*[0-9.]+\s*%\s*$"}]}
_BUDGET_SCHEMA = {"anyOf": [_AMOUNT_SCHEMA, {"type": "array", "items": _AMOUNT_SCHEMA, "minItems": 1}]}
"""What is read before it is checked: percentages are texts."""


class KvSelectionConfig(StrictConfig):
    """What drafts attend to of a sequence's K/V: which part, in which numbers (`speculative_config.kv`)."""

    policy: KvPolicyName = "full"
    """full: everything; streaming: the first tokens and a window of the last ones; snapkv and verified: the
    first tokens, a small window, and the blocks to which the latest tokens attend most. snapkv scores blocks
    now and then, over the last tokens before that; verified keeps a running mean of what verification
    sees. Both need a target that drafts for itself (self, layerskip, quantized): a draft model, or heads with
    K/V of their own, drop what they do not attend to."""
    budget: Annotated[BudgetAmount | tuple[BudgetAmount, ...], WithJsonSchema(_BUDGET_SCHEMA)] = 0.05
    """Tokens that a draft attends to. An integer: tokens; a number below 1 (write 0.05 or "5%"): share of the
    sequence's length, at least `floor`. A list of these: the goodput controller picks one for each request,
    by measured acceptance and cost; the first is where nothing is known yet, and with a fixed k. Left out:
    0.05; of draft models and heads, which keep what they attend to, 512 tokens, unless `floor` is given."""
    floor: int = Field(default=256, ge=1)
    """Least budget (tokens) where it is a share of the length."""
    sink_tokens: int = Field(default=4, ge=0)
    """Tokens from the beginning that always belong to the budget; whole blocks are selected."""
    rescore_every: int | None = Field(default=None, ge=1)
    """snapkv: committed tokens between two scorings, 32 unless given; verified: between two rounds that are
    looked at, 1 unless given (every round), on a GPU 16. Rounds without drafts never are; in a batch, half
    is enough where another sequence is looked at."""

    positions: Literal["auto", "absolute", "in_cache"] = "auto"
    """Which positions a draft model gives to what it attends to. in_cache: positions among what it keeps, so
    that it drafts behind texts of any length; it reads its window again whenever its positions run out.
    absolute: those of the text; refused where the target serves longer texts than the draft model has
    positions for. auto: in_cache where the target serves longer texts, there is a window and it fits,
    otherwise absolute."""

    dtype: Literal["auto", "int8"] = "auto"
    """Numbers of the K/V that drafts attend to. auto: those of the model; int8: a copy of the target's K/V in
    8 bits, beside it in memory, for methods self, layerskip and quantized. Verification attends to the
    target's own."""

    @model_validator(mode="before")
    @classmethod
    def _read_budget(cls, data: object) -> object:
        if not isinstance(data, dict) or "budget" not in data:
            return data
        given = data["budget"]
        try:
            if isinstance(given, list | tuple):
                return {**data, "budget": tuple(map(read_budget, given))}
            return {**data, "budget": read_budget(given)}
        except ValueError as error:
            raise ValueError(f"budget: {error}") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.budgets or len(set(self.budgets)) < len(self.budgets):
            raise ValueError("budget: a list takes one or more budgets, all of them different")
        if self.rescore_every is not None and not self.is_scored:
            raise ValueError(f"rescore_every: policy {self.policy} scores nothing: leave it out")
        return self

    @property
    def budgets(self) -> tuple[KvBudget, ...]:
        """What there is to choose from."""
        amounts = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        return tuple(KvBudget(amount, self.floor) for amount in amounts)

    @property
    def is_packed(self) -> bool:
        """Whether it is a copy in 8 bits."""
        return self.dtype == "int8"

    @property
    def is_scored(self) -> bool:
        """Whether the policy chooses by what the target attends to."""
        return self.policy in ("snapkv", "verified")

    @property
    def token_budget(self) -> KvBudget:
        """The first of them."""
        return self.budgets[0]

    @property
    def unheeded(self) -> tuple[str, ...]:
        """Settings that say how much is selected, where everything is."""
        if self.policy != "full":
            return ()
        names = ("budget", "floor", "sink_tokens")
        return tuple(name for name in names if getattr(self, name) != type(self).model_fields[name].default)

    @property
    def largest(self) -> TokenBudget:
        """What a sequence keeps at most, whichever of the budgets it gets: what memory is planned for.

        Coordinators tell of every sequence what it may keep (`SequenceView.kv_budget`).
        """
        return self.token_budget if len(self.budgets) == 1 else LargestBudget(self.budgets)

    def largest_budget(self, num_tokens: int) -> KvBudget:
        """Return the one that is most for a sequence of so many tokens."""
        return max(self.budgets, key=lambda budget: budget.tokens(num_tokens))

    def require_room(self, num_draft_tokens: int) -> None:
        """Check that the budget holds the sink and a draft, which attends to itself.

        Raises:
            ValueError: it does not; names the setting.
        """
        if self.policy == "full":
            return
        for budget in self.budgets:
            fault = self.room_fault(budget, num_draft_tokens)
            if fault is not None:
                raise ValueError(f"kv.{budget.least_setting}: {fault}")

    def room_fault(self, budget: KvBudget, num_draft_tokens: int) -> str | None:
        """Say why a budget does not hold the sink and a draft of so many tokens; None: it does."""
        needed = self.sink_tokens + num_draft_tokens
        if budget.smallest >= needed:
            return None
        return (
            f"{budget.smallest} tokens do not hold kv.sink_tokens ({self.sink_tokens}) "
            f"and a draft of num_speculative_tokens ({num_draft_tokens}): give at least {needed}"
        )

    def make(
        self, block_size: int, budget: TokenBudget | None = None, *, most_tokens: int | None = None
    ) -> KvSelection:
        """Return the policy over blocks of `block_size` tokens, with the first budget or another one.

        A share is of `most_tokens` at most.
        """
        if self.policy == "full":
            return FullSelection(block_size)
        chosen = (budget or self.token_budget).capped(most_tokens)
        streaming = StreamingSelection(chosen, sink_tokens=self.sink_tokens, block_size=block_size)
        if self.policy == "streaming":
            return streaming
        if self.policy == "snapkv":
            return ScoredSelection(streaming, partial(WindowScores, self.rescore_every or _SNAPKV_INTERVAL))
        return ScoredSelection(streaming, partial(RunningScores, self.rescore_every or 1))


def with_tokens_as_budget(section: Any) -> Any:
    """Return a `kv` section as it is given, of a drafter with K/V of its own: without a budget it gets one.

    That is a number of tokens, so that what is kept does not grow with the text. Who writes a `floor` has a
    share in mind, and gets that.
    """
    given = section.model_dump(exclude_unset=True) if isinstance(section, KvSelectionConfig) else section
    if not isinstance(given, dict) or given.keys() & {"budget", "floor"}:
        return section
    return section if given.get("policy", "full") == "full" else {**given, "budget": _TOKENS_OF_OWN_KV}


class KvBudgets:
    """The budgets of the requests of one engine: a default, which may change at any time, and their own.

    Nothing that is selected by one budget outlives a round at a target that drafts for itself. The window of
    a draft model, or of heads, has freed what a smaller one left out: it grows from then on.
    """

    def __init__(
        self, config: KvSelectionConfig, num_draft_tokens: int, *, drafter: str | None = None
    ) -> None:
        """Begin with what is configured, for drafts of up to `num_draft_tokens` tokens.

        `drafter` is the name of the one that has budgets, of several; None: there is but one.
        """
        assert config.policy != "full", "where everything is attended to there are no budgets"
        self._config = config
        self._num_draft_tokens = num_draft_tokens
        self._drafter = drafter
        self._default = config.token_budget
        self.is_set = False
        """Whether the default was changed: nobody picks budgets for requests then."""
        self.pick: Callable[[RequestId, str], KvBudget] | None = None
        """Picks one of several configured budgets for a request of a class, whichever of several drafters it
        has; None: there is but one, or nobody to choose."""

    @property
    def default(self) -> KvBudget:
        """Of requests that ask for none."""
        return self._default

    def set_default(self, written: WrittenBudget) -> None:
        """Change the default, from the next round on (any thread).

        Raises:
            ValueError: it is no budget, or does not hold the sink and a draft.
        """
        fault = self.fault(written)
        if fault is not None:
            raise ValueError(f"kv.budget: {fault}")
        self._default = KvBudget(read_budget(written), self._config.floor)
        self.is_set = True

    def fault(self, written: WrittenBudget, num_draft_tokens: int | None = None) -> str | None:
        """Say what is wrong with a budget for drafts of so many tokens.

        None, or more than is configured: as configured, for nobody's drafts are longer.
        """
        most = self._num_draft_tokens
        num_draft_tokens = most if num_draft_tokens is None else min(num_draft_tokens, most)
        try:
            amount = read_budget(written)
        except ValueError as error:
            return str(error)
        budget = KvBudget(amount, self._config.floor)
        fault = self._config.room_fault(budget, num_draft_tokens)
        if fault is None or budget.least_setting == "budget":
            return fault
        return f"a share is kv.floor tokens at least, and {fault}"

    @property
    def drafter(self) -> str | None:
        """Name of the one whose they are, of several; None: there is but one."""
        return self._drafter

    def is_of(self, drafter: str) -> bool:
        """Whether these are the budgets of one of several drafters, by its name."""
        return self._drafter in (None, drafter)

    def tokens(self, own: BudgetAmount | None, num_tokens: int, picked: KvBudget | None = None) -> int:
        """Return the budget, in tokens, of a sequence of `num_tokens` tokens.

        That is what it asks for (`own`), or what is picked for it, or the default.
        """
        if own is not None:
            return KvBudget(own, self._config.floor).tokens(num_tokens)
        return (picked or self._default).tokens(num_tokens)


def budgets_of(
    config: KvSelectionConfig, num_draft_tokens: int, *, drafter: str | None = None
) -> KvBudgets | None:
    """Return the budgets of an engine's requests; None: its drafts attend to everything.

    The other arguments are those of `KvBudgets`.
    """
    return None if config.policy == "full" else KvBudgets(config, num_draft_tokens, drafter=drafter)
