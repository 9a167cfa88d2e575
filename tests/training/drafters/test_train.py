"""The whole of ``drafthouse train`` on a tiny target."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import PreTrainedModel
from typer.testing import CliRunner

from deploy.cli.main import app
from deploy.cli.train import _beside
from deploy.cli.train import train as train_command
from specdec.core.errors import ConfigError
from specdec.drafters.attention import CausalRows
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.files import open_drafter
from specdec.drafters.checkpoints.hydra import save_hydra
from specdec.drafters.checkpoints.registry import detect, load_drafter
from specdec.drafters.hydra import Hydra
from specdec.drafters.mtp import Mtp
from tests.pairwise import mostly_full
from tests.training.drafters.tiny_runs import TINY, losses, options
from training.drafters import acceptance, groundwork, train
from training.drafters.acceptance import (
    acceptance_by_depth,
    evaluate_acceptance,
    evaluate_language_model,
    measure_acceptance,
)
from training.drafters.capture import Capture
from training.drafters.drafting import Choose, draft_everywhere
from training.drafters.groundwork import Groundwork
from training.drafters.methods import make_training
from training.drafters.options import TrainOptions
from training.drafters.recipe import METHODS, CheckpointLayout, DrafterRecipe, Method
from training.drafters.train import train_drafter

BESIDE_THE_TARGET = sorted({*METHODS} - {"medusa2", "layerskip", "draft_model"})
"""Methods that leave the target as it is and draft from its states; files of their own test the others."""


@pytest.mark.parametrize("method", BESIDE_THE_TARGET)
def test_every_method_learns_and_writes_what_loads(
    method: Method, model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(method=method, **(TINY | {"steps": 20}))
    report = train_drafter(recipe, options(target_folder, texts, tmp_path))
    logged = losses(tmp_path)
    first = "tokens" if method == "eagle" else "d1"
    assert logged[-1][first] < logged[0][first]
    for temperature in ("0.0", "0.7"):
        reached = report["acceptance"][temperature]["reached"]
        assert len(reached) == 3
        assert reached == sorted(reached, reverse=True)
        by_depth = report["acceptance"][temperature]["acceptance_by_depth"]
        assert 1 <= len(by_depth) <= 3
        assert all(sum(rates) <= 1.0 + 1e-9 for rates in by_depth)
    assert json.loads((tmp_path / "out" / "acceptance.json").read_text()) == json.loads(json.dumps(report))
    drafter = load_drafter(tmp_path / "out", TargetParts.of(model))
    assert sum(parameter.numel() for parameter in drafter.parameters()) == report["parameters"]


@pytest.mark.parametrize("method", METHODS)
def test_acceptance_is_measured_in_mixed_precision(
    method: Method, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    """The target is in bfloat16 where it stays as it is, the drafter in float32."""
    recipe = DrafterRecipe(method=method, **(TINY | {"steps": 1}))
    report = train_drafter(recipe, options(target_folder, texts, tmp_path, dtype="bfloat16"))
    for temperature in ("0.0", "0.7"):
        reached = report["acceptance"][temperature]["reached"]
        assert len(reached) == 3
        assert reached == sorted(reached, reverse=True)


@pytest.mark.parametrize("method", mostly_full(BESIDE_THE_TARGET, {"medusa", "eagle"}))
def test_an_interrupted_run_ends_with_the_same_weights(
    method: Method, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(method=method, **(TINY | {"accumulate": 2}))

    def run(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        chosen = options(target_folder, texts, tmp_path / name, eval_texts=0, **changes)
        train_drafter(recipe, chosen)
        (file,) = chosen.out.glob("*.safetensors")
        return load_file(file)

    straight = run("straight")
    early = run("resumed", stop_after_step=2)
    resumed = run("resumed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert not all(torch.equal(tensor, early[name]) for name, tensor in straight.items())


def test_accumulated_forwards_are_one_large_batch(target_folder: Path, texts: Path, tmp_path: Path) -> None:
    """Two forwards of two rows move the weights as one of four does."""

    def run(name: str, batch_rows: int, accumulate: int) -> dict[str, torch.Tensor]:
        changes = {"steps": 1, "batch_rows": batch_rows, "accumulate": accumulate, "warmup_steps": 1}
        recipe = DrafterRecipe(method="medusa", **(TINY | changes))
        train_drafter(recipe, options(target_folder, texts, tmp_path / name, eval_texts=0))
        return load_file(tmp_path / name / "out" / "medusa_lm_head.safetensors")

    whole, parts = run("whole", 4, 1), run("parts", 2, 2)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=1e-4)


def test_kept_hidden_states_and_the_targets_own_writing(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(method="mtp", **TINY)
    chosen = options(
        target_folder, texts, tmp_path, eval_texts=0, keeps_hidden=True, samples=6, dtype="bfloat16"
    )
    train_drafter(recipe, chosen)
    (kept,) = (tmp_path / "work" / "hidden").glob("*.bin")
    assert kept.stat().st_size == 6 * 24 * 16 * 2
    (written,) = (tmp_path / "work").glob("samples-*.pt")
    assert written.stat().st_size > 6 * 24 * 8


def test_the_targets_own_writing_is_gone_on_with_and_of_these_texts(
    target_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = DrafterRecipe(method="medusa", **TINY)
    monkeypatch.setattr(groundwork, "_SAMPLED_AT_ONCE", 4)
    write_rows, begun = groundwork.write_rows, []

    def cut(model: Any, beginnings: Any, **more: Any) -> torch.Tensor:
        if len(begun) == 2:
            raise KeyboardInterrupt
        begun.append(beginnings)
        return write_rows(model, beginnings, **more)

    def lay(work: str, data: Path = texts) -> torch.Tensor:
        chosen = options(target_folder, data, tmp_path / work, eval_texts=0, samples=12, dtype="float32")
        return Groundwork.lay(recipe, chosen).rows.tokens

    whole = lay("whole")
    monkeypatch.setattr(groundwork, "write_rows", cut)
    with pytest.raises(KeyboardInterrupt):
        lay("cut")
    assert len(begun) == 2
    monkeypatch.setattr(groundwork, "write_rows", write_rows)
    assert torch.equal(lay("cut"), whole)
    assert len(list((tmp_path / "cut" / "work").glob("*"))) == 1, "nothing temporary is left"
    other = tmp_path / "other.txt"
    other.write_text("\n".join(one.read_text()[::-1] for one in texts.iterdir()))
    assert not torch.equal(lay("cut", other), whole)


def test_hidden_states_are_found_by_other_runs(
    target_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by one that goes on after an interruption; not by those for a target with other weights."""
    computed: list[int] = []
    states = Capture.states

    def counted(self: Capture, tokens: torch.Tensor) -> torch.Tensor:
        computed.append(len(tokens))
        return states(self, tokens)

    monkeypatch.setattr(Capture, "states", counted)

    def run(name: str, method: Method, target: Path = target_folder, **changes: Any) -> int:
        computed.clear()
        recipe = DrafterRecipe(method=method, **TINY)
        if method == "draft_model":
            recipe = dataclasses.replace(recipe, on_policy=0.0)
        folder = tmp_path / "states"
        train_drafter(
            recipe, options(target, texts, tmp_path / name, eval_texts=0, hidden_folder=folder, **changes)
        )
        return sum(computed)

    assert run("first", "medusa", stop_after_step=4) == 16
    assert run("first", "medusa") == 8
    assert run("second", "mtp") == 0
    assert run("third", "draft_model") == 0
    resumed = load_file(tmp_path / "first" / "out" / "medusa_lm_head.safetensors")
    assert run("straight", "medusa") == 0
    straight = load_file(tmp_path / "straight" / "out" / "medusa_lm_head.safetensors")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert run("fourth", "medusa", other) == 24


