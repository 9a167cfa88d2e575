"""What of a `speculative_config` goes together, each key being right by itself.

Every check raises ValueError, which names the keys, what is wrong and what would be right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from specdec.proposers.lookahead.config import LookaheadConfig
from specdec.proposers.lookup_config import SuffixConfig
from specdec.proposers.several.config import fault_of
from specdec.proposers.tree_config import tree_shape
from specdec.verification.registry import capabilities_of

if TYPE_CHECKING:
    from specdec.proposers.config import SpeculativeConfig

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


def _default_of(config: SpeculativeConfig, key: str) -> Any:
    return type(config).model_fields[key].default


def _check_rule(config: SpeculativeConfig) -> None:
    rule = config.rejection_sample_method
    for key in ("posterior_threshold", "posterior_alpha"):
        if getattr(config, key) is not None and rule != "typical":
            raise ValueError(f"{key} is of the rule typical: leave it out with {rule}")
    if rule == "typical" and not config.allow_lossy:
        raise ValueError(
            "rejection_sample_method: typical is lossy, its output is not distributed as the target's; "
            "write allow_lossy: true to have it all the same, or choose a lossless rule (block, say)"
        )
    if rule == "typical" and config.method == "none":
        raise ValueError("method none drafts nothing that typical could verify: leave it out")


def _check_tree(config: SpeculativeConfig) -> None:
    shape, name = tree_shape(config.tree), f"tree.shape: {config.tree.shape}"
    if shape is None:
        return
    if config.method != "draft_model" and not config.has_heads and not config.is_self_drafting:
        raise ValueError(
            f"{name} is about what a model or heads draft; method {config.method} has neither: leave out tree"
        )
    if not capabilities_of(config.rejection_sample_method).takes_trees:
        raise ValueError(
            f"{name}: rejection_sample_method {config.rejection_sample_method} takes chains: write "
            "sample_and_match or multi_round"
        )
    if shape.max_nodes < config.num_speculative_tokens:
        raise ValueError(
            f"{name} has {shape.max_nodes} nodes at most, fewer than num_speculative_tokens: "
            f"{config.num_speculative_tokens}: write a smaller number there, or a larger tree"
        )
    if config.tree.shape == "static" and shape.max_nodes > config.num_speculative_tokens:
        raise ValueError(
            f"{name} has {shape.max_nodes} nodes, of which num_speculative_tokens: "
            f"{config.num_speculative_tokens} would never let the last be drafted: write "
            f"{shape.max_nodes} there, or a smaller tree"
        )
    if config.overlap == "draft_ahead":
        raise ValueError(f"{name} is not drafted ahead: write overlap: ping_pong, or leave it out")
    if config.synthetic_acceptance is not None:
        raise ValueError(f"{name}: synthetic_acceptance makes up verdicts on chains: leave one out")


def _check_lookups(config: SpeculativeConfig) -> None:
    is_used = "suffix" in (config.method, config.fallback) or config.lookup_first is not None
    if config.suffix != SuffixConfig() and not is_used:
        raise ValueError(
            "suffix is about method suffix, fallback: suffix and lookup_first; here, with method "
            f"{config.method}, nothing is looked up: leave it out"
        )
    rule = capabilities_of(config.rejection_sample_method)
    if config.suffix.max_shared_tokens and rule.needs_independent_drafts:
        raise ValueError(
            f"suffix.max_shared_tokens: {config.suffix.max_shared_tokens} does not go with "
            f"rejection_sample_method {rule.name}: what an earlier request of the same seed has said "
            "tells how its tests end, and drafts of it would change what is sampled: write 0, leave it "
            "out, or write sample_and_match"
        )
    is_model = config.method == "draft_model" or config.has_heads or config.is_self_drafting
    if config.lookup_first is not None and not is_model:
        raise ValueError(
            f"lookup_first goes before a draft model, heads, or a target that drafts for itself; method "
            f"{config.method} is none of them: leave it out"
        )
    if config.lookup_first is not None and config.fallback == "suffix":
        raise ValueError(
            "lookup_first with fallback: suffix would keep all texts twice: write fallback: ngram"
        )
    if config.suffix.shape == "tree" and config.method != "suffix":
        raise ValueError("suffix.shape: tree needs method suffix: what stands in proposes chains")
    if (config.retrieval is None) == (config.method == "retrieval"):
        raise ValueError(
            "method retrieval needs `retrieval`, with the path of a corpus; no other method takes it"
        )
    shapes = {"suffix": config.suffix.shape, "retrieval": config.retrieval and config.retrieval.shape}
    takes_trees = capabilities_of(config.rejection_sample_method).takes_trees
    if shapes.get(config.method) == "tree" and not takes_trees:
        raise ValueError(
            f"{config.method}.shape: tree: rejection_sample_method {config.rejection_sample_method} takes "
            "chains: write sample_and_match or multi_round"
        )


def _check_drafters(config: SpeculativeConfig) -> None:
    if (config.method == "several") != bool(config.drafters):
        raise ValueError(
            "method several needs `drafters`, the list of them; no other method takes it: write both, or "
            "neither"
        )
    if config.method != "several":
        return
    for key in _KEYS_OF_EACH:
        if getattr(config, key) != _default_of(config, key):
            raise ValueError(
                f"{key} is of one drafter, and beside `drafters` it would be none's: write it with those "
                "of `drafters`"
            )
    fault = fault_of(config.drafters, config.num_speculative_tokens)
    if fault is not None:
        raise ValueError(fault)
    for place, drafter in enumerate(config.drafters):
        if drafter.shadow is not None and config.rejection_sample_method != "sample_and_match":
            raise ValueError(
                f"drafters[{place}] ({drafter.name}): shadow: drafts that are not verified tell how they "
                "would have done under rejection_sample_method: sample_and_match alone: write that"
            )
        try:
            config.alone(drafter)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"drafters[{place}] ({drafter.name}): {reason}") from None


def _check_lookahead(config: SpeculativeConfig) -> None:
    if config.method != "lookahead":
        if config.lookahead != LookaheadConfig():
            raise ValueError(
                f"lookahead is about method lookahead; here the method is {config.method}: leave it out"
            )
        return
    most = config.lookahead.max_nodes
    if config.num_speculative_tokens > most:
        raise ValueError(
            f"num_speculative_tokens: {config.num_speculative_tokens} is more than lookahead ever "
            f"proposes, verification_set_size * (ngram_size - 1) = {most}: write at most that, or make "
            "one of these larger"
        )
    if not capabilities_of(config.rejection_sample_method).takes_trees:
        raise ValueError(
            f"method lookahead drafts trees, and rejection_sample_method {config.rejection_sample_method} "
            "takes chains: write sample_and_match or multi_round"
        )


def _check_synthetic(config: SpeculativeConfig) -> None:
    if config.synthetic_acceptance is None:
        return
    if config.method != "draft_model" or config.rejection_sample_method != "sample_and_match":
        raise ValueError(
            "synthetic_acceptance makes up the drafts of method draft_model, and verdicts of "
            "rejection_sample_method sample_and_match: write both, or leave it out"
        )
    if config.draft_tensor_parallel_size > 1:
        raise ValueError("synthetic_acceptance: not with draft_tensor_parallel_size: leave one out")
    if config.fallback != "none" or config.lookup_first is not None:
        raise ValueError(
            "synthetic_acceptance is that of the draft model alone: leave out fallback and lookup_first"
        )


def _check_online(config: SpeculativeConfig) -> None:
    if config.online is not None:
        config.online.require_draft_model(
            method=config.method,
            quantization=config.quantization,
            num_ranks=config.draft_tensor_parallel_size,
            is_made_up=config.synthetic_acceptance is not None,
            rule=capabilities_of(config.rejection_sample_method),
        )


def _check_controller(config: SpeculativeConfig) -> None:
    for low, high, k in config.num_speculative_tokens_per_batch_size:
        if not (1 <= low <= high and 0 <= k <= 64):
            raise ValueError(
                f"num_speculative_tokens_per_batch_size: [{low}, {high}, {k}] is not [lo, hi, k] with "
                "1 <= lo <= hi and k between 0 and 64"
            )
    if config.num_speculative_tokens_per_batch_size and config.controller == "fixed":
        raise ValueError(
            "num_speculative_tokens_per_batch_size bounds what the goodput controller chooses: "
            "write controller: goodput"
        )
    if config.overlap in ("ping_pong", "draft_ahead") and config.has_remote_heads:
        raise ValueError(
            f"overlap: {config.overlap} does not go with heads_at: draft_pool yet, since a target that is "
            "busy sends no hidden states: write overlap: lockstep, or leave it out"
        )
    if config.overlap in ("ping_pong", "draft_ahead") and config.method != "draft_model":
        raise ValueError(
            f"overlap: {config.overlap} needs a draft model that runs beside the target; method "
            f"{config.method} has none: leave out overlap"
        )


def _check_kv(config: SpeculativeConfig) -> None:
    if config.kv.policy != "full" and not config.attends_to_kv:
        raise ValueError(
            f"kv.policy: {config.kv.policy} is about the K/V that drafting attends to; method "
            f"{config.method} has none: leave out kv"
        )
    if config.kv.dtype != "auto" and not config.is_self_drafting:
        raise ValueError(
            f"kv.dtype: {config.kv.dtype} is a copy of the target's K/V for its own drafts, and method "
            f"{config.method} makes none: leave it out"
        )
    if config.kv.positions == "in_cache" and config.method != "draft_model":
        raise ValueError(
            f"kv.positions: in_cache is about the positions that a draft model is given; with method "
            f"{config.method} tokens keep theirs: leave it out"
        )
    if config.kv.positions == "in_cache" and config.kv.policy == "full":
        raise ValueError(
            "kv.positions: in_cache counts what a window keeps, and kv.policy: full keeps everything: "
            "write policy: streaming, or leave positions out"
        )
    if config.kv.is_scored and not config.is_self_drafting:
        raise ValueError(
            f"kv.policy: {config.kv.policy} needs method self, layerskip or quantized: it looks at what "
            "the target attends to, and brings back blocks that a draft model or heads would have freed; "
            "write policy: streaming"
        )
    if config.is_self_drafting and config.rejection_sample_method != "sample_and_match":
        raise ValueError(
            f"rejection_sample_method: {config.rejection_sample_method} does not go with method "
            f"{config.method}, which drafts at the target's own noise: write sample_and_match"
        )
    config.kv.require_room(config.num_speculative_tokens)


def _check_views(config: SpeculativeConfig) -> None:
    if (config.method == "layerskip") != (config.exit_layer is not None):
        raise ValueError(
            "method layerskip needs `exit_layer`, after how many of the target's layers drafts leave it; "
            "no other method takes it"
        )
    if config.method == "quantized" and config.quantization is None:
        raise ValueError(
            "method quantized needs `quantization`, how the target's weights are quantized for drafting: "
            "int4, say"
        )


def _check_heads(config: SpeculativeConfig) -> None:
    if config.heads_at == "draft_pool" and not config.has_heads:
        raise ValueError(
            f"heads_at: draft_pool is about heads on the target's hidden states; method {config.method} "
            "has none: leave it out"
        )
    if (
        config.hidden_memory_bytes != _default_of(config, "hidden_memory_bytes")
        and not config.has_remote_heads
    ):
        raise ValueError(
            "hidden_memory_bytes is what draft workers take for hidden states: write heads_at: "
            "draft_pool, or leave it out"
        )
    if config.has_heads and config.cache.memory_fraction is not None:
        raise ValueError(
            f"cache.memory_fraction: {config.cache.memory_fraction} is of a draft model's own "
            f"memory; method {config.method} has none: write cache.memory_bytes or cache.num_blocks"
        )
    if config.has_heads and not config.has_remote_heads and (config.dtype, config.device) != ("auto", "auto"):
        key = "dtype" if config.dtype != "auto" else "device"
        raise ValueError(
            f"{key}: heads run in the target's process as the target does: leave it out, or write "
            "heads_at: draft_pool"
        )


def _check_draft_top_k(config: SpeculativeConfig) -> None:
    # Not by whether it was given: a configuration that has been dumped and read again gives everything.
    if config.draft_top_k in (None, _default_of(config, "draft_top_k")):
        return
    if config.method not in ("draft_model", "several") and not config.has_heads:
        raise ValueError(f"method {config.method} samples nothing: leave out draft_top_k")
    if config.rejection_sample_method in ("sample_and_match", "typical"):
        raise ValueError(
            f"{config.rejection_sample_method} needs no probabilities of drafts: leave out draft_top_k"
        )


def _check_models(config: SpeculativeConfig) -> None:
    if config.method == "draft_model" and config.model is None:
        raise ValueError("method draft_model needs `model`, the path of the draft model's folder")
    if config.has_heads and config.model is None and config.method != "mtp":
        raise ValueError(f"method {config.method} needs `model`, the path of the folder of its heads")
    if config.method != "draft_model" and not config.has_heads and config.model is not None:
        raise ValueError(f"method {config.method} takes no `model`; did you mean method: draft_model?")
    if config.method != "draft_model" and config.draft_tensor_parallel_size > 1:
        raise ValueError(
            f"method {config.method} has no model to divide: leave out draft_tensor_parallel_size"
        )
    if not config.drafts_in_pool and config.fallback != "none":
        raise ValueError(
            f"fallback: {config.fallback} stands in for a draft model, or for heads in draft workers; "
            f"method {config.method} has none: leave out fallback"
        )
    if config.max_model_len is not None and not config.keeps_kv:
        remedy = "write it with those of `drafters`" if config.method == "several" else "leave it out"
        raise ValueError(
            f"max_model_len: {config.max_model_len} is about draft_model and heads with K/V of their own "
            "(eagle, eagle3, mtp, parallel_heads, hydra): the longest text that they draft behind; "
            f"method {config.method} has no such limit: {remedy}"
        )
    if config.method != "draft_model" and config.trust_remote_code:
        remedy = "write it with those of `drafters`" if config.method == "several" else "leave it out"
        raise ValueError(
            "trust_remote_code is about the code of a draft model, target.trust_remote_code about the "
            f"target's; method {config.method} has no draft model: {remedy}"
        )
    if config.method not in ("draft_model", "quantized") and config.quantization is not None:
        raise ValueError(f"method {config.method} has no weights to quantize: leave out quantization")
    if config.quantization is not None and config.draft_tensor_parallel_size > 1:
        raise ValueError(
            f"quantization: {config.quantization} does not go with draft_tensor_parallel_size: "
            f"{config.draft_tensor_parallel_size} yet: scales would depend on how the weights are cut"
        )
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ValueError(
            f"prompt_lookup_min ({config.prompt_lookup_min}) must not exceed "
            f"prompt_lookup_max ({config.prompt_lookup_max})"
        )


def _check_attention(config: SpeculativeConfig) -> None:
    if config.attention_backend == "auto" or config.keeps_kv:
        return
    if config.is_self_drafting:
        raise ValueError(
            f"attention_backend: method {config.method} drafts with the target's attention: leave it out, or "
            "write target.attention_backend"
        )
    remedy = "write it with those of `drafters`" if config.method == "several" else "leave it out"
    raise ValueError(
        f"attention_backend: {config.attention_backend} is about draft_model and heads with K/V of their own "
        f"(eagle, eagle3, mtp, parallel_heads, hydra); method {config.method} has none: {remedy}"
    )


CHECKS: Final[tuple[Callable[[SpeculativeConfig], None], ...]] = (
    _check_rule,
    _check_tree,
    _check_lookups,
    _check_drafters,
    _check_lookahead,
    _check_synthetic,
    _check_online,
    _check_controller,
    _check_kv,
    _check_views,
    _check_heads,
    _check_draft_top_k,
    _check_models,
    _check_attention,
)
"""In this order: the first that finds something is heard."""
