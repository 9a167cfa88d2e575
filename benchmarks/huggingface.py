"""The peers on the same prompts: `generate`, and assisted generation, of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging


class HuggingFaceGenerator:
    """Greedy `generate` of exactly `num_tokens` new tokens, batched with left padding."""

    def __init__(self, folder: Path, dtype: torch.dtype, draft_folder: Path | None = None) -> None:
        # Any: transformers types `generate` too narrowly for its keywords.
        self._model: Any = _load(folder, dtype)
        self._draft = None if draft_folder is None else _load(draft_folder, dtype)

    def generate(self, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[list[int]]:
        """Plain greedy decoding; return the new tokens of every prompt."""
        return self._run(prompts, num_tokens)

    def generate_assisted(
        self, prompts: Sequence[tuple[int, ...]], num_tokens: int, num_draft_tokens: int
    ) -> list[list[int]]:
        """Greedy assisted generation, k fixed; transformers does one prompt at a time."""
        assert self._draft is not None, "assisted generation needs a draft model"
        config = self._draft.generation_config
        assert config is not None
        config.num_assistant_tokens = num_draft_tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        return [self._run([p], num_tokens, assistant_model=self._draft)[0] for p in prompts]

    def _run(
        self,
        prompts: Sequence[tuple[int, ...]],
        num_tokens: int,
        assistant_model: PreTrainedModel | None = None,
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                assistant_model=assistant_model,
            )
        tokens: list[list[int]] = output[:, longest:].tolist()
        return tokens


def _load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # we have our own
    transformers_logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    return model