def test_an_mtp_module_is_written_in_either_layout(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    """Published: as DeepSeek does, however many there are."""
    recipe = DrafterRecipe(method="mtp", **(TINY | {"steps": 1}))
    found = {}
    for layout in get_args(CheckpointLayout):
        chosen = options(target_folder, texts, tmp_path / layout, eval_texts=0, layout=layout)
        train_drafter(recipe, chosen)
        found[layout] = detect(open_drafter(chosen.out))
        drafter = load_drafter(chosen.out, TargetParts.of(model))
        assert isinstance(drafter, Mtp)
        assert drafter.num_modules == 1
    assert found == {"published": "mtp", "speculators": "speculators"}
    config = json.loads((tmp_path / "published" / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert "model.layers.6.eh_proj.weight" in load_file(tmp_path / "published" / "out" / "model.safetensors")


def test_hydra_with_a_prefix_layer(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    """Hydra++ learns, is written and read, and drafts the same then."""
    recipe = DrafterRecipe(method="hydra", **(TINY | {"steps": 20, "has_prefix_layer": True}))
    report = train_drafter(recipe, options(target_folder, texts, tmp_path))
    logged = losses(tmp_path)
    assert logged[-1]["d1"] < logged[0]["d1"]
    assert report["acceptance"]["0.0"]["k"] == 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hydra_head_arch"] == "prefix-mlp"
    parts = TargetParts.of(model)
    drafter = load_drafter(tmp_path / "out", parts)
    assert isinstance(drafter, Hydra)
    assert drafter.prefix is not None
    capture = Capture(model, drafter.hidden_layers)
    tokens = torch.randint(5, 100, (1, 10), generator=torch.Generator().manual_seed(4))

    def drafts(one: Hydra) -> torch.Tensor:
        hidden = capture.hidden(capture.states(tokens))[:, :-1]
        return draft_everywhere(one, hidden, tokens, 3, lambda _, logits: logits.argmax(dim=-1))

    found = drafts(drafter)
    assert found.shape == (1, 9, 3)
    save_hydra(drafter, tmp_path / "again", base_model="m")
    again = load_drafter(tmp_path / "again", parts)
    assert isinstance(again, Hydra)
    assert torch.equal(drafts(again), found)
    with torch.no_grad():
        for parameter in again.prefix.parameters() if again.prefix is not None else ():
            parameter.add_(1.0)
    assert not torch.equal(drafts(again), found), "the prefix layer counts"


def test_several_mtp_modules(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(method="mtp", **(TINY | {"steps": 20, "num_modules": 2}))
    report = train_drafter(recipe, options(target_folder, texts, tmp_path))
    logged = losses(tmp_path)
    assert logged[-1]["d2"] < logged[0]["d2"]
    reached = report["acceptance"]["0.7"]["reached"]
    assert reached == sorted(reached, reverse=True)
    drafter = load_drafter(tmp_path / "out", TargetParts.of(model))
    assert isinstance(drafter, Mtp)
    assert drafter.num_modules == 2
    assert drafter.borrowed == {"embeddings", "head"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 2
    further = options(target_folder, texts, tmp_path / "further", eval_texts=0, start_from=tmp_path / "out")
    with pytest.raises(ConfigError, match="was made with --num-modules 2, not 1: give that"):
        train_drafter(dataclasses.replace(recipe, num_modules=1), further)
    with pytest.raises(ConfigError, match=r"--num-modules must be from 1 to --depth \(3\)"):
        dataclasses.replace(recipe, num_modules=4)


@torch.no_grad()
def test_modules_are_evaluated_as_they_draft(model: PreTrainedModel) -> None:
    """From every position: the chain that modules draft behind the text up to there, step by step."""
    torch.manual_seed(2)
    drafter = Mtp(TargetParts.of(model), num_modules=2)
    tokens = torch.randint(5, 100, (1, 10))
    capture = Capture(model, drafter.hidden_layers)
    hidden = capture.hidden(capture.states(tokens))[:, :-1]
    drafts = draft_everywhere(drafter, hidden, tokens, 3, lambda _, logits: logits.argmax(dim=-1))
    for t in range(2, 6):
        features, path = hidden[:, : t + 1], tokens[0, : t + 2].tolist()
        for depth in range(3):
            rows = torch.tensor([path[1 + min(depth, 1) :]])
            places = torch.arange(rows.shape[1])[None]
            step = drafter.step(drafter.embed(rows), features, places, CausalRows(), depth)
            assert drafts[0, t, depth] == drafter.logits(step.outputs[0, -1]).argmax()
            path.append(int(tokens[0, t + 2 + depth]))
            own = step.features if depth == 0 else torch.cat([features, step.features[:, -1:]], dim=1)
            features = own


def test_weights_are_stored_as_they_are_asked_for(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(method="eagle", **(TINY | {"steps": 1}))
    report = train_drafter(recipe, options(target_folder, texts, tmp_path, stored_dtype="bfloat16"))
    assert {one.dtype for one in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert report["acceptance"]["0.0"]["texts"] == 2
    plain = options(target_folder, texts, tmp_path / "plain", eval_texts=0)
    train_drafter(recipe, plain)
    for rounded, exact in zip(
        load_file(tmp_path / "out" / "model.safetensors").values(),
        load_file(tmp_path / "plain" / "out" / "model.safetensors").values(),
        strict=True,
    ):
        assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_weights_can_be_trained_further(target_folder: Path, texts: Path, tmp_path: Path) -> None:
    recipe = DrafterRecipe(method="mtp", **(TINY | {"steps": 20}))
    first = options(target_folder, texts, tmp_path / "first", eval_texts=0)
    train_drafter(recipe, first)
    further = options(target_folder, texts, tmp_path / "further", eval_texts=0, start_from=first.out)
    train_drafter(recipe, further)
    anew, ended = (losses(tmp_path / "first")[at]["d1"] for at in (0, -1))
    assert losses(tmp_path / "further")[0]["d1"] < (anew + ended) / 2
    with pytest.raises(ConfigError, match="start_from"):
        train_drafter(recipe, dataclasses.replace(further, start_from=None))
    eagle = DrafterRecipe(method="eagle", **TINY)
    with pytest.raises(ConfigError, match="holds Mtp, not Eagle"):
        train_drafter(eagle, options(target_folder, texts, tmp_path / "other", start_from=first.out))
    medusa = DrafterRecipe(method="medusa", **(TINY | {"steps": 1}))
    heads = options(target_folder, texts, tmp_path / "heads", eval_texts=0)
    train_drafter(medusa, heads)
    wider = dataclasses.replace(medusa, depth=4)
    with pytest.raises(ConfigError, match="was made with --depth 3, not 4: give that"):
        train_drafter(wider, options(target_folder, texts, tmp_path / "wider", start_from=heads.out))


def test_eagle3_of_a_part_of_the_vocabulary_in_both_layouts(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(method="eagle3", **(TINY | {"steps": 1, "is_v31": True, "draft_vocab_size": 40}))
    for layout in ("published", "speculators"):
        chosen = options(target_folder, texts, tmp_path / layout, eval_texts=0, layout=layout)
        train_drafter(recipe, chosen)
        drafter = load_drafter(tmp_path / layout / "out", TargetParts.of(model))
        assert drafter.vocabulary is not None
        known = set(drafter.vocabulary.target_ids.tolist())
        assert len(known) == 40
        assert {ord(letter) - 30 for letter in "abcxyz"} <= known, "letters of the texts"
        assert drafter.hidden_layers == (2, 3, 3)


def test_hits_are_counted_by_depth_and_rank_where_parents_stand() -> None:
    """Two texts, of which the deeper ranks end sooner; ranks beyond those that are counted stand nowhere."""
    first = [torch.tensor([0, 0, 1, 20]), torch.tensor([0, 1, 0])]
    second = [torch.tensor([0, 1, 1, 0]), torch.tensor([2, 0, 0])]
    along_the_likeliest = acceptance_by_depth([first, second], 1)
    assert along_the_likeliest[0] == [0.5, 0.375, *[0.0] * 6]
    assert along_the_likeliest[1][:3] == [0.3333, 0.3333, 0.3333], "behind ranks of 0 alone"
    behind_all = acceptance_by_depth([first, second], 8)
    assert behind_all[1][:3] == [0.6666, 0.1666, 0.1666]
    nothing_stands = [torch.tensor([3, 3]), torch.tensor([0])]
    assert len(acceptance_by_depth([nothing_stands], 1)) == 1


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_heads_are_measured_without_being_trained(
    method: Method, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(method=method, **(TINY | {"steps": 2}))
    first = options(target_folder, texts, tmp_path / "first")
    report = train_drafter(recipe, first)
    still = dataclasses.replace(recipe, steps=1, muon_lr=0.0, adamw_lr=0.0)
    again = options(target_folder, texts, tmp_path / "again", start_from=first.out)
    measured = train_drafter(still, again)["acceptance"]
    by_depth, before = (one["0.7"]["acceptance_by_depth"] for one in (measured, report["acceptance"]))
    assert by_depth == before


def test_perfect_and_useless_drafters_are_told_apart(model: PreTrainedModel) -> None:
    """A head that cannot be wrong accepts everything; the same head shifted by one accepts nothing."""
    parts = TargetParts.of(model)
    training = make_training(
        DrafterRecipe(method="medusa", **TINY), parts, torch.zeros(128, dtype=torch.int64)
    )
    heads: Any = training.drafter
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # A target whose final state is constant writes one token for ever, or what its noise says.
        base: Any = model.base_model
        base.norm.weight.fill_(1.0)
        base.embed_tokens.weight.fill_(1.0)
        head = model.get_output_embeddings()
        head.weight[7] = 0.05
    heads.start_from_target()
    prompts = torch.full((2, 4), 9)
    good = evaluate_acceptance(
        Capture(model, heads.hidden_layers), heads, prompts, num_generated=12, num_drafted=3, ends=()
    )
    assert good["0.0"]["reached"] == [1.0, 1.0, 1.0]
    assert good["0.7"]["acceptance_by_depth"] == [[1.0, *[0.0] * 7]] * 3
    assert good["0.7"]["acceptance"] == 1.0, "with the noise of the target, q = p always matches"
    with torch.no_grad():
        for own in heads.heads:
            own[-1].weight.copy_(own[-1].weight.roll(1, dims=0))
    bad = evaluate_acceptance(
        Capture(model, heads.hidden_layers), heads, prompts, num_generated=12, num_drafted=3, ends=()
    )
    assert bad["0.0"]["reached"] == [0.0, 0.0, 0.0]
    assert bad["0.0"]["acceptance_by_depth"][0][0] == 0.0


@pytest.mark.parametrize(("rows_kept", "num_drawings"), [(0.5, 5), (1, 5), (2, 3), (5, 1), (1000, 1)])
def test_noise_is_drawn_once_for_as_many_texts_as_there_is_memory_for(
    model: PreTrainedModel, rows_kept: float, num_drawings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever texts share it, each has its own: the target as its own drafter is always right."""
    num_rows, num_generated, vocab_size = 5, 12, 128
    drawn: list[int] = []
    gumbel_noise = acceptance.gumbel_noise

    def counted(seed: int, step: int, *shape: int) -> torch.Tensor:
        drawn.append(step)
        return gumbel_noise(seed, step, *shape)

    monkeypatch.setattr(acceptance, "gumbel_noise", counted)
    monkeypatch.setattr(acceptance, "_NOISE_BYTES", int(rows_kept * 4 * num_generated * vocab_size))
    report = evaluate_language_model(
        model,
        lambda text: model(text).logits,
        torch.randint(5, 100, (num_rows, 6), generator=torch.Generator().manual_seed(0)),
        num_generated=num_generated,
        num_drafted=1,
        ends=(),
        seed=3,
    )
    assert drawn == [*range(num_generated)] * num_drawings
    assert report["0.7"]["reached"] == [1.0]
    assert report["0.0"]["reached"] == [1.0]


def test_what_the_target_would_say_behind_the_end_counts_for_nothing(model: PreTrainedModel) -> None:
    """The text ends with its fourth token; drafts are right up to there, and wrong ever after."""

    def drafts(text: torch.Tensor, choose: Choose) -> torch.Tensor:
        read.append(text[0].tolist())
        right = torch.stack([F.pad(text[0, 2 + depth :], (0, 1 + depth), value=-1) for depth in range(2)], -1)
        return torch.where(torch.arange(len(right))[:, None] < 7, right, -1)[None]

    read: list[list[int]] = []
    prompts = torch.randint(5, 100, (1, 6), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"num_generated": 12, "k": 2, "seed": 0, "temperatures": (0.0,)}
    measure_acceptance(model, drafts, prompts, ends=(), **settings)
    (whole,) = read
    assert len(whole) == 18
    end = whole[9]
    assert end not in whole[6:9]
    ended = measure_acceptance(model, drafts, prompts, ends=(end,), num_standing_ranks=0, **settings)["0.0"]
    assert read[1] == whole[:10]
    assert ended["rounds"] == 1
    assert ended["reached"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": 0}, "--steps must be at least 1"),
        ({"depth": 30}, "too short to look 30 tokens ahead"),
        ({"has_prefix_layer": True}, "--prefix-layer is of method hydra"),
        ({"draft_vocab_size": 10}, "--draft-vocab-size is of method eagle3"),
        ({"feature_noise": 0.2}, "--feature-noise is of method eagle, not of medusa"),
        ({"method": "eagle", "decay": 0.5}, "of method medusa, hydra, .* and medusa2, not of eagle"),
        ({"decay": 1.5}, "--decay must be from 0 to 1"),
        ({"constant_share": -0.1}, "--constant-share must be from 0 to 1"),
        ({"weight_decay": -1.0}, "--weight-decay must not be negative"),
        ({"warmup_steps": -1}, "--warmup-steps must not be negative"),
        ({"clip_norm": 0.0}, "--clip-norm must be above 0"),
        ({"muon_lr": -0.1}, "--matrix-lr must be finite, and not negative"),
        ({"adamw_lr": float("inf")}, "--vector-lr must be finite, and not negative"),
        ({"method": "eagle3", "draft_vocab_size": -5}, "--draft-vocab-size must be at least 1"),
        ({"method": "layerskip", "exit_scale": -1.0}, "--exit-scale must not be negative"),
        ({"method": "eagle3", "num_layers": 2}, "--num-layers is of method medusa, .*, not of eagle3"),
        ({"method": "mtp", "num_layers": 2}, "--num-layers is of .* and draft_model, not of mtp"),
        ({"method": "parallel_heads", "num_layers": 2}, "--num-layers is of .*, not of parallel_heads"),
        ({"method": "layerskip", "num_layers": 2}, "--num-layers is of .*, not of layerskip"),
        ({"seed": -1}, "--seed must be from 0 to 4294967295"),
        ({"seed": 1 << 32}, "--seed must be from 0 to 4294967295"),
        ({"method": "medusa2", "heads_weight": -0.2}, "--heads-weight must be finite, and not negative"),
        ({"method": "medusa2", "lora_rank": 2, "lora_alpha": 0.0}, "--lora-alpha must be finite, and above"),
        ({"method": "medusa2", "lora_alpha": float("nan")}, "--lora-alpha must be finite, and above 0"),
    ],
)
def test_recipes_that_make_no_sense(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DrafterRecipe(**(TINY | {"method": "medusa"} | changes))


@pytest.mark.parametrize("temperature", [-0.7, float("nan"), float("inf")])
def test_samples_have_a_temperature(tmp_path: Path, temperature: float) -> None:
    with pytest.raises(ConfigError, match="--sample-temperature must be finite, and not negative"):
        options(tmp_path, tmp_path, tmp_path, sample_temperature=temperature)


def test_a_temperature_is_one_of_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--sample-temperature is that of --samples: give both, or leave"):
        options(tmp_path, tmp_path, tmp_path, sample_temperature=0.0)
    assert options(tmp_path, tmp_path, tmp_path, sample_temperature=0.0, samples=4).samples == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"draft_vocab_size": 200}, "--draft-vocab-size 200: the target knows 128 ids"),
        ({"fused_layers": (2, 6)}, "--fused-layers 2,6: the target has 6 layers"),
    ],
)
def test_recipes_that_do_not_fit_the_target(
    model: PreTrainedModel, changes: dict[str, Any], text: str
) -> None:
    recipe = DrafterRecipe(method="eagle3", **(TINY | changes))
    with pytest.raises(ConfigError, match=text):
        make_training(recipe, TargetParts.of(model), torch.zeros(128, dtype=torch.int64))


def test_another_run_in_the_same_folder_is_refused(target_folder: Path, texts: Path, tmp_path: Path) -> None:
    chosen = options(target_folder, texts, tmp_path, eval_texts=0)
    train_drafter(DrafterRecipe(method="medusa", **(TINY | {"steps": 1})), chosen)
    with pytest.raises(ConfigError, match=r"holds a run with decay 0\.8, not 0\.5: give another --work"):
        train_drafter(DrafterRecipe(method="medusa", **(TINY | {"steps": 1, "decay": 0.5})), chosen)


def test_what_lies_in_the_folder_is_not_written_over(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = DrafterRecipe(method="medusa", **(TINY | {"steps": 1}))
    chosen = options(target_folder, texts, tmp_path, eval_texts=0)
    chosen.out.mkdir()
    train_drafter(recipe, chosen)
    train_drafter(recipe, chosen)
    with pytest.raises(
        ConfigError, match=r"--out .*out holds files, and .*other no run that they could be of"
    ):
        train_drafter(recipe, dataclasses.replace(chosen, work=tmp_path / "other"))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="file is a file: give a folder"):
        train_drafter(recipe, dataclasses.replace(chosen, out=file))
    with pytest.raises(ConfigError, match=f"{target_folder.name} holds files"):
        train_drafter(recipe, dataclasses.replace(chosen, out=target_folder, work=tmp_path / "third"))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"method": "medusa"}, "medusa"),
        ({"method": "mtp", "num_modules": 2}, "several MTP modules"),
        ({"method": "layerskip"}, "layerskip"),
        ({"method": "draft_model"}, "draft_model"),
    ],
)
def test_layouts_that_do_not_hold_a_method_are_refused_before_anything_is_trained(
    target_folder: Path, texts: Path, tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    chosen = options(target_folder, texts, tmp_path, layout="speculators")
    with pytest.raises(ConfigError, match=f"--format speculators does not hold {what}: give published"):
        train_drafter(DrafterRecipe(**(TINY | changes)), chosen)
    assert not chosen.work.exists()


def test_fused_layers_that_the_published_layout_does_not_hold(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    """That of speculators does: there ids that begin with 1 can be nothing else."""
    recipe = DrafterRecipe(method="eagle3", **(TINY | {"steps": 1, "fused_layers": (1, 2, 4)}))
    chosen = options(target_folder, texts, tmp_path, eval_texts=0)
    with pytest.raises(ConfigError, match=r"--fused-layers 1,2,4: .* give --format speculators"):
        train_drafter(recipe, chosen)
    assert not chosen.work.exists()
    train_drafter(recipe, dataclasses.replace(chosen, layout="speculators"))
    assert load_drafter(chosen.out, TargetParts.of(model)).hidden_layers == (1, 2, 4)


@pytest.mark.parametrize(
    ("settings", "changes", "text"),
    [
        (
            {"method": "eagle"},
            {"allow_pickled_weights": True},
            "--allow-pickled-weights is about the files of --start-from: give both, or leave it out",
        ),
        (
            {"method": "draft_model"},
            {"allow_pickled_weights": True, "start_from": Path("small")},
            "--allow-pickled-weights is not of method draft_model, which reads safetensors alone: leave it",
        ),
        (
            {"method": "layerskip"},
            {"allow_pickled_weights": True},
            "--allow-pickled-weights is not of method layerskip, which reads safetensors alone: leave it",
        ),
        (
            {"method": "draft_model", "on_policy": 1.0},
            {"keeps_hidden": True},
            "--keep-hidden does not go with --on-policy 1: all steps are on what the draft model has just",
        ),
        (
            {"method": "draft_model", "on_policy": 1.0},
            {"hidden_folder": Path("states")},
            "--hidden-folder does not go with --on-policy 1: .*: leave it out",
        ),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    target_folder: Path,
    texts: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    changes: dict[str, Any],
    text: str,
) -> None:
    chosen = options(target_folder, texts, tmp_path, **changes)
    with pytest.raises(ConfigError, match=text):
        train_drafter(DrafterRecipe(**(TINY | settings)), chosen)
    assert not chosen.work.exists()


def test_an_adapter_is_what_medusa2_alone_can_store(target_folder: Path, texts: Path, tmp_path: Path) -> None:
    chosen = options(target_folder, texts, tmp_path, stores_adapter=True)
    with pytest.raises(ConfigError, match="--store adapter is of method medusa2, not of eagle3"):
        train_drafter(DrafterRecipe(**(TINY | {"method": "eagle3"})), chosen)
    assert not chosen.work.exists()


def test_the_command(target_folder: Path, texts: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["train", "medusa", "--target", str(target_folder), "--data", str(texts)]
    sizes = ["--steps", "2", "--row-length", "24", "--batch-rows", "4", "--depth", "2", "--eval-texts", "1"]
    done = runner.invoke(app, [*arguments, *sizes, "--out", str(tmp_path / "heads"), "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    assert "share of rounds that accept" in done.stderr
    assert (tmp_path / "heads" / "medusa_lm_head.safetensors").exists()
    assert (tmp_path / "heads-work" / "checkpoint.pt").exists()
    wrong = runner.invoke(app, [*arguments, "--out", str(tmp_path / "b"), "--fused-layers", "2;3"])
    assert wrong.exit_code == 2
    assert "--fused-layers must be numbers with commas between" in wrong.stderr
    missing = runner.invoke(
        app, ["train", "eagle", "--target", str(tmp_path), "--data", str(texts), "--out", str(tmp_path)]
    )
    assert missing.exit_code == 2
    assert "config.json" in missing.stderr


def test_the_command_reads_lines_of_json(target_folder: Path, tmp_path: Path) -> None:
    """Chats too, where the target has a template for them; what is wrong is told with its line."""
    target = shutil.copytree(target_folder, tmp_path / "target")
    (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    turns = [{"from": "human", "value": "abcdef" * 8}, {"from": "gpt", "value": "ghijkl" * 8}]
    lines = [{"text": "mnopqr" * 16}, {"messages": [{"role": "user", "content": "stuvwx" * 16}]}]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(map(json.dumps, [*lines, {"conversations": turns}])))
    arguments = ["train", "medusa", "--target", str(target), "--data", str(data), "--dtype", "float32"]
    sizes = ["--steps", "1", "--row-length", "24", "--batch-rows", "2", "--depth", "2", "--eval-texts", "0"]
    done = CliRunner().invoke(app, [*arguments, *sizes, "--out", str(tmp_path / "heads")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "heads" / "medusa_lm_head.safetensors").exists()
    with data.open("a") as file:
        file.write('\n{"words": "yz"}')
    wrong = CliRunner().invoke(app, [*arguments, *sizes, "--out", str(tmp_path / "others")])
    assert wrong.exit_code == 2
    assert f"{data}:4 must be an object with" in "".join(wrong.stderr.split("\n"))


def test_options_of_single_methods_reach_their_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[DrafterRecipe, TrainOptions]] = []

    def note(recipe: DrafterRecipe, chosen: TrainOptions) -> dict[str, Any]:
        seen.append((recipe, chosen))
        return {"elapsed_s": 0.0}

    monkeypatch.setattr(train, "train_drafter", note)
    for arguments in (
        "medusa2 --heads-first 9 --heads-weight 0.5 --lora-rank 4 --lora-alpha 8 --target-loss self"
        " --store adapter --target-rate 0.1",
        "layerskip --layer-dropout 0.2 --exit-scale 0.3 --exit-layer 2 --target-rate 0.2",
        "draft_model --divergence jsd --on-policy 0.75",
        "mtp --num-modules 3 --hidden-folder h",
        "eagle --feature-noise 0.3 --classification-weight 0.2 --weight-decay 0.01 --warmup-steps 7"
        " --constant-share 0.5 --clip-norm 2",
        "medusa --decay 0.6",
    ):
        method, *more = arguments.split()
        folders = ["--target", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(app, ["train", method, *folders, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    joint, exits, draft, mtp, eagle, medusa = (recipe for recipe, _ in seen)
    assert (joint.heads_first, joint.heads_weight, joint.target_rate) == (9, 0.5, 0.1)
    assert (joint.lora_rank, joint.lora_alpha, joint.target_loss) == (4, 8.0, "self")
    assert seen[0][1].stores_adapter
    assert (exits.layer_dropout, exits.exit_scale, exits.exit_layer, exits.target_rate) == (0.2, 0.3, 2, 0.2)
    assert (draft.divergence, draft.on_policy) == ("jsd", 0.75)
    assert (mtp.num_modules, seen[3][1].hidden_folder) == (3, Path("h"))
    assert (eagle.feature_noise, eagle.classification_weight, eagle.weight_decay) == (0.3, 0.2, 0.01)
    assert (eagle.warmup_steps, eagle.constant_share, eagle.clip_norm) == (7, 0.5, 2.0)
    assert medusa.decay == 0.6


def test_checkpoints_lie_beside_what_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _beside(Path("a/heads")) == Path("a/heads-work")
    (tmp_path / "heads").mkdir()
    monkeypatch.chdir(tmp_path / "heads")
    assert _beside(Path()) == tmp_path / "heads-work"


def test_every_field_of_a_recipe_has_an_option() -> None:
    """With the recipe's own default."""
    called = {"has_prefix_layer": "prefix_layer", "is_v31": "v31", "muon_lr": "matrix_lr"}
    options_there = inspect.signature(train_command).parameters
    for field in dataclasses.fields(DrafterRecipe):
        option = options_there[(called | {"adamw_lr": "vector_lr"}).get(field.name, field.name)]
        if field.name != "method":
            assert option.default == field.default, field.name


@pytest.mark.parametrize(
    ("method", "num_layers", "is_warned"),
    [("medusa", 1, False), ("medusa", 2, True), ("hydra", 2, False), ("hydra", 3, True), ("eagle", 3, False)],
)
def test_heads_that_the_authors_code_would_read_otherwise_are_warned_of(
    method: Method,
    num_layers: int,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(train, "train_beside_target", lambda recipe, options: {})
    recipe = DrafterRecipe(method=method, num_layers=num_layers, **TINY)
    train.train_drafter(recipe, options(tmp_path, tmp_path, tmp_path))
    assert any("the last block" in one.message for one in caplog.records) == is_warned
