"""Loads Hugging Face model folders. Nothing here touches the network."""

from __future__ import annotations

import copy
import json
import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from specdec.attention.base import LayerAttention
from specdec.attention.config import flashinfer_refusal
from specdec.attention.hf import ATTENTION_NAME
from specdec.attention.registry import require_flashinfer
from specdec.core.errors import CheckpointError, ConfigError, ResourceError
from specdec.model.adapters import ADAPTED_MODEL_TYPES, adapt
from specdec.model.checkpoint import (
    Checkpoint,
    LoadProgress,
    ModelFolder,
    open_checkpoint,
    open_folder,
    outline_of,
    revision_of,
)
from specdec.model.config import ModelConfig, QuantizationName
from specdec.model.experts import run_experts_one_by_one
from specdec.model.inspection import inspect_forward, inspect_on_paper
from specdec.model.invariance.choose import invariant_forward
from specdec.model.invariance.operations import InvariantForward
from specdec.model.parallel.cuts import VocabShard
from specdec.model.parallel.grid import RankGrid
from specdec.model.parallel.group import RankGroup, same_fate
from specdec.model.parallel.loading import ReadPart, read_part
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stage import Stage
from specdec.model.parallel.stages import StagePlan, plan_stages
from specdec.model.parallel.surgery import check_parallel
from specdec.model.quantization import (
    UnsupportedQuantization,
    check_quantizable,
    replace_layers,
    require_torchao,
)
from specdec.model.quantized_loading import read_quantized
from specdec.model.rotary import RotaryRule, install, longest_sequence, rule_of
from specdec.model.support import kind_of, unsupported_reason

logger = logging.getLogger(__name__)

# transformers annotates these factories too loosely to be of use.
_AUTO_CONFIG: Any = AutoConfig
_AUTO_MODEL: Any = AutoModelForCausalLM
_HF_LOGGING: Any = transformers_logging

_SHORTEST_CONTEXT = 2
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for paged inference, and the facts about it that others need."""

    path: Path
    model: PreTrainedModel
    """In evaluation mode, without gradients, its attention replaced by the paged one."""
    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    """Width of the logits (tokenizers may know fewer ids)."""
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    eos_token_ids: tuple[int, ...]
    revision: str
    """Hash over config.json and weights."""
    layers: tuple[LayerAttention, ...]
    """Those of this rank's stage, with the heads of this rank."""
    grid: RankGrid | None = None
    """This rank's place among those that hold the model together; None: it is here in full."""
    vocab: VocabShard | None = None
    """The token ids whose logits this rank computes; None: all of them."""
    stage: Stage | None = None
    """This rank's stage of a pipeline; None: all layers are here."""
    rotary: RotaryRule | None = None
    """How its rotary embedding depends on the length of a sequence; None: it does not."""
    quantization: QuantizationName | None = None
    """How the weights of linear layers are quantized; None: they are not."""
    invariant: InvariantForward | None = None
    """What its forward runs in so that rows do not depend on the batch; None: that was not asked for."""

    @property
    def ranks(self) -> RankGroup | None:
        """All that hold the model together; None: it is here in full."""
        return None if self.grid is None else self.grid.ranks


