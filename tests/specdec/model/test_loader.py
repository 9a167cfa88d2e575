"""Loading model folders, and the errors that name what is wrong with one."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec.attention.base import LayerAttention
from specdec.attention.hf import ATTENTION_NAME, AttentionProbe
from specdec.attention.native import NativeUnavailable
from specdec.core.errors import CheckpointError, ConfigError, ResourceError
from specdec.model.checkpoint import open_checkpoint, revision_of
from specdec.model.config import ModelConfig
from specdec.model.facts import head_dims_of, read_facts
from specdec.model.inspection import TESTED_MODEL_TYPES, masked_window_error, paged_forward_error
from specdec.model.loader import load_model
from tests.architectures import ARCHITECTURES, VOCAB_SIZE, save_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(folder: Path, **settings: Any) -> Any:
    return load_model(ModelConfig.model_validate({"model": str(folder), **settings}))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_what_is_known_about_a_loaded_model(original: Path) -> None:
    loaded = load(original)
    assert loaded.dtype == torch.float32
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.max_model_len == 256
    assert loaded.eos_token_ids == (0,)
    assert [layer.layer_idx for layer in loaded.layers] == [0, 1, 2]
    assert (loaded.layers[0].num_heads, loaded.layers[0].num_kv_heads, loaded.layers[0].head_dim) == (4, 2, 8)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_eos_ids_come_from_both_configs(folder: Path) -> None:
    file = folder / "generation_config.json"
    for mark in ("", "\ufeff"):
        file.write_text(mark + json.dumps({"eos_token_id": [7, 3]}), encoding="utf-8")
        assert load(folder).eos_token_ids == (0, 3, 7)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("auto", torch.float32)]
)
def test_dtype(original: Path, name: str, dtype: torch.dtype) -> None:
    loaded = load(original, dtype=name)
    assert loaded.dtype == dtype
    assert next(loaded.model.parameters()).dtype == dtype


def test_auto_dtype_is_read_from_the_weights_when_the_config_is_silent(folder: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    edit_config(folder, dtype=None)
    assert load(folder).dtype == torch.bfloat16


def test_progress_is_reported(original: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(ModelConfig(model=str(original)), lambda *report: seen.append(report))
    assert [stage for stage, _, _ in seen] == ["hash", "weights", "weights", "probe"]
    assert all(0 <= done <= total for _, done, total in seen)


def test_revision_is_that_of_config_and_weights(original: Path, folder: Path) -> None:
    revision = revision_of(open_checkpoint(original))
    assert load(folder).revision == revision == revision_of(open_checkpoint(folder))
    (folder / "README.md").write_text("nothing to do with it")
    assert revision_of(open_checkpoint(folder)) == revision
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    changed = revision_of(open_checkpoint(folder))
    edit_config(folder, rope_theta=5.0)
    assert len({revision, changed, revision_of(open_checkpoint(folder))}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sharded_weights_load(original: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(original).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = load(tmp_path)
    assert loaded.dtype == dtype
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for ours, theirs in zip(loaded.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def add_code(folder: Path, marker: Path, **config: Any) -> None:
    """Give a Llama folder code of its own, which leaves `marker` behind when it runs."""
    (folder / "own.py").write_text(
        "from pathlib import Path\n\nfrom transformers import LlamaConfig, LlamaForCausalLM\n\n"
        f"Path({str(marker)!r}).touch()\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(folder, auto_map=classes, **config)


def test_code_of_a_checkpoint_runs_only_when_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "has run"
    add_code(folder, marker, model_type="own")
    assert ModelConfig(model=str(folder)).trust_remote_code is False
    with pytest.raises(CheckpointError, match=r"no model that transformers knows \(model_type 'own'"):
        load(folder)
    assert not marker.exists()
    assert type(load(folder, trust_remote_code=True).model).__name__ == "OwnForCausalLM"
    assert marker.exists()


def test_code_of_a_checkpoint_of_a_known_kind_is_left_alone(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "has run"
    add_code(folder, marker)
    assert type(load(folder).model).__name__ == "LlamaForCausalLM"
    assert not marker.exists()


def test_tensors_of_training_extras_are_left_alone(folder: Path) -> None:
    """An MTP module's tensors, say, live in the target's file."""
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.3.enorm.weight"] = torch.ones(4)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert len(load(folder).layers) == 3


# ------------------------------------------------------------------------------------- broken folders


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncate_weights(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])


def truncate_in_header(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:100])


def garble_header(folder: Path) -> None:
    file = folder / WEIGHTS
    content = bytearray(file.read_bytes())
    content[8:12] = b"oops"
    file.write_bytes(content)


def put_lfs_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def resize_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = torch.zeros(3, 32)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def rename_to_bin(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def lose_a_shard(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lose_the_index(folder: Path) -> None:
    for number in (1, 2):
        shutil.copy(folder / WEIGHTS, folder / f"model-0000{number}-of-00002.safetensors")
    (folder / WEIGHTS).unlink()


def adapter(*, with_config: bool) -> Callable[[Path], None]:
    def leave(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
        if not with_config:
            (folder / "config.json").unlink()

    return leave


def index_without_names(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": None}}))


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")


def config_of(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def generation_config(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "generation_config.json").write_text(content)

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), r"has no config\.json"),
        (remove(WEIGHTS), r"has no weights \(model\.safetensors or"),
        (
            lose_the_index,
            r"has model-00001-of-00002\.safetensors and 1 more .*neither model\.safetensors nor "
            r"model\.safetensors\.index\.json",
        ),
        (adapter(with_config=False), r"has no config\.json: it is an adapter .*merge it into its base model"),
        (adapter(with_config=True), r"has no weights .*it is an adapter \(adapter_config\.json\)"),
        (rename_to_bin, r"pytorch_model\.bin is of a format that is not read"),
        (lose_a_shard, r"lacks the weight file model-00002-of-00002\.safetensors"),
        (index_without_names, r"weight_map must give a file name"),
        (truncate_weights, r"model\.safetensors is truncated: it has \d+ bytes, its header describes \d+"),
        (truncate_in_header, r"model\.safetensors is not a whole safetensors file: .*truncated or corrupt"),
        (garble_header, r"model\.safetensors is corrupt: its safetensors header"),
        (put_lfs_pointer, r"model\.safetensors .*Git LFS pointer"),
        (drop_tensor, r"lack 1 tensors of the model, first model\.layers\.1\.mlp\.up_proj\.weight"),
        (resize_tensor, r"tensor lm_head\.weight has shape \(3, 32\), the model needs \(128, 32\)"),
        (not_json, r"config\.json cannot be read as JSON"),
        (config_of(model_type="no_such_model"), r"'no_such_model'"),
        (config_of(model_type="vit"), r"vit is another kind of model, not a causal language model"),
        (config_of(dtype="float64"), r"dtype torch\.float64 is not supported"),
        (config_of(dtype="no_such_dtype"), r"config\.json .*no_such_dtype"),
        (config_of(num_attention_heads=3), r"config\.json .*not a multiple of the number of attention heads"),
        (config_of(num_attention_heads=0), r"config\.json describes no model"),
        (config_of(hidden_size="32"), r"config\.json .*hidden_size"),
        (config_of(num_key_value_heads=0), r"describes no llama that can be made: ZeroDivisionError"),
        (config_of(pad_token_id=10**9), r"describes no llama that can be made: .*Padding_idx"),
        (config_of(num_hidden_layers=0), r"it has no layers"),
        (config_of(num_hidden_layers=40), r"they hold \d+ parameters, the model needs \d+"),
        (config_of(max_position_embeddings=1), r"max_position_embeddings is 1"),
        (generation_config("[]"), r"generation_config\.json must hold a JSON object, not list"),
        (generation_config('{"eos_token_id": [null]}'), r"generation_config\.json: eos_token_id must be"),
        (generation_config('{"eos_token_id": "</s>"}'), r"generation_config\.json: eos_token_id must be"),
    ],
)
def test_a_broken_folder_is_refused_by_name(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        {"num_return_sequences": 4},
        {"max_new_tokens": -5},
        {"cache_implementation": "not of this version"},
        {"watermarking_config": {"of": "another version"}},
    ],
)
def test_what_transformers_would_generate_with_is_no_reason(folder: Path, said: dict[str, Any]) -> None:
    """None of it counts here, and from_pretrained refuses whole models for it."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, **said}))
    with pytest.raises((ValueError, TypeError)):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert load(folder).eos_token_ids == (0, 7)


