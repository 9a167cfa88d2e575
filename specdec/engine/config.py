"""Everything one engine needs to know."""

from __future__ import annotations

from typing import Self

from pydantic import ValidationError, model_validator

from specdec.attention.config import refusal_of
from specdec.core.config import StrictConfig
from specdec.kv.config import CacheConfig
from specdec.model.config import ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.sampling.config import GrammarConfig
from specdec.scheduling.config import SchedulerConfig


class EngineConfig(StrictConfig):
    """Target, drafter, cache and scheduler of one engine."""

    target: ModelConfig
    """The model whose distribution the output follows."""
    speculative_config: SpeculativeConfig = SpeculativeConfig()
    """What drafts for it; without this block: ngram."""
    cache: CacheConfig = CacheConfig()
    """The target's KV cache."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Batching and queueing."""
    grammar: GrammarConfig = GrammarConfig()
    """Bounds of the grammars (JSON schemas, regular expressions, ...) that requests bring."""

    @model_validator(mode="after")
    def _check_each_drafter(self) -> Self:
        speculative = self.speculative_config
        for place, one in enumerate(speculative.every_drafter if speculative.method == "several" else ()):
            try:
                type(self)(target=self.target, speculative_config=one)
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
                name = speculative.drafters[place].name
                raise ValueError(f"speculative_config.drafters[{place}] ({name}): {reason}") from None
        return self

    @model_validator(mode="after")
    def _check_invariance(self) -> Self:
        rule = self.speculative_config.rejection_sample_method
        if (
            self.target.batch_invariant
            and self.speculative_config.method != "none"
            and rule != "sample_and_match"
        ):
            raise ValueError(
                f"target.batch_invariant does not go with rejection_sample_method: {rule}, whose tokens "
                "depend on what was drafted: write sample_and_match"
            )
        return self

    @model_validator(mode="after")
    def _check_self_speculation(self) -> Self:
        method, target = self.speculative_config.method, self.target
        if self.speculative_config.is_self_drafting and target.pipeline_parallel_size > 1:
            raise ValueError(
                f"speculative_config.method: {method} does not go with target.pipeline_parallel_size: "
                f"{target.pipeline_parallel_size} yet: write 1, or use tensor_parallel_size"
            )
        if method == "quantized" and target.quantization is not None:
            raise ValueError(
                "speculative_config.method: quantized drafts with fewer bits than the target has, and "
                f"target.quantization: {target.quantization} leaves none to take away: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_remote_heads(self) -> Self:
        speculative, num_stages = self.speculative_config, self.target.pipeline_parallel_size
        if speculative.has_remote_heads and num_stages > 1:
            raise ValueError(
                f"speculative_config.heads_at: draft_pool does not go with target.pipeline_parallel_size: "
                f"{num_stages} yet, since no stage has all hidden states: write heads_at: target, or use "
                "tensor_parallel_size"
            )
        return self

    def in_one_process(self) -> EngineConfig:
        """Return what it means where one process has all of it."""
        speculative = self.speculative_config
        return self.model_copy(update={"speculative_config": speculative.in_one_process()})

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        target, draft = self.target, self.speculative_config
        dtype = target.dtype if draft.dtype == "auto" else draft.dtype
        for name, block, numbers in (("target", target, target.dtype), ("speculative_config", draft, dtype)):
            asked = block.attention_backend
            reason = refusal_of(asked, device=block.device, dtype=numbers)
            if reason is not None:
                raise ValueError(f"{name}.attention_backend: {asked} cannot be had: {reason}")
        return self
