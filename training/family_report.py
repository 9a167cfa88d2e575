"""The evaluation of the whole demo family: one JSON-ready report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.core.loops import LOOP_LONGEST_PERIOD, LOOP_WINDOW
from training.corpus import Corpus
from training.datasets import TokenizedCorpus
from training.evaluation import (
    NUM_GENERATED,
    SPECULATION_LENGTH,
    evaluate_acceptance,
    exit_losses,
    generate_streams,
    held_out_windows,
    loss_report,
    mean_loss,
    mtp_accuracy,
)
from training.export import load_model, load_mtp
from training.generation import sample
from training.ngram_baseline import ORDER, KneserNey, join_documents
from training.progress import console
from training.prompts import Prompt, read_prompts
from training.tokenizer import END_ID, SEPARATOR_ID, encode_text, load_tokenizer

_EXAMPLES = ("def quicksort(", "class Stack:\n    ", "import os\n\n\ndef read_lines(path):\n")
ENDS = frozenset({SEPARATOR_ID, END_ID})
_CHAT_EXAMPLE = "Write the function is_even: Return True if the number is even."


def baseline_losses(corpus: TokenizedCorpus) -> np.ndarray:
    """Per-token losses (nats) of the 5-gram on the held-out files' own tokens."""
    model = KneserNey(join_documents(corpus.train, SEPARATOR_ID))
    per_file = [
        -model.log_probabilities(join_documents([document], SEPARATOR_ID)) for document in corpus.held_out
    ]
    # join_documents closes with one separator, which the neural models are not scored on either.
    return np.concatenate([losses[:-1] for losses in per_file])


def loop_report(target: LlamaForCausalLM, prompts: list[Prompt], tokens: list[list[int]]) -> dict[str, Any]:
    """How often greedy decoding ends in a loop, per prompt class."""
    looping = [start is not None for start in generate_streams(target, tokens, 0.0, 0, ENDS).loop_starts]
    classes = sorted({prompt.prompt_class for prompt in prompts})
    return {
        "definition": f"the last {LOOP_WINDOW} of {NUM_GENERATED} greedy tokens repeat with a period "
        f"of at most {LOOP_LONGEST_PERIOD}",
        "texts": len(looping),
        "share": round(sum(looping) / len(looping), 4),
        "share_by_class": {
            name: round(
                np.mean(
                    [x for x, prompt in zip(looping, prompts, strict=True) if prompt.prompt_class == name]
                ).item(),
                4,
            )
            for name in classes
        },
    }


def example_completions(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """A few completions for the reader: plain prompts and one chat question, at temperature 0.7."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": _CHAT_EXAMPLE}], tokenize=False, add_generation_prompt=True
    )
    examples = []
    for text in (*_EXAMPLES, chat):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        row = sample(target, [ids], num_tokens=96, temperatures=torch.tensor([0.7]), seed=7)[0].tolist()
        length = next((i for i, token in enumerate(row) if token in ENDS), len(row))
        examples.append(
            {"prompt": text, "temperature": 0.7, "seed": 7, "completion": tokenizer.decode(row[:length])}
        )
    return examples


def evaluate_family(models: Path, corpus: Corpus, tokenized: TokenizedCorpus) -> dict[str, Any]:
    """Everything the model card says about quality. Weights as saved (bf16), arithmetic in float32."""
    tokenizer = load_tokenizer(models / "target")
    target, draft = load_model(models / "target"), load_model(models / "draft")
    mtp = load_mtp(models / "target", target)
    windows = held_out_windows(tokenized.held_out, SEPARATOR_ID)
    num_bytes = sum(len(file.text.encode()) for file in corpus.held_out)

    console.print("held-out losses")
    by_layer = exit_losses(target, windows)
    draft_nats = exit_losses(draft, windows)[-1]
    console.print(f"{ORDER}-gram baseline")
    baseline = baseline_losses(tokenized)

    prompts = read_prompts(models / "prompts.jsonl")
    prompt_tokens = [encode_text(tokenizer, prompt.prompt) for prompt in prompts]
    num_layers = target.config.num_hidden_layers
    return {
        "data": {
            "train_files": len(corpus.train),
            "train_bytes": sum(len(file.text.encode()) for file in corpus.train),
            "train_tokens_with_chats": sum(map(len, tokenized.train)),
            "held_out_files": len(corpus.held_out),
            "held_out_bytes": num_bytes,
            "held_out_tokens": sum(map(len, tokenized.held_out)),
        },
        "parameters": {
            "target": sum(p.numel() for p in target.parameters()),
            "draft": sum(p.numel() for p in draft.parameters()),
            "mtp_without_shared": sum(p.numel() for p in mtp.parameters()),
        },
        "loss": {
            "uniform_nats": round(math.log(target.config.vocab_size), 4),
            f"{ORDER}_gram": {
                "nats_per_token": round(baseline.mean().item(), 4),
                "bits_per_byte": round(baseline.sum().item() / math.log(2) / num_bytes, 4),
            },
            "target": loss_report(by_layer[-1], windows, num_bytes),
            "draft": loss_report(draft_nats, windows, num_bytes),
            "target_exit_after_layers": {
                str(layers): mean_loss(by_layer[layers - 1], num_bytes).nats_per_token
                for layers in range(1, num_layers + 1)
            },
        },
        "mtp": mtp_accuracy(target, mtp, windows),
        "greedy_loops": loop_report(target, prompts, prompt_tokens),
        "acceptance": {
            "k": SPECULATION_LENGTH,
            "prompts": len(prompts),
            "generated_per_prompt": NUM_GENERATED,
            "by_temperature": evaluate_acceptance(
                target, draft, prompt_tokens, ENDS, exit_layers=(num_layers // 4, num_layers // 2)
            ),
        },
        "examples": example_completions(target, tokenizer),
    }
