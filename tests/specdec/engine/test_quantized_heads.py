"""Heads on a quantized target, whose LM head is no matrix: it says with them what it says alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.core.sampling_params import SamplingParams
from specdec.drafters.mtp import Mtp
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.model.config import ModelConfig
from specdec.model.loader import load_model
from specdec.model.quantized_linear import QuantizedLinear
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.heads_factory import LoadedFeatureDrafter, load_heads
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.drafter_files import DrafterFiles
from tests.specdec.engine.drafter_table import DRAFTERS, Files, Place
from tests.specdec.engine.placed_engines import compile_all, over_workers
from tests.specdec.engine.sampling_kinds import KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models

pytestmark = pytest.mark.usefixtures("one_thread", "quantizer")
HEADS = ("medusa", "hydra++", "eagle", "eagle3", "mtp", "parallel_heads")
OF_MODULE = "model.layers.3.shared_head.head.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return DrafterFiles(Bench(Models(tmp_path_factory.mktemp("models"))), tmp_path_factory)


def quantized(config: EngineConfig, name: str) -> EngineConfig:
    target = config.target.model_copy(update={"quantization": name})
    return config.model_copy(update={"target": target})


def streams(engine: Engine, params: SamplingParams) -> list[tuple[int, ...]]:
    results = engine.generate(PROMPTS, params)
    engine.check_integrity()
    return [result.token_ids for result in results]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", [*HEADS, "several"])
def test_it_says_what_it_says_alone(files: Files, name: str, quantization: str) -> None:
    plain = quantized(DRAFTERS["none"].config("chain", "one process", files), quantization)
    if name == "several":
        drafters = [{"name": "lookup", "method": "ngram"}, {"name": "heads", **eager(files, "eagle")}]
        speculative = SpeculativeConfig.model_validate(
            {"method": "several", "controller": "fixed", "drafters": drafters[::-1]}
        )
        config = plain.model_copy(update={"speculative_config": speculative})
    else:
        config = quantized(DRAFTERS[name].config("chain", "one process", files), quantization)
    for kind in ("greedy", "plain"):
        with Engine(plain) as engine:
            expected = streams(engine, KINDS[kind])
        with Engine(config) as engine:
            assert streams(engine, KINDS[kind]) == expected
            assert engine.metrics().num_accepted_tokens > 0


def eager(files: Files, method: str) -> dict[str, Any]:
    return {
        "method": method,
        "model": files(method),
        "compile": {"mode": "off"},
        "cache": {"block_size": 4, "num_blocks": 200},
    }


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("place", ["compiled", "draft pool"])
def test_in_every_place(files: Files, name: str, place: Place) -> None:
    plain = quantized(DRAFTERS["none"].config("chain", "one process", files), "int8")
    config = quantized(DRAFTERS[name].config("chain", place, files), "int8")
    with Engine(plain) as engine:
        expected = streams(engine, KINDS["greedy"])
    with over_workers(config) if place == "draft pool" else Engine(config) as engine:
        if place == "compiled":
            compile_all(engine)
        assert streams(engine, KINDS["greedy"]) == expected
        assert engine.metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_head_that_is_stored_with_modules_is_compared_with_the_stored_one(
    files: Files, tmp_path: Path, is_copy: bool
) -> None:
    """The quantized one cannot tell whether it was the same."""
    folder = tmp_path / "mtp"
    folder.mkdir()
    for file in Path(files("mtp")).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "mtp.safetensors")
    assert OF_MODULE in tensors
    if not is_copy:
        tensors[OF_MODULE] = tensors[OF_MODULE] + 1.0
        save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
    target = load_model(ModelConfig(model=str(folder), dtype="float32", quantization="int8"))
    config = SpeculativeConfig.model_validate({"method": "mtp", "cache": {"num_blocks": 20}})
    made = load_heads(config, target, max_num_seqs=2, max_num_batched_tokens=32)
    assert isinstance(made, LoadedFeatureDrafter)
    modules = made.drafter
    assert isinstance(modules, Mtp)
    assert isinstance(modules.target.head, QuantizedLinear)
    assert (modules.head is None) == is_copy
    if modules.head is not None:
        assert torch.equal(modules.head.weight, tensors[OF_MODULE])
