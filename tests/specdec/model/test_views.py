"""Views of a model: what they compute, what they share with it, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from specdec.core.errors import ConfigError
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.layer_map import CONFIG_KEY
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.model.views import early_exit, with_fewer_bits
from tests.architectures import ARCHITECTURES, make_model, save_model, with_layers
from tests.pairwise import mostly_full
from tests.quantizer import some_quantizer
from tests.specdec.model.compiled_runners import compiled_runner, make_batches, make_runner, run

pytestmark = pytest.mark.usefixtures("one_thread_each")
LoadedOf = Callable[[str], LoadedModel]
QUANTIZABLE = tuple(name for name in ARCHITECTURES if name not in {"mixtral", "qwen2_moe", "qwen3_moe"})
NUM_LAYERS = 4
EXIT = 2


@pytest.fixture(autouse=True)
def _quantizer() -> Iterator[None]:
    with some_quantizer():
        yield


@pytest.fixture(scope="module")
def loaded_of(tmp_path_factory: pytest.TempPathFactory) -> LoadedOf:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def load(architecture: str) -> LoadedModel:
        save_model(folder / architecture, architecture, num_layers=NUM_LAYERS)
        return load_model(ModelConfig(model=str(folder / architecture), dtype="float32"))

    return load


def save_first_layers(folder: Path, architecture: str, num_layers: int) -> LoadedModel:
    """A model with fewer layers, by transformers, and the weights of `loaded_of`."""
    whole = make_model(architecture, num_layers=NUM_LAYERS)
    config = with_layers(ARCHITECTURES[architecture](), num_layers)
    shorter = transformers.AutoModelForCausalLM.from_config(config)
    assert not shorter.load_state_dict(whole.state_dict(), strict=False).missing_keys
    shorter.save_pretrained(folder)
    return load_model(ModelConfig(model=str(folder), dtype="float32"))


def compile_view(view: ModelRunner, of: ModelRunner) -> CompiledForward:
    assert isinstance(of.graphs, CompiledForward)
    view.graphs = compiled = CompiledForward(view, CompileConfig(), like=of.graphs)
    assert compiled.warm_up() == "ready"
    return compiled


def assert_close(mine: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("architecture", mostly_full(tuple(ARCHITECTURES), ("llama", "gemma3", "gpt2")))
def test_early_exit_is_a_model_of_fewer_layers(
    loaded_of: LoadedOf, architecture: str, tmp_path: Path
) -> None:
    loaded = loaded_of(architecture)
    view = make_runner(loaded).of_view(early_exit(loaded, EXIT))
    alone = make_runner(save_first_layers(tmp_path, architecture, EXIT))
    batches = make_batches(view)
    for mine, expected in zip(run(view, batches), run(alone, batches), strict=True):
        assert_close(mine, expected)  # eager products may depend on where weights happen to lie in memory
    assert len(list(view.pool.keys)) == NUM_LAYERS


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_compiled_early_exit_packs_nothing_again(loaded_of: LoadedOf, architecture: str) -> None:
    loaded = loaded_of(architecture)
    runner = compiled_runner(loaded)
    eager, view = (runner.of_view(early_exit(loaded, EXIT)) for _ in range(2))
    assert isinstance(runner.graphs, CompiledForward)
    num_packed_bytes = runner.graphs.num_packed_bytes
    compiled = compile_view(view, runner)
    batches = make_batches(view)
    for mine, expected in zip(run(view, batches), run(eager, batches), strict=True):
        assert_close(mine, expected)
    assert compiled.num_packed_bytes == 0
    assert runner.graphs.num_packed_bytes == num_packed_bytes > 0


def test_views_change_nothing_of_the_model(loaded_of: LoadedOf) -> None:
    loaded = loaded_of("llama")
    runner = make_runner(loaded)
    batches = make_batches(runner)
    before = run(runner, batches)
    weights = {name: one.data_ptr() for name, one in loaded.model.named_parameters()}
    for view in (early_exit(loaded, 1), with_fewer_bits(loaded, "int4")):
        run(runner.of_view(view), batches)
        shared = {name: one.data_ptr() for name, one in view.model.named_parameters()}
        assert shared
        assert set(shared.items()) <= set(weights.items())
    assert {name: one.data_ptr() for name, one in loaded.model.named_parameters()} == weights
    for mine, expected in zip(run(runner, batches), before, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("architecture", mostly_full(QUANTIZABLE, ("llama", "gpt2", "falcon")))
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_fewer_bits_are_those_of_a_quantized_model(loaded_of: LoadedOf, architecture: str, name: str) -> None:
    loaded = loaded_of(architecture)
    bits = "int8" if name == "int8" else "int4"
    alone = load_model(ModelConfig(model=str(loaded.path), dtype="float32", quantization=bits))
    view = make_runner(loaded).of_view(with_fewer_bits(loaded, bits))
    batches = make_batches(view)
    for mine, expected in zip(run(view, batches), run(make_runner(alone), batches), strict=True):
        assert torch.equal(mine, expected)


def test_compiled_fewer_bits(loaded_of: LoadedOf) -> None:
    loaded = loaded_of("llama")
    runner = compiled_runner(loaded)
    eager, view = (runner.of_view(with_fewer_bits(loaded, "int4")) for _ in range(2))
    compile_view(view, runner)
    batches = make_batches(view)
    for mine, expected in zip(run(view, batches), run(eager, batches), strict=True):
        assert_close(mine, expected)


def test_layers_of_inflated_checkpoints_are_the_original_ones(loaded_of: LoadedOf) -> None:
    loaded = copy.copy(loaded_of("llama"))
    config = copy.deepcopy(loaded.config)
    setattr(config, CONFIG_KEY, [0, 3])
    object.__setattr__(loaded, "config", config)
    assert early_exit(loaded, 1).model.model.layers.__len__() == 2  # half of the layers, as in the original
    with pytest.raises(ConfigError, match=r"exit_layer: 2 .* the 2 layers .* write 1 to 1"):
        early_exit(loaded, 2)


@pytest.mark.parametrize("exit_layer", [0, NUM_LAYERS, 99])
def test_an_exit_that_leaves_out_nothing_is_refused(loaded_of: LoadedOf, exit_layer: int) -> None:
    message = rf"exit_layer: {exit_layer} does not leave out any of the 4 layers of llama: write 1 to 3"
    with pytest.raises(ConfigError, match=message):
        early_exit(loaded_of("llama"), exit_layer)


def test_a_model_of_one_layer_has_no_exit(tmp_path: Path) -> None:
    save_model(tmp_path, num_layers=1)
    loaded = load_model(ModelConfig(model=str(tmp_path), dtype="float32"))
    with pytest.raises(ConfigError, match="a model of one layer has no early exit"):
        early_exit(loaded, 1)


def test_weights_that_cannot_be_quantized_are_named(loaded_of: LoadedOf) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config.quantization: int4-64 .* groups of 64"):
        with_fewer_bits(loaded_of("llama"), "int4-64")
    with pytest.raises(ConfigError, match=r"speculative_config.quantization: int8 .*experts"):
        with_fewer_bits(loaded_of("mixtral"), "int8")
