"""The model cards of the demo family, rendered from the evaluation report and the recipe records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.export import MTP_FILE
from training.recipe_record import read_recipe

_HEADER = """\
---
license: apache-2.0
language: [code, en]
library_name: transformers
pipeline_tag: text-generation
---

# The Drafthouse demo family

A small target and a draft distilled from it, for demonstrations, tests and benchmarks of speculative
decoding on any machine. They write text that looks like the Python standard library; they are no
programming assistants. This page is written by `python -m training evaluate`; the raw numbers are in
`evaluation.json`.

| | target | draft |
|---|---|---|
"""

_DATA = """
## Data and licences

The weights are released under **Apache-2.0**. They were trained on the `.py` files of the standard library
of CPython {python} ({train_files} files, {train_bytes:,} bytes), which are under the **PSF licence**;
`prompts.jsonl` holds short excerpts of those sources and stays under the PSF licence. `site-packages`, the
generated `pydoc_data`, files that are not UTF-8 and exact duplicates are left out. Whole files are held out
by a hash of their path ({held_out_files} files, {held_out_bytes:,} bytes, {held_out_tokens:,} tokens): no
recipe trains on them, the tokenizer included. About 4 % of the tokens are chat-formatted examples made from
the same training files ("Write the function NAME: DOCSTRING", answered by the source), so that the chat
template means something. Files are joined by `<|endoftext|>`.

The tokenizer is a byte-level BPE of exactly 4,096 ids with the specials `<|endoftext|>` (0), `<|pad|>` (1),
`<|system|>`, `<|user|>`, `<|assistant|>` and `<|end|>` (2-5), the same in both folders. Newlines and
indentation are tokens of their own, so that a prompt may end after either.
"""

_METHOD = """
## How they were trained

**Target.** Next-token loss on rows of 512 tokens; near the end every other step has rows of 4,096 (a share
of {target_long_share} of all tokens). From the first step with LayerSkip's recipe (Elhoushi et al. 2024):
dropout of whole layers per sequence, growing exponentially with depth (p_max {layer_dropout}) and over
time, and an early-exit loss through the shared final norm and head, one exit a step in rotation (e_scale
{exit_scale}). Any exit works; the exit layer is a setting of whoever serves it. One DeepSeek-V3-style MTP
module is an auxiliary objective (weight {mtp_weight}, {mtp_weight_end} for the last third); its tensors are
in `target/mtp.safetensors` under the published names (`model.layers.8.*`), the embedding and head in it are
the target's. It takes the target's hidden state **after** the final norm, embedding half first in
`eh_proj`.

