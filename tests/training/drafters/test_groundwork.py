"""Targets, data and folders that do not go together, and what is said of them before anything is trained."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from specdec.core.errors import CheckpointError, ConfigError
from specdec.drafters.base import TargetParts
from specdec.model.tokenizer import load_tokenizer
from tests.architectures import make_model, make_tokenizer, save_model
from tests.training.drafters.tiny_runs import TINY, options
from training.drafters import groundwork
from training.drafters.folders import alone_in
from training.drafters.frozen_target import _require_trainable
from training.drafters.groundwork import Groundwork
from training.drafters.methods import make_training
from training.drafters.recipe import DrafterRecipe, Method
from training.drafters.texts import leading_ids
from training.drafters.train import train_drafter

ONE_STEP = TINY | {"steps": 1, "warmup_steps": 1}


def recipe(method: Method = "medusa", **changes: Any) -> DrafterRecipe:
    return DrafterRecipe(method=method, **(ONE_STEP | changes))


@pytest.fixture
def copied(target_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copied"
    shutil.copytree(target_folder, folder)
    return folder


class TestTargets:
    def test_rows_are_not_longer_than_the_targets_texts(
        self, target_folder: Path, texts: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match="--row-length 129: the target is made for texts of 128 tokens"):
            Groundwork.lay(recipe(row_length=129), options(target_folder, texts, tmp_path))

    def test_what_is_measured_is_within_the_targets_positions(self, texts: Path, tmp_path: Path) -> None:
        """Learned ones are a table with an end."""
        torch.manual_seed(0)
        folder = tmp_path / "gpt2"
        config = transformers.GPT2Config(
            vocab_size=128, n_embd=16, n_layer=4, n_head=2, n_positions=40, bos_token_id=1, eos_token_id=0
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        report = train_drafter(recipe(), options(folder, texts, tmp_path, eval_tokens=96))
        assert report["acceptance"]["0.0"]["generated"] == 20

    def test_token_ids_that_the_model_does_not_have(self, copied: Path, texts: Path, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        tokenizer.add_tokens(["<added>"])
        tokenizer.save_pretrained(copied)
        train_drafter(recipe(), options(copied, texts, tmp_path / "without", eval_texts=0))
        (texts / "0.txt").write_text("abc <added> " * 9)
        with pytest.raises(CheckpointError, match="makes token id 128 of --data, and the model knows 128"):
            Groundwork.lay(recipe(), options(copied, texts, tmp_path))

    def test_a_folder_that_lacks_weights_is_no_target(
        self, copied: Path, texts: Path, tmp_path: Path
    ) -> None:
        """transformers would draw them by chance."""
        weights = load_file(copied / "model.safetensors")
        del weights["model.layers.2.mlp.up_proj.weight"]
        save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* first model\.layers\.2\.mlp\.up_proj"):
            Groundwork.lay(recipe(), options(copied, texts, tmp_path))

    def test_without_an_end_of_text_of_the_tokenizer_the_models_is_taken(
        self, copied: Path, texts: Path, tmp_path: Path
    ) -> None:
        settings = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps({**settings, "eos_token_id": [9, 8]}))
        assert Groundwork.lay(recipe(), options(copied, texts, tmp_path)).separator == 0
        tokenizer = make_tokenizer()
        tokenizer.eos_token = None
        tokenizer.save_pretrained(copied)
        assert Groundwork.lay(recipe(), options(copied, texts, tmp_path)).separator == 9

    @pytest.mark.parametrize(
        ("architecture", "text"),
        [
            ("gemma3", "Gemma3RotaryEmbedding cannot be used one by one"),
            ("cohere2", "model type 'cohere2', which are no RMS norms"),
            ("gpt2", "no drafter can be made of layers of model type 'gpt2'"),
        ],
    )
    def test_layers_that_no_module_can_be_made_of_are_named(self, architecture: str, text: str) -> None:
        model = make_model(architecture)
        with pytest.raises(CheckpointError, match=text):
            make_training(recipe("mtp"), TargetParts.of(model), torch.zeros(128, dtype=torch.int64))

    @pytest.mark.parametrize(
        ("architecture", "changes", "text"),
        [
            ("gemma2", {"method": "parallel_heads"}, r"parallel_heads .* for this target: softcap \(50\)"),
            ("gemma2", {"method": "mtp"}, r"mtp cannot be trained for this target: softcap \(50\)"),
            ("mistral", {"method": "mtp"}, r"mtp .* with --row-length 24: .* 12 positions .* at most 13$"),
            ("mistral", {"method": "parallel_heads"}, "attend to 12 positions .* at most 12$"),
            ("mistral", {"method": "hydra", "has_prefix_layer": True}, "attend to 12 positions"),
        ],
    )
    def test_attention_that_is_not_trained_with_is_named_before_the_target_writes(
        self, architecture: str, changes: dict[str, Any], text: str, texts: Path, tmp_path: Path
    ) -> None:
        save_model(tmp_path / "target", architecture)
        chosen = options(tmp_path / "target", texts, tmp_path, samples=4)
        with pytest.raises(ConfigError, match=text):
            train_drafter(recipe(**changes), chosen)
        assert not list(tmp_path.rglob("samples-*"))

    @pytest.mark.parametrize(("method", "most"), [("mtp", 13), ("parallel_heads", 12)])
    def test_rows_as_long_as_a_window_are_trained_on(
        self, method: Method, most: int, texts: Path, tmp_path: Path
    ) -> None:
        save_model(tmp_path / "target", "mistral")
        target = tmp_path / "target"
        train_drafter(recipe(method, row_length=most), options(target, texts, tmp_path, eval_texts=0))
        measured = options(target, texts, tmp_path / "measured")
        with pytest.raises(
            ConfigError, match=r"the drafter is in .* than the sliding window of 12: give --eval"
        ):
            train_drafter(recipe(method, row_length=most), measured)
        assert (measured.out / "config.json").exists()

    def test_a_target_is_looked_at_without_drawing_anything(
        self, target_folder: Path, texts: Path, tmp_path: Path
    ) -> None:
        """What is trained begins with the weights that it has always begun with."""
        chosen = options(target_folder, texts, tmp_path)
        drawn = []
        for check in (None, partial(_require_trainable, recipe("mtp"))):
            Groundwork.lay(recipe("mtp"), chosen, check=check)
            drawn.append(torch.rand(3))
        assert torch.equal(*drawn)

    def test_a_target_for_images_too_is_one_for_text(self, texts: Path, tmp_path: Path) -> None:
        save_model(tmp_path / "target", "gemma3_with_images")
        report = train_drafter(recipe(), options(tmp_path / "target", texts, tmp_path))
        assert report["acceptance"]["0.7"]["k"] == 3

    def test_a_target_without_a_norm_behind_its_layers_is_refused(self) -> None:
        model = make_model("llama")
        del model.base_model.norm
        with pytest.raises(CheckpointError, match="model type 'llama': no norm is found"):
            TargetParts.of(model)

    def test_dropout_of_the_targets_layers_is_left_out(self, texts: Path, tmp_path: Path) -> None:
        """What it draws is in no checkpoint: a run that was interrupted would end otherwise."""
        folder = tmp_path / "target"
        save_model(folder, "phi3")
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "resid_pdrop": 0.5}))

        def run(name: str, **changes: Any) -> dict[str, torch.Tensor]:
            chosen = options(folder, texts, tmp_path / name, eval_texts=0, **changes)
            train_drafter(recipe("mtp", steps=2), chosen)
            return load_file(chosen.out / "model.safetensors")

        straight = run("straight")
        run("resumed", stop_after_step=1)
        torch.rand(3)
        resumed = run("resumed")
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


def with_bos(folder: Path) -> None:
    """Let the tokenizer of a folder put id 1 before each text, as those of Llama 2 and 3 and Gemma do."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.save_pretrained(folder)


