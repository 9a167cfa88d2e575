"""Tiny, random models in fp32 by architecture, what transformers says to them, and prompts for them."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import torch

from specdec.model.config import ModelConfig
from specdec.model.loader import LoadedModel, load_model
from tests.architectures import VOCAB_SIZE, save_model

NUM_TOKENS = 20


class Models:
    """Models by (architecture, seed), and what transformers says to some prompts; each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, int], Any] = {}
        self._loaded: dict[tuple[str, int], LoadedModel] = {}
        self._greedy: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def load(self, architecture: str, seed: int = 0) -> LoadedModel:
        key = (architecture, seed)
        if key not in self._loaded:
            folder = self._folder / f"{architecture}-{seed}"
            self._references[key] = save_model(folder, architecture, seed)
            self._loaded[key] = load_model(ModelConfig(model=str(folder), dtype="float32"))
        return self._loaded[key]

    def reference(self, architecture: str) -> Any:
        self.load(architecture)
        return self._references[architecture, 0]

    def greedy(self, architecture: str, prompt: tuple[int, ...]) -> list[int]:
        key = (architecture, prompt)
        if key not in self._greedy:
            self.load(architecture)
            # Of a model that has seen nothing: dynamic rotary tables remember the longest text they met.
            generated = copy.deepcopy(self._references[architecture, 0]).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            self._greedy[key] = generated[0, len(prompt) :].tolist()
        return self._greedy[key]


def ragged_prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Lengths from 1 to 40; half of them repeat themselves, for look-ups."""
    generator = random.Random(seed)
    prompts = []
    for index in range(count):
        length = 1 + (index * 13) % 40
        phrase = generator.choices(range(2, VOCAB_SIZE), k=4 if index % 2 else length)
        prompts.append(tuple(itertools.islice(itertools.cycle(phrase), length)))
    return prompts


PROMPTS = ragged_prompts(8, seed=1)


class SharpModels(Models):
    """Attention with large weights: what it sees, and where, then makes a difference."""

    def load(self, architecture: str, seed: int = 0) -> LoadedModel:
        is_new = (architecture, seed) not in self._loaded
        loaded = super().load(architecture, seed)
        if is_new:
            for model in (loaded.model, self._references[architecture, seed]):
                for name, weight in model.named_parameters():
                    if "_proj" in name and "self_attn" in name:
                        weight.data *= 6.0
        return loaded
