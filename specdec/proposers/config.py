"""The `speculative_config` block, with vLLM's key names where the meaning is the same."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from specdec.attention.config import AttentionName
from specdec.core.config import StrictConfig
from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.kv.config import CacheConfig
from specdec.kv.selection import KvSelectionConfig, with_tokens_as_budget
from specdec.model.config import CompileConfig, Dtype, QuantizationName
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
    fault_of,
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
_KEYS_OF_EACH: Final = (
    "dtype",
    "device",
    "num_threads",
    "compile",
    "cache",
    "kv",
    "prompt_lookup_min",
    "prompt_lookup_max",
)
"""What each of several drafters has for itself, and no other check refuses beside them."""
_RULES_ELSEWHERE = {"standard": "rejection", "strict": "rejection", "typical_acceptance_sampler": "typical"}
"""Names that other engines give to rules."""


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
    profile_seconds: float = Field(default=3.0, ge=0.0, le=60.0, allow_inf_nan=False)
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
    device: str = "auto"
    """Where the draft model runs; auto: cuda when a GPU is visible, else cpu."""
    attention_backend: AttentionName = "auto"
    """Attention of the draft model, as in `target.attention_backend`."""
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
        """The configuration of what drafts at the target; of the first drafter, where none does."""
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
    def _translate_rule(cls, data: Any) -> Any:
        name = data.get("rejection_sample_method") if isinstance(data, dict) else None
        if isinstance(name, str) and name in _RULES_ELSEWHERE:  # what is no text is refused like any other
            raise ValueError(
                f"rejection_sample_method: there is no {name!r} here; write {_RULES_ELSEWHERE[name]!r}"
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
    def _check_rule(self) -> Self:
        rule = self.rejection_sample_method
        for key in ("posterior_threshold", "posterior_alpha"):
            if getattr(self, key) is not None and rule != "typical":
                raise ValueError(f"{key} is of the rule typical: leave it out with {rule}")
        if rule == "typical" and not self.allow_lossy:
            raise ValueError(
                "rejection_sample_method: typical is lossy, its output is not distributed as the target's; "
                "write allow_lossy: true to have it all the same, or choose a lossless rule (block, say)"
            )
        if rule == "typical" and self.method == "none":
            raise ValueError("method none drafts nothing that typical could verify: leave it out")
        return self

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        shape, name = tree_shape(self.tree), f"tree.shape: {self.tree.shape}"
        if shape is None:
            return self
        if self.method != "draft_model" and not self.has_heads and not self.is_self_drafting:
            raise ValueError(
                f"{name} is about what a model or heads draft; method {self.method} has neither: leave out "
                "tree"
            )
        if not capabilities_of(self.rejection_sample_method).takes_trees:
            raise ValueError(
                f"{name}: rejection_sample_method {self.rejection_sample_method} takes chains: write "
                "sample_and_match or multi_round"
            )
        if shape.max_nodes < self.num_speculative_tokens:
            raise ValueError(
                f"{name} has {shape.max_nodes} nodes at most, fewer than num_speculative_tokens: "
                f"{self.num_speculative_tokens}: write a smaller number there, or a larger tree"
            )
        if self.tree.shape == "static" and shape.max_nodes > self.num_speculative_tokens:
            raise ValueError(
                f"{name} has {shape.max_nodes} nodes, of which num_speculative_tokens: "
                f"{self.num_speculative_tokens} would never let the last be drafted: write "
                f"{shape.max_nodes} there, or a smaller tree"
            )
        if self.overlap == "draft_ahead":
            raise ValueError(f"{name} is not drafted ahead: write overlap: ping_pong, or leave it out")
        if self.synthetic_acceptance is not None:
            raise ValueError(f"{name}: synthetic_acceptance makes up verdicts on chains: leave one out")
        return self

    @model_validator(mode="after")
    def _check_suffix(self) -> Self:
        is_used = "suffix" in (self.method, self.fallback) or self.lookup_first is not None
        if self.suffix != SuffixConfig() and not is_used:
            raise ValueError(
                "suffix is about method suffix, fallback: suffix and lookup_first; here, with method "
                f"{self.method}, nothing is looked up: leave it out"
            )
        rule = capabilities_of(self.rejection_sample_method)
        if self.suffix.max_shared_tokens and rule.needs_independent_drafts:
            raise ValueError(
                f"suffix.max_shared_tokens: {self.suffix.max_shared_tokens} does not go with "
                f"rejection_sample_method {rule.name}: what an earlier request of the same seed has said "
                "tells how its tests end, and drafts of it would change what is sampled: write 0, leave it "
                "out, or write sample_and_match"
            )
        is_model = self.method == "draft_model" or self.has_heads or self.is_self_drafting
        if self.lookup_first is not None and not is_model:
            raise ValueError(
                f"lookup_first goes before a draft model, heads, or a target that drafts for itself; method "
                f"{self.method} is none of them: leave it out"
            )
        if self.lookup_first is not None and self.fallback == "suffix":
            raise ValueError(
                "lookup_first with fallback: suffix would keep all texts twice: write fallback: ngram"
            )
        if self.suffix.shape == "tree" and self.method != "suffix":
            raise ValueError("suffix.shape: tree needs method suffix: what stands in proposes chains")
        if (self.retrieval is None) == (self.method == "retrieval"):
            raise ValueError(
                "method retrieval needs `retrieval`, with the path of a corpus; no other method takes it"
            )
        shapes = {"suffix": self.suffix.shape, "retrieval": self.retrieval and self.retrieval.shape}
        takes_trees = capabilities_of(self.rejection_sample_method).takes_trees
        if shapes.get(self.method) == "tree" and not takes_trees:
            raise ValueError(
                f"{self.method}.shape: tree: rejection_sample_method {self.rejection_sample_method} takes "
                "chains: write sample_and_match or multi_round"
            )
        return self

    @model_validator(mode="after")
    def _check_drafters(self) -> Self:
        if (self.method == "several") != bool(self.drafters):
            raise ValueError(
                "method several needs `drafters`, the list of them; no other method takes it: write both, or "
                "neither"
            )
        if self.method != "several":
            return self
        for key in _KEYS_OF_EACH:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} is of one drafter, and beside `drafters` it would be none's: write it with those "
                    "of `drafters`"
                )
        fault = fault_of(self.drafters, self.num_speculative_tokens)
        if fault is not None:
            raise ValueError(fault)
        for place, drafter in enumerate(self.drafters):
            if drafter.shadow is not None and self.rejection_sample_method != "sample_and_match":
                raise ValueError(
                    f"drafters[{place}] ({drafter.name}): shadow: drafts that are not verified tell how they "
                    "would have done under rejection_sample_method: sample_and_match alone: write that"
                )
            try:
                self.alone(drafter)
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"drafters[{place}] ({drafter.name}): {reason}") from None
        return self

    @model_validator(mode="after")
    def _check_lookahead(self) -> Self:
        if self.method != "lookahead":
            if self.lookahead != LookaheadConfig():
                raise ValueError(
                    f"lookahead is about method lookahead; here the method is {self.method}: leave it out"
                )
            return self
        most = self.lookahead.max_nodes
        if self.num_speculative_tokens > most:
            raise ValueError(
                f"num_speculative_tokens: {self.num_speculative_tokens} is more than lookahead ever "
                f"proposes, verification_set_size * (ngram_size - 1) = {most}: write at most that, or make "
                "one of these larger"
            )
        if not capabilities_of(self.rejection_sample_method).takes_trees:
            raise ValueError(
                f"method lookahead drafts trees, and rejection_sample_method {self.rejection_sample_method} "
                "takes chains: write sample_and_match or multi_round"
            )
        return self

    @model_validator(mode="after")
    def _check_synthetic(self) -> Self:
        if self.synthetic_acceptance is None:
            return self
        if self.method != "draft_model" or self.rejection_sample_method != "sample_and_match":
            raise ValueError(
                "synthetic_acceptance makes up the drafts of method draft_model, and verdicts of "
                "rejection_sample_method sample_and_match: write both, or leave it out"
            )
        if self.draft_tensor_parallel_size > 1:
            raise ValueError("synthetic_acceptance: not with draft_tensor_parallel_size: leave one out")
        if self.fallback != "none" or self.lookup_first is not None:
            raise ValueError(
                "synthetic_acceptance is that of the draft model alone: leave out fallback and lookup_first"
            )
        return self

    @model_validator(mode="after")
    def _check_online(self) -> Self:
        if self.online is not None:
            self.online.require_draft_model(
                method=self.method,
                quantization=self.quantization,
                num_ranks=self.draft_tensor_parallel_size,
                is_made_up=self.synthetic_acceptance is not None,
                rule=capabilities_of(self.rejection_sample_method),
            )
        return self

    @model_validator(mode="after")
    def _check_controller(self) -> Self:
        for low, high, k in self.num_speculative_tokens_per_batch_size:
            if not (1 <= low <= high and 0 <= k <= 64):
                raise ValueError(
                    f"num_speculative_tokens_per_batch_size: [{low}, {high}, {k}] is not [lo, hi, k] with "
                    "1 <= lo <= hi and k between 0 and 64"
                )
        if self.num_speculative_tokens_per_batch_size and self.controller == "fixed":
            raise ValueError(
                "num_speculative_tokens_per_batch_size bounds what the goodput controller chooses: "
                "write controller: goodput"
            )
        if self.overlap in ("ping_pong", "draft_ahead") and self.has_remote_heads:
            raise ValueError(
                f"overlap: {self.overlap} does not go with heads_at: draft_pool yet, since a target that is "
                "busy sends no hidden states: write overlap: lockstep, or leave it out"
            )
        if self.overlap in ("ping_pong", "draft_ahead") and self.method != "draft_model":
            raise ValueError(
                f"overlap: {self.overlap} needs a draft model that runs beside the target; method "
                f"{self.method} has none: leave out overlap"
            )
        return self

    @model_validator(mode="after")
    def _check_kv(self) -> Self:
        if self.kv.policy != "full" and not self.attends_to_kv:
            raise ValueError(
                f"kv.policy: {self.kv.policy} is about the K/V that drafting attends to; method "
                f"{self.method} has none: leave out kv"
            )
        if self.kv.dtype != "auto" and not self.is_self_drafting:
            raise ValueError(
                f"kv.dtype: {self.kv.dtype} is a copy of the target's K/V for its own drafts, and method "
                f"{self.method} makes none: leave it out"
            )
        if self.kv.positions == "in_cache" and self.method != "draft_model":
            raise ValueError(
                f"kv.positions: in_cache is about the positions that a draft model is given; with method "
                f"{self.method} tokens keep theirs: leave it out"
            )
        if self.kv.positions == "in_cache" and self.kv.policy == "full":
            raise ValueError(
                "kv.positions: in_cache counts what a window keeps, and kv.policy: full keeps everything: "
                "write policy: streaming, or leave positions out"
            )
        if self.kv.is_scored and not self.is_self_drafting:
            raise ValueError(
                f"kv.policy: {self.kv.policy} needs method self, layerskip or quantized: it looks at what "
                "the target attends to, and brings back blocks that a draft model or heads would have freed; "
                "write policy: streaming"
            )
        if self.is_self_drafting and self.rejection_sample_method != "sample_and_match":
            raise ValueError(
                f"rejection_sample_method: {self.rejection_sample_method} does not go with method "
                f"{self.method}, which drafts at the target's own noise: write sample_and_match"
            )
        self.kv.require_room(self.num_speculative_tokens)
        return self

    @model_validator(mode="after")
    def _check_views(self) -> Self:
        if (self.method == "layerskip") != (self.exit_layer is not None):
            raise ValueError(
                "method layerskip needs `exit_layer`, after how many of the target's layers drafts leave it; "
                "no other method takes it"
            )
        if self.method == "quantized" and self.quantization is None:
            raise ValueError(
                "method quantized needs `quantization`, how the target's weights are quantized for drafting: "
                "int4, say"
            )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.heads_at == "draft_pool" and not self.has_heads:
            raise ValueError(
                f"heads_at: draft_pool is about heads on the target's hidden states; method {self.method} "
                "has none: leave it out"
            )
        if self.hidden_memory_bytes != _HIDDEN_BYTES and not self.has_remote_heads:
            raise ValueError(
                "hidden_memory_bytes is what draft workers take for hidden states: write heads_at: "
                "draft_pool, or leave it out"
            )
        if self.has_heads and self.cache.memory_fraction is not None:
            raise ValueError(
                f"cache.memory_fraction: {self.cache.memory_fraction} is of a draft model's own "
                f"memory; method {self.method} has none: write cache.memory_bytes or cache.num_blocks"
            )
        if self.has_heads and not self.has_remote_heads and (self.dtype, self.device) != ("auto", "auto"):
            key = "dtype" if self.dtype != "auto" else "device"
            raise ValueError(
                f"{key}: heads run in the target's process as the target does: leave it out, or write "
                "heads_at: draft_pool"
            )
        return self

    @model_validator(mode="after")
    def _check_draft_top_k(self) -> Self:
        # Not by whether it was given: a configuration that has been dumped and read again gives everything.
        if self.draft_top_k in (None, type(self).model_fields["draft_top_k"].default):
            return self
        if self.method not in ("draft_model", "several") and not self.has_heads:
            raise ValueError(f"method {self.method} samples nothing: leave out draft_top_k")
        if self.rejection_sample_method in ("sample_and_match", "typical"):
            raise ValueError(
                f"{self.rejection_sample_method} needs no probabilities of drafts: leave out draft_top_k"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method == "draft_model" and self.model is None:
            raise ValueError("method draft_model needs `model`, the path of the draft model's folder")
        if self.has_heads and self.model is None and self.method != "mtp":
            raise ValueError(f"method {self.method} needs `model`, the path of the folder of its heads")
        if self.method != "draft_model" and not self.has_heads and self.model is not None:
            raise ValueError(f"method {self.method} takes no `model`; did you mean method: draft_model?")
        if self.method != "draft_model" and self.draft_tensor_parallel_size > 1:
            raise ValueError(
                f"method {self.method} has no model to divide: leave out draft_tensor_parallel_size"
            )
        if not self.drafts_in_pool and self.fallback != "none":
            raise ValueError(
                f"fallback: {self.fallback} stands in for a draft model, or for heads in draft workers; "
                f"method {self.method} has none: leave out fallback"
            )
        if self.max_model_len is not None and not self.keeps_kv:
            remedy = "write it with those of `drafters`" if self.method == "several" else "leave it out"
            raise ValueError(
                f"max_model_len: {self.max_model_len} is about draft_model and heads with K/V of their own "
                "(eagle, eagle3, mtp, parallel_heads, hydra): the longest text that they draft behind; "
                f"method {self.method} has no such limit: {remedy}"
            )
        if self.method != "draft_model" and self.trust_remote_code:
            remedy = "write it with those of `drafters`" if self.method == "several" else "leave it out"
            raise ValueError(
                "trust_remote_code is about the code of a draft model, target.trust_remote_code about the "
                f"target's; method {self.method} has no draft model: {remedy}"
            )
        if self.method != "draft_model" and self.attention_backend != "auto":
            raise ValueError(f"method {self.method} runs no model: leave out attention_backend")
        if self.method not in ("draft_model", "quantized") and self.quantization is not None:
            raise ValueError(f"method {self.method} has no weights to quantize: leave out quantization")
        if self.quantization is not None and self.draft_tensor_parallel_size > 1:
            raise ValueError(
                f"quantization: {self.quantization} does not go with draft_tensor_parallel_size: "
                f"{self.draft_tensor_parallel_size} yet: scales would depend on how the weights are cut"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not exceed "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self