class TestBeginnings:
    """Servers have the tokenizer put its BOS before a prompt: no text without is ever drafted for."""

    @pytest.mark.parametrize("samples", [0, 4])
    def test_every_row_and_excerpt_begins_as_served_texts_do(
        self, copied: Path, texts: Path, tmp_path: Path, samples: int
    ) -> None:
        plain = Groundwork.lay(recipe(), options(copied, texts, tmp_path / "plain"))
        assert plain.lead == ()
        with_bos(copied)
        ground = Groundwork.lay(recipe(), options(copied, texts, tmp_path, samples=samples))
        rows = ground.rows.tokens
        assert rows.shape[1] == plain.rows.tokens.shape[1]
        assert rows[:, 0].tolist() == [1] * len(rows)
        excerpts = ground.excerpts()
        assert excerpts[:, 0].tolist() == [1] * len(excerpts)
        assert excerpts.shape == (2, 64)
        assert torch.equal(excerpts[:, 1:], plain.excerpts()[:, :-1])
        if not samples:
            streams = [rows[:, 1:].flatten(), plain.rows.tokens.flatten()]
            common = min(map(len, streams))
            assert torch.equal(streams[0][:common], streams[1][:common])

    def test_chats_do_not_begin_twice(self, copied: Path, texts: Path, tmp_path: Path) -> None:
        """Chat templates write the BOS themselves, which no server then adds."""
        with_bos(copied)
        tokenizer = load_tokenizer(copied)
        tokenizer.chat_template = "<bos>{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
        tokenizer.save_pretrained(copied)
        chat = {"messages": [{"role": "user", "content": "how are you " * 9}]}
        (texts / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 9))
        ground = Groundwork.lay(recipe(), options(copied, texts, tmp_path))
        assert not (ground.rows.tokens[:, 1:] == 1).any()

    def test_a_bos_that_the_model_does_not_have(self, copied: Path, texts: Path, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "<begin>"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<begin> $A", special_tokens=[("<begin>", 128)]
        )
        tokenizer.save_pretrained(copied)
        with pytest.raises(CheckpointError, match="makes token id 128 of --data, and the model knows 128"):
            Groundwork.lay(recipe(), options(copied, texts, tmp_path))

    def test_the_demo_targets_rows_are_what_they_were(self) -> None:
        """Its heads were trained on texts without a BOS, which it is served without."""
        demo = Path(__file__).parents[3] / "models" / "demo" / "target"
        assert leading_ids(load_tokenizer(demo)) == ()