def test_models_saved_with_what_training_looks_at_are_served_without_it(tmp_path: Path) -> None:
    """Mixtures would add up their routers' loss in each step, and hand the wish for it on to attention."""
    save_model(tmp_path, "mixtral")
    edit_config(tmp_path, output_router_logits=True, output_hidden_states=True)
    config = load(tmp_path).model.config
    assert (config.output_router_logits, config.output_hidden_states) == (False, False)


def test_ends_of_text_that_the_vocabulary_does_not_have_are_left_aside(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(folder, eos_token_id=[VOCAB_SIZE - 1, VOCAB_SIZE])
    (folder / "generation_config.json").write_text('{"eos_token_id": -1}')
    assert load(folder).eos_token_ids == (VOCAB_SIZE - 1,)
    assert f"eos_token_id names -1, {VOCAB_SIZE}, which the vocabulary of {VOCAB_SIZE} tokens" in caplog.text
    assert read_facts(ModelConfig(model=str(folder))).eos_token_ids == (VOCAB_SIZE - 1,)


def test_what_the_system_says_of_files_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"model folder x+ cannot be read: File name too long"):
        load(Path("x" * 5000))

    def forbidden(path: Path, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for method, what in (("open", "the weights in"), ("is_dir", "model folder")):
        with monkeypatch.context() as patch:
            # What pathlib itself opens by this name is read before.
            patch.setattr("specdec.model.checkpoint.read_json", lambda file: {"model_type": "llama"})
            patch.setattr(Path, method, forbidden)
            with pytest.raises(CheckpointError, match=f"{what} .* cannot be read: Permission denied"):
                open_checkpoint(folder)


def test_pickled_shards_can_be_converted_as_it_is_said(folder: Path) -> None:
    """As of Vicuna, whose generation_config.json transformers would not let anybody write anew."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for index, file in enumerate(files):
        torch.save(dict(list(tensors.items())[index::2]), folder / file)
    weight_map = {name: files[index % 2] for index, name in enumerate(tensors)}
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    generation_config('{"eos_token_id": 0, "temperature": 0.9, "top_p": 0.6}')(folder)
    with pytest.raises(CheckpointError, match="convert it to safetensors: python -c") as refused:
        load(folder)
    text = str(refused.value)
    command = shlex.split(text[text.index("python -c") :])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=240)
    converted = load_file(folder / WEIGHTS)
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
    assert load(folder).vocab_size == VOCAB_SIZE


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; `model` must be a local"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is not a folder"):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"dtype": "float8_e4m3fn"}, r"stored quantised \(dtype float8_e4m3fn\)"),
    ],
)
def test_unsupported_kinds_of_llama_are_refused_before_weights_are_read(
    folder: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.model.loader._read_weights", None)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=f"model type llama cannot be served: .*{message}"):
        load(folder)


def test_what_modelopt_has_quantised_is_refused_before_weights_are_looked_at(folder: Path) -> None:
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    load(folder)
    file.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    (folder / WEIGHTS).unlink()
    with pytest.raises(
        CheckpointError, match=r"stored quantised \(hf_quant_config\.json, quant_algo NVFP4\)"
    ):
        load(folder)


def test_a_dtype_of_codes_is_no_reason_to_set_another(folder: Path) -> None:
    edit_config(folder, dtype=None)
    codes = {name: one.to(torch.float8_e4m3fn) for name, one in load_file(folder / WEIGHTS).items()}
    save_file(codes, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"dtype F8_E4M3 is not supported; weights .* quantised cannot be"
    ):
        read_facts(ModelConfig(model=str(folder)))


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.GptOssConfig(**SMALL, num_attention_heads=2), "gpt_oss cannot be served: .*sinks"),
        (transformers.MambaConfig(**SMALL), "mamba cannot be served: it keeps state other than K/V"),
        (transformers.BloomConfig(**SMALL), "bloom cannot be served: .*attention interface"),
        (
            transformers.Llama4TextConfig(**SMALL, num_attention_heads=2),
            "llama4_text cannot be served: .*chunked_attention",
        ),
        (
            transformers.Llama4TextConfig(
                **SMALL,
                num_attention_heads=2,
                layer_types=["full_attention"] * 2,
                no_rope_layers=[1, 0],
                attn_temperature_tuning=True,
            ),
            "llama4_text cannot be served: it scales attention by the place .*; docs/models.md says what can",
        ),
        (
            transformers.Gemma3TextConfig(
                **SMALL,
                rope_parameters={
                    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            ),
            "gemma3_text cannot be served: .*full_attention layers is of type dynamic",
        ),
        (transformers.JambaConfig(**SMALL), "jamba cannot be served: it keeps state other than K/V"),
        (transformers.FalconH1Config(**SMALL), "falcon_h1 cannot be served: it keeps state other than K/V"),
        (transformers.Qwen3NextConfig(**SMALL), "qwen3_next cannot be served: it keeps state other than K/V"),
        (transformers.Gemma3nTextConfig(**SMALL), "gemma3n_text cannot be served: its layers share K/V"),
        (transformers.T5Config(), "t5 is an encoder-decoder model, not a causal language model"),
        (transformers.WhisperConfig(), "whisper cannot be served: it is an encoder-decoder model"),
        (
            transformers.MusicgenConfig(
                text_encoder=transformers.T5Config(),
                audio_encoder=transformers.EncodecConfig(),
                decoder=transformers.MusicgenDecoderConfig(),
            ),
            "musicgen cannot be served: it is an encoder-decoder model",
        ),
        (transformers.Qwen2VLConfig(), "qwen2_vl is a multimodal model, not a causal language model"),
        (transformers.LlavaConfig(), "llava is a multimodal model, not a causal language model"),
        (
            transformers.BertConfig(**SMALL, num_attention_heads=2, intermediate_size=32),
            "bert cannot be served: layer 0 is not causal",
        ),
        (
            transformers.DeepseekV3Config(
                **SMALL,
                num_attention_heads=4,
                intermediate_size=32,
                moe_intermediate_size=8,
                n_routed_experts=8,
            ),
            "deepseek_v3 cannot be served: layer 0 has keys and values of different shapes",
        ),
        (transformers.FalconConfig(**SMALL, alibi=True), "falcon cannot be served: .*ALiBi"),
    ],
)
def test_unsupported_architectures_are_refused_before_weights_are_looked_at(
    folder: Path, config: transformers.PretrainedConfig, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.model.loader._read_weights", None)
    config.save_pretrained(folder)
    for damage in (lambda folder: None, garble_header, remove(WEIGHTS)):
        damage(folder)
        with pytest.raises(CheckpointError, match=message):
            load(folder)


# ----------------------------------------------------------------------- the look at a model's forward


def save_untested(folder: Path) -> None:
    config = transformers.OlmoConfig(**SMALL, num_attention_heads=2, intermediate_size=32)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_an_architecture_without_tests_is_compared_with_its_own_attention(folder: Path) -> None:
    save_untested(folder)
    assert "olmo" not in TESTED_MODEL_TYPES
    loaded = load(folder)
    assert paged_forward_error(loaded.model, loaded.layers) < 1e-5
    assert loaded.model.config._attn_implementation == ATTENTION_NAME


def test_only_architectures_with_tests_are_spared_the_comparison() -> None:
    assert {make_config().model_type for make_config in ARCHITECTURES.values()} >= TESTED_MODEL_TYPES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_that_differs_from_its_own_attention_is_refused(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misjudged(probe: AttentionProbe, num_layers: int) -> tuple[LayerAttention, ...]:
        return tuple(replace(layer, sliding_window=1) for layer in recorded(probe, num_layers))

    recorded = AttentionProbe.layers
    monkeypatch.setattr(AttentionProbe, "layers", misjudged)
    save_untested(folder)
    with pytest.raises(CheckpointError, match=r"olmo cannot be served: .*logits differ from its own"):
        load(folder, dtype=dtype)


def save_windowed(folder: Path, window: int, **settings: Any) -> None:
    """A PhiMoE, whose window is in its mask and in nothing that its layers ask for."""
    torch.manual_seed(5)
    config = transformers.PhimoeConfig(
        **SMALL,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
        sliding_window=window,
        **settings,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.save_pretrained(folder)


def test_a_window_that_is_in_the_mask_alone_is_kept_to(folder: Path) -> None:
    save_windowed(folder, 8)
    loaded = load(folder)
    assert [layer.sliding_window for layer in loaded.layers] == [8, 8]
    # 24 tokens, three times the window, against transformers' own forward.
    assert paged_forward_error(loaded.model, loaded.layers) < 1e-5
    without = [replace(layer, sliding_window=None) for layer in loaded.layers]
    assert paged_forward_error(loaded.model, without) > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [8, 40])
def test_one_whose_window_nobody_tells_of_is_refused(
    folder: Path, window: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer window does not show in the tokens of the comparison."""
    save_windowed(folder, window)
    assert [layer.sliding_window for layer in load(folder, dtype=dtype).layers] == [window, window]
    monkeypatch.setattr("specdec.attention.hf._WINDOW_IN_MASK_ALONE", frozenset())
    message = (
        "logits differ from its own" if window == 8 else "window shows either in the mask of its attention"
    )
    with pytest.raises(CheckpointError, match=f"phimoe cannot be served: .*{message}"):
        load(folder, dtype=dtype, max_model_len=window)


def test_a_window_that_only_the_layers_have_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is longer than the tokens of the ordinary comparison."""
    save_untested(folder)
    edit_config(folder, sliding_window=40)
    monkeypatch.setattr("specdec.attention.hf._WINDOW_IN_MASK_ALONE", frozenset({"olmo"}))
    with pytest.raises(CheckpointError, match=r"olmo cannot be served: its sliding window shows either"):
        load(folder)


@pytest.mark.parametrize("keys", [{}, {"layer_types": ["sliding_attention"] * 3}])
@pytest.mark.parametrize("is_tested", [False, True])
def test_a_window_that_only_transformers_cache_keeps_bounds_the_length(
    folder: Path, is_tested: bool, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward over a whole text says something else than `generate`, behind the window."""
    if not is_tested:
        save_untested(folder)
        keys = {name: value[:2] for name, value in keys.items()}
    edit_config(folder, sliding_window=40, **keys)
    loaded = load(folder, max_model_len=40)
    assert [layer.sliding_window for layer in loaded.layers] == [None] * len(loaded.layers)
    assert loaded.model.config.sliding_window == 40
    assert masked_window_error(loaded.model, loaded.layers) < 1e-5
    assert loaded.model.config.sliding_window == 40
    assert loaded.model.config._attn_implementation == ATTENTION_NAME
    monkeypatch.setattr("specdec.model.loader._read_weights", None)
    with pytest.raises(CheckpointError, match=r"layer 0 attends to all tokens, .*set max_model_len to 40"):
        load(folder, max_model_len=41)


# ------------------------------------------------------------------------------------------- settings


def test_max_model_len(original: Path) -> None:
    assert load(original, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len = 257 exceeds the 256 positions"):
        load(original, max_model_len=257)


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ({}, {"dtype": "bfloat16"}, "attention_backend: flashinfer: it runs heads of 64, .* are of 8"),
        ({"head_dim": 64}, {"dtype": "float32"}, "attention_backend: flashinfer: it does not run float32"),
        ({"head_dim": 64}, {"device": "cpu"}, "attention_backend: flashinfer: it runs on CUDA devices"),
        # What `auto` stands for is only known later, and still before the weights.
        (
            {"head_dim": 64, "dtype": "float32"},
            {"device": "auto"},
            "attention_backend flashinfer: it runs on",
        ),
    ],
)
def test_flashinfer_is_refused_before_weights_are_read(
    folder: Path,
    sizes: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec.model.loader._read_weights", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("specdec.model.loader._check_size", lambda *sizes: None)
    edit_config(folder, **sizes)
    with pytest.raises(ConfigError, match=message):
        load(folder, attention_backend="flashinfer", **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"device": "cuda"}, ConfigError, "attention_backend: cpu: it runs on CPUs, and the device is cuda"),
        ({"dtype": "float16"}, ConfigError, "attention_backend: cpu: it does not run float16"),
        ({"device": "cpu"}, ResourceError, "attention_backend cpu: no C.* compiler here; leave"),
    ],
)
def test_the_cpus_own_is_refused_before_weights_are_read(
    folder: Path,
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unavailable(_cache_dir: str | None) -> None:
        raise NativeUnavailable("no C++ compiler here")

    monkeypatch.setattr("specdec.model.loader._read_weights", None)
    monkeypatch.setattr("specdec.attention.registry.CpuPagedAttention", unavailable)
    with pytest.raises(error, match=message):
        load(folder, attention_backend="cpu", **settings)


@pytest.mark.parametrize(
    ("architecture", "head_dim"), [("llama", 8), ("qwen3", 16), ("gpt2", 8), ("falcon", 8), ("gemma3", 16)]
)
def test_head_sizes_on_paper_are_those_of_the_model(tmp_path: Path, architecture: str, head_dim: int) -> None:
    save_model(tmp_path, architecture)
    assert head_dims_of(transformers.AutoConfig.from_pretrained(tmp_path)) == (head_dim,)
    assert {layer.head_dim for layer in load(tmp_path).layers} == {head_dim}


GEMMA4: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
}