def load_model(
    config: ModelConfig, progress: LoadProgress | None = None, ranks: RankGroup | None = None
) -> LoadedModel:
    """Load the model of `config`, and set this process's thread count when `config` gives one.

    With `ranks`, every rank calls this at the same time, reads its part of the weights, and raises when any
    of them cannot load.

    Raises:
        CheckpointError: the folder or a file in it is missing, corrupt or of an unsupported kind; the
            text names it and the cause.
        ConfigError: max_model_len exceeds what the model was made for, or is needed and missing; or
            quantization needs a package that is not installed; or batch_invariant cannot be kept so; or
            FlashInfer cannot run the model.
        ResourceError: the device does not exist, or batch_invariant or FlashInfer needs what is not here.
        TransportError: another rank is gone.
    """
    _require_ranks(config, ranks)
    grid = None if ranks is None else RankGrid.of(ranks, config.pipeline_parallel_size)
    with same_fate(ranks):
        if config.quantization is not None:
            _require_quantization(config.quantization, ranks)
        # What cannot be served says so by name, even where the weights are damaged or not there yet.
        on_paper = check_servable(config)
        hf_config, max_model_len = on_paper.config, on_paper.max_model_len
        rotary, stages = on_paper.rotary, on_paper.stages
        checkpoint = open_checkpoint(config.model)
        _check_size(checkpoint, on_paper.num_parameters)
        dtype = _resolve_dtype(config, checkpoint, hf_config)
        device = resolve_device(config.device) if ranks is None else ranks.device
        if config.attention_backend == "flashinfer":
            require_flashinfer(device, dtype, _head_dims(hf_config))
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        invariant = invariant_forward(config, device, dtype)
        if invariant is not None and hf_config.model_type not in ADAPTED_MODEL_TYPES:
            run_experts_one_by_one(on_paper.model)
            inspect_on_paper(on_paper.model, checkpoint.path, invariant)
        revision = revision_of(checkpoint, progress) if ranks is None or ranks.rank == 0 else ""
        read = (
            _read_weights(checkpoint, hf_config, dtype, config.trust_remote_code, progress, grid, stages)
            if config.quantization is None
            else _read_quantized_weights(checkpoint, hf_config, dtype, config, progress)
        )
        model = read.model
        torch.nn.Module.eval(torch.nn.Module.to(model, device)).requires_grad_(requires_grad=False)
        _install_rotary(checkpoint, model, rotary)
        if invariant is not None:
            _make_invariant(model, invariant, grid)
        eos_token_ids = _eos_token_ids(checkpoint, hf_config)
    if ranks is not None:
        revision = _same_revision(checkpoint, revision, ranks)
    layers, num_logits = inspect_forward(model, checkpoint.path, read.stage, invariant)
    if progress is not None:
        progress("probe", 1, 1)
    return LoadedModel(
        path=checkpoint.path,
        model=model,
        config=hf_config,
        dtype=dtype,
        device=device,
        vocab_size=num_logits if read.vocab is None else read.vocab.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        revision=revision,
        layers=layers,
        grid=grid,
        vocab=read.vocab,
        stage=read.stage,
        rotary=rotary,
        quantization=config.quantization,
        invariant=invariant,
    )


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


def check_servable(config: ModelConfig) -> ModelOnPaper:
    """Check all that can be told of a model, and how `config` divides it, without looking at its weights.

    Raises:
        CheckpointError: the folder has no readable config.json, or describes a model that cannot be served,
            divided or quantized as `config` says; the text names its type and the cause.
        ConfigError: as `load_model`.
    """
    folder = open_folder(config.model)
    hf_config = _load_config(folder, trust_remote_code=config.trust_remote_code)
    _refuse_unsupported(folder, hf_config, config)
    _refuse_attention(folder, hf_config, config)
    max_model_len = _resolve_max_model_len(config, hf_config)
    rotary = rule_of(hf_config, max_model_len)
    model = _model_on_paper(folder, hf_config, config, rotary)
    return ModelOnPaper(
        config=hf_config,
        model=model,
        max_model_len=max_model_len,
        rotary=rotary,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        stages=_divided_on_paper(folder, model, config),
    )


def _make_invariant(model: PreTrainedModel, invariant: InvariantForward, grid: RankGrid | None) -> None:
    invariant.operations.adopt(model)
    run_experts_one_by_one(model)
    if grid is not None and grid.tensor is not None:
        grid.tensor.adds_in_order = True


def _require_quantization(name: QuantizationName, ranks: RankGroup | None) -> None:
    require_torchao(name)
    if ranks is not None:
        raise ConfigError(f"quantization: {name} does not go with a model over several ranks yet")


