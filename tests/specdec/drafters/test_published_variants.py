"""Layouts of the same formats by different hands: they draft what the same weights do as we know them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from specdec.core.errors import CheckpointError
from specdec.drafters.attention import CausalRows
from specdec.drafters.base import Drafter, FeatureDrafter, IndependentHeads, TargetParts
from specdec.drafters.checkpoints.eagle3 import save_eagle3
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from tests.specdec.drafters import published
from tests.specdec.drafters.conftest import Target, randomize
from tests.specdec.drafters.formulas import Memory, attention, llama_layer, rms_norm, swiglu
from tests.specdec.drafters.published import HEAD_DIM, HIDDEN, MODEL, VOCAB, Tensors

EPS = 1e-5
KNOWN = torch.tensor(published.KNOWN_IDS)


@torch.no_grad()
def logits_of(drafter: Drafter, target: Target, tokens: torch.Tensor) -> torch.Tensor:
    """What it drafts first behind every row, and heads at all depths."""
    hidden = target.hidden(tokens, drafter.hidden_layers)[:, :-1]
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    if isinstance(drafter, FeatureDrafter):
        step = drafter.step(drafter.embed(tokens[:, 1:]), drafter.fuse(hidden), positions, CausalRows())
        return drafter.logits(step.outputs)
    assert isinstance(drafter, IndependentHeads)
    return drafter.logits(drafter.prepare(hidden, positions, CausalRows()))


def loaded(
    folder: Path, target: Target, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Drafter:
    return load_drafter(published.write(folder, config, tensors, MODEL), target.parts)


def of_whole_vocabulary() -> tuple[dict[str, Any], Tensors]:
    """An EAGLE-3 head without maps."""
    config, tensors = published.eagle3()
    del config["draft_vocab_size"], tensors["d2t"], tensors["t2d"]
    return config, tensors | published.filled({"lm_head.weight": (VOCAB, HIDDEN)}, seed=2)


@torch.no_grad()
def eagle3_by_formula(tensors: Tensors, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one row of states [T, F] and embeddings [T, H]; the residual is not normed."""
    memory, found = Memory(), []
    layer = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, tensors[f"{name}.weight"], EPS)

    for position, (states, embedding) in enumerate(zip(hidden, embedded, strict=True)):
        if "input_norm.weight" in tensors:
            states = norm(states, "input_norm")
        feature = tensors["fc.weight"] @ states
        inputs = torch.cat([norm(embedding, f"{layer}input_layernorm"), norm(feature, f"{layer}hidden_norm")])
        attended, memory = attention(inputs, position, tensors, f"{layer}self_attn.", HEAD_DIM, memory)
        x = feature + attended
        x = x + swiglu(norm(x, f"{layer}post_attention_layernorm"), tensors, f"{layer}mlp.")
        found.append(tensors["lm_head.weight"] @ norm(x, "norm"))
    return torch.stack(found)