def save_drawn_wide(folder: Path, config: transformers.PretrainedConfig) -> None:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.save_pretrained(folder)


def test_layers_may_have_heads_of_different_sizes(tmp_path: Path) -> None:
    save_drawn_wide(tmp_path, transformers.Gemma4TextConfig(**GEMMA4))
    assert head_dims_of(transformers.AutoConfig.from_pretrained(tmp_path)) == (8, 16)
    with pytest.raises(ConfigError, match=r"it runs heads of 64, .* are of 8:"):
        load(tmp_path, attention_backend="flashinfer", dtype="bfloat16")
    loaded = load(tmp_path, attention_backend="sdpa")
    assert [layer.head_dim for layer in loaded.layers] == [8, 16]


def test_attention_in_both_directions_among_images_is_no_reason(tmp_path: Path) -> None:
    """Text is causal all the same, and nothing else is served."""
    save_drawn_wide(tmp_path, transformers.Gemma4TextConfig(**GEMMA4, use_bidirectional_attention="vision"))
    loaded = load(tmp_path)
    assert paged_forward_error(loaded.model, loaded.layers) < 1e-5


@pytest.mark.parametrize("value", [True, "all"])
def test_attention_in_both_directions_among_tokens_is_refused(tmp_path: Path, value: Any) -> None:
    config = (
        transformers.Gemma4TextConfig(**GEMMA4, use_bidirectional_attention=value)
        if value == "all"
        else transformers.Gemma3TextConfig(**SMALL, use_bidirectional_attention=value)
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="its attention is not causal"):
        load(tmp_path)


def test_a_layer_that_drops_the_keywords_is_served(tmp_path: Path) -> None:
    """Nemotron's hand their attention only those that they know."""
    save_drawn_wide(
        tmp_path,
        transformers.NemotronConfig(
            **SMALL, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8
        ),
    )
    assert "nemotron" not in TESTED_MODEL_TYPES
    loaded = load(tmp_path)
    assert paged_forward_error(loaded.model, loaded.layers) < 1e-5


@pytest.mark.parametrize("kind", [transformers.HunYuanDenseV1Config, transformers.HunYuanMoEV1Config])
def test_frequencies_that_alpha_stretches_are_served(tmp_path: Path, kind: Any) -> None:
    """Hunyuan calls them dynamic; they do not depend on the length."""
    experts = {} if kind is transformers.HunYuanDenseV1Config else {"num_experts": 4, "moe_topk": 2}
    config = kind(
        **SMALL,
        **experts,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
    )
    save_drawn_wide(tmp_path, config)
    loaded = load(tmp_path)
    assert loaded.rotary is None
    assert loaded.max_model_len == 16
    # 24 tokens: beyond the length from which on a dynamic embedding would change.
    assert paged_forward_error(loaded.model, loaded.layers) < 1e-5
