"""Settings of a draft model that goes on learning: `speculative_config.online`."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from specdec.core.config import StrictConfig
from specdec.verification.base import RuleCapabilities

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


class OnlineConfig(StrictConfig):
    """What a draft model learns from, and when what it has learnt is served."""

    tenants: tuple[str, ...] = ()
    """SHA-256 digests (hex) of the API keys whose texts may be learnt from, as in `http.api_keys_file`; texts
    of others are not even kept. Whoever is named agrees that texts of theirs shape the drafter of all."""
    allow_shared: bool = False
    """Learn from every text, whosever it is; without it only those of `tenants` are learnt from."""
    learning_rate: float = Field(default=2e-4, gt=0.0, le=1.0)
    """Of AdamW, at its peak."""
    batch_texts: int = Field(default=8, ge=1, le=1024)
    """Texts of one optimizer step."""
    max_text_tokens: int = Field(default=512, ge=16, le=1 << 17)
    """Tokens of a text that one step reads, at most; a part of longer ones."""
    steps_per_version: int = Field(default=50, ge=1, le=1 << 20)
    """Optimizer steps before a version is tried on what was held back."""
    min_new_tokens: int = Field(default=4096, ge=1)
    """Generated tokens that have to be heard before another version is begun."""
    max_buffer_tokens: int = Field(default=1 << 20, ge=256, le=1 << 30)
    """Tokens of texts that are kept, prompts included, about 8 bytes each; of whoever has most the oldest
    give way."""
    held_back_share: float = Field(default=0.2, gt=0.0, le=0.5)
    """Share of the texts, by their prompts, that no version is trained on: versions are judged by them."""
    min_held_back_tokens: int = Field(default=1024, ge=1)
    """Tokens of such texts to judge by: with fewer nothing is judged, so that nothing is begun."""
    min_gain: float = Field(default=0.01, ge=0.0, le=1.0)
    """How much larger the acceptance of a version on these must be than that of the one that is served."""
    cpu_share: float = Field(default=0.25, gt=0.0, le=1.0)
    """Of one core of the draft worker's machine: how much the trainer takes at most, on average."""
    seed: int = 0
    """Of the order in which texts are learnt from."""

    @field_validator("tenants", mode="after")
    @classmethod
    def _read_tenants(cls, tenants: tuple[str, ...]) -> tuple[str, ...]:
        found = [_DIGEST.fullmatch(one.lower()) for one in tenants]
        digests = tuple(one[1] for one in found if one is not None)
        if len(digests) < len(tenants):
            raise ValueError(
                "tenants are SHA-256 digests of API keys, 64 hexadecimal digits each, as `drafthouse keys "
                "new` prints them; a key or a name does not do"
            )
        return digests

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.allow_shared and self.tenants:
            raise ValueError("allow_shared: true learns from everybody: leave out tenants, or allow_shared")
        if not self.allow_shared and not self.tenants:
            raise ValueError(
                "nobody's texts may be learnt from: name API keys in `tenants`, or write allow_shared: true "
                "to learn from all (drafts of each then show, by how fast they are, what others have written)"
            )
        num_held_back = round(self.held_back_share * self.max_buffer_tokens)
        if num_held_back < self.min_held_back_tokens:
            raise ValueError(
                f"held_back_share of max_buffer_tokens are {num_held_back} tokens, prompts included: never "
                f"would min_held_back_tokens ({self.min_held_back_tokens} generated ones) be held back, and "
                "anything learnt: give a larger max_buffer_tokens, or less for the other"
            )
        return self

    def require_draft_model(
        self,
        *,
        method: str,
        quantization: str | None,
        num_ranks: int,
        is_made_up: bool,
        rule: RuleCapabilities,
    ) -> None:
        """Check that what drafts can be given other weights, and that these leave output as it is.

        A rule that needs drafts without knowledge of the request's noise is not exact with weights that have
        learnt from a text of the same seed. Under any other whose drafts have noise of their own nobody
        knows which drafts would have stood, so that versions could not be judged.

        Raises:
            ValueError: it cannot; names the setting.
        """
        if method != "draft_model":
            raise ValueError(f"online: method draft_model learns, not {method}: leave out online")
        if quantization is not None:
            raise ValueError(
                f"online: weights in fewer bits do not learn: leave out quantization: {quantization}, or "
                "online"
            )
        if num_ranks > 1:
            raise ValueError(
                f"online does not go with draft_tensor_parallel_size: {num_ranks} yet: leave one of them out"
            )
        if is_made_up:
            raise ValueError("online: synthetic_acceptance makes verdicts up: leave one of them out")
        if rule.draft_stream != "target":
            reason = (
                "drafts must know nothing of what a request's seed has decided before, and what learns from "
                "texts does"
                if rule.needs_independent_drafts
                else "no text tells which drafts would have stood"
            )
            raise ValueError(
                f"online: under rejection_sample_method: {rule.name} {reason}: write sample_and_match, or "
                "leave out online"
            )

    def may_learn_from(self, owner: str | None) -> bool:
        """Whether texts of an owner (`Request.owner`) may be learnt from."""
        return self.allow_shared or (owner is not None and owner in self.tenants)
