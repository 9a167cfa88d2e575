"""Names of attention backends, as configurations write them, and what goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

AttentionName = Literal["auto", "sdpa", "triton", "flashinfer"]
"""auto: triton on CUDA devices where the package is installed, else sdpa (a compiled forward on a CPU brings
its own); sdpa: the portable one; triton: our CUDA kernels, or an error at start; flashinfer: the library
FlashInfer on CUDA, or an error at start, and never what auto means."""

FLASHINFER_DTYPES = ("bfloat16", "float16")
FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""Head sizes whose kernels FlashInfer publishes; those of others it compiles without checking them."""


def flashinfer_refusal(*, device: str, dtype: str, head_dims: Sequence[int] = ()) -> str | None:
    """Return why FlashInfer's attention does not go with a model, and what does, or None.

    `auto` stands for a device or dtype that is not known yet.
    """
    otherwise = "or leave attention_backend out"
    kind = device.partition(":")[0]
    if kind not in ("auto", "cuda"):
        return f"it runs on CUDA devices, and the device is {device}: set device to cuda, {otherwise}"
    if dtype not in ("auto", *FLASHINFER_DTYPES):
        wanted = " or ".join(FLASHINFER_DTYPES)
        return f"it does not run {dtype}: set dtype to {wanted}, {otherwise}"
    unknown = [head_dim for head_dim in head_dims if head_dim not in FLASHINFER_HEAD_DIMS]
    if unknown:
        *sizes, last = FLASHINFER_HEAD_DIMS
        wanted = f"{', '.join(map(str, sizes))} and {last}"
        return f"it runs heads of {wanted}, and the model's are of {unknown[0]}: leave attention_backend out"
    return None