def _require_ranks(config: ModelConfig, ranks: RankGroup | None) -> None:
    size = 1 if ranks is None else ranks.size
    if config.num_ranks != size:
        asked = " x ".join(f"{name} = {number}" for name, number in _parallel_keys(config))
        raise ConfigError(f"{asked} needs as many ranks; here {'is' if size == 1 else 'are'} {size}")


def _parallel_keys(config: ModelConfig) -> list[tuple[str, int]]:
    """The keys that divide a model, and their values, without those that do not."""
    sizes = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
    }
    return [(name, size) for name, size in sizes.items() if size > 1] or [*sizes.items()][:1]


def _same_revision(checkpoint: Checkpoint, revision: str, ranks: RankGroup) -> str:
    """Return rank 0's revision (only it hashes the weights), after comparing what is cheap to compare.

    Raises:
        CheckpointError: ranks have read different models (on different nodes, say).
    """
    outline = outline_of(checkpoint)
    answers = [answer.decode().split() for answer in ranks.exchange(f"{outline} {revision}".encode())]
    for rank, answer in enumerate(answers):
        if answer[0] != answers[0][0]:
            raise CheckpointError(f"{checkpoint.path}: rank {rank} has read another model than rank 0")
    return answers[0][1]


def _load_config(folder: ModelFolder, *, trust_remote_code: bool) -> PretrainedConfig:
    model_type = folder.config.get("model_type")
    with _foreign_files(
        f"{folder.path / 'config.json'} describes no model that transformers knows "
        f"(model_type {model_type!r})"
    ):
        loaded: PretrainedConfig = _AUTO_CONFIG.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    return loaded


@contextmanager
def _foreign_files(problem: str) -> Iterator[None]:
    """Turn whatever transformers stumbles over in a model folder into an error that says so."""
    try:
        yield
    except Exception as error:  # its checks of foreign files raise errors of many libraries
        raise CheckpointError(f"{problem}: {type(error).__name__}: {error}") from error


def _refuse_unsupported(folder: ModelFolder, hf_config: PretrainedConfig, config: ModelConfig) -> None:
    """Raise CheckpointError, before weights are read, for models that the engine cannot run."""
    has_own_code = _has_own_code(hf_config, trust_remote_code=config.trust_remote_code)
    if has_own_code and config.num_ranks > 1:
        name, size = _parallel_keys(config)[0]
        raise CheckpointError(
            f"{folder.path}: a model with code of its own cannot be served with {name} {size}"
        )
    if has_own_code:
        return  # its class is only known once loaded; the attention probe has the last word
    if type(hf_config) not in _AUTO_MODEL._model_mapping:
        raise CheckpointError(
            f"{folder.path}: {hf_config.model_type} is {kind_of(hf_config)}, not a causal language model"
        )
    reason = unsupported_reason(hf_config, _model_class(hf_config))
    if reason is not None:
        raise CheckpointError(f"{folder.path}: model type {hf_config.model_type} cannot be served: {reason}")


def _refuse_attention(folder: ModelFolder, hf_config: PretrainedConfig, config: ModelConfig) -> None:
    """Raise ConfigError where FlashInfer was asked for, for a model that it cannot run."""
    if config.attention_backend != "flashinfer":
        return
    head_dims = _head_dims(hf_config)
    reason = flashinfer_refusal(device=config.device, dtype=config.dtype, head_dims=head_dims)
    if reason is not None:
        raise ConfigError(f"{folder.path} does not go with attention_backend: flashinfer: {reason}")


