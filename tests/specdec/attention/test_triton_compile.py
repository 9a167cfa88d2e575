"""The Triton kernels, compiled to machine code for GPUs that need not be there.

The interpreter shows what they compute; this shows that the compiler takes them, in which shapes, with tensor
cores and asynchronous copies, and without spilling registers to memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="the package triton is not installed (pip install -e '.[cuda]')",
    ),
]

# In a process of its own: in this one the kernels may be the interpreter's.
PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.attention import triton_kernels
from specdec.model import norm_kernels

name, capability, types, constants, options = json.loads(sys.argv[1])
kernel = getattr(triton_kernels, name, None) or getattr(norm_kernels, name)
names = kernel.arg_names
signature = {one: types.get(one, "constexpr") for one in names}
aligned = {
    (at,): [["tt.divisibility", 16]]
    for at, one in enumerate(names)
    if (signature[one].startswith("*") and one not in kernel.do_not_specialize) or one.endswith("_stride")
}
source = ASTSource(
    fn=kernel,
    signature=signature,
    constexprs={(names.index(one),): value for one, value in constants.items()},
    attrs=aligned,
)
compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
ptx = compiled.asm["ptx"]
print(json.dumps({
    "shared": compiled.metadata.shared,
    "tensor_cores": "mma.sync" in ptx or "wgmma" in ptx,
    "async_copies": "cp.async" in ptx,
    "cubin_bytes": len(compiled.asm["cubin"]),
}))
"""

ATTEND = {
    **dict.fromkeys(("partial_out", "partial_max", "partial_sum"), "*fp32"),
    **dict.fromkeys(("work", "num_work", "context_lens", "block_tables"), "*i32"),
    **dict.fromkeys(("query_row_stride", "query_head_stride"), "i32"),
    **dict.fromkeys(("table_width", "mask_width"), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    "positions": "*i64",
    "ancestor_mask": "*u8",
    "is_tree": "*u8",
}
LLAMA_8B = {
    "NUM_KV_HEADS": 8,
    "RATIO": 4,
    "HEAD_DIM": 128,
    "BLOCK_SIZE": 16,
    "WINDOW": 0,
    "HAS_SOFTCAP": False,
    "HAS_MASK": False,
    "IN_ORDER": False,
    "SPLIT_KEYS": 512,
    "BLOCK_M": 32,
    "BLOCK_N": 64,
    "BLOCK_D": 128,
    "DEFER_SUM": True,
    "WIDEN": False,
}
TREE = {"WINDOW": 1024, "HAS_SOFTCAP": True, "HAS_MASK": True}
IN_ORDER = {"HAS_MASK": True, "IN_ORDER": True}
PROMPT = {"SPLIT_KEYS": 0, "BLOCK_M": 64, "DEFER_SUM": False}


def compile_kernel(cache: Path, *arguments: object) -> dict[str, int]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[3],
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, int] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "changed", "num_warps"),
    [
        ("bf16", {}, 4),
        pytest.param("bf16", TREE, 4, marks=pytest.mark.full),
        pytest.param("bf16", IN_ORDER, 4, marks=pytest.mark.full),
        pytest.param("bf16", IN_ORDER | TREE, 4, marks=pytest.mark.full),
        pytest.param("fp32", IN_ORDER | {"BLOCK_N": 32}, 4, marks=pytest.mark.full),
        pytest.param("bf16", PROMPT, 4, marks=pytest.mark.full),
        pytest.param("fp32", {"BLOCK_N": 32}, 4, marks=pytest.mark.full),
    ],
    ids=["verify", "tree", "tree_in_order", "tree_in_order_window", "tree_in_order_fp32", "prompt", "fp32"],
)
def test_attention_compiles(
    tmp_path: Path, capability: int, dtype: str, changed: dict[str, object], num_warps: int
) -> None:
    tensors = dict.fromkeys(("query", "key_cache", "value_cache", "out"), f"*{dtype}")
    options = {"num_warps": num_warps, "num_stages": 3 if dtype == "bf16" else 2}
    made = compile_kernel(
        tmp_path, "attend_kernel", capability, ATTEND | tensors, LLAMA_8B | changed, options
    )
    assert made["cubin_bytes"] > 0
    assert made["async_copies"]
    assert made["tensor_cores"] == (dtype == "bf16"), "fp32 products must not be rounded to TF32"
    # What any GPU has from 8.0 on; prompts are many tiles, and on 9.0 are given room for one more of them.
    assert made["shared"] <= (227 << 10 if changed is PROMPT and capability == 90 else 99 << 10)


def test_the_other_kernels_compile(tmp_path: Path) -> None:
    store = {
        **dict.fromkeys(("key", "value", "key_cache", "value_cache", "out"), "*bf16"),
        **dict.fromkeys(
            ("key_row_stride", "key_head_stride", "value_row_stride", "value_head_stride", "num_sequences"),
            "i32",
        ),
        "slots": "*i64",
        "query_start": "*i32",
    }
    sizes = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "OUT_WIDTH": 4096, "BLOCK": 1024}
    assert compile_kernel(tmp_path, "store_kernel", 90, store, sizes, {"num_warps": 4})["cubin_bytes"]
    combine = {
        **dict.fromkeys(("partial_out", "partial_max", "partial_sum"), "*fp32"),
        **dict.fromkeys(("row_sequences", "context_lens", "query_start", "partial_places"), "*i32"),
        "first_row": "i32",
        "out": "*bf16",
    }
    sizes = {
        "NUM_HEADS": 32,
        "HEAD_DIM": 128,
        "SPLIT_KEYS": 512,
        "MAX_SPLITS": 256,
        "SPLITS_AT_ONCE": 16,
        "BLOCK_D": 128,
    }
    flags = {"WINDOW": 0, "HAS_MASK": False}
    made = compile_kernel(tmp_path, "combine_kernel", 90, combine, sizes | flags, {"num_warps": 4})
    assert made["cubin_bytes"]
    norm = {**dict.fromkeys(("x", "weight", "out"), "*bf16"), "epsilon": "fp32", "row_stride": "i32"}
    sizes = {"SIZE": 4096, "BLOCK": 4096, "ROUNDS_BEFORE": True, "PLUS_ONE": False}
    assert compile_kernel(tmp_path, "rms_norm_kernel", 90, norm, sizes, {"num_warps": 8})["cubin_bytes"]
