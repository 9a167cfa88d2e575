"""Whatever is wrong with a published drafter is named: file, key or tensor, and what would be right."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core.errors import CheckpointError
from specdec.drafters.checkpoints.registry import load_drafter
from tests.specdec.drafters import published
from tests.specdec.drafters.conftest import Target
from tests.specdec.drafters.published import MODEL

Broken = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
Writer = Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]]


def change(**values: Any) -> Broken:
    return lambda config, _: config.update(values)


def drop(name: str) -> Broken:
    return lambda _, tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Broken:
    return lambda _, tensors: tensors.update({name: tensor})


def whole_map(offsets: torch.Tensor) -> Broken:
    """Have the head know as many ids as the target, by these offsets."""

    def harm(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["draft_vocab_size"] = len(offsets)
        tensors["d2t"] = offsets

    return harm


BROKEN: dict[str, tuple[Writer, Broken, list[str]]] = {
    "missing tensor": (
        published.eagle3,
        drop("midlayer.mlp.up_proj.weight"),
        ["lack 1 tensors, first midlayer.mlp.up_proj.weight of shape (24, 16)"],
    ),
    "no hidden norm": (
        published.eagle3,
        drop("midlayer.hidden_norm.weight"),
        ["lack 1 tensors, first midlayer.hidden_norm.weight of shape (16,)"],
    ),
    "no hidden norm, named as others do": (
        lambda: published.eagle3(layer="layers.0.", prefix="model."),
        drop("model.layers.0.hidden_norm.weight"),
        ["lack 1 tensors, first model.layers.0.hidden_norm.weight of shape (16,)"],
    ),
    "nothing that fuses states": (
        published.eagle3,
        drop("fc.weight"),
        ["lack 1 tensors, first fc.weight of shape (16, 48)"],
    ),
    "nothing that fuses states, in a module": (
        lambda: published.eagle3(prefix="model."),
        drop("model.fc.weight"),
        ["lack 1 tensors, first model.fc.weight of shape (16, 48)"],
    ),
    "nothing that joins token and state": (
        lambda: published.eagle(has_bias=False),
        drop("fc.weight"),
        ["lack 1 tensors, first fc.weight of shape (16, 32)"],
    ),
    "extra tensor": (
        published.eagle3,
        put("midlayer.mlp.extra.weight", torch.zeros(2, 3)),
        ["hold 1 tensors", "Eagle3", "first midlayer.mlp.extra.weight of shape (2, 3)"],
    ),
    "wrong shape": (
        published.eagle3,
        put("fc.weight", torch.zeros(16, 32)),
        ["tensor fc.weight has shape (16, 32)", "must be (16, 48)"],
    ),
    "quantized weights": (
        published.eagle,
        put("fc.weight", torch.zeros(16, 32, dtype=torch.int8)),
        ["fc.weight holds torch.int8", "not quantized"],
    ),
    "another vocabulary": (
        published.eagle,
        change(vocab_size=50),
        ["config.json: vocab_size is 50; the target's is 48"],
    ),
    "another width": (
        published.eagle,
        change(hidden_size=32),
        ["config.json: hidden_size is 32; the target's is 16"],
    ),
    "another target's width": (
        published.eagle3,
        change(target_hidden_size=32),
        ["target_hidden_size is 32; the target's is 16"],
    ),
    "narrow head without embeddings": (
        published.eagle3,
        change(hidden_size=8, target_hidden_size=16, num_attention_heads=2),
        ["lack embed_tokens.weight of shape (48, 8)"],
    ),
    "bias that is not there": (
        lambda: published.eagle(has_bias=False),
        change(bias=True),
        ["config.json: bias is True; the weights lack fc.bias"],
    ),
    "no map of the vocabulary": (
        published.eagle3,
        drop("d2t"),
        ["lack 1 tensors, first d2t of shape (6,)"],
    ),
    "map of another size": (
        published.eagle3,
        change(draft_vocab_size=7),
        ["tensor d2t has shape (6,)", "(7,)"],
    ),
    "ids instead of offsets": (
        published.eagle3,
        put("d2t", torch.tensor(published.KNOWN_IDS)),
        ["d2t leads to token ids outside of 0 .. 47"],
    ),
    "t2d of another map": (
        published.eagle3,
        put("t2d", torch.ones(48, dtype=torch.bool)),
        ["t2d and d2t contradict each other, first at token id 0"],
    ),
    "vocabulary larger than the target's": (
        published.eagle3,
        change(draft_vocab_size=49),
        ["draft_vocab_size is 49", "has 48 ids"],
    ),
    "map that is no integers": (
        published.eagle3,
        put("d2t", torch.zeros(6)),
        ["d2t holds torch.float32; offsets of token ids are integers"],
    ),
    "map of the whole vocabulary that meets": (
        published.eagle3,
        whole_map(torch.tensor([1, *[0] * 47])),
        ["d2t leads from two draft ids to the same token id"],
    ),
    "layers beyond the target's": (
        published.speculators_eagle3,
        change(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
        [
            ": eagle_aux_hidden_state_layer_ids is [2, 3, 4]; read as inputs of layers it means the states "
            "after 2, 3, 4 layers; the target has 4 layers"
        ],
    ),
    "outputs of layers beyond the target's": (
        published.eagle3,
        change(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        [
            "eagle_config.eagle_aux_hidden_state_layer_ids is [1, 2, 3]; read as outputs of layers it means "
            "the states after 2, 3, 4 layers; the target has 4 layers"
        ],
    ),
    "layers in two places": (
        published.eagle3,
        change(eagle_aux_hidden_state_layer_ids=[2, 2, 3]),
        [
            "eagle_config.eagle_aux_hidden_state_layer_ids is [1, 0, 2]; read as outputs of layers it means "
            "the states after 2, 1, 3 layers, and eagle_aux_hidden_state_layer_ids at the top is [2, 2, 3]"
        ],
    ),
    "inputs that no layer has": (
        published.eagle3,
        change(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}),
        [
            "eagle_config.eagle_aux_hidden_state_layer_ids is [1, 2, 4]; read as inputs of layers it means "
            "the states after 1, 2, 4 layers; the target has 4 layers"
        ],
    ),
    "layers that are no list": (
        published.eagle3,
        change(eagle_aux_hidden_state_layer_ids="2,3,4"),
        ["eagle_aux_hidden_state_layer_ids", "must be a list of integers, 0 and more"],
    ),
    "no number of layers": (
        published.eagle,
        change(num_hidden_layers=None),
        ["config.json: it describes no llama that can be made: Field 'num_hidden_layers' expected int"],
    ),
    "number that is a string": (
        published.eagle3,
        change(rms_norm_eps="1e-5"),
        ["config.json: it describes no llama", "Field 'rms_norm_eps' expected float, got str"],
    ),
    "size of a head that is a string": (
        published.eagle,
        change(head_dim="8"),
        ["config.json: it describes no llama", "Field 'head_dim' with value '8'"],
    ),
    "size of a head that is a string, of a speculator": (
        published.speculators_mtp,
        lambda config, _: config.update(
            transformer_layer_config=config["transformer_layer_config"] | {"head_dim": "8"}
        ),
        ["config.json: transformer_layer_config describes no qwen3", "Field 'head_dim' expected int"],
    ),
    "width that heads do not divide": (
        published.eagle,
        change(num_attention_heads=3),
        ["config.json: num_attention_heads is 3; it must divide hidden_size, 16"],
    ),
    "two layers": (
        published.eagle3,
        put("layers.1.mlp.up_proj.weight", torch.zeros(24, 16)),
        ["hold 1 tensors of more than one decoder layer, first layers.1.mlp.up_proj.weight; EAGLE-3 heads"],
    ),
    "two layers, named as others do": (
        published.eagle3,
        put("midlayers.1.mlp.up_proj.weight", torch.zeros(24, 16)),
        ["of more than one decoder layer, first midlayers.1.mlp.up_proj.weight"],
    ),
    "both norms": (published.eagle3, change(fc_norm=True, norm_before_fc=True), ["fc_norm is True"]),
    "both norms, named as before": (
        published.eagle3,
        change(use_aux_norm=True, norm_before_fc=True),
        ["use_aux_norm is True; norm_before_fc is true too"],
    ),
    "no LM head for a part of the vocabulary": (
        published.eagle3,
        drop("lm_head.weight"),
        ["lack 1 tensors, first lm_head.weight of shape (6, 16)"],
    ),
    "flag that is a string": (
        published.eagle3,
        change(norm_output="yes"),
        ["norm_output is 'yes'; it must be true or false"],
    ),
    "no fused states": (
        published.eagle3,
        change(eagle_config={"use_aux_hidden_state": False}),
        ["eagle_config.use_aux_hidden_state is False"],
    ),
    "unknown model type": (
        published.speculators_eagle3,
        lambda config, _: config.update(
            transformer_layer_config=config["transformer_layer_config"] | {"model_type": "alpaca"}
        ),
        ["transformer_layer_config describes no alpaca"],
    ),
    "unknown model type of other parts": (
        published.eagle,
        lambda config, tensors: (
            config.update(model_type="alpaca"),
            tensors.update({"layers.0.mlp.experts.0.up_proj.weight": torch.zeros(24, 16)}),
        ),
        ["it describes no alpaca"],
    ),
    "no width": (
        published.eagle,
        lambda config, _: config.pop("intermediate_size"),
        ["intermediate_size is nothing; it must be a positive integer"],
    ),
    "fewer medusa heads than stated": (
        published.medusa,
        change(medusa_num_heads=4),
        ["lack 3 tensors, first 3.0.linear.bias of shape (16,)"],
    ),
    "more medusa layers than stated": (
        lambda: published.medusa(num_layers=2),
        change(medusa_num_layers=1),
        ["lack 3 tensors, first 0.1.weight of shape (48, 16)"],
    ),
    "no number of medusa heads": (
        published.medusa,
        change(medusa_num_heads=0),
        ["medusa_num_heads is 0; it must be a positive integer"],
    ),
    "fewer converted medusa heads than stated": (
        published.medusa_for_vllm,
        change(num_heads=4),
        ["lack 3 tensors, first blocks.3.layers.0.bias of shape (16,)"],
    ),
    "medusa that knows some ids, not said which": (
        published.medusa_for_vllm,
        lambda config, tensors: (
            config.update(truncated_vocab_size=6),
            tensors.update({f"lm_heads.{head}.weight": torch.zeros(6, 16) for head in range(3)}),
        ),
        ["lack 1 tensors, first token_map of shape (6,)"],
    ),
    "medusa that knows ids beyond the target's": (
        published.medusa_for_vllm,
        lambda config, tensors: (
            config.update(truncated_vocab_size=2),
            tensors.update({f"lm_heads.{head}.weight": torch.zeros(2, 16) for head in range(3)}),
            tensors.update(token_map=torch.tensor([3, 48])),
        ),
        ["token_map, as offsets d2t: d2t leads to token ids outside of 0 .. 47"],
    ),
    "medusa of a larger vocabulary": (
        published.medusa_for_vllm,
        change(truncated_vocab_size=49),
        ["truncated_vocab_size is 49; the target's vocabulary has 48 ids"],
    ),
    "medusa with scaled logits": (
        published.medusa_for_vllm,
        change(logit_scale=0.5),
        ["logit_scale is 0.5; Medusa heads with scaled logits are not supported"],
    ),
    "hydra of another architecture": (
        published.hydra,
        change(hydra_head_arch="eagle-attn"),
        [
            "hydra_head_arch is 'eagle-attn'; Hydra heads of this architecture are not supported, those of "
            "mlp, prefix-mlp are"
        ],
    ),
    "hydra that is not grounded": (
        published.hydra,
        change(grounded_heads=False),
        ["hydra_mlp.0.0.linear.weight has shape (16, 32)", "(16, 16)"],
    ),
    "hydra's offset": (
        published.hydra,
        change(hidden_state_offset=9),
        ["hidden_state_offset is 9; it must be an integer from 0 to 4"],
    ),
    "another kind of speculator": (
        published.speculators_eagle3,
        change(speculators_model_type="dflash"),
        ["speculators_model_type is 'dflash'; one of eagle3, mtp"],
    ),
    "EAGLE-1 of speculators": (
        published.speculators_eagle3,
        change(speculators_model_type="eagle"),
        ["speculators_model_type is 'eagle'; one of eagle3, mtp"],
    ),
    "speculator without its layer": (
        published.speculators_eagle3,
        change(transformer_layer_config=None),
        ["transformer_layer_config.hidden_size is nothing"],
    ),
    "no parallel head": (
        published.parallel_heads,
        change(n_future_tokens=1),
        ["n_future_tokens is 1; it must be at least 2"],
    ),
    "nothing that is known": (
        lambda: ({"architectures": ["Other"]}, {"some.weight": torch.zeros(2)}),
        change(),
        ["holds no drafter of a known format (architectures ['Other'])"],
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_named(folder: Path, target: Target, what: str) -> None:
    write, harm, texts = BROKEN[what]
    config, tensors = write()
    published.write(folder, config, tensors, MODEL)
    if what != "nothing that is known":
        load_drafter(folder, target.parts)
    harm(config, tensors)
    published.write(folder, config, tensors, MODEL)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder, target.parts)
    for text in (str(folder), *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda folder: (folder / MODEL).unlink(), "has no weights of a drafter"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / MODEL).write_bytes(b"nothing"), "is not a whole safetensors file"),
    ],
)
def test_files_that_cannot_be_read(
    folder: Path, target: Target, spoil: Callable[[Path], None], text: str
) -> None:
    published.write(folder, *published.eagle(), MODEL)
    spoil(folder)
    with pytest.raises(CheckpointError, match=text):
        load_drafter(folder, target.parts)


@pytest.mark.parametrize(
    ("file", "converted", "content"),
    [
        ("medusa_lm_head.pt", "medusa_lm_head.safetensors", published.medusa),
        ("hydra_lm_head.pt", "hydra_lm_head.safetensors", published.hydra),
        ("pytorch_model.bin", MODEL, published.eagle),
    ],
)
def test_a_pickle_is_not_read_unasked_and_can_be_converted_as_it_is_said(
    folder: Path, target: Target, file: str, converted: str, content: Callable[[], Any]
) -> None:
    published.write(folder, *content(), file)
    with pytest.raises(CheckpointError) as refused:
        load_drafter(folder, target.parts)
    text = str(refused.value)
    assert text.startswith(f"{folder / file} is pickled, and only safetensors are read unasked")
    assert "speculative_config.allow_pickled_weights: true" in text
    expected = load_drafter(folder, target.parts, allow_pickled=True).state_dict()
    command = shlex.split(text[text.index("python -c") : text.index(" - or have")])
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=120)
    (folder / file).unlink()
    assert (folder / converted).is_file()
    found = load_drafter(folder, target.parts).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def written_in_parts(folder: Path) -> tuple[Path, Path]:
    """Write EAGLE as transformers once did what is large: pickled files, and an index of their tensors."""
    config, tensors = published.eagle()
    parts = folder / "pytorch_model-00001-of-00002.bin", folder / "pytorch_model-00002-of-00002.bin"
    places = {name: parts[place % 2] for place, name in enumerate(sorted(tensors))}
    for part in parts:
        of_part = {name: tensor for name, tensor in tensors.items() if places[name] == part}
        published.write(folder, config, of_part, part.name)
    index = {"weight_map": {name: part.name for name, part in places.items()}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return parts


def test_pickled_parts_are_read_and_converted_as_one_file_is(folder: Path, target: Target) -> None:
    first, second = written_in_parts(folder)
    with pytest.raises(CheckpointError) as refused:
        load_drafter(folder, target.parts)
    text = str(refused.value)
    assert text.startswith(f"{first} and 1 more parts are pickled, and only safetensors are read unasked")
    expected = load_drafter(folder, target.parts, allow_pickled=True).state_dict()
    published.write(folder / "whole", *published.eagle(), MODEL)
    whole = load_drafter(folder / "whole", target.parts).state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in whole.items())
    command = shlex.split(text[text.index("python -c") : text.index(" - or have")])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=120)
    first.unlink()
    second.unlink()
    found = load_drafter(folder, target.parts).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("allowed", [False, True])
def test_pickled_parts_that_are_not_all_there(folder: Path, target: Target, allowed: bool) -> None:
    first, second = written_in_parts(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the weight file {second.name} that pytorch_model"):
        load_drafter(folder, target.parts, allow_pickled=allowed)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": [second.name]}}))
    with pytest.raises(CheckpointError, match="weight_map must give a file name for every tensor"):
        load_drafter(folder, target.parts, allow_pickled=allowed)
    index.unlink()
    with pytest.raises(CheckpointError, match=f"has {first.name}, but no {index.name}, which names all"):
        load_drafter(folder, target.parts, allow_pickled=allowed)


def test_a_pickle_that_would_run_something_is_not_even_opened_unasked(folder: Path, target: Target) -> None:
    published.write(folder, published.medusa()[0], {}, "medusa_lm_head.pt")
    (folder / "medusa_lm_head.pt").write_bytes(b"no pickle at all")
    with pytest.raises(CheckpointError, match="is pickled, and only safetensors are read unasked"):
        load_drafter(folder, target.parts)
    with pytest.raises(CheckpointError, match="cannot be read as a file of tensors alone"):
        load_drafter(folder, target.parts, allow_pickled=True)


def test_safetensors_are_read_beside_a_pickle(folder: Path, target: Target) -> None:
    published.write(folder, *published.eagle(), "pytorch_model.bin")
    published.write(folder, *published.eagle(), MODEL)
    load_drafter(folder, target.parts)


def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(folder: Path, target: Target) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (folder / "was-run",)

    published.write(folder, published.medusa()[0], {}, "medusa_lm_head.pt")
    torch.save({"0.0.linear.weight": Runs()}, folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="cannot be read as a file of tensors alone"):
        load_drafter(folder, target.parts, allow_pickled=True)
    assert not (folder / "was-run").exists()
    torch.save([torch.zeros(2)], folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="must hold a dictionary of tensors by name"):
        load_drafter(folder, target.parts, allow_pickled=True)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"num_nextn_predict_layers": 2},
            "num_nextn_predict_layers is 2; the weights hold modules in",
        ),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers is True; it must be a positive"),
    ],
)
def test_mtp_that_is_stated_otherwise(
    folder: Path, target: Target, config: dict[str, Any], text: str
) -> None:
    published.whole_target(folder, target.model, published.mtp_deepseek())
    stated = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match=text):
        load_drafter(folder, target.parts)


def test_drafters_of_blocks_are_told_apart_from_eagle(folder: Path, target: Target) -> None:
    config, tensors = published.eagle3()
    published.write(folder, {**config, "architectures": ["DFlashDraftModel"]}, tensors, MODEL)
    with pytest.raises(CheckpointError, match=r"holds a DFlash drafter .*not supported; known are EAGLE"):
        load_drafter(folder, target.parts)


def test_eagle_that_was_converted_for_vllm_is_told_apart_from_a_model(folder: Path, target: Target) -> None:
    config, tensors = published.eagle()
    converted = {name if "fc." in name else f"model.{name}": tensor for name, tensor in tensors.items()}
    converted |= {f"model.{name}.weight": torch.ones(16) for name in ("norm", "layers.0.input_layernorm")}
    converted |= {"lm_head.weight": torch.zeros(6, 16), "token_map": torch.arange(6)}
    nested = {"model_type": "eagle", "architectures": ["EAGLEModel"], "truncated_vocab_size": 6}
    published.write(folder, nested | {"model": config}, converted, MODEL)
    with pytest.raises(
        CheckpointError,
        match=r"an EAGLE head that was converted for vLLM's first engine .* beside layers\.\*",
    ):
        load_drafter(folder, target.parts, kind="eagle")


@pytest.mark.parametrize(
    ("kind", "lacks", "has"),
    [
        ("olmo2", "input_layernorm", "post_feedforward_layernorm.weight"),
        ("phi3", "q_proj", "self_attn.qkv_proj.weight"),
    ],
)
def test_eagle3_of_layers_that_are_made_of_other_parts(
    folder: Path, target: Target, kind: str, lacks: str, has: str
) -> None:
    config, tensors = published.eagle3()
    tensors[f"midlayer.{has}"] = torch.ones(16)
    published.write(folder, {**config, "model_type": kind, "pad_token_id": 0}, tensors, MODEL)
    with pytest.raises(CheckpointError, match=f"no EAGLE-3 head .* of model type '{kind}': .*'{lacks}'"):
        load_drafter(folder, target.parts)


def test_rotary_factors_for_a_part_of_a_head(folder: Path, target: Target) -> None:
    """A target's that turns a part of its heads: a Llama turns all of them, and needs as many more."""
    config, tensors = published.eagle()
    config |= {"model_type": "phi3", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}
    factors = {name: [1.0] * (published.HEAD_DIM // 4) for name in ("short_factor", "long_factor")}
    published.write(folder, config | {"rope_scaling": {"type": "longrope", **factors}}, tensors, MODEL)
    with pytest.raises(CheckpointError, match="no drafter can be made of layers of model type 'llama'"):
        load_drafter(folder, target.parts)


def test_a_kind_of_rotary_embedding_that_nobody_has(folder: Path, target: Target) -> None:
    config, tensors = published.eagle()
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}
    published.write(folder, config, tensors, MODEL)
    with pytest.raises(CheckpointError, match=r"rope_scaling: type 'mrope' is none .*; known: default, dyn"):
        load_drafter(folder, target.parts)


@pytest.mark.parametrize("told_by", ["architectures", "eagle_config"])
def test_eagle3_without_fused_states_is_told_by_its_config(
    folder: Path, target: Target, told_by: str
) -> None:
    """It needs no `fc`, and no map of a vocabulary."""
    config, _ = published.eagle3()
    config["eagle_config"] = {"use_aux_hidden_state": False}
    if told_by == "eagle_config":
        config["architectures"] = ["LlamaForCausalLM"]
    tensors = published.filled(published.layer_shapes("layers.0.", inputs=32))
    if told_by == "architectures":
        tensors["fc.weight"] = torch.zeros(16, 32)
    published.write(folder, config, tensors, MODEL)
    with pytest.raises(CheckpointError, match=r"eagle_config.use_aux_hidden_state is False; heads without"):
        load_drafter(folder, target.parts)


@pytest.mark.parametrize("file", ["hydra_lm_head.pt", "hydra_lm_head.safetensors"])
def test_hydra_with_tensors_of_eagles_names_is_told_apart(folder: Path, target: Target, file: str) -> None:
    published.write(folder, *published.hydra_eagle_attention(), file)
    with pytest.raises(CheckpointError, match=r"hydra_head_arch is 'eagle-attn'; .* mlp, prefix-mlp are"):
        load_drafter(folder, target.parts, allow_pickled=True)


def test_a_target_without_modules_has_none(folder: Path, target: Target) -> None:
    published.whole_target(folder, target.model, {})
    with pytest.raises(CheckpointError, match="holds no drafter of a known format"):
        load_drafter(folder, target.parts)
