"""Draft models: what they begin as, what they learn from, and what comes of a run."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.core.errors import CheckpointError, ConfigError
from specdec.model.generation_file import GENERATION_FILE
from specdec.model.layer_map import CONFIG_KEY, LayerMap
from specdec.model.tokenizer import check_same_tokenizer, load_tokenizer
from tests.training.drafters.tiny_runs import TINY, losses, options
from training.draft_distillation import SAMPLE_TEMPERATURES, cycled
from training.drafters.acceptance import evaluate_language_model
from training.drafters.draft_model import (
    REFRESH_STEPS,
    DraftModelTraining,
    Vocabularies,
    first_layers,
    is_on_policy,
)
from training.drafters.groundwork import Groundwork
from training.drafters.recipe import DrafterRecipe
from training.drafters.train import train_drafter


def recipe(**changes: Any) -> DrafterRecipe:
    return DrafterRecipe(method="draft_model", **(TINY | changes))


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 10), (0.5, 20), (1.0, 40)])
def test_its_own_writing_is_spread_evenly(share: float, count: int) -> None:
    chosen = [is_on_policy(step, share) for step in range(40)]
    assert sum(chosen) == count
    assert abs(sum(chosen[:20]) - count / 2) <= 1


def test_it_begins_as_the_targets_first_layers(model: PreTrainedModel) -> None:
    draft = first_layers(model, 2)
    tokens = torch.arange(12)[None] + 5
    output = model(tokens, output_hidden_states=True)
    base: Any = model.base_model
    wanted = model.get_output_embeddings()(base.norm(output.hidden_states[2]))
    torch.testing.assert_close(draft(tokens).logits, wanted)
    with pytest.raises(ConfigError, match="--num-layers 6: the target has 6; a draft model has fewer"):
        first_layers(model, 6)


MIXTURE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""Of models that state of every layer what it is."""


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Mellum", {}),
        ("ExaoneMoe", {}),
        ("Cohere2Moe", {"prefix_dense_intermediate_size": 24}),
        ("Laguna", {"num_attention_heads_per_layer": [2, 4, 2, 4], "shared_expert_intermediate_size": 8}),
    ],
)
def test_the_first_layers_of_a_mixture_can_be_written(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**MIXTURE, **more))
    draft = first_layers(target.eval(), 2).eval()
    draft.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.mlp_layer_types == ["dense", "sparse"]
    for name in ("layer_types", *(name for name, value in more.items() if isinstance(value, list))):
        assert getattr(again.config, name) == getattr(target.config, name)[:2]
    tokens = torch.arange(12)[None] + 5
    torch.testing.assert_close(again(tokens).logits, draft(tokens).logits)


@pytest.mark.parametrize(("positions", "left"), [([0, 2, 4, 5], [0, 2]), ([3, 4], None)])
def test_of_an_inflated_target_the_layers_that_are_left_are_mapped(
    positions: list[int], left: list[int] | None, model: PreTrainedModel
) -> None:
    inflated = copy.deepcopy(model)
    setattr(inflated.config, CONFIG_KEY, positions)
    draft = first_layers(inflated, 3)
    assert getattr(draft.config, CONFIG_KEY, None) == left
    assert LayerMap.of_model(draft.config).positions == tuple(left or range(3))
    assert getattr(inflated.config, CONFIG_KEY) == positions


def test_a_configuration_that_does_not_go_with_fewer_layers_is_told_at_once() -> None:
    """Not when the model has been trained and is to be written."""
    target = AutoModelForCausalLM.from_config(transformers.MellumConfig(**MIXTURE))
    target.config.mlp_layer_types = target.config.mlp_layer_types[:3]
    with pytest.raises(
        ConfigError, match=r"can be cut from this target \(.*`mlp_layer_types` \(3\).*--start-from"
    ):
        first_layers(target, 2)


SAID = {"eos_token_id": 7, "max_new_tokens": -5, "watermarking_config": {"of": "another version"}}
"""transformers refuses to load a model whose folder says so; servers do not."""


@pytest.mark.parametrize("said", [SAID, None])
def test_what_a_folder_says_of_generation_is_handed_on(
    target_folder: Path, texts: Path, tmp_path: Path, said: dict[str, Any] | None
) -> None:
    target = tmp_path / "target"
    shutil.copytree(target_folder, target)
    (target / GENERATION_FILE).unlink(missing_ok=True)
    if said is not None:
        (target / GENERATION_FILE).write_text(json.dumps(said))
    train_drafter(recipe(steps=1, num_layers=2), options(target, texts, tmp_path, eval_texts=0))
    written = tmp_path / "out" / GENERATION_FILE
    assert (json.loads(written.read_text()) if written.exists() else None) == said


