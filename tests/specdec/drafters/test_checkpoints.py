"""Drafters in the published layouts load, tensors go where they belong, and they are written the same."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from specdec.core.errors import CheckpointError
from specdec.drafters.base import Drafter
from specdec.drafters.checkpoints.eagle import save_eagle
from specdec.drafters.checkpoints.eagle3 import save_eagle3
from specdec.drafters.checkpoints.files import open_drafter
from specdec.drafters.checkpoints.hydra import save_hydra
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.checkpoints.mtp import save_mtp
from specdec.drafters.checkpoints.parallel_heads import save_parallel_heads
from specdec.drafters.checkpoints.registry import detect, load_drafter
from specdec.drafters.checkpoints.speculators import save_speculator
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
from tests.specdec.drafters import published
from tests.specdec.drafters.conftest import LAYERS, Target, tiny_config
from tests.specdec.drafters.published import MODEL

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def same(found: torch.Tensor, stored: torch.Tensor) -> bool:
    return found.dtype == stored.dtype and torch.equal(found, stored)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa(folder: Path, target: Target, file: str, num_layers: int) -> None:
    config, tensors = published.medusa(num_layers=num_layers)
    published.write(folder, config, tensors, file)
    heads = load_drafter(folder, target.parts, allow_pickled=file.endswith(".pt"))
    assert isinstance(heads, Medusa)
    state = heads.state_dict()
    assert len(state) == len(tensors)
    assert all(same(state[f"heads.{name}"], tensor) for name, tensor in tensors.items())
    save_medusa(heads, folder / "again", base_model="somebody/some-model")
    again = load_file(folder / "again" / "medusa_lm_head.safetensors")
    assert again.keys() == tensors.keys()
    assert all(same(again[name], tensor) for name, tensor in tensors.items())
    assert config.items() >= {"medusa_num_heads": 3}.items()
    saved = json.loads((folder / "again" / "config.json").read_text())
    assert all(saved[name] == value for name, value in config.items() if name != "transformers_version")
    save_medusa(heads, folder / "pickled", base_model="somebody/some-model", file_format="pt")
    assert isinstance(load_drafter(folder / "pickled", target.parts, allow_pickled=True), Medusa)


def test_medusa_2_with_its_target_in_one_file(folder: Path, target: Target) -> None:
    config, tensors = published.medusa(prefix="medusa_head.")
    whole = tensors | {name: x.clone() for name, x in target.model.state_dict().items()}
    published.write(folder, config, whole, MODEL)
    state = load_drafter(folder, target.parts).state_dict()
    assert all(same(state[f"heads.{n.removeprefix('medusa_head.')}"], x) for n, x in tensors.items())


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_beside_their_target_in_one_folder(folder: Path, target: Target, kind: str) -> None:
    """What is in the file of heads drafts; the target's own files have no part in it."""
    target.model.save_pretrained(folder)  # type: ignore[no-untyped-call]
    config, tensors = getattr(published, kind)()
    of_target = json.loads((folder / "config.json").read_text())
    published.write(folder, of_target | config, tensors, f"{kind}_lm_head.safetensors")
    heads = load_drafter(folder, target.parts)
    assert isinstance(heads, Medusa if kind == "medusa" else Hydra)
    assert len(heads.state_dict()) == len(tensors.keys() - {"input_embed_fn.weight"})


