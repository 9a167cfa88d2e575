"""Models with quantized weights: what is quantized, to what, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.core.errors import CheckpointError, ConfigError
from specdec.model import quantization, quantized_loading
from specdec.model.config import INT4_GROUP_SIZES, ModelConfig
from specdec.model.loader import LoadedModel, load_model
from specdec.model.quantization import (
    UnsupportedQuantization,
    check_quantizable,
    layers_of,
    quantize,
    scheme_of,
)
from specdec.model.quantized_linear import QuantizedLinear
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import ARCHITECTURES, make_model, save_model
from tests.quantizer import HAS_TORCHAO, nearest, some_quantizer
from tests.specdec.model.compiled_runners import compiled_runner, make_batches, make_runner, run

pytestmark = pytest.mark.usefixtures("one_thread_each")
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe"}
QUANTIZABLE = tuple(name for name in ARCHITECTURES if name not in EXPERTS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LoadedOf = Callable[[str, str, str], LoadedModel]

needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")


@pytest.fixture(autouse=True)
def _quantizer() -> Iterator[None]:
    with some_quantizer():
        yield


@pytest.fixture(scope="module")
def loaded_of(tmp_path_factory: pytest.TempPathFactory) -> LoadedOf:
    """(architecture, dtype, quantization) -> the model."""

    @cache
    def folder_of(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        save_model(folder, architecture)
        return folder

    @cache
    def make(architecture: str, dtype: str, name: str) -> LoadedModel:
        return load(folder_of(architecture), dtype=dtype, quantization=name)

    return make


@pytest.fixture(scope="module")
def _compiler() -> None:
    try:
        CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"no compiled forward here: {error}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig.model_validate({"model": str(folder), **settings}))


def dequantized(model: transformers.PreTrainedModel, name: str) -> None:
    """Round the weights of a reference as `name` does, in place."""
    for _, layer, scheme in layers_of(model, scheme_of(name)):
        anything: Any = layer
        is_transposed = not isinstance(layer, torch.nn.Linear)
        matrix = anything.weight.detach()
        matrix = matrix.t().contiguous() if is_transposed else matrix
        values, scales = quantization._quantized_rows(matrix, scheme)
        grouped = values.float().unflatten(1, (scales.shape[1], -1)) * scales.float()[..., None]
        rounded = grouped.flatten(1).to(matrix.dtype)
        anything.weight = torch.nn.Parameter(rounded.t() if is_transposed else rounded)


def logits_of_prompt(loaded: LoadedModel, runner: Any) -> tuple[list[int], torch.Tensor]:
    first = make_batches(runner)[0][:1]
    return list(first[0].token_ids), run(runner, [first])[0][0]


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("architecture", QUANTIZABLE)
def test_logits_are_those_of_the_rounded_weights(loaded_of: LoadedOf, architecture: str, name: str) -> None:
    """fp32, against transformers with the same weights: only sums are in another order."""
    loaded = loaded_of(architecture, "float32", name)
    token_ids, logits = logits_of_prompt(loaded, make_runner(loaded))
    reference = make_model(architecture)
    dequantized(reference, name)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    with torch.inference_mode():
        unrounded = make_model(architecture)(input_ids=torch.tensor([token_ids]), use_cache=False)
    assert (unrounded.logits[0, -1] - expected).abs().max() > 1e-3 * expected.abs().max(), "it shows"


@needs_torchao
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt_neox"])
def test_logits_are_those_of_torchao(loaded_of: LoadedOf, architecture: str, name: Any, dtype: str) -> None:
    """Against torchao's own eager layers, in a model that it has quantized itself.

    fp32: sums are in another order. bf16: there, products are rounded before they are scaled (int8) or
    weights after (int4), which with two dozen layers behind each other makes a few units of 2^-8.
    """
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    loaded = loaded_of(architecture, dtype, name)
    token_ids, logits = logits_of_prompt(loaded, make_runner(loaded))
    reference: Any = make_model(architecture).to(DTYPES[dtype])
    head = reference.get_output_embeddings()
    int8 = Int8WeightOnlyConfig(set_inductor_config=False)
    scheme = scheme_of(name)
    if scheme.group_size is not None:
        int4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(scheme.group_size))
        quantize_(reference, int4, lambda layer, _: isinstance(layer, torch.nn.Linear) and layer is not head)
        quantize_(reference, int8, lambda layer, _: layer is head)
    else:
        quantize_(reference, int8)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1].float()
    tolerance = 2e-6 if dtype == "float32" else 0.03
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@needs_torchao
@pytest.mark.parametrize("name", ["int8", "int4", "int4-128"])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_the_stand_in_for_torchao_does_as_it_does(name: Any, dtype: torch.dtype) -> None:
    rows = torch.randn(64, 256).to(dtype)
    values, scales = quantization._quantized_rows(rows, scheme_of(name))
    ours, our_scales = nearest(rows, scheme_of(name))
    assert (scales.dtype, scales.shape) == (our_scales.dtype, our_scales.shape)
    torch.testing.assert_close(our_scales, scales, rtol=torch.finfo(scales.dtype).eps, atol=0)
    assert ((ours - values).abs() <= 1).all()
    assert (ours != values).float().mean() < 0.01


@pytest.mark.cover(1)
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "qwen2", "gemma2", "gemma3_with_images", "phi3_longrope", "falcon"]
)
def test_compiled_forward_of_quantized_models(
    loaded_of: LoadedOf, architecture: str, name: str, dtype: str
) -> None:
    check_compiled(loaded_of(architecture, dtype, name), dtype)


@pytest.mark.full
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("architecture", QUANTIZABLE)
def test_compiled_forward_of_every_quantized_model(
    loaded_of: LoadedOf, architecture: str, name: str, dtype: str
) -> None:
    check_compiled(loaded_of(architecture, dtype, name), dtype)


def check_compiled(loaded: LoadedModel, dtype: str) -> None:
    """Against the eager forward; and a row has the same bits whatever shares its batch."""
    eager, compiled = make_runner(loaded), compiled_runner(loaded)
    batches = make_batches(eager)
    tolerance = 2e-5 if dtype == "float32" else 0.05
    for ours, expected in zip(run(compiled, batches), run(eager, batches), strict=True):
        torch.testing.assert_close(
            ours, expected, rtol=0, atol=tolerance * float(expected.abs().amax() if expected.numel() else 0)
        )
    together = compiled.forward(batches[0])
    alone = [compiled.forward([piece]).clone() for piece in batches[0]]
    assert torch.equal(compiled.forward(batches[0]), torch.cat(alone))
    assert together.shape[0] == sum(piece.num_logit_rows for piece in batches[0])
    assert compiled.graphs.num_packed_bytes == 0, "weights are read where they are"  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt2"])
def test_every_linear_layer_is_replaced_and_freed(loaded_of: LoadedOf, architecture: str) -> None:
    loaded = loaded_of(architecture, "bfloat16", "int4")
    layers = {
        name: layer for name, layer in loaded.model.named_modules() if isinstance(layer, QuantizedLinear)
    }
    expected = {name for name, _, _ in layers_of(make_model(architecture), scheme_of("int4"))}
    assert set(layers) == expected
    assert not any(isinstance(layer, torch.nn.Linear) for layer in loaded.model.modules())
    assert {name for name, layer in layers.items() if layer.bits == 8} == {"lm_head"}
    matrices = {name for name, parameter in loaded.model.named_parameters() if parameter.dim() > 1}
    assert all("embed" in name or "wte" in name or "wpe" in name for name in matrices)
    assert loaded.quantization == "int4"


def test_what_is_for_images_stays_as_it_is(loaded_of: LoadedOf) -> None:
    """Groups of 32 would not even fit it."""
    loaded = loaded_of("gemma3_with_images", "bfloat16", "int4")
    linear = {name for name, layer in loaded.model.named_modules() if isinstance(layer, torch.nn.Linear)}
    quantized = {name for name, layer in loaded.model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert linear
    assert all("vision" in name for name in linear)
    assert all(name == "lm_head" or "language_model" in name for name in quantized)
    assert len(quantized) == 1 + 7 * loaded.config.get_text_config().num_hidden_layers


@pytest.mark.parametrize("max_shard_size", ["20KB", "10GB"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_from_the_dtype_asked_for(
    tmp_path: Path, stored: torch.dtype, max_shard_size: str
) -> None:
    """Whatever they are stored in, and over however many files."""
    model = make_model("llama").to(stored)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    loaded = load(tmp_path, dtype="bfloat16", quantization="int8")
    name = "model.layers.1.mlp.down_proj"
    matrix: Any = model.get_submodule(name).weight
    matrix = matrix.detach().bfloat16()
    expected = quantize(lambda first, end: matrix[first:end], *matrix.shape, scheme_of("int8"))
    layer = loaded.model.get_submodule(name)
    assert torch.equal(layer.panels, expected.panels)  # type: ignore[arg-type]
    assert torch.equal(layer.scales, expected.scales)  # type: ignore[arg-type]


def test_no_layer_is_ever_read_in_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights arrive in stretches of rows (here, a panel's), and none of them in any other way."""
    monkeypatch.setattr(quantization, "_ROWS_ELEMENTS", 1)
    sizes: list[int] = []
    rows = quantized_loading._QuantizedTensor._rows

    def counted(self: Any, first: int, end: int) -> torch.Tensor:
        piece = rows(self, first, end)
        sizes.append(piece.numel())
        return piece

    monkeypatch.setattr(quantized_loading._QuantizedTensor, "_rows", counted)
    reports: list[tuple[str, int, int]] = []
    config = ModelConfig(model=str(folder), quantization="int8")
    load_model(config, lambda *report: reports.append(report))
    assert max(sizes) == 32 * 64 < 128 * 32
    assert sum(sizes) == sum(
        parameter.numel()
        for name, parameter in make_model("llama").named_parameters()
        if parameter.dim() > 1 and "embed" not in name
    )
    assert [stage for stage, _, _ in reports][-1] == "probe"
    assert all(done <= total for _, done, total in reports)


