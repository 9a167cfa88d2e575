"""Tiny random models over a byte-level vocabulary, which grammars need, and engines that run them."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.kv.config import CacheConfig
from specdec.model.config import ModelConfig
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.fallback import FallbackProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.sampling.config import GrammarConfig
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.specdec.engine.toy_engines import Forgetful
from tests.specdec.engine.tree_drafters import Bushy

TOKENIZER_FOLDER = Path(__file__).parents[3] / "models" / "demo" / "target"
VOCAB_SIZE = 4112
"""The tokenizer's 4096, and padding."""
EOS = 0


def save_byte_level_model(
    folder: Path, seed: int = 0, spread: float = 3.0, vocab_size: int = VOCAB_SIZE
) -> None:
    """Save a random model with the demo family's tokenizer."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=EOS,
        bos_token_id=EOS,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    model.eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER_FOLDER / name, folder / name)


class GrammarModels:
    """Loads each model once, and makes engines over them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.load = cache(self._load)
        self.tokenizer = HuggingFaceTokenizer(
            transformers.AutoTokenizer.from_pretrained(str(TOKENIZER_FOLDER), local_files_only=True)
        )

    def _load(self, seed: int) -> LoadedModel:
        folder = self._folder / f"bytes-{seed}"
        save_byte_level_model(folder, seed)
        return load_model(ModelConfig(model=str(folder), dtype="float32"))

    def runner(self, seed: int, num_blocks: int) -> ModelRunner:
        return ModelRunner(self.load(seed), CacheConfig(block_size=8, num_blocks=num_blocks), max_num_seqs=32)

    def proposer(self, drafter: str, num_blocks: int) -> Proposer:
        if drafter.startswith("bushy "):
            inner = self.proposer(drafter.removeprefix("bushy "), num_blocks)
            return Bushy(inner, vocab_size=VOCAB_SIZE)
        if drafter == "none":
            return NoProposer()
        if drafter == "ngram":
            return NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)
        runner = self.runner(0 if drafter == "same model" else 1, num_blocks)
        proposer = DraftModelProposer(
            runner, DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
        )
        if drafter == "forgetful model":
            return FallbackProposer(Forgetful(proposer), self.proposer("ngram", num_blocks))
        return proposer

    def engine(
        self,
        drafter: str = "none",
        num_draft_tokens: int = 4,
        *,
        num_blocks: int = 1000,
        grammar: GrammarConfig | None = None,
    ) -> Engine:
        return Engine.from_parts(
            target=LocalTarget(self.runner(0, num_blocks), Sampler()),
            proposer=self.proposer(drafter, num_blocks),
            tokenizer=self.tokenizer,
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
            controller=FixedController(num_draft_tokens),
            grammar=grammar,
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> GrammarModels:
    return GrammarModels(tmp_path_factory.mktemp("models"))


def token_of(models: GrammarModels, text: str) -> int:
    (token_id,) = models.tokenizer.encode(text)
    return token_id