def _head_dims(hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Head sizes that a configuration states; what they really are, the probe of the loaded model tells."""
    text_config: Any = hf_config.get_text_config()
    stated = getattr(text_config, "head_dim", None)
    if stated is not None:
        return (int(stated),)
    width, num_heads = (getattr(text_config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return (width // num_heads,) if width and num_heads else ()


def _has_own_code(hf_config: PretrainedConfig, *, trust_remote_code: bool) -> bool:
    return trust_remote_code and "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})


def _model_class(hf_config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that transformers has for a configuration that it knows."""
    model_class: Any = _AUTO_MODEL._model_mapping[type(hf_config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class  # type: ignore[no-any-return]


def _resolve_max_model_len(config: ModelConfig, hf_config: PretrainedConfig) -> int:
    limit = longest_sequence(hf_config)
    if limit is None and config.max_model_len is None:
        raise ConfigError(f"{config.model} states no max_position_embeddings: set max_model_len")
    if limit is not None and limit < _SHORTEST_CONTEXT:
        raise CheckpointError(
            f"{config.model}: max_position_embeddings is {limit}; a prompt and its first token need "
            f"{_SHORTEST_CONTEXT} positions"
        )
    if config.max_model_len is None:
        assert limit is not None
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} exceeds the {limit} positions that {config.model} has"
        )
    return config.max_model_len


def _resolve_dtype(config: ModelConfig, checkpoint: Checkpoint, hf_config: PretrainedConfig) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    dtype: Any = hf_config.dtype or getattr(hf_config.get_text_config(), "dtype", None)
    if dtype is None:
        dtype = _dtype_of_weights(checkpoint)
    if dtype not in _DTYPES.values():
        raise CheckpointError(
            f"{checkpoint.path}: the checkpoint's dtype {dtype} is not supported; "
            f"set dtype to one of {', '.join(_DTYPES)}"
        )
    return dtype  # type: ignore[no-any-return]


def _dtype_of_weights(checkpoint: Checkpoint) -> Any:
    """Dtype of the first floating-point tensor, or its safetensors name if we have none for it."""
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    for header in checkpoint.headers:
        for name, entry in json.loads(header).items():
            if name != "__metadata__" and "F" in entry["dtype"]:
                return names.get(entry["dtype"], entry["dtype"])
    return None


def resolve_device(name: str) -> torch.device:
    """Return the device of a configuration's `device`.

    Raises:
        ResourceError: it cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ResourceError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _read_weights(
    checkpoint: Checkpoint,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    progress: LoadProgress | None,
    grid: RankGrid | None,
    stages: StagePlan | None,
) -> ReadPart:
    """Read the model, or this rank's part of it."""
    if progress is not None:
        progress("weights", 0, checkpoint.weight_bytes)
    options = _loading_options(hf_config, dtype)
    with _foreign_files(f"{checkpoint.path}: the weights cannot be loaded"), _quiet_transformers():
        if grid is None:
            model, info = _AUTO_MODEL.from_pretrained(
                checkpoint.path,
                config=hf_config,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                **options,
            )
            read = ReadPart(model=model, info=info, vocab=None, stage=None)
        else:
            count = _ByteCount(progress, checkpoint.weight_bytes)
            model_class = _model_class(hf_config)
            read = read_part(model_class, checkpoint, hf_config, grid, stages, note_read=count, **options)
    _check_loading_info(checkpoint, read.info)
    adapt(read.model)
    if progress is not None:
        progress("weights", checkpoint.weight_bytes, checkpoint.weight_bytes)
    return read


def _attention_of(hf_config: PretrainedConfig) -> str:
    """Name of the attention that a model is made with; those that need an adapter get ours later."""
    return "eager" if hf_config.model_type in ADAPTED_MODEL_TYPES else ATTENTION_NAME


def _loading_options(hf_config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Of `from_pretrained`."""
    return {
        "dtype": dtype,
        "attn_implementation": _attention_of(hf_config),
        # Reported, not tolerated: the error of transformers names no tensor.
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }


def _read_quantized_weights(
    checkpoint: Checkpoint,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    config: ModelConfig,
    progress: LoadProgress | None,
) -> ReadPart:
    """Read the model with quantized layers in the place of linear ones.

    The class of a model with code of its own is only known once it is loaded: it is read in full first.
    """
    assert config.quantization is not None
    if _has_own_code(hf_config, trust_remote_code=config.trust_remote_code):
        read = _read_weights(checkpoint, hf_config, dtype, config.trust_remote_code, progress, None, None)
        replace_layers(read.model, config.quantization, {})
        return read
    if progress is not None:
        progress("weights", 0, checkpoint.weight_bytes)
    with _foreign_files(f"{checkpoint.path}: the weights cannot be loaded"), _quiet_transformers():
        model, info = read_quantized(
            _model_class(hf_config),
            checkpoint,
            hf_config,
            config.quantization,
            note_read=_ByteCount(progress, checkpoint.weight_bytes),
            **_loading_options(hf_config, dtype),
        )
    _check_loading_info(checkpoint, info)
    adapt(model)
    if progress is not None:
        progress("weights", checkpoint.weight_bytes, checkpoint.weight_bytes)
    return ReadPart(model=model, info=info, vocab=None, stage=None)


def _install_rotary(folder: ModelFolder, model: PreTrainedModel, rotary: RotaryRule | None) -> None:
    if rotary is not None and not install(model, rotary):
        raise CheckpointError(
            f"{folder.path}: model type {model.config.model_type} cannot be served: its rotary "
            f"embedding of type {rotary.kind} is not transformers' usual one"
        )


def _model_on_paper(
    folder: ModelFolder, hf_config: PretrainedConfig, config: ModelConfig, rotary: RotaryRule | None
) -> PreTrainedModel:
    """Return the model without numbers, after refusing rotary embeddings and attention not supported."""
    made_of = f"{folder.path / 'config.json'} describes no {hf_config.model_type} that can be made"
    with _foreign_files(made_of), torch.device("meta"):
        model: PreTrainedModel = _AUTO_MODEL.from_config(
            copy.deepcopy(hf_config),
            trust_remote_code=config.trust_remote_code,
            attn_implementation=_attention_of(hf_config),
        )
    _install_rotary(folder, model, rotary)
    if hf_config.model_type not in ADAPTED_MODEL_TYPES:
        inspect_on_paper(model, folder.path)
    return model


def _check_size(checkpoint: Checkpoint, num_needed: int) -> None:
    """Refuse weights that are much smaller than the model that config.json describes.

    Missing tensors are found later one by one, but transformers first makes them up: with a config.json that
    has lost its sizes and so describes a model of billions of parameters, that takes minutes or all memory.
    """
    num_stored = sum(
        math.prod(entry["shape"])
        for header in checkpoint.headers
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    )
    # Tensors that are stored once and used twice at most double what is needed.
    if num_needed > 2 * num_stored:
        raise CheckpointError(
            f"{checkpoint.path}: the weights do not fit config.json: they hold {num_stored} parameters, "
            f"the model needs {num_needed}"
        )


def _divided_on_paper(folder: ModelFolder, model: PreTrainedModel, config: ModelConfig) -> StagePlan | None:
    stages: StagePlan | None = None
    for name, size in _parallel_keys(config):
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


def _check_loading_info(checkpoint: Checkpoint, info: dict[str, Any]) -> None:
    """Every tensor of the model must come from the weights, in its shape; tensors to spare are fine."""
    missing, mismatched = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: the weights lack {len(missing)} tensors of the model, first {missing[0]}"
        )
    if mismatched:
        name, stored, expected = mismatched[0]
        raise CheckpointError(
            f"{checkpoint.path}: the weights do not fit config.json: tensor {name} has shape "
            f"{tuple(stored)}, the model needs {tuple(expected)}"
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        logger.info(
            "%s holds %d tensors that the model does not use, first %s",
            checkpoint.path,
            len(unexpected),
            unexpected[0],
        )


class _ByteCount:
    """Reports bytes read as progress; called from several threads."""

    def __init__(self, progress: LoadProgress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress("weights", self._done, self._total)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the progress bar and load report of transformers: we report ourselves."""
    verbosity = _HF_LOGGING.get_verbosity()
    had_bar = _HF_LOGGING.is_progress_bar_enabled()
    _HF_LOGGING.set_verbosity_error()
    _HF_LOGGING.disable_progress_bar()
    try:
        yield
    finally:
        _HF_LOGGING.set_verbosity(verbosity)
        if had_bar:
            _HF_LOGGING.enable_progress_bar()


def _eos_token_ids(checkpoint: Checkpoint, hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Sorted ids that end a text, from generation_config.json and config.json."""
    found: set[int] = set()
    # A model of text and images may say at the top alone what ends a turn (Gemma 3).
    configs: tuple[Any, ...] = (hf_config, hf_config.get_text_config())
    sources = [("config.json", getattr(config, "eos_token_id", None)) for config in configs]
    generation_file = checkpoint.path / "generation_config.json"
    if generation_file.is_file():
        try:
            content = json.loads(generation_file.read_text(encoding="utf-8"))
            sources.append((generation_file.name, content.get("eos_token_id")))
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise CheckpointError(f"{generation_file} cannot be read as JSON: {error}") from error
    for name, value in sources:
        token_ids = [] if value is None else [value] if isinstance(value, int) else value
        if not isinstance(token_ids, list) or not all(isinstance(one, int) for one in token_ids):
            raise CheckpointError(
                f"{checkpoint.path / name}: eos_token_id must be a token id or a list of them, got {value!r}"
            )
        found.update(token_ids)
    return tuple(sorted(found))


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        CheckpointError: the folder or the tokenizer's files are missing or unreadable.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist")
    with _foreign_files(f"{folder} has no tokenizer that can be loaded"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    return tokenizer


def check_same_tokenizer(target_path: str | Path, draft_path: str | Path) -> tuple[str, ...]:
    """Check that a draft model means by every token id what the target means by it.

    Vocabulary sizes of models say nothing (they are padded differently), so the tokenizers are compared,
    token text by token text.

    Returns:
        Warnings for the user: differences in special tokens or in the chat template. They do not make
        drafts wrong, but the two models may have been trained for different formats.

    Raises:
        CheckpointError: a token id with different texts, or known to only one of the two; or one of the
            tokenizers cannot be loaded.
    """
    target, draft = load_tokenizer(target_path), load_tokenizer(draft_path)
    target_texts = {token_id: text for text, token_id in target.get_vocab().items()}
    draft_texts = {token_id: text for text, token_id in draft.get_vocab().items()}
    for token_id in sorted(target_texts.keys() | draft_texts.keys()):
        ours, theirs = target_texts.get(token_id), draft_texts.get(token_id)
        if ours != theirs:
            raise CheckpointError(
                f"the draft model {draft_path} has another tokenizer than the target {target_path}: token id "
                f"{token_id} is {_text_or_absent(theirs)} in the draft and {_text_or_absent(ours)} in the "
                "target; a draft model must use the target's tokenizer"
            )
    return tuple(_format_differences(target, draft))


def _text_or_absent(text: str | None) -> str:
    return "absent" if text is None else repr(text)


def _format_differences(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> Iterator[str]:
    ours: dict[str, Any] = dict(target.special_tokens_map)
    theirs: dict[str, Any] = dict(draft.special_tokens_map)
    for name in sorted(ours.keys() | theirs.keys()):
        if str(ours.get(name)) != str(theirs.get(name)):
            yield (
                f"special token {name} is {theirs.get(name)!r} in the draft model's tokenizer and "
                f"{ours.get(name)!r} in the target's"
            )
            break
    our_template, their_template = str(target.chat_template or ""), str(draft.chat_template or "")
    if our_template != their_template:
        pairs = zip(our_template, their_template, strict=False)
        same = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        place = min(len(our_template), len(their_template)) if same is None else same
        yield f"the chat templates of draft model and target differ from character {place} on"
