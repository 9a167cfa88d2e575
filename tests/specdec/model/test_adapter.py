"""Low-rank adapters in the layout of peft: merged as they say, refused by name where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.core.errors import CheckpointError, ConfigError
from specdec.model.adapter import LowRankPair, merge_adapter, save_adapter

NAME = "model.layers.0.self_attn.q_proj"
TENSOR = f"base_model.model.{NAME}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model in two files, one of its tensors in bfloat16."""
    folder = tmp_path / "base"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    first = {f"{NAME}.weight": torch.randn(6, 4, generator=generator).bfloat16()}
    second = {"lm_head.weight": torch.randn(8, 4, generator=generator)}
    weight_map = {}
    for number, tensors in enumerate((first, second), 1):
        save_file(tensors, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def pair() -> LowRankPair:
    generator = torch.Generator().manual_seed(1)
    return LowRankPair(down=torch.randn(2, 4, generator=generator), up=torch.randn(6, 2, generator=generator))


@pytest.fixture
def adapter(tmp_path: Path, base: Path, pair: LowRankPair) -> Path:
    save_adapter(tmp_path / "adapter", {NAME: pair}, rank=2, alpha=4.0, base=base)
    return tmp_path / "adapter"


def change(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def test_what_is_added(base: Path, adapter: Path, pair: LowRankPair, tmp_path: Path) -> None:
    assert merge_adapter(base, adapter, tmp_path / "out") == 1
    before = load_file(base / "model-1.safetensors")[f"{NAME}.weight"]
    after = load_file(tmp_path / "out" / "model-1.safetensors")[f"{NAME}.weight"]
    assert after.dtype == torch.bfloat16
    assert torch.equal(after, (before.float() + 2.0 * (pair.up @ pair.down)).bfloat16())
    assert not torch.equal(after, before)
    for name in ("model-2.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (tmp_path / "out" / name).exists()
    untouched = load_file(tmp_path / "out" / "model-2.safetensors")["lm_head.weight"]
    assert torch.equal(untouched, load_file(base / "model-2.safetensors")["lm_head.weight"])


def test_rank_stabilised_scale_of_an_adapter_from_elsewhere(
    base: Path, adapter: Path, pair: LowRankPair, tmp_path: Path
) -> None:
    change(adapter, use_rslora=True, drafthouse_base_revision=...)
    merge_adapter(base, adapter, tmp_path / "out")
    before = load_file(base / "model-1.safetensors")[f"{NAME}.weight"]
    after = load_file(tmp_path / "out" / "model-1.safetensors")[f"{NAME}.weight"]
    assert torch.equal(after, (before.float() + 4.0 / 2**0.5 * (pair.up @ pair.down)).bfloat16())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"r": 0}, "r at least 1"),
        ({"bias": "all"}, "bias must be none"),
        ({"use_dora": True}, "use_dora is True; adapters with that cannot be merged"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is "),
        ({"alora_invocation_tokens": [5, 6]}, r"adapter_config\.json: alora_invocation_tokens is \[5, 6\]"),
        ({"layer_replication": [[0, 1], [0, 1]]}, r"adapter_config\.json: layer_replication is \[\[0, 1\]"),
        *(
            (
                {"init_lora_weights": kind},
                rf"adapter_config\.json: init_lora_weights is '{kind}', .* becomes true",
            )
            for kind in ("pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "loftq", "lora_ga")
        ),
        ({"r": 3}, r"lora_A.weight is \(2, 4\), which is not of rank 3"),
        ({"drafthouse_base_revision": "0" * 32}, "was trained on another model than"),
    ],
)
def test_configurations_that_are_refused(
    base: Path, adapter: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    change(adapter, **changes)
    with pytest.raises(CheckpointError, match=text):
        merge_adapter(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [True, False, "gaussian", "eva", "orthogonal", None])
def test_beginnings_that_leave_the_base_as_it_is(
    base: Path, adapter: Path, tmp_path: Path, kind: bool | str | None
) -> None:
    change(adapter, init_lora_weights=kind, alora_invocation_tokens=None, layer_replication=None)
    assert merge_adapter(base, adapter, tmp_path / "out") == 1


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({f"{TENSOR}.lora_A.weight": (2, 4)}, f"has no {TENSOR}.lora_B.weight"),
        ({f"{TENSOR}.lora_B.weight": (6, 2)}, f"has no {TENSOR}.lora_A.weight"),
        ({"lm_head.weight": (2, 2)}, "lm_head.weight is no tensor of an adapter"),
        (
            {f"{TENSOR}.lora_A.weight": (2, 5), f"{TENSOR}.lora_B.weight": (6, 2)},
            r"adds \(6, 5\) to .*q_proj.weight, which is \(6, 4\)",
        ),
        (
            {"base_model.model.x.lora_A.weight": (2, 4), "base_model.model.x.lora_B.weight": (6, 2)},
            "adds to x.weight, which .* does not have",
        ),
        ({}, "is empty"),
    ],
)
def test_tensors_that_are_refused(
    base: Path, adapter: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], text: str
) -> None:
    made = {name: torch.zeros(shape) for name, shape in tensors.items()}
    save_file(made, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=text):
        merge_adapter(base, adapter, tmp_path / "out")


def test_what_is_quantised_is_nothing_to_add_to(base: Path, adapter: Path, tmp_path: Path) -> None:
    file = base / "model-1.safetensors"
    save_file({name: one.to(torch.float8_e4m3fn) for name, one in load_file(file).items()}, file)
    change(adapter, drafthouse_base_revision=...)
    with pytest.raises(CheckpointError, match=r"has quantised \(F8_E4M3\); merge it into the unquantised"):
        merge_adapter(base, adapter, tmp_path / "out")


def test_files_that_are_missing_or_in_the_way(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out .* holds something"):
        merge_adapter(base, adapter, base)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json: it is no adapter"):
        merge_adapter(base, base, tmp_path / "out")
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        merge_adapter(base, adapter, tmp_path / "out")
    save_adapter(adapter, {}, rank=1, alpha=1.0, base=base)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        merge_adapter(base, adapter, tmp_path / "out")