def test_more_medusa_heads_than_stated_are_used(
    folder: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = published.medusa(num_heads=5)
    published.write(folder, config | {"medusa_num_heads": 2}, tensors, "medusa_lm_head.pt")
    assert load_drafter(folder, target.parts, allow_pickled=True).max_depth == 5
    assert "medusa_num_heads is 2, the weights hold 5 heads" in caplog.text


def test_medusa_heads_are_counted_where_nobody_states_how_many(
    folder: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = published.medusa(num_heads=4)
    del config["medusa_num_heads"]
    published.write(folder, config, tensors, MODEL)
    assert load_drafter(folder, target.parts).max_depth == 4
    assert "config.json has no medusa_num_heads, the weights hold 4 heads: all are used" in caplog.text


@pytest.mark.parametrize("is_grounded", [True, False])
@pytest.mark.parametrize("has_prefix_layer", [True, False])
def test_hydra(folder: Path, target: Target, is_grounded: bool, has_prefix_layer: bool) -> None:
    config, tensors = published.hydra(is_grounded=is_grounded, has_prefix_layer=has_prefix_layer)
    published.write(folder, config, tensors, "hydra_lm_head.pt")
    heads = load_drafter(folder, target.parts, allow_pickled=True)
    assert isinstance(heads, Hydra)
    save_hydra(heads, folder / "again", base_model="somebody/some-model")
    again = load_file(folder / "again" / "hydra_lm_head.safetensors")
    stored = {name for name in tensors if not name.endswith("inv_freq")}
    assert again.keys() == stored
    own = stored - {"input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"}
    assert all(same(again[name], tensors[name]) for name in own)
    embeddings = target.model.state_dict()["model.embed_tokens.weight"]
    assert all(same(again[name], embeddings) for name in stored - own)
    saved = json.loads((folder / "again" / "config.json").read_text())
    assert all(saved[name] == value for name, value in config.items())
    # Which tensor went where: the last block of head 2 and its LM head.
    place, head = ("3", "1.") if has_prefix_layer else ("1", "")
    state = heads.state_dict()
    assert same(state["mlps.2.1.linear.weight"], tensors[f"hydra_mlp.2.{place}.linear.weight"])
    assert same(state["lm_heads.2.bias"], tensors[f"hydra_lm_head.2.{head}bias"])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("file", [MODEL, "pytorch_model.bin"])
def test_eagle(folder: Path, target: Target, has_bias: bool, prefix: str, file: str) -> None:
    config, tensors = published.eagle(has_bias=has_bias, prefix=prefix)
    published.write(folder, config, tensors, file)
    head = load_drafter(folder, target.parts, allow_pickled=file != MODEL)
    assert isinstance(head, Eagle)
    state = head.state_dict()
    assert state.keys() == {name.removeprefix(prefix) for name in tensors}
    assert all(same(state[name.removeprefix(prefix)], tensor) for name, tensor in tensors.items())
    save_eagle(head, folder / "again")
    again = load_file(folder / "again" / MODEL)
    assert all(same(again[name], tensor) for name, tensor in state.items())
    saved = json.loads((folder / "again" / "config.json").read_text())
    assert saved["bias"] is has_bias
    assert saved["num_hidden_layers"] == 1
    assert isinstance(load_drafter(folder / "again", target.parts), Eagle)


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("fc_norm", [True, False])
def test_eagle3(folder: Path, target: Target, layer: str, prefix: str, fc_norm: bool) -> None:
    config, tensors = published.eagle3(layer=layer, prefix=prefix, fc_norm=fc_norm)
    config |= {"fc_norm": fc_norm, "norm_output": fc_norm}
    published.write(folder, config, tensors, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    assert head.hidden_layers == (2, 1, 3)
    assert head.settings.norm_output is fc_norm
    assert head.settings.norm_before_residual is False
    assert head.vocabulary is not None
    assert tuple(head.vocabulary.target_ids.tolist()) == published.KNOWN_IDS
    state = head.state_dict()
    assert same(state["midlayer.self_attn.q_proj.weight"], tensors[f"{prefix}{layer}self_attn.q_proj.weight"])
    save_eagle3(head, folder / "again")
    again = load_file(folder / "again" / MODEL)
    renamed = {name.removeprefix(prefix).replace(layer, "midlayer."): x for name, x in tensors.items()}
    assert again.keys() == renamed.keys()
    assert all(same(again[name], tensor) for name, tensor in renamed.items())
    once_more = load_drafter(folder / "again", target.parts)
    assert isinstance(once_more, Eagle3)
    assert once_more.settings.fused_layers == head.settings.fused_layers
    assert once_more.settings.fc_norm is fc_norm


def test_eagle3_with_its_own_embeddings_and_without_t2d(folder: Path, target: Target) -> None:
    config, tensors = published.eagle3()
    del tensors["t2d"]
    own = torch.randn(published.VOCAB, published.HIDDEN)
    published.write(folder, config, tensors | {"embed_tokens.weight": own}, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    assert torch.equal(head.embed(torch.tensor([[7]]))[0, 0], own[7])


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eagle3_shares_embeddings_that_are_the_targets(
    folder: Path, target: Target, caplog: pytest.LogCaptureFixture, prefix: str, dtype: torch.dtype
) -> None:
    """Many heads are published with a copy, rounded to the numbers that they are stored in."""
    config, tensors = published.eagle3(prefix=prefix)
    rows = target.model.get_input_embeddings().weight.detach()
    copied = {f"{prefix}embed_tokens.weight": rows.to(dtype)}
    published.write(folder, config, tensors | copied, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    assert head.embed_tokens is None
    assert head.borrowed == {"embeddings"}
    assert torch.equal(head.embed(torch.tensor([[7]]))[0, 0], rows[7])
    assert "is not the target's" not in caplog.text
    copied = {f"{prefix}embed_tokens.weight": rows + 1.0}
    published.write(folder, config, tensors | copied, MODEL)
    head = load_drafter(folder, target.parts)
    assert head.borrowed == frozenset()
    assert f"{prefix}embed_tokens.weight is not the target's, and is used as it is" in caplog.text


def test_eagle3_for_a_target_that_scales_its_embeddings(
    folder: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """What heads read is not scaled, so it is another matrix; that is no sign of another target."""

    class Scaled(torch.nn.Embedding):
        def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
            return 4.0 * super().forward(token_ids)

    rows = target.model.get_input_embeddings().weight.detach()
    scaled = replace(target.parts, embeddings=Scaled(*rows.shape, _weight=rows))
    config, tensors = published.eagle3()
    published.write(folder, config, tensors | {"embed_tokens.weight": rows}, MODEL)
    head = load_drafter(folder, scaled)
    assert isinstance(head, Eagle3)
    assert torch.equal(head.embed(torch.tensor([[7]]))[0, 0], rows[7])
    assert "is not the target's" not in caplog.text


@pytest.mark.parametrize("ids", [None, []], ids=["no list", "an empty one"])
def test_eagle3_that_does_not_say_what_it_fuses(
    folder: Path, target: Target, caplog: pytest.LogCaptureFixture, ids: list[int] | None
) -> None:
    """ModelOpt writes an empty list."""
    config, tensors = published.eagle3()
    config |= {"eagle_config": {LAYER_IDS: ids}, LAYER_IDS: ids}
    published.write(folder, config, tensors, MODEL)
    assert load_drafter(folder, target.parts).hidden_layers == (2, 2, 1)
    said = "no eagle_aux_hidden_state_layer_ids: the states after 2, 2, 1 layers are assumed to be fused"
    assert said in caplog.text


def test_eagle3_with_the_whole_vocabulary(folder: Path, target: Target) -> None:
    config, tensors = published.eagle3()
    for name in ("d2t", "t2d"):
        del tensors[name]
    del config["draft_vocab_size"]
    tensors["lm_head.weight"] = torch.randn(published.VOCAB, published.HIDDEN)
    published.write(folder, config, tensors, MODEL)
    assert load_drafter(folder, target.parts).vocabulary is None


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_embeddings", [True, False])
def test_eagle3_without_a_head_may_have_meant_its_own_embeddings(
    folder: Path, target: Target, caplog: pytest.LogCaptureFixture, is_tied: bool, has_embeddings: bool
) -> None:
    """The target's head is used; where another may have been meant, that is said."""
    config, tensors = published.eagle3()
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    del config["draft_vocab_size"]
    if has_embeddings:
        tensors["embed_tokens.weight"] = torch.randn(published.VOCAB, published.HIDDEN)
    published.write(folder, config | {"tie_word_embeddings": is_tied}, tensors, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    assert head.lm_head is None
    said = "the weights lack lm_head.weight, and the target's is used" in caplog.text
    assert said == (is_tied and has_embeddings)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "speculators_eagle3", "speculators_mtp"])
def test_heads_in_several_files(folder: Path, target: Target, kind: str) -> None:
    """As large ones are published: an index says which tensor lies in which."""
    config, tensors = getattr(published, kind)()
    whole = published.write(folder / "whole", config, tensors, MODEL)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    split = folder / "split"
    for file, its in parts.items():
        published.write(split, config, {name: tensors[name] for name in its}, file)
    weight_map = {name: file for file, its in parts.items() for name in its}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    expected, got = (load_drafter(one, target.parts).state_dict() for one in (whole, split))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    (split / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        load_drafter(split, target.parts)


def test_eagle3_with_the_whole_vocabulary_in_another_order(folder: Path, target: Target) -> None:
    config, tensors = published.eagle3()
    config["draft_vocab_size"] = published.VOCAB
    tensors["lm_head.weight"] = torch.randn(published.VOCAB, published.HIDDEN)
    tensors["t2d"] = torch.ones(published.VOCAB, dtype=torch.bool)
    tensors["d2t"] = torch.zeros(published.VOCAB, dtype=torch.int64)
    published.write(folder, config, tensors, MODEL)
    assert load_drafter(folder, target.parts).vocabulary is None, "every id is its own"
    tensors["d2t"][:2] = torch.tensor([1, -1])
    published.write(folder, config, tensors, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    assert head.vocabulary is not None
    assert head.vocabulary.target_ids[:3].tolist() == [1, 0, 2]
    save_eagle3(head, folder / "again")
    again = load_drafter(folder / "again", target.parts).vocabulary
    assert again is not None
    assert again.target_ids[:3].tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("inside", "outside", "layers", "said"),
    [
        ([1, 0, 2], None, (2, 1, 3), "eagle_config.eagle_aux_hidden_state_layer_ids are read as outputs"),
        ([2, 1, 0], None, (3, 2, 1), "read as outputs of layers: the states after 3, 2, 1 layers"),
        ([-1, 1, 2], None, (0, 2, 3), "read as outputs of layers: the states after 0, 2, 3 layers"),
        (None, [2, 2, 3], (2, 2, 3), ": eagle_aux_hidden_state_layer_ids are read as inputs"),
        (None, [0, 2, 3], (0, 2, 3), "read as inputs of layers: the states after 0, 2, 3 layers"),
        (None, [1, 2, 1], (2, 3, 2), "read as outputs (they begin with 1) of layers"),
        ([1, 0, 2], [2, 1, 3], (2, 1, 3), "read as outputs of layers: the states after 2, 1, 3 layers"),
        ([1, 0, 2], [1, 0, 2], (2, 1, 3), "read as outputs of layers: the states after 2, 1, 3 layers"),
        ([0, 1, 2], [1, 2, 3], (1, 2, 3), "read as outputs of layers: the states after 1, 2, 3 layers"),
        ([2, 2, 1], None, (2, 2, 1), "are read as inputs of layers: the states after 2, 2, 1 layers"),
        ([2, 2, 1], [2, 2, 1], (2, 2, 1), "eagle_config.eagle_aux_hidden_state_layer_ids are read as inputs"),
        ([2, 2, 1], [3, 3, 2], (3, 3, 2), "are read as outputs of layers: the states after 3, 3, 2 layers"),
        (None, None, (2, 2, 1), ""),
    ],
)
def test_both_conventions_of_fused_layers(
    folder: Path,
    target: Target,
    caplog: pytest.LogCaptureFixture,
    inside: list[int] | None,
    outside: list[int] | None,
    layers: tuple[int, ...],
    said: str,
) -> None:
    """Outputs of layers in `eagle_config` (SpecForge, SGLang), inputs of layers at the top (vLLM).

    What is the default of inputs is meant so in `eagle_config`, too, unless the top says that it is not.
    """
    config, tensors = published.eagle3()
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = inside
    published.write(folder, config | {"eagle_aux_hidden_state_layer_ids": outside}, tensors, MODEL)
    assert load_drafter(folder, target.parts).hidden_layers == layers
    assert said in caplog.text


def test_fused_layers_are_written_for_engines_of_either_convention(folder: Path, target: Target) -> None:
    published.write(folder, *published.eagle3(), MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    save_eagle3(head, folder / "again")
    saved = json.loads((folder / "again" / "config.json").read_text())
    assert saved["eagle_aux_hidden_state_layer_ids"] == [2, 1, 3]
    assert saved["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 0, 2]
    for only in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
        told = {name: value for name, value in saved.items() if name != only}
        (folder / "again" / "config.json").write_text(json.dumps(told))
        assert load_drafter(folder / "again", target.parts).hidden_layers == (2, 1, 3)


@pytest.mark.parametrize(
    ("ids", "says"), [([1, 2, 3], "begin with 1 and are read as inputs of layers"), ([2, 1, 3], "")]
)
def test_speculators_defines_its_fused_layers(
    folder: Path, target: Target, caplog: pytest.LogCaptureFixture, ids: list[int], says: str
) -> None:
    """Inputs of layers, whatever they begin with, and whoever reads them there; elsewhere engines differ."""
    config, tensors = published.speculators_eagle3()
    published.write(folder, config | {"eagle_aux_hidden_state_layer_ids": ids}, tensors, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    assert head.hidden_layers == tuple(ids)
    assert ("begin with 1" in caplog.text) == bool(says)
    assert says in caplog.text
    save_speculator(head, folder / "again", base_model="somebody/some-model", num_speculative_tokens=3)
    saved = json.loads((folder / "again" / "config.json").read_text())
    assert saved["eagle_aux_hidden_state_layer_ids"] == ids
    assert load_drafter(folder / "again", target.parts).hidden_layers == tuple(ids)
    if says:
        with pytest.raises(CheckpointError, match=r"published: .* after 1, 2, 3 layers cannot be written"):
            save_eagle3(head, folder / "published")


def test_the_demo_heads_fused_layers_are_the_same_for_everybody() -> None:
    path = Path(__file__).parents[3] / "models" / "demo" / "heads" / "eagle3"
    config = json.loads((path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]


def test_an_unstated_residual_is_said_aloud(
    folder: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = published.eagle3()
    del config["norm_before_residual"]
    published.write(folder, config, tensors, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    assert head.settings.norm_before_residual is False
    assert "has no norm_before_residual, false is assumed" in caplog.text


def test_speculators_eagle3(folder: Path, target: Target) -> None:
    config, tensors = published.speculators_eagle3()
    published.write(folder, config, tensors, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle3)
    assert head.settings.norm_before_residual is True
    save_speculator(head, folder / "again", base_model="somebody/some-model", num_speculative_tokens=3)
    again = load_file(folder / "again" / MODEL)
    assert again.keys() == tensors.keys()
    assert all(same(again[name], tensor) for name, tensor in tensors.items())
    saved = json.loads((folder / "again" / "config.json").read_text())
    for name in ("speculators_model_type", "norm_before_residual", "draft_vocab_size", "architectures"):
        assert saved[name] == config[name]
    assert saved["speculators_config"]["verifier"] == {
        "name_or_path": "somebody/some-model",
        "architectures": [],
    }
    assert isinstance(load_drafter(folder / "again", target.parts), Eagle3)


def test_speculators_mtp(folder: Path, target: Target) -> None:
    config, tensors = published.speculators_mtp()
    published.write(folder, config, tensors, MODEL)
    modules = load_drafter(folder, target.parts)
    assert isinstance(modules, Mtp)
    state = modules.state_dict()
    assert same(state["mtp_modules.0.enorm.weight"], tensors["mtp_layers.0.token_layernorm.weight"])
    assert same(state["mtp_modules.0.hnorm.weight"], tensors["mtp_layers.0.hidden_layernorm.weight"])
    assert modules.config.model_type == "qwen3"
    save_speculator(modules, folder / "again", base_model="somebody/some-model", num_speculative_tokens=3)
    again = load_file(folder / "again" / MODEL)
    assert again.keys() == tensors.keys()
    assert all(same(again[name], tensor) for name, tensor in tensors.items())
    assert isinstance(load_drafter(folder / "again", target.parts), Mtp)


def test_embeddings_and_head_of_a_speculators_mtp(folder: Path, target: Target) -> None:
    """They are the target's where they are the same, and its own where they are not."""
    config, tensors = published.speculators_mtp()
    state = target.model.state_dict()
    same_ones = {
        "embed_tokens.weight": state["model.embed_tokens.weight"].clone(),
        "lm_head.weight": state["lm_head.weight"].clone(),
    }
    published.write(folder, config, tensors | same_ones, MODEL)
    modules = load_drafter(folder, target.parts)
    assert isinstance(modules, Mtp)
    assert modules.borrowed == {"embeddings", "head"}
    for name in same_ones:
        own = torch.randn(published.VOCAB, published.HIDDEN)
        published.write(folder, config, tensors | same_ones | {name: own}, MODEL)
        modules = load_drafter(folder, target.parts)
        assert isinstance(modules, Mtp)
        if name == "lm_head.weight":
            assert modules.borrowed == {"embeddings"}
            row = torch.randn(1, published.HIDDEN)
            torch.testing.assert_close(modules.logits(row), row @ own.T)
        else:
            assert modules.borrowed == {"head"}
            assert torch.equal(modules.embed(torch.tensor([[7]]))[0, 0], own[7])
        with pytest.raises(CheckpointError, match="shares embeddings and head with"):
            save_speculator(modules, folder / "again", base_model="m", num_speculative_tokens=3)
    published.write(folder, config, tensors | {"lm_head.weight": own[1:]}, MODEL)
    with pytest.raises(CheckpointError, match=r"tensor lm_head.weight has shape \(47, 16\)"):
        load_drafter(folder, target.parts)


@pytest.mark.parametrize("file", [MODEL, "mtp.safetensors"])
@pytest.mark.parametrize("num_modules", [1, 2])
def test_mtp_of_deepseek(folder: Path, target: Target, file: str, num_modules: int) -> None:
    tensors = published.mtp_deepseek(num_modules)
    state = target.model.state_dict()
    for layer in range(LAYERS, LAYERS + num_modules):
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = state["lm_head.weight"].clone()
    published.whole_target(folder, target.model, tensors, file)
    modules = load_drafter(folder, target.parts)
    assert isinstance(modules, Mtp)
    assert modules.embed_tokens is None, "they are the target's"
    assert modules.head is None
    own = modules.state_dict()
    last = num_modules - 1
    name = f"model.layers.{LAYERS + last}."
    assert same(own[f"mtp_modules.{last}.norm.weight"], tensors[f"{name}shared_head.norm.weight"])
    assert same(own[f"mtp_modules.{last}.block.mlp.up_proj.weight"], tensors[f"{name}mlp.up_proj.weight"])
    save_mtp(modules, folder)
    again = load_file(folder / "mtp.safetensors")
    assert again.keys() == tensors.keys()
    assert all(same(again[name], tensor) for name, tensor in tensors.items())


def test_mtp_with_embeddings_of_its_own(folder: Path, target: Target) -> None:
    tensors = published.mtp_deepseek()
    own = torch.randn(published.VOCAB, published.HIDDEN)
    tensors[f"model.layers.{LAYERS}.embed_tokens.weight"] = own
    published.whole_target(folder, target.model, tensors)
    modules = load_drafter(folder, target.parts)
    assert isinstance(modules, Mtp)
    assert torch.equal(modules.embed(torch.tensor([[7]]))[0, 0], own[7])


@pytest.mark.parametrize("part", ["embed_tokens", "shared_head.head"])
def test_mtp_modules_that_do_not_share(folder: Path, target: Target, part: str) -> None:
    first, second = (f"model.layers.{layer}.{part}.weight" for layer in (LAYERS, LAYERS + 1))
    one, other = (torch.randn(published.VOCAB, published.HIDDEN) for _ in range(2))
    for tensors, text in (
        ({first: one, second: other}, f"tensor {second} is not {first}"),
        ({second: other}, f"tensor {second} is not that of the target"),
        ({first: one, second: other[1:]}, f"{second} has shape"),
    ):
        shutil.rmtree(folder)
        folder.mkdir()
        published.whole_target(folder, target.model, published.mtp_deepseek(2) | tensors)
        with pytest.raises(CheckpointError, match=re.escape(text)):
            load_drafter(folder, target.parts)
    published.whole_target(
        folder, target.model, published.mtp_deepseek(2) | {first: one, second: one.clone()}
    )
    modules = load_drafter(folder, target.parts)
    assert isinstance(modules, Mtp)
    assert (modules.embed_tokens is None) == (part != "embed_tokens")


def test_mtp_of_qwen(folder: Path, target: Target) -> None:
    tensors = published.mtp_qwen()
    published.whole_target(folder, target.model, tensors)
    state = load_drafter(folder, target.parts).state_dict()
    assert len(state) == len(tensors)
    assert same(state["mtp_modules.0.eh_proj.weight"], tensors["mtp.fc.weight"])
    assert same(state["mtp_modules.0.enorm.weight"], tensors["mtp.pre_fc_norm_embedding.weight"])
    assert same(state["mtp_modules.0.norm.weight"], tensors["mtp.norm.weight"])


def test_parallel_heads(folder: Path, target: Target) -> None:
    config, tensors = published.parallel_heads()
    published.write(folder, config, tensors, MODEL)
    heads = load_drafter(folder, target.parts)
    assert isinstance(heads, ParallelHeads)
    assert heads.max_depth == 2
    save_parallel_heads(heads, folder / "again", base_model="somebody/some-model")
    again = load_file(folder / "again" / MODEL)
    assert again.keys() == tensors.keys()
    assert all(same(again[name], tensor) for name, tensor in tensors.items())
    assert json.loads((folder / "again" / "config.json").read_text()) == config


def test_the_demo_targets_module_loads() -> None:
    from transformers import AutoModelForCausalLM

    from specdec.drafters.base import TargetParts

    path = Path(__file__).parents[3] / "models" / "demo" / "target"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    modules = load_drafter(path, TargetParts.of(model), torch.float32)
    assert isinstance(modules, Mtp)
    with safe_open(path / "mtp.safetensors", framework="pt") as tensors:
        stored = tensors.get_tensor("model.layers.8.eh_proj.weight").float()
    assert torch.equal(modules.state_dict()["mtp_modules.0.eh_proj.weight"], stored)


@pytest.mark.parametrize(
    ("of_target", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_embeddings_of_the_target_are_not_kept_twice(
    folder: Path, target: Target, of_target: torch.dtype, stored: torch.dtype
) -> None:
    """EAGLE's, rounded to whichever numbers: of the head in its file, or of the target that is served."""
    with torch.no_grad():
        # Far below what fp16 has with all its digits.
        target.parts.embeddings.weight[3] *= 1e-6  # type: ignore[index, operator]
    target.model.to(of_target)  # type: ignore[arg-type]
    head = Eagle(target.parts, tiny_config(num_hidden_layers=1)).to(stored)
    save_eagle(head, folder)
    assert load_file(folder / MODEL)["embed_tokens.weight"].dtype == stored
    again = load_drafter(folder, target.parts)
    assert again.borrowed == {"embeddings", "head"}
    with torch.no_grad():
        target.parts.embeddings.weight[7] += 1.0  # type: ignore[index, operator]
    other = load_drafter(folder, target.parts)
    assert isinstance(other, Eagle)
    assert other.borrowed == {"head"}, "they are its own"


@pytest.mark.parametrize(
    ("rope", "older"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}),
        ({"rope_type": "dynamic", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}),
        (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
    ids=lambda one: one.get("rope_type") if isinstance(one, dict) else None,
)
def test_how_positions_turn_is_told_in_both_forms(
    folder: Path, target: Target, rope: dict[str, Any], older: dict[str, Any] | None
) -> None:
    """That of transformers 5, and what was before it; either alone is read as the other."""
    rope = {**rope, "rope_theta": 500.0}
    head = Eagle(target.parts, tiny_config(num_hidden_layers=1, rope_parameters=dict(rope)))
    save_eagle(head, folder)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["rope_parameters"] == rope
    assert saved["rope_theta"] == 500.0
    assert saved["rope_scaling"] == older
    for only in (set(), {"rope_parameters"}, {"rope_theta", "rope_scaling"}):
        told = {name: value for name, value in saved.items() if name not in only}
        (folder / "config.json").write_text(json.dumps(told))
        again = load_drafter(folder, target.parts)
        assert isinstance(again, Eagle)
        assert torch.equal(again.rotary.inv_freq, head.rotary.inv_freq)  # type: ignore[arg-type]
        if "rope_parameters" in told:
            assert again.config.rope_parameters == rope


def test_weights_take_the_dtype_asked_for(folder: Path, target: Target) -> None:
    config, tensors = published.eagle3()
    published.write(folder, config, tensors, MODEL)
    head = load_drafter(folder, target.parts, torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert head.vocabulary is not None
    assert head.vocabulary.d2t.dtype == torch.int64
    assert not head.training


@pytest.mark.parametrize("name", ["eagle", "eagle3", "parallel_heads"])
def test_rotary_tables_are_no_weights(folder: Path, target: Target, name: str) -> None:
    """They stay as they are computed, whatever dtype the weights take."""
    published.write(folder, *getattr(published, name)(), MODEL)
    exact, rounded = (load_drafter(folder, target.parts, dtype) for dtype in (None, torch.bfloat16))
    for table in ("inv_freq", "original_inv_freq"):
        assert same(getattr(rounded.rotary, table), getattr(exact.rotary, table))
        assert getattr(rounded.rotary, table).dtype == torch.float32


def test_kinds_of_all_of_the_targets_layers_beside_one_layer(folder: Path, target: Target) -> None:
    """Heads were once written so."""
    config, tensors = published.eagle()
    kinds = ["sliding_attention", *["full_attention"] * 3]
    config |= {"model_type": "qwen3", "layer_types": kinds, "use_sliding_window": True, "sliding_window": 7}
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(published.HEAD_DIM) for name in "qk"}
    published.write(folder, config, tensors, MODEL)
    head = load_drafter(folder, target.parts)
    assert isinstance(head, Eagle)
    assert head.config.layer_types == ["sliding_attention"]
    assert [layer.sliding_window for layer in head.attention_layers] == [7]


def test_formats_are_told_apart_by_their_tensors(folder: Path, target: Target) -> None:
    found = {}
    for name, content, file in (
        ("medusa", published.medusa(), "medusa_lm_head.pt"),
        ("hydra", published.hydra(), "hydra_lm_head.pt"),
        ("medusa, converted", published.medusa_for_vllm(), MODEL),
        ("parallel_heads", published.parallel_heads(), MODEL),
        ("eagle", published.eagle(), MODEL),
        ("eagle3", published.eagle3(layer="layers.0."), MODEL),
        ("speculators", published.speculators_eagle3(), MODEL),
    ):
        written = published.write(folder / name, *content, file)
        found[name] = detect(open_drafter(written, allow_pickled=True))
    published.whole_target(folder / "mtp", target.model, published.mtp_deepseek(), "mtp.safetensors")
    found["mtp"] = detect(open_drafter(folder / "mtp"))
    published.whole_target(folder / "mimo", target.model, published.mtp_mimo())
    found["mtp of MiMo"] = detect(open_drafter(folder / "mimo"))
    assert found == {name: re.split("[, ]", name)[0] for name in found}


def test_saved_weights_share_no_memory(folder: Path, target: Target) -> None:
    """A head that starts as the target's LM head is still a tensor of its own in the file."""
    heads = Medusa(target.parts, num_heads=2)
    heads.start_from_target()
    save_medusa(heads, folder, base_model="m")
    loaded: Drafter = load_drafter(folder, target.parts)
    assert len(loaded.state_dict()) == 6


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