**Draft.** Distilled from the target's full distribution (GKD, Agarwal et al. 2024): corpus rows first with
{early_divergence}; then corpus rows alternate with generated ones (a third of them the target's samples,
two thirds the draft's own, at temperatures 0, 0.7 and 1), under the mean of {early_divergence} and
{late_divergence}; rows of 4,096 tokens alternate in the last fifth. Rows compare the two at temperatures 1,
0.7 and 0.4 in turn.

Matrices are trained with Muon, embeddings and norms with AdamW; bf16 autocast over float32 weights. Batches
are a function of (seed, step), and a run that is interrupted continues from its checkpoint with the same
command.
"""


def _table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines: list[Sequence[object]] = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def _overview(models: Path, report: dict[str, Any], recipes: dict[str, dict[str, Any]]) -> str:
    parameters = report["parameters"]
    mtp = f" + {parameters['mtp_without_shared'] / 1e6:.2f} M (MTP)"
    target, draft = recipes["target"], recipes["draft"]
    rows: list[list[object]] = [
        ["architecture", "LlamaForCausalLM, 8 layers, hidden 256", "LlamaForCausalLM, 3 layers, hidden 128"],
        ["heads (query / KV), head size", "4 / 2, 64", "2 / 1, 64"],
        ["intermediate size", 640, 384],
        ["context", "4,096 tokens", "4,096 tokens"],
        ["parameters", f"{parameters['target'] / 1e6:.2f} M{mtp}", f"{parameters['draft'] / 1e6:.2f} M"],
        [
            "weights (bf16)",
            " + ".join(_megabytes(models / "target" / name) for name in ("model.safetensors", MTP_FILE)),
            _megabytes(models / "draft/model.safetensors"),
        ],
        [
            "trained tokens",
            f"{target['trained_tokens'] / 1e6:.1f} M",
            f"{draft['trained_tokens'] / 1e6:.1f} M",
        ],
        ["time on 2 CPU cores", f"{target['elapsed_s'] / 60:.0f} min", f"{draft['elapsed_s'] / 60:.0f} min"],
        ["seed", target["recipe"]["seed"], draft["recipe"]["seed"]],
        ["command", f"`{target['command']}`", f"`{draft['command']}`"],
    ]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows) + "\n"


def _losses(report: dict[str, Any]) -> str:
    loss = report["loss"]
    rows = [
        [name, f"{loss[key]['nats_per_token']:.3f}", f"{loss[key]['bits_per_byte']:.3f}"]
        for name, key in (
            ("target", "target"),
            ("draft", "draft"),
            ("5-gram, interpolated modified Kneser-Ney, same tokens", "5_gram"),
        )
    ]
    text = "\n## Held-out loss\n\n" + _table(["model", "nats per token", "bits per byte"], rows)
    buckets = list(loss["target"]["by_position_full_windows"])
    text += (
        "\nBy position, over windows of 4,096 tokens (each column sees the same files), nats per token:\n\n"
    )
    text += _table(
        ["position", *buckets],
        [
            [name, *(f"{loss[name]['by_position_full_windows'][bucket]:.3f}" for bucket in buckets)]
            for name in ("target", "draft")
        ],
    )
    exits = loss["target_exit_after_layers"]
    text += "\nThe target, exiting after so many layers, nats per token:\n\n"
    text += _table(["layers", *exits], [["loss", *(f"{value:.3f}" for value in exits.values())]])
    mtp = report["mtp"]
    agreement, accuracy, by_target = (
        f"{mtp[key]:.1%}" for key in ("agreement", "accuracy", "target_accuracy")
    )
    return text + (
        f"\nThe MTP module's first token agrees with the target's own greedy choice at {agreement} of the\n"
        f"held-out positions, and with the text at {accuracy} (the target itself: {by_target}); its loss is\n"
        f"{mtp['nats_per_token']:.3f} nats per token.\n"
    )


def _acceptance_rows(report: dict[str, Any], drafter: str, name: str) -> list[list[object]]:
    rows: list[list[object]] = []
    for temperature, entry in report["acceptance"]["by_temperature"].items():
        result = entry[drafter]
        for kind, texts in (
            ("not looping", result["texts"] - result["looping_texts"]),
            ("before loop", result["looping_texts"]),
            ("looping", result["looping_texts"]),
        ):
            summary = result[kind.replace(" ", "_")]
            if summary["rounds"]:
                shares = " / ".join(f"{share:.2f}" for share in summary["reached"])
                rows.append(
                    [
                        name,
                        temperature,
                        kind,
                        texts,
                        f"{summary['acceptance']:.3f}",
                        shares,
                        f"{summary['mean_accepted']:.2f}",
                    ]
                )
    return rows


def _acceptance(report: dict[str, Any]) -> str:
    loops = report["greedy_loops"]
    by_class = ", ".join(f"{name} {share:.0%}" for name, share in loops["share_by_class"].items())
    drafters = {"draft": "draft"}
    first = next(iter(report["acceptance"]["by_temperature"].values()))
    drafters |= {key: key.replace("_", " ") for key in first if key != "draft"}
    rows = [row for key, name in drafters.items() for row in _acceptance_rows(report, key, name)]
    return f"""
## Loops and acceptance

Greedy decoding ends in a loop for {loops["share"]:.0%} of the {loops["texts"]} held-out prompts
({by_class}). Definition: {loops["definition"]}.

Acceptance at k = 4 with same-noise drafting (`sample_and_match`),
{report["acceptance"]["generated_per_prompt"]} tokens after each of the {report["acceptance"]["prompts"]}
prompts of `prompts.jsonl`, looping and other text apart (*before loop* is the part of a looping text
before it repeats itself). *Acceptance* is accepted over verified draft tokens (a round verifies up to its
first mismatch); *reached* is the share of rounds that accept the 1st / 2nd / 3rd / 4th token; *accepted*
is draft tokens per round, to which each round adds one token.

""" + _table(["drafter", "temperature", "text", "texts", "acceptance", "reached", "accepted"], rows)


def _examples(report: dict[str, Any]) -> str:
    text = "\n## What it writes\n\nUnselected, temperature 0.7, 96 tokens; the prompt ends at the mark.\n"
    for example in report["examples"]:
        text += f"\n````\n{example['prompt']}⟩{example['completion']}\n````\n"
    return text


def render_card(models: Path, report: dict[str, Any]) -> str:
    """The card's markdown."""
    recipes = {name: read_recipe(models / name) for name in ("target", "draft")}
    settings = {**recipes["target"]["recipe"], **recipes["draft"]["recipe"]}
    settings["target_long_share"] = recipes["target"]["recipe"]["long_share"]
    names = {key: str(settings[key]).replace("_", " ") for key in ("early_divergence", "late_divergence")}
    names = {key: name.replace(" kl", " KL") for key, name in names.items()}
    data = _DATA.format(python=recipes["target"]["python"], **report["data"])
    notes = "".join(f"\n**Note.** {recipe['note']}\n" for recipe in recipes.values() if recipe.get("note"))
    return (
        _HEADER
        + _overview(models, report, recipes)
        + data
        + _METHOD.format(**{**settings, **names})
        + notes
        + _losses(report)
        + _acceptance(report)
        + _examples(report)
    )


def write_card(models: Path, report: dict[str, Any]) -> None:
    """Write ``README.md`` beside the models."""
    (models / "README.md").write_text(render_card(models, report), encoding="utf-8")
