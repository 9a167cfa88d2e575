"""The `speculative_config.drafters` list: several drafters with names, one of them for each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from specdec.attention.config import AttentionName
from specdec.core.config import StrictConfig
from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.kv.config import CacheConfig
from specdec.kv.selection import KvSelectionConfig, with_tokens_as_budget
from specdec.model.config import CompileConfig, Device, Dtype, QuantizationName
from specdec.proposers.lookup_config import RetrievalConfig, SuffixConfig
from specdec.proposers.tree_config import ChainConfig, TreeConfig

MOST_CHOICES: Final = 4
"""Drafters that requests are given: every set of them is weighed."""
MOST_DRAFTERS: Final = 8
"""Those that only look on included."""
_OWN_KEYS: Final = frozenset({"name", "share", "shadow"})
OwnKvSelection = Annotated[KvSelectionConfig, BeforeValidator(with_tokens_as_budget)]
"""Of drafters that keep what they attend to."""


class NamedDrafter(StrictConfig):
    """What all drafters of the list have."""

    is_at_target: ClassVar[bool] = False
    """Whether it drafts in the target's step."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")
    """What metrics and requests call it (`speculation.drafter`)."""
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MAX_DRAFT_TOKENS)
    """Its k, where that is less than `speculative_config.num_speculative_tokens`; None: that."""
    share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of requests that always get this drafter, by a hash of their id (an A/B test); requests that no
    share falls to get what the controller finds best for them. None: no request as such."""
    shadow: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of requests that it drafts for without being heard: its drafts are compared with what was
    generated, never verified. No request gets such a drafter. None: requests do."""

    def settings(self, most_draft_tokens: int) -> dict[str, Any]:
        """Return its keys as those of a `speculative_config` with this drafter alone."""
        own = self.model_dump(exclude=set(_OWN_KEYS), exclude_none=True)
        return {"num_speculative_tokens": most_draft_tokens, **own}


class NgramDrafter(NamedDrafter):
    """Prompt lookup."""

    method: Literal["ngram"]
    """What followed the last tokens before, in the request's own text."""
    prompt_lookup_min: int = Field(default=2, ge=1)
    """Shortest n-gram (tokens) that is looked up."""
    prompt_lookup_max: int = Field(default=4, ge=1)
    """Longest n-gram (tokens) that is looked up."""


class SuffixDrafter(NamedDrafter):
    """What most often followed the longest match."""

    method: Literal["suffix"]
    """What most often followed the longest match, in the request's text and in those before it."""
    suffix: SuffixConfig = SuffixConfig()
    """What it looks up."""


class RetrievalDrafter(NamedDrafter):
    """A corpus."""

    method: Literal["retrieval"]
    """What followed the longest match in a corpus."""
    retrieval: RetrievalConfig
    """The corpus."""


class ModelDrafter(NamedDrafter):
    """A draft model."""

    method: Literal["draft_model"]
    """A smaller model with the same tokenizer."""
    model: str
    """Path of its folder."""
    tree: TreeConfig = ChainConfig()
    """As `speculative_config.tree`."""
    dtype: Dtype = "auto"
    """Numbers that it runs in; auto: the target's."""
    trust_remote_code: bool = False
    """Run Python code that comes with it."""
    quantization: QuantizationName | None = None
    """Quantize its weights, as `target.quantization` does the target's."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prefix that it continues, in tokens; None: its own limit."""
    device: Device = "auto"
    """Where it runs; auto: cuda when a GPU is visible, else cpu."""
    attention_backend: AttentionName = "auto"
    """As `target.attention_backend`."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of its process; None: in a worker, as many as its affinity and its container's CPU
    quota let run, shared by its ranks; in one process, PyTorch's default."""
    compile: CompileConfig = CompileConfig()
    """Compilation of its forward."""
    cache: CacheConfig | None = None
    """Its KV cache; None: 256 MiB."""
    kv: OwnKvSelection = KvSelectionConfig()
    """As `speculative_config.kv`; of several drafters, one may attend to a part."""


class _AtTarget(NamedDrafter):
    is_at_target: ClassVar[bool] = True

    tree: TreeConfig = ChainConfig()
    """As `speculative_config.tree`."""
    kv: KvSelectionConfig = KvSelectionConfig()
    """As `speculative_config.kv`; of several drafters, one may attend to a part."""


class SelfDrafter(_AtTarget):
    """The target, attending to a part of its K/V."""

    method: Literal["self"]
    """The target itself, attending to the part of its K/V that `kv` selects."""


