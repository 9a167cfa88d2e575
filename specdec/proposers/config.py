"""The `speculative_config` block, with vLLM's key names where the meaning is the same."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from specdec.attention.config import AttentionName
from specdec.core.config import StrictConfig
from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.kv.config import CacheConfig
from specdec.kv.selection import KvSelectionConfig, with_tokens_as_budget
from specdec.model.config import CompileConfig, Device, Dtype, QuantizationName
from specdec.proposers.config_checks import CHECKS
from specdec.proposers.lookahead.config import LookaheadConfig
from specdec.proposers.lookup_config import (
    RetrievalConfig,
    SuffixConfig,
    explain_suffix_keys,
)
from specdec.proposers.online_config import OnlineConfig
from specdec.proposers.several.config import (
    MOST_DRAFTERS,
    DrafterConfig,
    HeadsDrafter,
    ModelDrafter,
)
from specdec.proposers.synthetic_config import SyntheticAcceptance
from specdec.proposers.tree_config import ChainConfig, TreeConfig, tree_shape
from specdec.verification.registry import capabilities_of

_CACHE_BYTES = 256 << 20
_HIDDEN_BYTES = 256 << 20
Method = Literal[
    "none",
    "ngram",
    "suffix",
    "retrieval",
    "lookahead",
    "draft_model",
    "self",
    "layerskip",
    "quantized",
    "medusa",
    "hydra",
    "eagle",
    "eagle3",
    "mtp",
    "parallel_heads",
    "several",
]
HeadPlace = Literal["target", "draft_pool"]
SELF_METHODS: Final = frozenset({"self", "layerskip", "quantized"})
"""The target drafts, or a view of it, on its own K/V."""
HEAD_METHODS: Final = frozenset({"medusa", "hydra", "eagle", "eagle3", "mtp", "parallel_heads"})
"""Draft from hidden states of the target, in its process or in draft workers, with weights of their own."""
_OWN_KV_METHODS: Final = HEAD_METHODS - {"medusa"} | {"draft_model"}
"""What drafts keeps K/V of its own, as far as the method tells."""
Overlap = Literal["auto", "lockstep", "ping_pong", "draft_ahead"]
Rule = Literal["sample_and_match", "rejection", "block", "multi_round", "typical"]
_SHARED_KEYS: Final = (
    "rejection_sample_method",
    "allow_lossy",
    "allow_pickled_weights",
    "posterior_threshold",
    "posterior_alpha",
    "draft_top_k",
)
"""What all of several drafters have in common."""
_RULES_ELSEWHERE = {
    "standard": "'rejection'",
    "strict": "'rejection'",
    "typical_acceptance_sampler": "'typical'",
    "synthetic": "synthetic_acceptance in its place",
}
"""Names that other engines give to rules, and what to write here."""
_KEYS_ELSEWHERE = {
    "revision": "a model is a folder here, of one revision: write its path as `model`",
    "kv_cache_dtype": "what drafts keeps its K/V in the numbers that it runs in: leave it out (kv.dtype is "
    "about drafts of the target itself)",
    "draft_sample_method": "rejection_sample_method says how drafts are sampled, too: leave it out",
    "synthetic_acceptance_length": "write synthetic_acceptance, with the acceptance at each position",
}
"""Keys of other engines that have no namesake here, and what to write."""


class SpeculativeConfig(StrictConfig):
    """What drafts, and how much."""

    method: Method = "ngram"
    """none; ngram (prompt lookup); suffix (what most often followed the longest match in the request's own
    text and in what earlier requests generated); retrieval (what followed it in a corpus of yours);
    lookahead (n-grams that the target makes up itself, beside what it verifies);
    draft_model (a smaller model with the same tokenizer); self (the target itself, attending to the part of
    its K/V that `kv` selects); layerskip (the target's first `exit_layer` layers, on its K/V); quantized (the
    target with weights of fewer bits, `quantization`, on its K/V); medusa, hydra, parallel_heads (a head
    for each token to come on the target's hidden states); eagle, eagle3, mtp (a layer or more that goes on
    behind its own drafts, on the target's hidden states); `heads_at` says in which process; several
    (those of `drafters`, for each request one)."""
    heads_at: HeadPlace = "target"
    """medusa, hydra, parallel_heads, eagle, eagle3, mtp: where they draft. target: in the target's process;
    draft_pool: in draft workers, as a draft model does, to which target workers send hidden states over
    `torch.distributed`. An engine that is all in one process has no draft pool: they draft at the target
    there."""
    model: str | None = None
    """Path of the folder of the draft model, or of the heads; required by draft_model, medusa, hydra,
    parallel_heads, eagle and eagle3; mtp without it: the target's own folder."""
    allow_pickled_weights: bool = False
    """Heads without safetensors: read them of `pytorch_model.bin`, `medusa_lm_head.pt` or `hydra_lm_head.pt`.
    Only tensors are, and anything else in such a file is refused; but to unpickle is to trust PyTorch with
    what the file says, which safetensors spare. False: such a folder is refused."""
    exit_layer: int | None = Field(default=None, ge=1)
    """layerskip: how many of the target's layers draft, less than it has; its final norm and its head read
    what the last of these gives. layerskip needs it, no other method takes it."""
    num_speculative_tokens: int = Field(default=4, ge=1, le=MAX_DRAFT_TOKENS)
    """k: draft tokens per request and round; with the goodput controller, the most there may be. What a
    request asks for itself (`speculation`) is cut to that."""
    tree: TreeConfig = ChainConfig()
    """draft_model, what drafts from hidden states (medusa, eagle, ...), and self, layerskip, quantized: which
    trees are drafted, of `num_speculative_tokens` nodes at most. `shape: chain`: none."""
    controller: Literal["goodput", "fixed"] = "goodput"
    """goodput: k of every request, the overlap of drafting and verifying, and whether to draft at all follow
    what rounds cost and bring, so that speculation costs nobody anything; fixed: always
    `num_speculative_tokens`. A request's own `speculation` wins over either, up to that number."""
    overlap: Overlap = "auto"
    """How drafting and verifying share time. lockstep: one after the other; ping_pong: two halves of the
    requests take turns; draft_ahead: continuations of likely verdicts are drafted during verification; auto:
    of those that are possible, what the controller finds best (lockstep with a fixed k)."""
    max_branches: int = Field(default=4, ge=1, le=32)
    """draft_ahead: most continuations that are prepared for one request and round."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """[[lo, hi, k], ...]: with lo to hi running requests k is at most that; the first that holds counts. A
    bound for the goodput controller, which chooses less by itself where that is better."""
    profile_seconds: float = Field(default=3.0, ge=0.0, le=60.0)
    """About how long (seconds) costs of draft and target are measured before the first request, once for each
    pair, machine and configuration; 0: never, rounds tell."""
    profile_dir: str | None = None
    """Folder where measured costs are kept; None: `~/.cache/drafthouse/profiles`."""
    draft_tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes (GPUs) that hold one draft model together; independent of the target's."""
    dtype: Dtype = "auto"
    """Numbers that the draft model runs in; auto: the target's."""
    trust_remote_code: bool = False
    """draft_model: run Python code that comes with the draft model; independent of
    `target.trust_remote_code`."""
    quantization: QuantizationName | None = None
    """Quantize the draft model's weights, as `target.quantization` does the target's; independent of it.
    quantized, which needs it: how the target's weights are quantized for drafting, in a copy beside the ones
    that verify."""
    max_model_len: int | None = Field(default=None, ge=2)
    """draft_model, and heads with K/V of their own: longest prefix that they continue, in tokens; None: the
    draft model's own limit, with heads the target's. With `kv.positions: in_cache`, the positions that a
    draft model is given; texts may be longer."""
    fallback: Literal["none", "ngram", "suffix"] = "none"
    """What a request is proposed in a round that the draft model has nothing for: its drafts were not
    prepared (overlap draft_ahead), its draft worker is late, dead or full, or its text is longer than the
    draft model reads. none: nothing, it goes on with one token; ngram: what followed its last tokens before
    (see `prompt_lookup_min`);
    suffix: as method suffix, chains."""
    lookup_first: int | None = Field(default=None, ge=1, le=64)
    """draft_model, heads at the target, and targets that draft for themselves: where the last so many tokens,
    or more, occurred before, what followed them is proposed (as by method suffix, chains), and the drafter is
    not asked. None: it always is."""
    prompt_lookup_min: int = Field(default=2, ge=1)
    """Shortest n-gram (tokens) that ngram looks up, as method or as fallback."""
    prompt_lookup_max: int = Field(default=4, ge=1)
    """Longest n-gram (tokens) that ngram looks up."""
    suffix: SuffixConfig = SuffixConfig()
    """What suffix looks up, as method or as fallback."""
    retrieval: RetrievalConfig | None = None
    """The corpus of method retrieval, which needs it."""
    lookahead: LookaheadConfig = LookaheadConfig()
    """Of method lookahead: its window, its n-grams and its pool."""
    drafters: tuple[DrafterConfig, ...] = Field(default=(), max_length=MOST_DRAFTERS)
    """several: the drafters, each with a name, its method and that method's keys. Which of them a request
    gets is its own choice, or that of their shares, or the controller's: by what each has brought requests
    of its class for what it costs (with controller: fixed, the first)."""
    rejection_sample_method: Rule = "sample_and_match"
    """Verification rule. sample_and_match (the default), rejection, block and multi_round are lossless;
    typical changes what is generated at a temperature above 0, and responses say so."""
    allow_lossy: bool = False
    """Consent to a rule that is not lossless; typical needs it."""
    posterior_threshold: float | None = Field(default=None, gt=0.0, le=1.0)
    """typical: a draft token with a probability above this always stands (Medusa's epsilon); None: 0.09."""
    posterior_alpha: float | None = Field(default=None, gt=0.0, le=1.0)
    """typical: with entropy H (nats), a draft token with a probability above this times exp(-H) stands
    (Medusa's delta); None: 0.3."""
    draft_top_k: int | None = Field(default=1024, ge=1)
    """rejection, block, multi_round: the draft model samples from its so many most likely tokens at most.
    This bounds what goes over the network (8 bytes for each, per draft token); None: from all. Lossless
    either way."""
    device: Device = "auto"
    """Where the draft model runs; auto: cuda when a GPU is visible, else cpu."""
    attention_backend: AttentionName = "auto"
    """Attention of the draft model, or of heads with K/V of their own, as in `target.attention_backend`."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the draft model's process; None: in a worker, as many as its affinity and its
    container's CPU quota let run, shared by its ranks; in one process, PyTorch's default."""
    compile: CompileConfig = CompileConfig()
    """Compilation of the draft model's forward."""
    synthetic_acceptance: SyntheticAcceptance | None = None
    """For benchmarks alone: tokens are made up so that drafts stand this often. Nothing else takes it."""
    cache: CacheConfig = CacheConfig(memory_bytes=_CACHE_BYTES)
    """The KV cache of the draft model, or of heads that have K/V of their own (all but medusa, and hydra
    without a prefix layer); 256 MiB unless a size is given."""
    hidden_memory_bytes: int = Field(default=_HIDDEN_BYTES, ge=1 << 20)
    """heads_at: draft_pool: most memory (bytes) of a draft worker for hidden states of one target group that
    its heads have not read yet. A single request may take more."""
    online: OnlineConfig | None = None
    """draft_model: the draft model goes on learning, from what the target writes. None: it does not."""
    kv: KvSelectionConfig = KvSelectionConfig()
    """What drafts attend to of a sequence's K/V, and all of it that a draft model keeps, or heads that have
    K/V of their own. Output is the same whatever it says."""

    def alone(self, drafter: DrafterConfig) -> Self:
        """Return the configuration of one of `drafters`, as if there were no other."""
        shared = {key: getattr(self, key) for key in _SHARED_KEYS}
        if not isinstance(drafter, ModelDrafter | HeadsDrafter):
            del shared["draft_top_k"]  # it samples nothing
        return type(self).model_validate(shared | drafter.settings(self.num_speculative_tokens))

    @property
    def choices(self) -> tuple[Self, ...]:
        """Configurations of the drafters that requests may get, in order: this one, where it is alone."""
        if self.method != "several":
            return (self,)
        return tuple(self.alone(one) for one in self.drafters if one.shadow is None)

    @property
    def every_drafter(self) -> tuple[Self, ...]:
        """Configurations of all drafters, those included that no request gets."""
        return tuple(map(self.alone, self.drafters)) if self.method == "several" else (self,)

    @property
    def at_target(self) -> Self:
        """The configuration of what drafts at the target: of several heads, without all else; of the first
        drafter, where none does.
        """
        heads = tuple(one for one in self.drafters if isinstance(one, HeadsDrafter))
        if len(heads) > 1:
            return self.model_copy(update={"drafters": heads})
        return next((one for one in self.choices if one.has_heads or one.is_self_drafting), self.choices[0])

    @property
    def drafts_trees(self) -> bool:
        """Whether rows of a sequence may be anything but a chain: trees, and the window of lookahead."""
        return any(one._has_tree for one in self.every_drafter)

    @property
    def _has_tree(self) -> bool:
        lookups = {"suffix": self.suffix.shape, "retrieval": self.retrieval and self.retrieval.shape}
        is_tree = tree_shape(self.tree) is not None or lookups.get(self.method) == "tree"
        return is_tree or self.method == "lookahead"

    @property
    def budgeted_choice(self) -> int | None:
        """Which of `choices` attends to a part of the K/V, by a budget; there is one at most. None: none."""
        return next((place for place, one in enumerate(self.choices) if one.kv.policy != "full"), None)

    @property
    def has_heads(self) -> bool:
        """Whether heads draft from the target's hidden states."""
        return self.method in HEAD_METHODS

    @property
    def has_remote_heads(self) -> bool:
        """Whether heads draft in draft workers, to which hidden states are sent."""
        return self.has_heads and self.heads_at == "draft_pool"

    @property
    def drafts_in_pool(self) -> bool:
        """Whether there is something for draft workers to do."""
        return self.method == "draft_model" or self.has_remote_heads

    def in_one_process(self) -> SpeculativeConfig:
        """Return what it means where there is no draft pool."""
        if not self.has_remote_heads:
            return self
        return self.model_copy(update={"heads_at": "target", "device": "auto", "dtype": "auto"})

    @property
    def num_rows_beside(self) -> int:
        """Rows that drafting for a sequence adds to a round, beside those of drafts."""
        return self.lookahead.num_rows_beside if self.method == "lookahead" else 0

    @property
    def lookup(self) -> SuffixConfig:
        """`suffix`, as the verification rule allows it."""
        if capabilities_of(self.rejection_sample_method).needs_independent_drafts:
            return self.suffix.model_copy(update={"max_shared_tokens": 0})
        return self.suffix

    @property
    def is_self_drafting(self) -> bool:
        """Whether the target drafts, or a view of it, on the target's own K/V."""
        return self.method in SELF_METHODS

    @property
    def keeps_kv(self) -> bool:
        """Whether what drafts keeps K/V of its own, as far as the method tells."""
        return self.method in _OWN_KV_METHODS

    @property
    def attends_to_kv(self) -> bool:
        """Whether drafting attends to K/V, from which `kv` may select."""
        return self.keeps_kv or self.is_self_drafting

    @property
    def max_prefix_len(self) -> int | None:
        """Longest prefix (tokens) that is drafted behind, as far as the configuration says; what else there
        is to know, draft workers tell (`kv.positions: auto`, see `draft_positions`).
        """
        may_be_moved = (
            self.method == "draft_model" and self.kv.policy != "full" and self.kv.positions != "absolute"
        )
        return None if may_be_moved else self.max_model_len

    @property
    def num_read_behind(self) -> int:
        """Most tokens that are read behind the committed ones: a draft, or nodes of a tree that are looked
        behind, and, where a draft model looks ahead, pending tokens and the target's own behind them.
        """
        most, shape = self.num_speculative_tokens, tree_shape(self.tree)
        if shape is not None:
            return max(most, shape.num_looked_behind(most))
        return most if self.has_heads else 2 * most + 1

    @property
    def num_beside_budget(self) -> int:
        """Positions that `kv.positions: in_cache` takes beside the budget: whole blocks are selected, and
        drafts come behind them.
        """
        return 2 * self.cache.block_size + self.num_read_behind

    @field_validator("cache", mode="after")
    @classmethod
    def _size_cache(cls, cache: CacheConfig) -> CacheConfig:
        if cache.is_sized:
            return cache
        return cache.model_copy(update={"memory_bytes": _CACHE_BYTES})

    @model_validator(mode="before")
    @classmethod
    def _explain_parallel_sizes(cls, data: Any) -> Any:
        if isinstance(data, dict) and "tensor_parallel_size" in data:
            raise ValueError(
                "tensor_parallel_size is not a key of speculative_config: "
                "write draft_tensor_parallel_size for the draft model"
            )
        if isinstance(data, dict) and {"pipeline_parallel_size", "draft_pipeline_parallel_size"} & set(data):
            raise ValueError(
                "a draft model is not divided into stages: leave out pipeline_parallel_size; "
                "draft_tensor_parallel_size divides its layers"
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _explain_foreign_keys(cls, data: Any) -> Any:
        foreign = [key for key in _KEYS_ELSEWHERE if key in data] if isinstance(data, dict) else []
        if foreign:
            raise ValueError(f"there is no key {foreign[0]} here; {_KEYS_ELSEWHERE[foreign[0]]}")
        return data

    @model_validator(mode="before")
    @classmethod
    def _translate_rule(cls, data: Any) -> Any:
        name = data.get("rejection_sample_method") if isinstance(data, dict) else None
        if isinstance(name, str) and name in _RULES_ELSEWHERE:  # what is no text is refused like any other
            raise ValueError(
                f"rejection_sample_method: there is no {name!r} here; write {_RULES_ELSEWHERE[name]}"
            )
        return data

    @model_validator(mode="before")
    @classmethod
    def _bound_what_is_kept(cls, data: Any) -> Any:
        method = data.get("method") if isinstance(data, dict) else None
        if isinstance(method, str) and method in _OWN_KV_METHODS and "kv" in data:
            return {**data, "kv": with_tokens_as_budget(data["kv"])}
        return data

    @model_validator(mode="before")
    @classmethod
    def _explain_suffix_keys(cls, data: Any) -> Any:
        explain_suffix_keys(data)
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        for check in CHECKS:
            check(self)
        return self
