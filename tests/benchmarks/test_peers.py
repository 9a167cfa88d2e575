"""The arithmetic of the comparison with other engines, the model they get, what their programs are told."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.peer_environments import RECIPES, PeerUnavailableError, Recipe, amended, ensure
from benchmarks.peer_process import PeerProcess
from benchmarks.peer_workers.gguf_file import gguf_name, interleave_rotary_pairs, read_bfloat16
from benchmarks.peer_workers.session import Setup, serve
from benchmarks.peers import (
    FULL,
    HUGGING_FACE,
    OURS,
    QUICK,
    Shape,
    agreement,
    check_agreement,
    check_lengths,
    headlines,
    make_checkpoint,
    setup_for,
    summarise,
)
from benchmarks.report import Paired, run_in_turn

SETUP = Setup(
    model="model", folder="folder", num_threads=2, max_batch=8, max_context=64, max_prompt_tokens=512
)


def paired() -> Paired:
    return Paired({HUGGING_FACE: [4.0, 6.0, 8.0], OURS: [2.0, 2.0, 2.0], "vllm": [4.0, 3.0, 2.0]})


def test_ratios_are_taken_round_by_round() -> None:
    cell = summarise(paired(), Shape(batch=8, prompt_tokens=64, num_tokens=128))
    assert cell["vs_hf"][OURS].values == (2.0, 3.0, 4.0)
    assert cell["vs_hf"]["vllm"].values == (1.0, 2.0, 4.0)
    assert cell["ours_vs"]["vllm"].values == (2.0, 1.5, 1.0)
    assert OURS not in cell["ours_vs"]
    assert cell["tokens_per_s"][OURS] == 8 * 128 / 2.0


def test_prefill_counts_what_is_read() -> None:
    cell = summarise(paired(), Shape(batch=8, prompt_tokens=512, num_tokens=1))
    assert cell["tokens_per_s"][OURS] == 8 * 512 / 2.0


def test_headlines_name_every_system() -> None:
    def cell(batch: int, seconds: float) -> dict[str, object]:
        times = Paired({HUGGING_FACE: [6.0], OURS: [seconds], "vllm": [3.0]})
        return {"batch": batch, **summarise(times, Shape(batch=batch, prompt_tokens=64, num_tokens=2))}

    prefill = [cell(1, 1.0), cell(8, 2.0), cell(1, 6.0)]
    numbers = headlines(
        {"systems": [OURS, "vllm"], "decode": [cell(1, 1.0), cell(8, 2.0)], "prefill": prefill}
    )
    assert numbers == {
        "prefill_vs_hf_drafthouse": 3.0,
        "prefill_vs_hf_vllm": 2.0,
        "decode_vs_hf_drafthouse_b1": 6.0,
        "decode_vs_hf_vllm_b1": 2.0,
        "decode_vs_hf_drafthouse_b8": 3.0,
        "decode_vs_hf_vllm_b8": 2.0,
    }


def test_variants_that_time_themselves_are_run_in_turn() -> None:
    calls: list[str] = []

    def run(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    ticks: list[None] = []
    result = run_in_turn({name: lambda name=name: run(name) for name in "ab"}, 2, lambda: ticks.append(None))
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert result.seconds == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert len(ticks) == 6


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    shares = agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [0, 6, 7, 8]])
    assert shares == {"first_tokens": 0.5, "tokens_before_a_difference": 2 / 8}
    check_agreement([{"agreement": {"vllm": {"first_tokens": 0.9}}}], "vllm")
    with pytest.raises(RuntimeError, match="50% of the first tokens"):
        check_agreement([{"agreement": {"vllm": shares}}], "vllm")


def test_a_text_too_short_is_an_error() -> None:
    shape = Shape(batch=2, prompt_tokens=4, num_tokens=3)
    check_lengths("vllm", [[1, 2, 3], [4, 5, 6]], shape)
    with pytest.raises(RuntimeError, match="vllm wrote"):
        check_lengths("vllm", [[1, 2, 3], [4, 5]], shape)
    with pytest.raises(RuntimeError, match="vllm wrote"):
        check_lengths("vllm", [[1, 2, 3]], shape)


def test_plans_fit_what_the_peers_are_told() -> None:
    setup = setup_for(FULL, Path("target"), Path("folder"))
    assert (setup.max_batch, setup.max_prompt_tokens, setup.num_threads) == (32, 4096, 2)
    assert all(shape.prompt_tokens + shape.num_tokens <= setup.max_context for shape in FULL.shapes)
    assert set(QUICK.shapes) < set(FULL.shapes)
    assert QUICK.rounds < FULL.rounds


def test_no_two_matrices_of_the_checkpoint_are_the_same(small: Path, tmp_path: Path) -> None:
    make_checkpoint(small, tmp_path / "big", 9)
    tensors = load_file(tmp_path / "big" / "model.safetensors")
    matrices = [t for t in tensors.values() if t.ndim == 2]
    assert len({bytes(t.view(torch.uint8).numpy().tobytes()) for t in matrices}) == len(matrices)
    assert sorted(p.name for p in (tmp_path / "big").glob("*.safetensors")) == ["model.safetensors"]
    assert "drafthouse_layer_positions" not in json.loads((tmp_path / "big" / "config.json").read_text())
    originals = load_file(small / "model.safetensors")
    for index, position in enumerate((0, 4, 8)):
        name = "self_attn.q_proj.weight"
        assert torch.equal(
            tensors[f"model.layers.{position}.{name}"], originals[f"model.layers.{index}.{name}"]
        )


def test_the_layers_on_top_have_next_to_no_influence(small: Path, tmp_path: Path) -> None:
    def logits(folder: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            return model(torch.arange(17)[None]).logits

    make_checkpoint(small, tmp_path / "big", 9)
    reference = logits(small)
    difference = logits(tmp_path / "big") - reference
    assert 0 < difference.std() < 0.1 * reference.std()


def test_neighbours_rotated_are_halves_rotated() -> None:
    """llama.cpp's rotation of the reordered projection is transformers' of the original, reordered."""
    generator = np.random.default_rng(0)
    num_heads, head_dim, width = 3, 8, 5
    weight = generator.normal(size=(num_heads * head_dim, width))
    hidden = generator.normal(size=width)
    angles = generator.normal(size=head_dim // 2)

    def rotate(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        )

    heads = (weight @ hidden).reshape(num_heads, head_dim)
    halves = np.concatenate(rotate(heads[:, :4], heads[:, 4:]), axis=1)
    reordered = (interleave_rotary_pairs(weight, num_heads) @ hidden).reshape(num_heads, head_dim)
    neighbours = np.stack(rotate(reordered[:, ::2], reordered[:, 1::2]), axis=2).reshape(num_heads, head_dim)
    expected = interleave_rotary_pairs(halves.reshape(-1, 1), num_heads).reshape(num_heads, head_dim)
    np.testing.assert_allclose(neighbours, expected)
    assert not np.allclose(neighbours, halves)


def test_gguf_gets_every_tensor_bit_for_bit(small: Path) -> None:
    tensors = load_file(small / "model.safetensors")
    bits = dict(read_bfloat16(small / "model.safetensors"))
    assert bits.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(bits[name], tensor.view(torch.uint16).numpy())
    assert len({gguf_name(name) for name in tensors}) == len(tensors)
    assert gguf_name("model.layers.12.mlp.down_proj.weight") == "blk.12.ffn_down.weight"
    save_file({"model.norm.weight": torch.ones(3)}, small / "float.safetensors")
    with pytest.raises(ValueError, match="F32, not BF16"):
        list(read_bfloat16(small / "float.safetensors"))


class Counting:
    """Writes the last token of a prompt and what follows it."""

    def __init__(self, setup: Setup) -> None:
        assert setup == SETUP

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        return [[prompt[-1] + index for index in range(num_tokens)] for prompt in prompts]


def test_a_session_answers_line_by_line() -> None:
    setup = {name: getattr(SETUP, name) for name in Setup.__dataclass_fields__}
    asked = [setup, {"prompts": [[1, 2], [7]], "num_tokens": 3}, {"prompts": [[4]], "num_tokens": 1}]
    replies = io.StringIO()
    serve(Counting, ("numpy",), io.StringIO("".join(json.dumps(line) + "\n" for line in asked)), replies)
    ready, first, second = map(json.loads, replies.getvalue().splitlines())
    assert ready == {"versions": {"numpy": np.__version__}}
    assert first["token_ids"] == [[2, 3, 4], [7, 8, 9]]
    assert second["token_ids"] == [[4]]
    assert 0 <= first["seconds"] < 1


def test_dependencies_that_pypi_has_not_are_replaced() -> None:
    requirements = [
        "torch==2.10.0+cpu; sys_platform == 'linux'",
        "torch==2.10.0; sys_platform == 'win32'",
        "pandas; extra == 'bench'",
        "numba==0.61.2",
    ]
    assert amended(requirements, {"torch": "torch==2.10.0"}) == ["torch==2.10.0", "numba==0.61.2"]


def test_what_cannot_be_had_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "nobody").mkdir()
    recipe = Recipe(module="no_such_module", worker="none", by_hand="build it")
    with pytest.raises(PeerUnavailableError, match=r"does not import; put into .*nobody: build it"):
        ensure("nobody", recipe, tmp_path, lambda _: None)


def test_a_program_that_ends_tells_its_last_words(tmp_path: Path) -> None:
    recipe = Recipe(module="json", worker="no_such_worker", by_hand="")
    setup = Setup(
        model="model",
        folder=str(tmp_path),
        num_threads=1,
        max_batch=1,
        max_context=1,
        max_prompt_tokens=1,
    )
    process = PeerProcess(recipe, Path(sys.executable), setup)
    with pytest.raises(PeerUnavailableError, match=r"No module named .*no_such_worker"):
        process.wait_ready()
    process.close()


def test_recipes_have_programs() -> None:
    folder = Path("benchmarks/peer_workers")
    assert {recipe.worker for recipe in RECIPES.values()} == {p.stem for p in folder.glob("*_worker.py")}
