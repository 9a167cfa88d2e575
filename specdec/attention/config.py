"""Names of attention backends, as configurations write them."""

from __future__ import annotations

from typing import Literal

AttentionName = Literal["auto", "sdpa", "triton"]
"""auto: triton on CUDA devices where the package is installed, else sdpa (a compiled forward on a CPU brings
its own); sdpa: the portable one; triton: our CUDA kernels, or an error at start."""
