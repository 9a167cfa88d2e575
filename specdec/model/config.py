"""Configuration of one model: where it is, in what numbers it runs, how it is compiled."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from specdec.attention.config import AttentionName
from specdec.core.config import StrictConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern="^(auto|cpu|cuda(:[0-9]+)?)$")]
"""Kinds of devices that there are kernels for; auto: cuda when a GPU is visible, else cpu."""

QuantizationName = Literal["int8", "int4", "int4-32", "int4-64", "int4-128", "int4-256"]
_Mode = Literal["auto", "off", False]
INT4_GROUP_SIZES = (32, 64, 128, 256)
"""Inputs that share a scale in `int4-...`; `int4` takes the smallest."""


def _off(value: object) -> object:
    """Without quotes YAML takes the word for the opposite of true."""
    return "off" if value is False else value


class CompileConfig(StrictConfig):
    """How the forward is compiled."""

    mode: Annotated[Literal["auto", "off"], BeforeValidator(_off, json_schema_input_type=_Mode)] = "auto"
    """auto: compile the forward (on a GPU: record CUDA graphs) at start and while idle where a C++ compiler
    exists, run eagerly until it is ready (and wherever none exists or the model cannot be compiled, with one
    log line); off: always eager."""
    startup_seconds: float = Field(default=20.0, ge=0)
    """Longest time (seconds) that a worker compiles before it reports ready; what is left is done while it
    is idle. Building the C++ kernels, once per machine, takes about ten seconds, the rest a second or so. 0:
    a worker is ready at once and runs eagerly until it has been idle for long enough. Ranks of one model
    compile together before they are ready, however long it takes."""
    cache_dir: str | None = None
    """Folder of compiled kernels, reused by later starts; None: `~/.cache/drafthouse/compile`."""
    cuda_graph_max_rows: int = Field(default=512, ge=0, le=4096)
    """On a GPU: steps of up to so many rows (tokens) run as recorded CUDA graphs; 0: none do."""
    max_frozen_bytes: int = Field(default=4 << 30, ge=0)
    """Most bytes that the packed copy of the weights, which the compiled forward reads, may take beside the
    model itself; what does not fit is read in place, which is slower. Matrices that are stored the other way
    round (GPT-2's) have to fit, or the model is not compiled."""


class ModelConfig(StrictConfig):
    """One Hugging Face causal LM folder."""

    model: str
    """Path of a Hugging Face model folder (config.json, safetensors, tokenizer)."""
    dtype: Dtype = "auto"
    """auto takes the checkpoint's own dtype."""
    device: Device = "auto"
    """auto: cuda when a GPU is visible, else cpu."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens, prompt and output together; None: the model's own limit."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of this model's process; None: in a worker, as many as its affinity and its container's CPU
    quota let run, shared by its ranks; in one process, PyTorch's default."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes (GPUs) that hold a layer together, each a part of it."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages that hold a share of the layers each, one behind the other; each takes `tensor_parallel_size`
    processes (GPUs)."""
    pipeline_micro_batch_tokens: int | None = Field(default=None, ge=1)
    """A round is divided into parts of at least so many tokens, so that stages work at the same time; with
    fewer, reading weights once more costs more than an idle stage. None: 256 on a GPU, 32 on a CPU."""
    attention_backend: AttentionName = "auto"
    """auto: our Triton kernels on a GPU (plain tensor operations, and a warning, where the package triton is
    missing); on a CPU C++ in the compiled forward, plain tensor operations in eager ones. triton: an error at
    start where they cannot be used; cpu: C++ in eager forwards, too, in float32 or bfloat16, or an error at
    start; sdpa: plain tensor operations where nothing is compiled; flashinfer: the library FlashInfer (extra
    `flashinfer`) on a GPU in bfloat16 or float16, heads of 64, 128 or 256, without CUDA graphs, or an error
    at start. No GPU has run it with this engine yet."""
    quantization: QuantizationName | None = None
    """Quantize the weights of linear layers while they are read, with torchao (the extra `quantization`).
    int8: one scale per output; int4-G: one for every G inputs of an output, and 8 bits for the layer that
    yields the logits; int4 is int4-32. None: weights stay as they are."""
    batch_invariant: bool = False
    """Promise that what a request gets is the same bit for bit whatever else is in the batch, however many
    tokens are drafted for it and however its prompt is cut, in every dtype: sums have one order, kernels and
    their tiles do not follow the batch. On a CPU the compiled forward keeps the promise at no cost, and is
    made before the model is ready; what runs eagerly costs more. Refused at start where it cannot be kept."""
    compile: CompileConfig = CompileConfig()
    """Compilation of this model's forward."""

    @model_validator(mode="after")
    def _check_invariance(self) -> Self:
        followers = {"sdpa": "products", "flashinfer": "splits"}
        if self.batch_invariant and self.attention_backend in followers:
            raise ValueError(
                f"batch_invariant does not go with attention_backend: {self.attention_backend}, whose "
                f"{followers[self.attention_backend]} follow the batch: leave attention_backend out"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if self.quantization is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                f"quantization: {self.quantization} does not go with tensor_parallel_size: "
                f"{self.tensor_parallel_size} yet: scales would depend on how the weights are cut"
            )
        if self.quantization is not None and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"quantization: {self.quantization} does not go with pipeline_parallel_size: "
                f"{self.pipeline_parallel_size} yet"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Processes that hold the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
