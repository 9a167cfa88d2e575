"""What can be told, and refused, of a model before its weights are read."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from specdec.attention.config import refusal_of
from specdec.attention.hf import ATTENTION_NAME
from specdec.core.errors import CheckpointError, ConfigError
from specdec.model.adapters import ADAPTED_MODEL_TYPES, adapt
from specdec.model.checkpoint import (
    ModelFolder,
    foreign_files,
    open_folder,
    read_json,
)
from specdec.model.config import ModelConfig
from specdec.model.facts import has_own_code, head_dims_of, load_config, model_class_of, resolve_max_model_len
from specdec.model.inspection import inspect_on_paper
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stages import StagePlan, plan_stages
from specdec.model.parallel.surgery import check_parallel
from specdec.model.quantization import (
    UnsupportedQuantization,
    check_quantizable,
)
from specdec.model.rotary import RotaryRule, install, rule_of
from specdec.model.support import WHAT_CAN_BE, kind_of, unsupported_reason

# transformers annotates these factories too loosely to be of use.
_AUTO_MODEL: Any = AutoModelForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnPaper:
    """What is known of a model without its weights."""

    config: PretrainedConfig
    model: PreTrainedModel
    """On the meta device."""
    max_model_len: int
    rotary: RotaryRule | None
    num_parameters: int
    stages: StagePlan | None
    """None: it is not divided into stages."""


def check_servable(config: ModelConfig, *, is_draft: bool = False) -> ModelOnPaper:
    """Check all that can be told of a model, and how `config` divides it, without looking at its weights.

    A draft model (`is_draft`) may attend to more than transformers keeps of a text: what its own `generate`
    would say is no standard, for the target has the last word.

    Raises:
        CheckpointError: the folder has no readable config.json, or describes a model that cannot be served,
            divided or quantized as `config` says; the text names its type and the cause.
        ConfigError: as `load_model`.
    """
    folder = open_folder(config.model)
    hf_config = load_config(folder, trust_remote_code=config.trust_remote_code)
    _refuse_unsupported(folder, hf_config, config)
    _refuse_attention(folder, hf_config, config)
    max_model_len = resolve_max_model_len(config, hf_config)
    rotary = rule_of(hf_config, max_model_len)
    model = _model_on_paper(folder, hf_config, config, rotary, None if is_draft else max_model_len)
    return ModelOnPaper(
        config=hf_config,
        model=model,
        max_model_len=max_model_len,
        rotary=rotary,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        stages=_divided_on_paper(folder, model, config),
    )


def parallel_keys(config: ModelConfig) -> list[tuple[str, int]]:
    """The keys that divide a model, and their values, without those that do not."""
    sizes = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
    }
    return [(name, size) for name, size in sizes.items() if size > 1] or [*sizes.items()][:1]


def attention_of(hf_config: PretrainedConfig) -> str:
    """Name of the attention that a model is made with; those that need an adapter get ours later."""
    return "eager" if hf_config.model_type in ADAPTED_MODEL_TYPES else ATTENTION_NAME


def install_rotary(folder: ModelFolder, model: PreTrainedModel, rotary: RotaryRule | None) -> None:
    """Give a model the rotary embedding that lengths of sequences change, if it has one.

    Raises:
        CheckpointError: the model's own is not the usual one, which ours could replace.
    """
    if rotary is not None and not install(model, rotary):
        raise CheckpointError(
            f"{folder.path}: model type {model.config.model_type} cannot be served: its rotary "
            f"embedding of type {rotary.kind} is not transformers' usual one; {WHAT_CAN_BE}"
        )


def _refuse_unsupported(folder: ModelFolder, hf_config: PretrainedConfig, config: ModelConfig) -> None:
    """Raise CheckpointError, before weights are read, for models that the engine cannot run."""
    brings_code = has_own_code(hf_config, trust_remote_code=config.trust_remote_code)
    if brings_code and config.num_ranks > 1:
        name, size = parallel_keys(config)[0]
        raise CheckpointError(
            f"{folder.path}: a model with code of its own cannot be served with {name} {size}"
        )
    _refuse_stored_form(folder)
    if brings_code:
        return  # its class is only known once loaded; the attention probe has the last word
    if type(hf_config) not in _AUTO_MODEL._model_mapping:
        raise CheckpointError(
            f"{folder.path}: {hf_config.model_type} is {kind_of(hf_config)}, not a causal language model; "
            f"{WHAT_CAN_BE}"
        )
    reason = unsupported_reason(hf_config, model_class_of(hf_config))
    if reason is not None:
        raise CheckpointError(
            f"{folder.path}: model type {hf_config.model_type} cannot be served: {reason}; {WHAT_CAN_BE}"
        )


def _refuse_stored_form(folder: ModelFolder) -> None:
    """Raise CheckpointError for what ModelOpt has quantised, which config.json need not say."""
    file = folder.path / "hf_quant_config.json"
    if not file.is_file():
        return
    stored_form = read_json(file).get("quantization")
    algorithm = stored_form.get("quant_algo") if isinstance(stored_form, dict) else None
    if algorithm is not None:  # it may be about the K/V cache alone
        raise CheckpointError(
            f"{folder.path}: its weights are stored quantised ({file.name}, quant_algo {algorithm}), which "
            "is not supported yet; the unquantised model can be served with quantization: int8 or int4"
        )


def _refuse_attention(folder: ModelFolder, hf_config: PretrainedConfig, config: ModelConfig) -> None:
    """Raise ConfigError where an attention was asked for by name that cannot run the model."""
    name = config.attention_backend
    if name == "auto":
        return
    head_dims = head_dims_of(hf_config)
    reason = refusal_of(name, device=config.device, dtype=config.dtype, head_dims=head_dims)
    if reason is not None:
        raise ConfigError(f"{folder.path} does not go with attention_backend: {name}: {reason}")


def _model_on_paper(
    folder: ModelFolder,
    hf_config: PretrainedConfig,
    config: ModelConfig,
    rotary: RotaryRule | None,
    max_model_len: int | None,
) -> PreTrainedModel:
    """Return the model without numbers, after refusing rotary embeddings and attention not supported."""
    made_of = f"{folder.path / 'config.json'} describes no {hf_config.model_type} that can be made"
    with foreign_files(made_of), torch.device("meta"):
        model: PreTrainedModel = _AUTO_MODEL.from_config(
            copy.deepcopy(hf_config),
            trust_remote_code=config.trust_remote_code,
            attn_implementation=attention_of(hf_config),
        )
    install_rotary(folder, model, rotary)
    if hf_config.model_type not in ADAPTED_MODEL_TYPES:
        adapt(model)
        inspect_on_paper(model, folder.path, max_model_len=max_model_len)
    return model


def _divided_on_paper(folder: ModelFolder, model: PreTrainedModel, config: ModelConfig) -> StagePlan | None:
    stages: StagePlan | None = None
    for name, size in parallel_keys(config):
        try:
            if size > 1 and name == "tensor_parallel_size":
                check_parallel(model, size)
            elif size > 1:
                stages = plan_stages(model, size)
        except UnsupportedParallelism as refusal:
            raise CheckpointError(
                f"{folder.path}: model type {model.config.model_type} cannot be served with "
                f"{name} {size}: {refusal}"
            ) from refusal
    if config.quantization is not None:
        try:
            check_quantizable(model, config.quantization)
        except UnsupportedQuantization as refusal:
            raise CheckpointError(
                f"{folder.path}: model type {model.config.model_type} cannot be served with quantization "
                f"{config.quantization}: {refusal}"
            ) from refusal
    return stages
