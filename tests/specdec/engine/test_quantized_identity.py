"""Guarantee B with quantized weights: they are another function, and the same one whatever drafts.

Targets in 8 and 4 bits, fp32 and bf16, compiled; the draft model is quantized in its own way, or not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.model.config import ModelConfig
from specdec.model.loader import LoadedModel, load_model
from tests.architectures import save_model
from tests.quantizer import some_quantizer
from tests.specdec.engine.identity_settings import Setting
from tests.specdec.engine.tiny_models import NUM_TOKENS, Models, ragged_prompts

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=NUM_TOKENS, seed=11)


class QuantizedModels(Models):
    """Seed 0 is the target, seed 1 the draft model, each quantized as asked."""

    def __init__(self, folder: Path, dtype: str, target: str | None, draft: str | None) -> None:
        super().__init__(folder)
        self._settings = {"dtype": dtype}
        self._names = (target, draft)
        self.load = cache(self._load)  # type: ignore[method-assign]

    def _load(self, architecture: str, seed: int = 0) -> LoadedModel:
        folder = self._folder / f"{architecture}-{seed}"
        save_model(folder, architecture, seed)
        settings = {"model": str(folder), "quantization": self._names[seed], **self._settings}
        with some_quantizer():
            return load_model(ModelConfig.model_validate(settings))


def streams(models: Models, setting: Setting, params: SamplingParams) -> list[tuple[int, ...]]:
    prompts = ragged_prompts(4, seed=1)
    engine: Engine
    with setting.engine(models, "llama") as engine:
        results = engine.generate(prompts, params)
        engine.check_integrity()
        if setting.drafter == "same model":
            metrics = engine.metrics()
            assert metrics.num_accepted_tokens > 0.8 * metrics.num_draft_tokens > 0
    return [result.token_ids for result in results]


PLAIN = Setting("none", batch=4, compiled=True)
SPECULATING = [
    Setting("none", batch=1, compiled=True),
    Setting("none", batch=3, chunk=8, num_blocks=24, compiled=True),
    Setting("ngram", num_draft_tokens=3, batch=4, compiled=True),
    Setting("other model", num_draft_tokens=5, batch=2, chunk=16, num_blocks=24, compiled=True),
    Setting("same model", num_draft_tokens=4, batch=4, compiled=True),
]
QUANTIZED = [
    ("float32", "int8", "int4"),
    ("float32", "int4", None),
    ("bfloat16", "int8", "int4"),
    ("bfloat16", "int4", "int8"),
    ("bfloat16", None, "int4"),
]


@pytest.mark.cover(1, "target", "draft")
@pytest.mark.parametrize(("dtype", "target", "draft"), QUANTIZED)
def test_same_tokens_whatever_drafts(
    tmp_path: Path, dtype: str, target: str | None, draft: str | None
) -> None:
    models = QuantizedModels(tmp_path, dtype, target, draft)
    for params in (GREEDY, SAMPLED):
        expected = streams(models, PLAIN, params)
        for setting in SPECULATING:
            assert streams(models, setting, params) == expected, setting
    if target == "int4":  # 8 bits change too little to show in so few tokens
        unquantized = QuantizedModels(tmp_path / "control", dtype, None, None)
        assert streams(unquantized, PLAIN, SAMPLED) != expected


@pytest.mark.parametrize("target", ["int8", pytest.param("int4", marks=pytest.mark.full)])
def test_eager_forwards_say_the_same_in_fp32(tmp_path: Path, target: str) -> None:
    models = QuantizedModels(tmp_path, "float32", target, "int4")
    expected = streams(models, PLAIN, SAMPLED)
    for setting in (PLAIN, SPECULATING[3], SPECULATING[4]):
        assert streams(models, replace(setting, compiled=False), SAMPLED) == expected
