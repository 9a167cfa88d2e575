"""Two kinds of text, each a rule by which a token follows another, and tiny models that know some of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.text_tap import LearnableText
from specdec.proposers.online_config import OnlineConfig
from specdec.sampling.sampler import Sampler
from tests.architectures import VOCAB_SIZE, make_tokenizer
from training.online.trainer import OnlineTrainer

QUICK = OnlineConfig(
    allow_shared=True,
    learning_rate=1e-2,
    batch_texts=4,
    steps_per_version=20,
    min_new_tokens=200,
    held_back_share=0.3,
    min_held_back_tokens=60,
    cpu_share=1.0,
)
"""Learns in a second or two what a text of a domain is."""


class Domain(NamedTuple):
    first: int
    factor: int
    size: int = 41
    """A prime, so that no text of a few dozen tokens comes round."""

    def after(self, token_id: int) -> int:
        return (self.factor * (token_id - self.first) + 1) % self.size + self.first

    def text(self, rng: random.Random, num_tokens: int) -> list[int]:
        tokens = [rng.randrange(self.size) + self.first]
        while len(tokens) < num_tokens:
            tokens.append(self.after(tokens[-1]))
        return tokens


FORMER, LATTER = Domain(2, 6), Domain(64, 13)


def heard(
    domain: Domain,
    num_texts: int,
    *,
    seed: int = 0,
    owner: str | None = None,
    num_tokens: int = 24,
    is_rubbish: bool = False,
) -> list[LearnableText]:
    """Texts as a greedy target that knows the domain would write them; rubbish is anything."""
    rng = random.Random(seed)
    texts = []
    for _ in range(num_texts):
        tokens = domain.text(rng, num_tokens)
        if is_rubbish:
            tokens[4:] = rng.choices(range(2, VOCAB_SIZE), k=num_tokens - 4)
        texts.append(
            LearnableText(
                owner=owner,
                token_ids=tuple(tokens),
                num_prompt_tokens=4,
                params=SamplingParams(temperature=0.0),
                seed=rng.getrandbits(64),
            )
        )
    return texts


def model_of(domains: Sequence[Domain], *, num_layers: int = 1, num_steps: int = 40) -> LlamaForCausalLM:
    """A model that knows these domains."""
    torch.manual_seed(num_layers)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=0,
            pad_token_id=0,
            tie_word_embeddings=True,
            initializer_range=0.1,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    rng = random.Random(1)
    for step in range(num_steps if domains else 0):
        domain = domains[step % len(domains)]
        tokens = torch.tensor([domain.text(rng, 24) for _ in range(8)])
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def trainer_of(
    model: LlamaForCausalLM, config: OnlineConfig = QUICK, dtype: torch.dtype = torch.float32
) -> OnlineTrainer:
    return OnlineTrainer(config, model, Sampler(), vocab_size=VOCAB_SIZE, served_dtype=dtype)


def work_off(trainer: OnlineTrainer) -> None:
    """Let a trainer do all that there is to do."""
    while trainer.run_next():
        pass
