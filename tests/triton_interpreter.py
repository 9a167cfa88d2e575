"""Whether Triton's interpreter can run kernels here; tests that need it carry `needs_interpreter`."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest


def _failure() -> str | None:
    """Why it cannot, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install 'triton>=3.9')"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "there is a GPU: kernels are tested compiled, in tests/gpu"
    import numpy as np
    import torch
    import triton
    import triton.language as tl

    def count(limit: Any, out: Any) -> None:
        total = 0
        for _ in range(0, tl.load(limit), 2):
            total += 1
        tl.store(out, total)

    limit, out = torch.tensor([6]), torch.zeros(1, dtype=torch.int32)
    try:
        triton.jit(count)[(1,)](limit, out)
    except Exception as error:  # noqa: BLE001 - the interpreter's own, of any kind
        return f"the interpreter of triton {triton.__version__} fails with numpy {np.__version__}: {error}"
    return None if out.item() == 3 else "the interpreter counts wrong"


FAILURE = _failure()
needs_interpreter = pytest.mark.skipif(FAILURE is not None, reason=str(FAILURE))
