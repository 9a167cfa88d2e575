"""Names of attention backends, as configurations write them, and what goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

AttentionName = Literal["auto", "sdpa", "cpu", "triton", "flashinfer"]
"""auto: triton on CUDA devices where the package is installed, else sdpa (a compiled forward on a CPU brings
its own); sdpa: the portable one; cpu: our C++ kernel, in forwards that are not compiled too, or an error at
start; triton: our CUDA kernels, or an error at start; flashinfer: the library FlashInfer on CUDA, or an error
at start, and never what auto means."""

CPU_DTYPES = ("float32", "bfloat16")
"""Numbers that the C++ kernel runs."""
FLASHINFER_DTYPES = ("bfloat16", "float16")
FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""Head sizes whose kernels FlashInfer publishes; those of others it compiles without checking them."""


def refusal_of(name: AttentionName, *, device: str, dtype: str, head_dims: Sequence[int] = ()) -> str | None:
    """Return why the attention of that name does not go with a model, and what does, or None.

    As far as that is known of it before it is loaded (`cpu`, `flashinfer`). `auto` stands for a device or
    dtype that is not known yet.
    """
    if name == "cpu":
        return _mismatch(device, "cpu", "CPUs", dtype, CPU_DTYPES)
    if name == "flashinfer":
        return flashinfer_refusal(device=device, dtype=dtype, head_dims=head_dims)
    return None


def flashinfer_refusal(*, device: str, dtype: str, head_dims: Sequence[int] = ()) -> str | None:
    """See `refusal_of`."""
    reason = _mismatch(device, "cuda", "CUDA devices", dtype, FLASHINFER_DTYPES)
    if reason is not None:
        return reason
    unknown = [head_dim for head_dim in head_dims if head_dim not in FLASHINFER_HEAD_DIMS]
    if unknown:
        *sizes, last = FLASHINFER_HEAD_DIMS
        wanted = f"{', '.join(map(str, sizes))} and {last}"
        return f"it runs heads of {wanted}, and the model's are of {unknown[0]}: leave attention_backend out"
    return None


def _mismatch(device: str, kind: str, called: str, dtype: str, dtypes: Sequence[str]) -> str | None:
    otherwise = "or leave attention_backend out"
    if device.partition(":")[0] not in ("auto", kind):
        return f"it runs on {called}, and the device is {device}: set device to {kind}, {otherwise}"
    if dtype not in ("auto", *dtypes):
        return f"it does not run {dtype}: set dtype to {' or '.join(dtypes)}, {otherwise}"
    return None