class TestEagle3:
    def test_layers_are_counted_by_their_tensors(
        self, folder: Path, target: Target, tokens: torch.Tensor, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An official head states the number of its target's."""
        config, tensors = published.eagle3()
        plain = loaded(folder / "plain", target, config, tensors)
        head = loaded(folder, target, config | {"num_hidden_layers": 40}, tensors)
        assert "num_hidden_layers is 40, the weights hold one decoder layer: one is used" in caplog.text
        assert torch.equal(logits_of(head, target, tokens), logits_of(plain, target, tokens))

    def test_maps_of_a_whole_vocabulary_that_nobody_filled(
        self, folder: Path, target: Target, tokens: torch.Tensor
    ) -> None:
        config, tensors = of_whole_vocabulary()
        plain = loaded(folder / "plain", target, config, tensors)
        unfilled = {
            "d2t": torch.zeros(VOCAB, dtype=torch.int64),
            "t2d": torch.zeros(VOCAB, dtype=torch.bool),
        }
        head = loaded(folder, target, config | {"draft_vocab_size": VOCAB}, tensors | unfilled)
        assert head.vocabulary is None
        assert torch.equal(logits_of(head, target, tokens), logits_of(plain, target, tokens))

    def test_the_targets_lm_head(self, folder: Path, target: Target, tokens: torch.Tensor) -> None:
        """Where the weights have none; `tie_word_embeddings` is the target's, and says nothing."""
        config, tensors = of_whole_vocabulary()
        tensors["lm_head.weight"] = target.model.state_dict()["lm_head.weight"].clone()
        plain = loaded(folder / "plain", target, config, tensors)
        assert plain.borrowed == {"embeddings"}
        del tensors["lm_head.weight"]
        head = loaded(folder, target, config | {"tie_word_embeddings": True}, tensors)
        assert head.borrowed == {"embeddings", "head"}
        assert torch.equal(logits_of(head, target, tokens), logits_of(plain, target, tokens))
        assert isinstance(head, Eagle3)
        save_eagle3(head, folder / "again")
        again = load_drafter(folder / "again", target.parts)
        assert torch.equal(logits_of(again, target, tokens), logits_of(plain, target, tokens))

    def test_a_narrow_head_must_have_its_own(self, folder: Path, target: Target) -> None:
        config, tensors = narrow()
        del tensors["lm_head.weight"], tensors["d2t"], tensors["t2d"], config["draft_vocab_size"]
        with pytest.raises(CheckpointError, match=r"lack 1 tensors, first lm_head.weight of shape \(48, 8\)"):
            loaded(folder, target, config, tensors)

    def test_a_narrow_head(self, folder: Path, target: Target, tokens: torch.Tensor) -> None:
        config, tensors = narrow()
        head = loaded(folder, target, config, tensors)
        assert head.borrowed == set()
        hidden = target.hidden(tokens, head.hidden_layers)[0, :-1]
        expected = eagle3_by_formula(tensors, hidden, tensors["embed_tokens.weight"][tokens[0, 1:]])
        found = logits_of(head, target, tokens)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("prefix", ["", "model."])
    def test_sglangs_names_of_before(
        self, folder: Path, target: Target, tokens: torch.Tensor, prefix: str
    ) -> None:
        config, tensors = published.eagle3(prefix=prefix, fc_norm=True)
        plain = loaded(folder / "plain", target, config | {"fc_norm": True}, tensors)
        for index, name in enumerate(("low", "mid", "high")):
            tensors[f"{prefix}aux_norm_{name}.weight"] = tensors.pop(f"{prefix}fc_norm.{index}.weight")
        head = loaded(folder, target, config | {"use_aux_norm": True}, tensors)
        assert isinstance(head, Eagle3)
        assert head.settings.fc_norm
        assert torch.equal(logits_of(head, target, tokens), logits_of(plain, target, tokens))

    def test_what_speculators_trains_by_default(
        self, folder: Path, target: Target, tokens: torch.Tensor
    ) -> None:
        """One layer of a Llama that sees a window, which is in its `layer_types` alone."""
        config, tensors = published.speculators_eagle3()
        config |= {"norm_before_residual": False, "norm_before_fc": True, "norm_output": True}
        config["transformer_layer_config"] = {
            **published.LAYER_CONFIG,
            "layer_types": ["sliding_attention"],
            "sliding_window": 12,
        }
        tensors |= published.filled({"input_norm.weight": (3 * HIDDEN,)}, seed=3)
        head = loaded(folder, target, config, tensors)
        assert isinstance(head, Eagle3)
        assert head.settings.norm_output
        assert [layer.sliding_window for layer in head.attention_layers] == [12]
        hidden = target.hidden(tokens, head.hidden_layers)[0, :-1]
        embeddings = target.model.state_dict()["model.embed_tokens.weight"]
        expected = eagle3_by_formula(tensors, hidden, embeddings[tokens[0, 1:]])
        found = logits_of(head, target, tokens)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def narrow() -> tuple[dict[str, Any], Tensors]:
    """An EAGLE-3 head of half of the target's width."""
    config, tensors = published.eagle3()
    width = HIDDEN // 2
    config |= {"hidden_size": width, "target_hidden_size": HIDDEN}

    def narrowed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in ("d2t", "t2d"):
            return tensor
        if name == "fc.weight":
            return tensor[:width]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return tensor[:width]
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            return tensor[:, : 2 * width]
        return tensor[..., :width]

    tensors = {name: narrowed(name, tensor).clone() for name, tensor in tensors.items()}
    return config, tensors | published.filled({"embed_tokens.weight": (VOCAB, width)}, seed=4)


class TestLayersOfEagle:
    """`model_type` in config.json is the target's; layers are what their tensors are."""

    @pytest.mark.parametrize("name", ["eagle", "eagle3"])
    @pytest.mark.parametrize(
        "stated",
        [
            {"model_type": "mixtral", "num_local_experts": 4},
            {"model_type": "phi3", "pad_token_id": 0, "partial_rotary_factor": 0.75},
            {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4},
            {"model_type": "mistral", "sliding_window": 4},
            {"model_type": "somebodys"},
        ],
        ids=lambda stated: stated["model_type"],
    )
    def test_a_llamas(
        self, folder: Path, target: Target, tokens: torch.Tensor, name: str, stated: dict[str, Any]
    ) -> None:
        config, tensors = getattr(published, name)()
        plain = loaded(folder / "plain", target, config, tensors)
        head = loaded(folder, target, config | stated, tensors)
        assert torch.equal(logits_of(head, target, tokens), logits_of(plain, target, tokens))
        assert isinstance(head, Eagle | Eagle3)
        assert [layer.sliding_window for layer in head.attention_layers] == [None]

    @pytest.mark.parametrize("name", ["eagle", "eagle3"])
    @pytest.mark.parametrize("kind", ["llama", "qwen2"])
    def test_null_where_a_default_is_meant(
        self, folder: Path, target: Target, tokens: torch.Tensor, name: str, kind: str
    ) -> None:
        config, tensors = getattr(published, name)()
        config |= {"model_type": kind, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
        plain = loaded(folder / "plain", target, config, tensors)
        nulls = (
            "attention_bias",
            "attention_dropout",
            "hidden_act",
            "initializer_range",
            "max_position_embeddings",
            "mlp_bias",
            "rms_norm_eps",
            "rope_theta",
            "tie_word_embeddings",
            "use_cache",
        )
        head = loaded(folder, target, config | dict.fromkeys(nulls), tensors)
        assert torch.equal(logits_of(head, target, tokens), logits_of(plain, target, tokens))

    def test_a_null_that_says_something(self, folder: Path) -> None:
        """A Mistral's default is a window."""
        keys = Keys(folder, published.LAYER_CONFIG | {"model_type": "mistral", "sliding_window": None})
        assert keys.layer_config().sliding_window is None

    @pytest.mark.parametrize("name", ["eagle", "eagle3"])
    def test_padding_of_another_vocabulary(
        self, folder: Path, target: Target, tokens: torch.Tensor, name: str
    ) -> None:
        config, tensors = getattr(published, name)()
        plain = loaded(folder / "plain", target, config, tensors)
        head = loaded(folder, target, config | {"pad_token_id": VOCAB}, tensors)
        assert torch.equal(logits_of(head, target, tokens), logits_of(plain, target, tokens))

    def test_a_window_that_is_switched_off(self, folder: Path, target: Target) -> None:
        config, tensors = published.eagle()
        config |= {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4}
        head = loaded(folder, target, config | {"layer_types": ["sliding_attention"] * 4}, tensors)
        assert isinstance(head, Eagle)
        assert [layer.sliding_window for layer in head.attention_layers] == [None]

    @pytest.mark.parametrize(
        "stated", [{}, {"attention_bias": True}, {"qkv_bias": True}, {"qkv_bias": False}]
    )
    @torch.no_grad()
    def test_biases_of_queries_keys_and_values(
        self, folder: Path, target: Target, tokens: torch.Tensor, stated: dict[str, Any]
    ) -> None:
        config, tensors = published.eagle()
        tensors |= biases("layers.0.")
        head = loaded(folder, target, config | {"model_type": "qwen2"} | stated, tensors)
        hidden = target.hidden(tokens, head.hidden_layers)[0, :-1]
        memory, expected = Memory(), []
        for position, state in enumerate(hidden):
            embedding = tensors["embed_tokens.weight"][tokens[0, position + 1]]
            x = tensors["fc.weight"] @ torch.cat([embedding, state]) + tensors["fc.bias"]
            x, memory = llama_layer(x, position, tensors, "layers.0.", HEAD_DIM, EPS, memory)
            expected.append(target.model.state_dict()["lm_head.weight"] @ x)
        found = logits_of(head, target, tokens)[0]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("has_attention_bias", [True, False])
    def test_biases_of_eagle3(
        self, folder: Path, target: Target, tokens: torch.Tensor, has_attention_bias: bool
    ) -> None:
        """None is of what attention gives, whatever a Llama of that `attention_bias` has."""
        config, tensors = of_whole_vocabulary()
        tensors |= biases("midlayer.")
        head = loaded(folder, target, config | {"attention_bias": has_attention_bias}, tensors)
        hidden = target.hidden(tokens, head.hidden_layers)[0, :-1]
        embeddings = target.model.state_dict()["model.embed_tokens.weight"]
        expected = eagle3_by_formula(tensors, hidden, embeddings[tokens[0, 1:]])
        found = logits_of(head, target, tokens)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    def test_a_bias_of_what_attention_gives(self, folder: Path, target: Target, tokens: torch.Tensor) -> None:
        config, tensors = published.eagle()
        plain = loaded(folder / "plain", target, config, tensors)
        bias = published.filled({"layers.0.self_attn.o_proj.bias": (HIDDEN,)}, seed=5)
        head = loaded(folder, target, config, tensors | bias)
        assert isinstance(head, Eagle)
        assert not torch.equal(logits_of(head, target, tokens), logits_of(plain, target, tokens))
        head.layers[0].self_attn.o_proj.bias.zero_()  # type: ignore[union-attr, operator]
        found, expected = logits_of(head, target, tokens), logits_of(plain, target, tokens)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("name", ["eagle", "eagle3"])
    @pytest.mark.parametrize("stated", ["llama", "qwen3_moe"])
    def test_a_qwen3s(
        self, folder: Path, target: Target, tokens: torch.Tensor, name: str, stated: str
    ) -> None:
        config, tensors = getattr(published, name)()
        layer = "layers.0." if name == "eagle" else "midlayer."
        norms = {f"{layer}self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        without = loaded(folder / "without", target, config, tensors)
        tensors |= published.filled(norms, seed=6)
        plain = loaded(folder / "plain", target, config | {"model_type": "qwen3"}, tensors)
        head = loaded(folder, target, config | {"model_type": stated}, tensors)
        found = logits_of(head, target, tokens)
        assert torch.equal(found, logits_of(plain, target, tokens))
        assert not torch.equal(found, logits_of(without, target, tokens))


def biases(layer: str) -> Tensors:
    """Of queries, keys and values."""
    wide, narrow_ = published.HEADS * HEAD_DIM, published.KV_HEADS * HEAD_DIM
    sizes = {"q": wide, "k": narrow_, "v": narrow_}
    return published.filled({f"{layer}self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()})


class TestMedusa:
    @pytest.mark.parametrize("num_layers", [1, 2])
    @pytest.mark.parametrize("prefix", ["", "medusa_head."])
    def test_the_targets_lm_head(
        self, folder: Path, target: Target, tokens: torch.Tensor, num_layers: int, prefix: str
    ) -> None:
        """As their authors train heads now."""
        config, tensors = published.medusa(num_layers=num_layers, prefix=prefix, has_lm_heads=False)
        lm_head = target.model.state_dict()["lm_head.weight"]
        own = {f"{prefix}{head}.{num_layers}.weight": lm_head.clone() for head in range(3)}
        plain = loaded(folder / "plain", target, config, tensors | own)
        assert plain.borrowed == set()
        heads = loaded(folder, target, config, tensors)
        assert heads.borrowed == {"head"}
        assert torch.equal(logits_of(heads, target, tokens), logits_of(plain, target, tokens))
        assert isinstance(heads, Medusa)
        save_medusa(heads, folder / "again", base_model="somebody/some-model")
        again = load_drafter(folder / "again", target.parts)
        assert torch.equal(logits_of(again, target, tokens), logits_of(plain, target, tokens))

    @pytest.mark.parametrize("num_layers", [1, 2])
    @pytest.mark.parametrize("prefix", ["", "medusa_heads."])
    def test_converted_for_vllm(
        self, folder: Path, target: Target, tokens: torch.Tensor, num_layers: int, prefix: str
    ) -> None:
        plain = loaded(folder / "plain", target, *published.medusa(num_layers=num_layers))
        config, tensors = published.medusa_for_vllm(num_layers=num_layers)
        converted = {prefix + name: tensor for name, tensor in tensors.items()}
        heads = loaded(folder, target, config, converted)
        assert heads.max_depth == 3
        assert torch.equal(logits_of(heads, target, tokens), logits_of(plain, target, tokens))

    def test_converted_without_biases(self, folder: Path, target: Target, tokens: torch.Tensor) -> None:
        config, tensors = published.medusa()
        for head in range(3):
            tensors[f"{head}.0.linear.bias"].zero_()
        plain = loaded(folder / "plain", target, config, tensors)
        config, tensors = published.medusa_for_vllm()
        del config["medusa_fc_bias"]
        weights = {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}
        heads = loaded(folder, target, config, weights)
        found, expected = logits_of(heads, target, tokens), logits_of(plain, target, tokens)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
    def test_one_lm_head_for_all(self, folder: Path, target: Target, tokens: torch.Tensor, name: str) -> None:
        config, tensors = published.medusa()
        for head in (1, 2):
            tensors[f"{head}.1.weight"] = tensors["0.1.weight"].clone()
        plain = loaded(folder / "plain", target, config, tensors)
        config, tensors = published.medusa_for_vllm()
        one = tensors["lm_heads.0.weight"]
        blocks = {name: tensor for name, tensor in tensors.items() if name.startswith("blocks.")}
        heads = loaded(folder, target, config | {"original_lm_head": True}, blocks | {name: one})
        assert sum(parameter.shape == (VOCAB, HIDDEN) for parameter in heads.parameters()) == 1
        assert torch.equal(logits_of(heads, target, tokens), logits_of(plain, target, tokens))
        assert isinstance(heads, Medusa)
        with pytest.raises(CheckpointError, match="holds an LM head for each head"):
            save_medusa(heads, folder / "again", base_model="m")

    def test_a_part_of_the_vocabulary(self, folder: Path, target: Target, tokens: torch.Tensor) -> None:
        """`token_map` has ids, not offsets, in any order."""
        config, tensors = published.medusa_for_vllm()
        whole = loaded(folder / "whole", target, config, tensors)
        ids = KNOWN[[3, 0, 5, 1, 2, 4]]
        cut = {name: x[ids] if name.startswith("lm_heads.") else x for name, x in tensors.items()}
        config["truncated_vocab_size"] = len(ids)
        heads = loaded(folder, target, config, cut | {"token_map": ids})
        found, expected = logits_of(heads, target, tokens), logits_of(whole, target, tokens)
        torch.testing.assert_close(found[..., ids], expected[..., ids])
        assert int(torch.isneginf(found[0, 0, 0]).sum()) == VOCAB - len(ids)
        # Heads that know all ids are used as they are.
        heads = loaded(folder, target, config, tensors | {"token_map": ids})
        assert torch.equal(logits_of(heads, target, tokens), expected)


class TestMtpOfMimo:
    @pytest.mark.parametrize("num_modules", [1, 2])
    def test_the_state_is_before_the_embedding(
        self, folder: Path, tokens: torch.Tensor, num_modules: int
    ) -> None:
        target = qwen2_target()
        tensors = published.mtp_mimo(num_modules)
        published.whole_target(folder, target.model, tensors)
        modules = load_drafter(folder, target.parts)
        assert isinstance(modules, Mtp)
        assert modules.num_modules == num_modules
        renamed = {}
        for name, tensor in tensors.items():
            index, part = name.removeprefix("model.mtp_layers.").split(".", 1)
            for theirs, ours in (
                ("token_layernorm", "enorm"),
                ("hidden_layernorm", "hnorm"),
                ("input_proj", "eh_proj"),
                ("final_layernorm", "shared_head.norm"),
            ):
                part = part.replace(theirs, ours)
            swapped = tensor.roll(HIDDEN, dims=1) if "eh_proj" in part else tensor
            renamed[f"model.layers.{published.LAYERS + int(index)}.{part}"] = swapped
        published.whole_target(folder / "deepseek", target.model, renamed)
        plain = load_drafter(folder / "deepseek", target.parts)
        assert torch.equal(logits_of(modules, target, tokens), logits_of(plain, target, tokens))
        own, expected = modules.state_dict(), plain.state_dict()
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())

    def test_modules_are_counted(self, folder: Path) -> None:
        target = qwen2_target()
        target.model.config.num_nextn_predict_layers = 2  # type: ignore[union-attr]
        published.whole_target(folder, target.model, published.mtp_mimo())
        with pytest.raises(CheckpointError, match=r"predict_layers is 2; the weights hold modules \[0\]"):
            load_drafter(folder, target.parts)


def qwen2_target() -> Target:
    config = Qwen2Config(**{**published.LAYER_CONFIG, "num_hidden_layers": published.LAYERS})
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed=1)
    return Target(model.eval(), TargetParts.of(model))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