class LayerSkipDrafter(_AtTarget):
    """The target's first layers."""

    method: Literal["layerskip"]
    """The target's first `exit_layer` layers, on its K/V."""
    exit_layer: int = Field(ge=1)
    """How many of the target's layers draft."""


class QuantizedDrafter(_AtTarget):
    """The target with weights of fewer bits."""

    method: Literal["quantized"]
    """The target with weights of fewer bits, on its K/V."""
    quantization: QuantizationName
    """How the target's weights are quantized for drafting, in a copy."""


class HeadsDrafter(_AtTarget):
    """Heads on the target's hidden states."""

    method: Literal["medusa", "hydra", "eagle", "eagle3", "mtp", "parallel_heads"]
    """What drafts from the target's hidden states, in its process."""
    model: str | None = None
    """Path of the folder of its weights; mtp without it: the target's own folder."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prefix that they continue, in tokens, where they have K/V of their own; None: the target's."""
    attention_backend: AttentionName = "auto"
    """As `target.attention_backend`, where they have K/V of their own."""
    compile: CompileConfig = CompileConfig()
    """Compilation of their forward."""
    cache: CacheConfig | None = None
    """K/V of its own, where it has some; None: 256 MiB."""
    kv: OwnKvSelection = KvSelectionConfig()
    """As `speculative_config.kv`; of several drafters, one may attend to a part."""


DrafterConfig = Annotated[
    NgramDrafter
    | SuffixDrafter
    | RetrievalDrafter
    | ModelDrafter
    | SelfDrafter
    | LayerSkipDrafter
    | QuantizedDrafter
    | HeadsDrafter,
    Field(discriminator="method"),
]


def fault_of(drafters: Sequence[DrafterConfig], most_draft_tokens: int) -> str | None:
    """Say what is wrong with drafters that are to be in one engine; None: nothing."""
    choices = [one for one in drafters if one.shadow is None]
    if twice := [name for name, count in Counter(one.name for one in drafters).items() if count > 1]:
        return f"drafters: the name {twice[0]} is there twice: give each drafter its own"
    if not choices:
        return "drafters: all of them are shadows: leave out shadow of one that requests may get"
    if len(choices) > MOST_CHOICES:
        return f"drafters: {len(choices)} to choose from are too many: give at most {MOST_CHOICES}"
    at_target = [one for one in drafters if one.is_at_target]
    if len(at_target) > 1 and not all(isinstance(one, HeadsDrafter) for one in at_target):
        names = " and ".join(one.name for one in at_target)
        return (
            f"drafters: {names} draft in the target's step, where there is place for heads, several of them, "
            "or for one that drafts with the target's own weights: leave the others out"
        )
    selecting = [one.name for one in drafters if _attends_to_a_part(one)]
    if len(selecting) > 1:
        return (
            f"drafters: {' and '.join(selecting)} each attend to a part of the K/V (kv.policy), and a "
            "request has one budget: leave out kv of all but one"
        )
    if total := _overfull(choices):
        return f"drafters: shares add up to {total:.6g}, more than all requests"
    for place, one in enumerate(drafters):
        fault = _own_fault(one, most_draft_tokens)
        if fault is not None:
            return f"drafters[{place}] ({one.name}): {fault}"
    return None


def _attends_to_a_part(one: DrafterConfig) -> bool:
    """Whether the K/V that a drafter attends to are selected by a budget."""
    return isinstance(one, ModelDrafter | _AtTarget) and one.kv.policy != "full"


def _overfull(choices: Sequence[DrafterConfig]) -> float:
    total = sum(one.share or 0.0 for one in choices)
    return total if total > 1.0 + 1e-9 else 0.0


def _own_fault(one: DrafterConfig, most_draft_tokens: int) -> str | None:
    if one.shadow is not None and one.share is not None:
        return "no request gets a shadow: leave out share or shadow"
    if one.shadow is not None and one.is_at_target:
        return f"shadow: {one.method} drafts only what is verified: give a drafter outside the target's step"
    own = one.num_speculative_tokens
    if own is not None and own > most_draft_tokens:
        return (
            f"num_speculative_tokens: {own} is more than the {most_draft_tokens} of speculative_config, "
            "which bounds every drafter: raise that"
        )
    if one.shadow is not None and isinstance(one, ModelDrafter) and len(one.kv.budgets) > 1:
        return "kv.budget: no request gets a shadow, so nobody picks one of several for it: give it one"
    return None
