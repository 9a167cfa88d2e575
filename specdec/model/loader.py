"""Loads Hugging Face model folders. Nothing here touches the network."""

from __future__ import annotations

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
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from specdec.attention.base import LayerAttention
from specdec.attention.registry import require_cpu, require_flashinfer
from specdec.core.errors import CheckpointError, ConfigError
from specdec.model.adapters import ADAPTED_MODEL_TYPES, adapt
from specdec.model.checkpoint import (
    Checkpoint,
    LoadProgress,
    foreign_files,
    open_checkpoint,
    outline_of,
    revision_of,
)
from specdec.model.config import ModelConfig, QuantizationName
from specdec.model.devices import resolve_device
from specdec.model.experts import run_experts_one_by_one
from specdec.model.facts import (
    eos_token_ids_of,
    has_own_code,
    head_dims_of,
    model_class_of,
    resolve_dtype,
)
from specdec.model.inspection import inspect_forward, inspect_on_paper
from specdec.model.invariance.choose import invariant_forward
from specdec.model.invariance.operations import InvariantForward
from specdec.model.on_paper import attention_of, check_servable, install_rotary, parallel_keys
from specdec.model.parallel.cuts import VocabShard
from specdec.model.parallel.grid import RankGrid
from specdec.model.parallel.group import RankGroup, same_fate
from specdec.model.parallel.loading import ReadPart, read_part
from specdec.model.parallel.stage import Stage
from specdec.model.parallel.stages import StagePlan
from specdec.model.quantization import (
    replace_layers,
    require_torchao,
)
from specdec.model.quantized_loading import read_quantized
from specdec.model.rotary import RotaryRule
from specdec.model.stored_shapes import check_stored_dtypes

logger = logging.getLogger(__name__)

# transformers annotates these factories too loosely to be of use.
_AUTO_MODEL: Any = AutoModelForCausalLM
_GENERATION_CONFIG: Any = GenerationConfig
_HF_LOGGING: Any = transformers_logging


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
    config: ModelConfig,
    progress: LoadProgress | None = None,
    ranks: RankGroup | None = None,
    *,
    is_draft: bool = False,
) -> LoadedModel:
    """Load the model of `config`, and set this process's thread count when `config` gives one.

    With `ranks`, every rank calls this at the same time, reads its part of the weights, and raises when any
    of them cannot load. `is_draft` as in `check_servable`.

    Raises:
        CheckpointError: the folder or a file in it is missing, corrupt or of an unsupported kind; the
            text names it and the cause.
        ConfigError: max_model_len exceeds what the model was made for, or is needed and missing; or
            quantization needs a package that is not installed; or batch_invariant cannot be kept so; or the
            attention that is asked for by name cannot run the model.
        ResourceError: the device does not exist, or batch_invariant or that attention needs what is not here.
        TransportError: another rank is gone.
    """
    _require_ranks(config, ranks)
    grid = None if ranks is None else RankGrid.of(ranks, config.pipeline_parallel_size)
    with same_fate(ranks):
        if config.quantization is not None:
            _require_quantization(config.quantization, ranks)
        # What cannot be served says so by name, even where the weights are damaged or not there yet.
        on_paper = check_servable(config, is_draft=is_draft)
        hf_config, max_model_len = on_paper.config, on_paper.max_model_len
        rotary, stages = on_paper.rotary, on_paper.stages
        checkpoint = open_checkpoint(config.model)
        check_stored_dtypes(checkpoint, on_paper.model)
        _check_size(checkpoint, on_paper.num_parameters)
        dtype = resolve_dtype(config, checkpoint, hf_config)
        device = resolve_device(config.device) if ranks is None else ranks.device
        if config.attention_backend == "flashinfer":
            require_flashinfer(device, dtype, head_dims_of(hf_config))
        elif config.attention_backend == "cpu":
            require_cpu(device, dtype, head_dims_of(hf_config), config.compile.cache_dir)
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
        install_rotary(checkpoint, model, rotary)
        if invariant is not None:
            _make_invariant(model, invariant, grid)
        eos_token_ids = eos_token_ids_of(checkpoint, hf_config, warns=True)
    if ranks is not None:
        revision = _same_revision(checkpoint, revision, ranks)
    layers, num_logits = inspect_forward(
        model, checkpoint.path, read.stage, invariant, max_model_len=None if is_draft else max_model_len
    )
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
        asked = " x ".join(f"{name} = {number}" for name, number in parallel_keys(config))
        raise ConfigError(f"{asked} needs as many ranks; here {'is' if size == 1 else 'are'} {size}")


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
    with foreign_files(f"{checkpoint.path}: the weights cannot be loaded"), _quiet_transformers():
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
            model_class = model_class_of(hf_config)
            read = read_part(model_class, checkpoint, hf_config, grid, stages, note_read=count, **options)
    _check_loading_info(checkpoint, read.info)
    adapt(read.model)
    if progress is not None:
        progress("weights", checkpoint.weight_bytes, checkpoint.weight_bytes)
    return read


def _loading_options(hf_config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Of `from_pretrained`."""
    return {
        "dtype": dtype,
        "attn_implementation": attention_of(hf_config),
        # Reported, not tolerated: the error of transformers names no tensor.
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
        # Not the folder's: what of it counts is read elsewhere, and transformers refuses whole models for it.
        "generation_config": _GENERATION_CONFIG(),
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
    if has_own_code(hf_config, trust_remote_code=config.trust_remote_code):
        read = _read_weights(checkpoint, hf_config, dtype, config.trust_remote_code, progress, None, None)
        replace_layers(read.model, config.quantization, {})
        return read
    if progress is not None:
        progress("weights", 0, checkpoint.weight_bytes)
    with foreign_files(f"{checkpoint.path}: the weights cannot be loaded"), _quiet_transformers():
        model, info = read_quantized(
            model_class_of(hf_config),
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