class TestEnds:
    def test_samples_go_on_with_other_texts_behind_an_end(
        self, copied: Path, texts: Path, tmp_path: Path
    ) -> None:
        chosen = options(copied, texts, tmp_path, samples=4, sample_temperature=0.0)
        free = Groundwork.lay(recipe(), chosen)
        written = free.rows.tokens[0].tolist()
        # What the target says first, at places that differ from row to row, ends texts from now on.
        end = written[12]
        settings = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps({**settings, "eos_token_id": [0, end]}))
        ground = Groundwork.lay(recipe(), chosen)
        assert set(ground.ends) == {0, end}
        row, whole = (
            ground.rows.tokens[0].tolist(),
            Groundwork.lay(recipe(), options(copied, texts, tmp_path)),
        )
        assert row[:13] == written[:13]
        assert row[13:] == whole.rows.tokens[4, :11].tolist()
        assert len(list(chosen.work.glob("samples-*.pt"))) == 2, "what was written otherwise is left alone"


class TestSamples:
    """Rows that the target writes take hours: they are kept as they are made."""

    @pytest.fixture
    def written_bytes(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Lengths of the files that were written. The target is not asked: its rows are drawn."""

        def write_rows(_: Any, beginnings: Any, *, length: int, seed: int, **__: Any) -> torch.Tensor:
            number = len(beginnings(0))
            return torch.randint(2, 100, (number, length), generator=torch.Generator().manual_seed(seed))

        def replace_file(path: Path, write: Callable[[Path], object]) -> None:
            replace(path, write)
            lengths.append(path.stat().st_size)

        replace, lengths = groundwork.replace_file, []
        monkeypatch.setattr(groundwork, "_SAMPLED_AT_ONCE", 4)
        monkeypatch.setattr(groundwork, "write_rows", write_rows)
        monkeypatch.setattr(groundwork, "replace_file", replace_file)
        return lengths

    def test_what_is_written_grows_as_the_rows_do(
        self, target_folder: Path, texts: Path, tmp_path: Path, written_bytes: list[int]
    ) -> None:
        def num_bytes(samples: int) -> int:
            written_bytes.clear()
            chosen = options(target_folder, texts, tmp_path / str(samples), samples=samples)
            rows = Groundwork.lay(recipe(row_length=96), chosen).rows.tokens
            assert rows.shape == (samples, 96)
            assert len(list(chosen.work.glob("*"))) == 1
            return sum(written_bytes)

        assert num_bytes(160) < 5 * num_bytes(40)

    @pytest.mark.parametrize("num_kept", [0, 4, 8, 20])
    def test_rows_that_earlier_versions_have_left_are_gone_on_from(
        self, target_folder: Path, texts: Path, tmp_path: Path, written_bytes: list[int], num_kept: int
    ) -> None:
        """They rewrote the file of all."""
        chosen = options(target_folder, texts, tmp_path, samples=20)
        whole = Groundwork.lay(recipe(), chosen).rows.tokens
        (file,) = chosen.work.glob("samples-*.pt")
        torch.save(whole[:num_kept].clone(), file)
        written_bytes.clear()
        assert torch.equal(Groundwork.lay(recipe(), chosen).rows.tokens, whole)
        assert len(written_bytes) == (20 - num_kept) // 4 + (num_kept < 20)
        assert len(list(chosen.work.glob("*"))) == 1

    @pytest.mark.parametrize("at", range(1, 7))
    def test_an_interruption_loses_one_part_at_most(
        self,
        target_folder: Path,
        texts: Path,
        tmp_path: Path,
        written_bytes: list[int],
        at: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """While a part is written, the whole, or behind that, where parts are still there."""
        whole = Groundwork.lay(recipe(), options(target_folder, texts, tmp_path / "whole", samples=20))
        counted, chosen = groundwork.replace_file, options(target_folder, texts, tmp_path / "cut", samples=20)
        written_bytes.clear()

        def cut(path: Path, write: Callable[[Path], object]) -> None:
            counted(path, write)
            if len(written_bytes) == at:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(groundwork, "replace_file", cut)
            with pytest.raises(KeyboardInterrupt):
                Groundwork.lay(recipe(), chosen)
        written_bytes.clear()
        assert torch.equal(Groundwork.lay(recipe(), chosen).rows.tokens, whole.rows.tokens)
        assert len(written_bytes) == 6 - at
        assert len(list(chosen.work.glob("*"))) == 1


class TestFolders:
    def test_only_what_this_run_has_written_is_written_over(
        self, target_folder: Path, texts: Path, tmp_path: Path
    ) -> None:
        chosen = options(target_folder, texts, tmp_path, eval_texts=0)
        train_drafter(recipe(), chosen)
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        (foreign / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"foreign holds files, and .* no run that they could be of"):
            train_drafter(recipe(), dataclasses.replace(chosen, out=foreign))
        assert (foreign / "config.json").read_text() == "{}"
        train_drafter(recipe(), dataclasses.replace(chosen, out=tmp_path / "second"))
        train_drafter(recipe(), dataclasses.replace(chosen, out=tmp_path / "second"))
        train_drafter(recipe(), chosen)
        moved = tmp_path / "moved"
        moved.mkdir()
        for folder in (chosen.out, chosen.work):
            folder.rename(moved / folder.name)
        train_drafter(recipe(), dataclasses.replace(chosen, out=moved / "out", work=moved / "work"))

    @pytest.mark.parametrize("work", ["out", "out/work"])
    def test_checkpoints_may_lie_in_what_is_made(
        self, target_folder: Path, texts: Path, tmp_path: Path, work: str
    ) -> None:
        chosen = options(target_folder, texts, tmp_path, eval_texts=0, work=tmp_path / work)
        for _ in range(2):
            train_drafter(recipe(), chosen)

    def test_another_start_is_refused_before_the_target_writes_anything(
        self, target_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chosen = options(target_folder, texts, tmp_path, eval_texts=0, samples=4)
        train_drafter(recipe(), chosen)

        def unwanted(*_: Any, **__: Any) -> None:
            raise AssertionError("this takes hours")

        monkeypatch.setattr(groundwork, "write_rows", unwanted)
        monkeypatch.setattr(groundwork, "load_frozen", unwanted)
        with pytest.raises(ConfigError, match="holds a run with samples 4, not 8"):
            train_drafter(recipe(), dataclasses.replace(chosen, samples=8))
        with pytest.raises(ConfigError, match=r"holds a run with muon_lr \(--matrix-lr\) 0\.01, not 0\.02"):
            train_drafter(recipe(muon_lr=0.02), chosen)
        with pytest.raises(ConfigError, match="holds a run with dtype 'float32', not 'bfloat16'"):
            train_drafter(recipe(), dataclasses.replace(chosen, dtype="bfloat16"))
        kept = r"holds a run with keep_hidden \(--keep-hidden or --hidden-folder\) False, not True: give"
        keeping: list[dict[str, Any]] = [{"keeps_hidden": True}, {"hidden_folder": tmp_path / "states"}]
        for changes in keeping:
            with pytest.raises(ConfigError, match=kept):
                train_drafter(recipe(), dataclasses.replace(chosen, **changes))

    def test_states_are_rounded_from_the_first_step_to_the_last(
        self, target_folder: Path, texts: Path, tmp_path: Path
    ) -> None:
        """Wherever they are kept: a run that went on with others would end with other weights."""
        states = tmp_path / "states"
        chosen = options(target_folder, texts, tmp_path, eval_texts=0, hidden_folder=states)
        train_drafter(recipe(), chosen)
        computed = dataclasses.replace(chosen, hidden_folder=None)
        with pytest.raises(ConfigError, match=r"--keep-hidden or --hidden-folder\) True, not False: give"):
            train_drafter(recipe(), computed)
        train_drafter(recipe(), dataclasses.replace(computed, keeps_hidden=True))

    def test_other_texts_and_targets_are_called_so(self, copied: Path, texts: Path, tmp_path: Path) -> None:
        chosen = options(copied, texts, tmp_path, eval_texts=0)
        train_drafter(recipe(), chosen)
        (texts / "more.txt").write_text("more of it " * 30)
        with pytest.raises(ConfigError, match="holds a run with other texts: what --data names"):
            train_drafter(recipe(), chosen)
        (texts / "more.txt").unlink()
        weights = load_file(copied / "model.safetensors")
        weights["model.norm.weight"] *= 1.5
        save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match="holds a run with another --target: the weights"):
            train_drafter(recipe(), chosen)

    def test_a_damaged_note_of_a_run_is_named(self, target_folder: Path, texts: Path, tmp_path: Path) -> None:
        chosen = options(target_folder, texts, tmp_path)
        chosen.work.mkdir()
        (chosen.work / "run.json").touch()
        with pytest.raises(ConfigError, match=r"run\.json is damaged"):
            Groundwork.lay(recipe(), chosen)

    def test_two_processes_do_not_train_in_one_folder(
        self, target_folder: Path, texts: Path, tmp_path: Path
    ) -> None:
        chosen = options(target_folder, texts, tmp_path, eval_texts=0)
        with alone_in(chosen.work), pytest.raises(ConfigError, match="another process trains in"):
            train_drafter(recipe(), chosen)
        train_drafter(recipe(), chosen)
