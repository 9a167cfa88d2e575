"""The saved models, and the code that saves them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from training.corpus import is_held_out
from training.evaluation import draft_matches, generate_streams
from training.export import load_mtp, save_target
from training.mtp import published_tensors
from training.prompts import read_prompts
from training.target import TargetRecipe, TargetTraining
from training.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, encode_text, load_tokenizer, train_tokenizer

_SIZE_LIMIT_BYTES = 22_000_000


def test_mtp_tensors_have_the_published_names(tiny_config: LlamaConfig) -> None:
    training = TargetTraining(tiny_config, TargetRecipe(steps=1))
    tensors = published_tensors(training.mtp, training.target.model.embed_tokens.weight, layer=4)
    shapes = {name.removeprefix("model.layers.4."): tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "enorm.weight": (16,),
        "hnorm.weight": (16,),
        "eh_proj.weight": (16, 32),
        "shared_head.norm.weight": (16,),
        "shared_head.head.weight": (64, 16),
        "embed_tokens.weight": (64, 16),
        "input_layernorm.weight": (16,),
        "post_attention_layernorm.weight": (16,),
        "self_attn.q_proj.weight": (16, 16),
        "self_attn.k_proj.weight": (8, 16),
        "self_attn.v_proj.weight": (8, 16),
        "self_attn.o_proj.weight": (16, 16),
        "mlp.gate_proj.weight": (32, 16),
        "mlp.up_proj.weight": (32, 16),
        "mlp.down_proj.weight": (16, 32),
    }
    assert all(name.startswith("model.layers.4.") for name in tensors)


def test_saved_folder_loads_as_it_was(tmp_path: Path, tiny_config: LlamaConfig) -> None:
    training = TargetTraining(tiny_config, TargetRecipe(steps=1))
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50)
    save_target(training, tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in training.target.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16().float()), name
    assert AutoConfig.from_pretrained(tmp_path).num_nextn_predict_layers == 1
    mtp = load_mtp(tmp_path, model)
    for name, tensor in training.mtp.state_dict().items():
        assert torch.equal(mtp.state_dict()[name], tensor.bfloat16().float()), name


def test_tokenizer_round_trips_and_separates_indentation() -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50)
    text = "def f(x):\n\n        return 'é' \t\r\n<|endoftext|>"
    ids = encode_text(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert 0 not in ids
    assert tokenizer.convert_ids_to_tokens(range(len(SPECIAL_TOKENS))) == list(SPECIAL_TOKENS)
    assert encode_text(tokenizer, "x\n    y")[:2] == encode_text(tokenizer, "x\n")


def test_demo_tokenizers_are_the_same_file(demo_models: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (demo_models / "target" / name).read_bytes() == (demo_models / "draft" / name).read_bytes()
    assert len(load_tokenizer(demo_models / "target")) == VOCAB_SIZE


def test_demo_chat_template_renders(demo_models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_models / "target")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "robot", "content": ""}], tokenize=False)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_demo_models_load_without_warnings(
    demo_models: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="transformers"):
        model = AutoModelForCausalLM.from_pretrained(demo_models / name)
    assert not caplog.records
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == 4096


def test_demo_mtp_module_loads(demo_models: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(demo_models / "target", dtype=torch.float32)
    load_mtp(demo_models / "target", target)
    embedding = load_file(demo_models / "target" / "mtp.safetensors")["model.layers.8.embed_tokens.weight"]
    assert torch.equal(embedding.float(), target.model.embed_tokens.weight)


@pytest.mark.full
def test_demo_target_writes_python_and_the_draft_follows(demo_models: Path) -> None:
    tokenizer = load_tokenizer(demo_models / "target")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(demo_models / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    prompts = [
        encode_text(tokenizer, prompt.prompt) for prompt in read_prompts(demo_models / "prompts.jsonl")[:4]
    ]
    streams = generate_streams(target, prompts, 0.0, 0, frozenset())
    text = "".join(tokenizer.batch_decode(streams.tokens))
    assert sum(text.count(word) for word in ("self", "def ", "return", "(", "import")) >= 20
    matches = [match for row in draft_matches(draft, streams) for match in row]
    assert sum(matches) / len(matches) > 0.4


def test_demo_prompts_are_held_out_and_short(demo_models: Path) -> None:
    prompts = read_prompts(demo_models / "prompts.jsonl")
    tokenizer = load_tokenizer(demo_models / "target")
    assert len(prompts) == len({prompt.id for prompt in prompts}) == 96
    assert all(is_held_out(prompt.file) for prompt in prompts)
    assert all(16 <= len(encode_text(tokenizer, prompt.prompt)) <= 300 for prompt in prompts)


def test_demo_family_is_small_and_reported(demo_models: Path) -> None:
    pair = [demo_models, demo_models / "target", demo_models / "draft"]
    sizes = [path.stat().st_size for folder in pair for path in folder.iterdir() if path.is_file()]
    assert sum(sizes) < _SIZE_LIMIT_BYTES
    report = json.loads((demo_models / "evaluation.json").read_text())
    loss = report["loss"]
    assert loss["target"]["nats_per_token"] < loss["5_gram"]["nats_per_token"]