def test_a_model_with_code_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_own_code(folder)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    loaded = load(folder, trust_remote_code=True, quantization="int8")
    assert type(loaded.model).__name__ == "OwnForCausalLM"
    assert not any(isinstance(layer, torch.nn.Linear) for layer in loaded.model.modules())


def add_own_code(folder: Path) -> None:
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = LlamaConfig\n"
    )
    file = folder / "config.json"
    content = json.loads(file.read_text())
    file.write_text(
        json.dumps({**content, "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}})
    )


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["int3", "int4-48", "INT8", "torchao", 8])
def test_an_unknown_scheme(name: object) -> None:
    with pytest.raises(
        ValidationError, match="'int8', 'int4', 'int4-32', 'int4-64', 'int4-128' or 'int4-256'"
    ):
        ModelConfig.model_validate({"model": "x", "quantization": name})


def test_names_and_group_sizes_are_the_same() -> None:
    assert [scheme_of(f"int4-{size}").group_size for size in INT4_GROUP_SIZES] == list(INT4_GROUP_SIZES)  # type: ignore[arg-type]
    assert scheme_of("int4") == scheme_of("int4-32")


def test_over_ranks() -> None:
    with pytest.raises(ValidationError, match="int8 does not go with tensor_parallel_size: 2 yet"):
        ModelConfig.model_validate({"model": "x", "quantization": "int8", "tensor_parallel_size": 2})
    with pytest.raises(ValidationError, match="int8 does not go with pipeline_parallel_size: 2 yet"):
        ModelConfig.model_validate({"model": "x", "quantization": "int8", "pipeline_parallel_size": 2})
    draft = {"method": "draft_model", "model": "x", "quantization": "int4"}
    with pytest.raises(ValidationError, match="int4 does not go with draft_tensor_parallel_size: 2 yet"):
        SpeculativeConfig.model_validate({**draft, "draft_tensor_parallel_size": 2})


def test_over_ranks_that_the_configuration_does_not_show(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a model is divided by: only whole ones are quantized."""
    monkeypatch.setattr("specdec.model.loader.same_fate", lambda ranks: nullcontext())
    ranks: Any = SimpleNamespace(size=1, rank=0)
    with pytest.raises(ConfigError, match="quantization: int4 does not go with a model over several ranks"):
        load_model(ModelConfig(model=str(folder), quantization="int4"), None, ranks)


def test_a_drafter_without_weights() -> None:
    with pytest.raises(ValidationError, match="method ngram has no weights to quantize"):
        SpeculativeConfig.model_validate({"method": "ngram", "quantization": "int8"})


def test_without_torchao(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.model.loader.require_torchao", quantization.require_torchao)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("specdec.model.loader.open_checkpoint", None)  # before anything is read
    with pytest.raises(ConfigError, match=r"quantization: int8 needs torchao.*-e '\.\[quantization\]'"):
        load(folder, quantization="int8")


def refuses_unread(folder: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.model.loader.revision_of", None)
    monkeypatch.setattr("specdec.model.loader.read_quantized", None)
    with pytest.raises(CheckpointError, match=message):
        load(folder, quantization=name)


def test_groups_that_do_not_fit_a_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        r"llama cannot be served with quantization int4-64: model\.layers\.0\.self_attn\.q_proj has 32 "
        "inputs, which groups of 64 do not divide; int4-32 and int8 would"
    )
    refuses_unread(folder, "int4-64", message, monkeypatch)


def test_an_odd_number_of_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=33, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refuses_unread(tmp_path, "int8", r"mlp\.down_proj has 33 inputs, an odd number", monkeypatch)


@pytest.mark.parametrize("architecture", sorted(EXPERTS))
def test_experts(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, architecture)
    message = (
        rf"{architecture} cannot be served with quantization int8: model\.layers\.0\.mlp\..* only linear"
    )
    refuses_unread(tmp_path, "int8", message, monkeypatch)


def test_weights_of_something_else_than_a_linear_layer() -> None:
    """Experts in one matrix, one below the other, say: left as they are, they would be most of the model."""
    model: Any = make_model("llama")
    model.model.layers[1].mlp.register_parameter("stacked", torch.nn.Parameter(torch.zeros(96, 32)))
    message = r"model\.layers\.1\.mlp\.stacked belongs to a LlamaMLP, and only linear layers"
    with pytest.raises(UnsupportedQuantization, match=message):
        check_quantizable(model, "int8")


def test_a_checkpoint_that_is_quantized_already(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "config.json"
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **stored}))
    refuses_unread(folder, "int8", "stored quantised .*quant_method awq", monkeypatch)


def test_weights_that_do_not_fit_the_model(folder: Path) -> None:
    """The errors are those of a model that is not quantized."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: torch.zeros(3, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"tensor {name} has shape \(3, 32\), the model needs \(64, 32\)"
    ):
        load(folder, quantization="int8")
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lack 1 tensors of the model, first {name}"):
        load(folder, quantization="int8")