def test_a_folder_that_transformers_stumbles_over_is_told_as_one(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(target_folder, target)
    for file in target.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"target"):
        train_drafter(recipe(steps=1, num_layers=2), options(target, texts, tmp_path, eval_texts=0))


def test_it_learns_and_is_written_as_an_ordinary_model(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    chosen = options(target_folder, texts, tmp_path, stored_dtype="bfloat16", keeps_hidden=True)
    report = train_drafter(recipe(steps=40, on_policy=0.25, num_layers=2), chosen)
    logged = losses(tmp_path)
    assert logged[-1]["rows"] < logged[0]["rows"]
    assert any("draft_rows" in line for line in logged)
    assert list((tmp_path / "work" / "hidden").glob("*.bin"))
    assert check_same_tokenizer(target_folder, tmp_path / "out") == ()
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert draft.config.num_hidden_layers == 2
    assert sum(parameter.numel() for parameter in draft.parameters()) == report["parameters"]
    reached = report["acceptance"]["0.7"]["reached"]
    assert len(reached) == 3
    assert reached == sorted(reached, reverse=True)


def test_the_target_itself_is_accepted_without_exception(model: PreTrainedModel) -> None:
    def target(text: torch.Tensor) -> torch.Tensor:
        return model(text).logits

    prompts = torch.randint(5, 100, (3, 6), generator=torch.Generator().manual_seed(0))
    same = evaluate_language_model(model, target, prompts, num_generated=16, num_drafted=3, ends=())
    for temperature in ("0.0", "0.7"):
        assert same[temperature]["reached"] == [1.0, 1.0, 1.0]
    shifted = evaluate_language_model(
        model, lambda text: target(text).roll(1, dims=-1), prompts, num_generated=16, num_drafted=3, ends=()
    )
    assert shifted["0.0"]["reached"] == [0.0, 0.0, 0.0]


def test_layers_are_those_of_the_model_that_it_begins_as(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    chosen = options(target_folder, texts, tmp_path, start_from=target_folder)
    with pytest.raises(ConfigError, match="--num-layers is of what is cut from the target: leave it out"):
        train_drafter(recipe(num_layers=2), chosen)


@pytest.mark.parametrize("on_policy", [0.5, pytest.param(0.0, marks=pytest.mark.full)])
def test_an_interrupted_run_ends_with_the_same_weights(
    target_folder: Path, texts: Path, tmp_path: Path, on_policy: float
) -> None:
    chosen = recipe(steps=REFRESH_STEPS + 3, on_policy=on_policy, row_length=12, batch_rows=2)

    def run(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        train_drafter(chosen, options(target_folder, texts, tmp_path / name, eval_texts=0, **changes))
        return load_file(tmp_path / name / "out" / "model.safetensors")

    straight = run("straight")
    early = run("resumed", stop_after_step=REFRESH_STEPS)
    resumed = run("resumed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert not all(torch.equal(tensor, early[name]) for name, tensor in straight.items())


def test_a_run_that_ends_anywhere_goes_on_from_where_nothing_is_missing(
    target_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the draft model wrote for a refresh is in no checkpoint: one is kept only between two of them."""
    chosen = recipe(steps=REFRESH_STEPS + 9, on_policy=0.5, row_length=12, batch_rows=2)

    def run(name: str) -> dict[str, torch.Tensor]:
        eager = options(target_folder, texts, tmp_path / name, eval_texts=0, checkpoint_every_s=0.0)
        train_drafter(chosen, eager)
        return load_file(tmp_path / name / "out" / "model.safetensors")

    straight, loss = run("straight"), DraftModelTraining.loss

    def until(one: DraftModelTraining, step: int, part: int) -> tuple[torch.Tensor, dict[str, float]]:
        if step == REFRESH_STEPS + 6:
            raise KeyboardInterrupt
        return loss(one, step, part)

    with monkeypatch.context() as broken:
        broken.setattr(DraftModelTraining, "loss", until)
        with pytest.raises(KeyboardInterrupt):
            run("resumed")
    resumed = run("resumed")
    assert len(losses(tmp_path / "resumed")) == len(losses(tmp_path / "straight"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


@pytest.mark.full
def test_a_model_with_the_targets_tokenizer_is_trained_further(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    first = options(target_folder, texts, tmp_path / "first", eval_texts=0)
    train_drafter(recipe(steps=30, on_policy=0.0), first)
    further = options(target_folder, texts, tmp_path / "further", eval_texts=0, start_from=first.out)
    train_drafter(recipe(steps=10, on_policy=0.0, muon_lr=1e-4, adamw_lr=1e-4), further)
    assert losses(tmp_path / "further")[0]["rows"] < losses(tmp_path / "first")[0]["rows"]
    nowhere = options(target_folder, texts, tmp_path / "other", start_from=tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="does not exist"):
        train_drafter(recipe(), nowhere)
    tokenizer = first.out / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"\u00e4"'))
    with pytest.raises(CheckpointError, match="has another tokenizer than the target"):
        train_drafter(recipe(), options(target_folder, texts, tmp_path / "another", start_from=first.out))


def padded(folder: Path, num_rows: int, out: Path) -> Path:
    """The model of a folder with another number of rows in its embeddings and LM head, and its tokenizer."""
    shutil.copytree(folder, out)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.resize_token_embeddings(num_rows, mean_resizing=False)
        # Rows of the padding, if there are any, are the likeliest of all: where they count, it shows.
        model.get_output_embeddings().weight[128:] *= 50.0
    model.save_pretrained(out)
    return out


def test_what_it_writes_itself_goes_on_where_a_text_ends(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    """Behind an end it would learn positions that nobody meets; there another part of the row begins."""
    chosen = recipe(row_length=24, batch_rows=2, num_layers=2)
    ground = Groundwork.lay(chosen, options(target_folder, texts, tmp_path))
    draft = first_layers(ground.model, 2).eval()
    with torch.no_grad():
        draft.get_output_embeddings().weight.zero_()  # of equal logits the lowest is chosen: id 0, an end
    training = DraftModelTraining(ground, draft, None)
    step = next(step for step in range(REFRESH_STEPS) if is_on_policy(step, chosen.on_policy))
    step += 2 * REFRESH_STEPS
    written = training._write(step - step % REFRESH_STEPS)[step, 0]
    batch = ground.batch(step, 0)
    (greedy,) = [
        row for row, heat in enumerate(cycled(SAMPLE_TEMPERATURES, 2, start=step).tolist()) if heat == 0.0
    ]
    row, text = written[greedy].tolist(), batch[greedy].tolist()
    assert row == [*text[:6], 0, *text[6:12], 0, *text[12:18], 0, *text[18:21]]


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(128, 136), (136, 128), (144, 136)])
def test_vocabularies_may_be_padded_differently(
    target_folder: Path, texts: Path, tmp_path: Path, target_rows: int, draft_rows: int
) -> None:
    target = padded(target_folder, target_rows, tmp_path / "target")
    small = padded(target_folder, draft_rows, tmp_path / "small")
    chosen = options(target, texts, tmp_path, start_from=small, samples=4, sample_temperature=1.0)
    report = train_drafter(recipe(steps=3, row_length=12, batch_rows=2), chosen)
    before, after = (load_file(path / "model.safetensors")["lm_head.weight"] for path in (small, chosen.out))
    assert after.shape[0] == draft_rows
    common = min(target_rows, draft_rows)
    assert torch.equal(after[common:], before[common:]), "what only one of the two has is not trained"
    assert not torch.equal(after[:common], before[:common])
    assert bool(after.isfinite().all())
    assert report["acceptance"]["0.7"]["texts"] == 2


def test_what_is_padding_of_one_is_left_out() -> None:
    small, large = Vocabularies(target=4, draft=6), Vocabularies(target=6, draft=4)
    assert (small.common, large.common) == (4, 4)
    assert small.as_target(torch.arange(6.0)).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert large.as_target(torch.arange(4.0)).tolist() == [0.0, 1.0, 2.0, 3.0, -torch.inf, -torch.inf]
    assert large.readable(torch.tensor([[1, 5]])).tolist() == [[1, 3]]


def test_a_model_without_rows_for_the_tokenizers_ids_is_refused(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    small = padded(target_folder, 120, tmp_path / "small")
    chosen = options(target_folder, texts, tmp_path, start_from=small)
    with pytest.raises(ConfigError, match=r"computes 120 logits, and the target 128, of which .* names 128"):
        train_drafter(recipe(), chosen)


def test_other_special_tokens_are_told_as_serving_tells_them(
    target_folder: Path, texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = padded(target_folder, 128, tmp_path / "small")
    tokenizer = load_tokenizer(small)
    tokenizer.pad_token = "<bos>"
    tokenizer.save_pretrained(small)
    chosen = options(target_folder, texts, tmp_path, start_from=small, eval_texts=0)
    with caplog.at_level(logging.WARNING):
        train_drafter(recipe(steps=1, row_length=12, batch_rows=2, on_policy=0.0), chosen)
    assert "--start-from: special token pad_token is '<bos>' in the draft model's tokenizer" in caplog.text
