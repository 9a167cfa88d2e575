"""Ordinary Hugging Face folders from trained modules: bf16 weights, configuration, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.core.errors import CheckpointError
from training.mtp import MultiTokenPrediction, load_published_tensors, published_tensors
from training.target import TargetTraining
from training.tokenizer import END_ID, PAD_ID, SEPARATOR_ID, save_tokenizer
from training.whole_models import load_whole_model

MTP_FILE = "mtp.safetensors"


def _save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    config = model.config
    copy = LlamaForCausalLM(type(config).from_dict(config.to_dict())).bfloat16()
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=SEPARATOR_ID,
        eos_token_id=[SEPARATOR_ID, END_ID],
        pad_token_id=PAD_ID,
    )
    copy.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def save_target(training: TargetTraining, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the target, and its MTP module beside it in a file of its own under the published names."""
    _save_model(training.target, tokenizer, folder)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["num_nextn_predict_layers"] = 1
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    layer = training.target.config.num_hidden_layers
    tensors = published_tensors(training.mtp, training.target.model.embed_tokens.weight, layer)
    save_file(tensors, folder / MTP_FILE, metadata={"format": "pt"})


def save_draft(draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the draft with the target's tokenizer."""
    _save_model(draft, tokenizer, folder)


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A saved demo model, in evaluation mode.

    Raises:
        CheckpointError: it cannot be read, lacks weights, or is none.
    """
    model = load_whole_model(folder, dtype)
    if not isinstance(model, LlamaForCausalLM):
        raise CheckpointError(
            f"{folder} holds a {type(model).__name__}; the demo models are LlamaForCausalLM"
        )
    return model.eval()


def load_mtp(folder: Path, target: LlamaForCausalLM) -> MultiTokenPrediction:
    """The target's MTP module from its published names, in float32."""
    tensors = load_file(folder / MTP_FILE)
    return load_published_tensors(target.config, tensors, target.config.num_hidden_layers).eval()
