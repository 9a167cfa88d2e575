"""The C++ paged attention against the portable reference, and what it promises beyond it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.attention.base import AttentionBackend
from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.attention.registry import require_cpu
from specdec.core.errors import ResourceError
from tests.specdec.attention.contract import CPU, DTYPES, AttentionContract, attend, make_case


def make_backend() -> CpuPagedAttention:
    """As `attention_backend: cpu` does."""
    try:
        return require_cpu(CPU, torch.float32, [])
    except ResourceError as error:
        pytest.skip(f"the C++ attention cannot be built here: {error}")


class TestCpuPagedAttention(AttentionContract):
    def make_backend(self) -> AttentionBackend:
        return make_backend()

    @DTYPES
    @pytest.mark.parametrize("window", [None, 600])
    def test_threads_change_nothing(
        self, backend: AttentionBackend, window: int | None, dtype: torch.dtype
    ) -> None:
        """Bitwise, however the work is shared out, also where a query holds NaN."""
        shapes = [(5, 1400), *self.shapes["mixed"], *self.shapes["verify"]]
        case = make_case(shapes, dtype=dtype, window=window)
        case.query[1] = float("nan")
        before = torch.get_num_threads()
        outputs = []
        try:
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                outputs.append(attend(backend, case)[0])
        finally:
            torch.set_num_threads(before)
        assert outputs[0][1].isnan().all()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0, equal_nan=True)

    @DTYPES
    @pytest.mark.parametrize("window", [None, 100])
    def test_a_chain_comes_out_the_same_beside_a_tree(
        self, backend: AttentionBackend, window: int | None, dtype: torch.dtype
    ) -> None:
        """Bitwise: it is not read with a mask, as the tree is."""
        shapes = [(200, 700), (9, 600), (5, 80)]
        case = make_case(shapes, dtype=dtype, window=window, trees=True)
        chunk, *trees = case.pieces
        case = replace(case, pieces=[replace(chunk, parents=None), *trees])
        self.check(backend, case)
        assert torch.equal(attend(backend, case)[0][:200], attend(backend, case.only(0))[0])


class TestPacked(AttentionContract):
    """K and V in 8 bits, written to the last bit as the reference writes them."""

    packed = True

    def make_backend(self) -> AttentionBackend:
        return make_backend()


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 8), (torch.bfloat16, 256)])
def test_what_it_runs(dtype: torch.dtype, head_dim: int) -> None:
    assert make_backend().supports(dtype, head_dim)


def test_half_precision_is_left_to_the_portable_path() -> None:
    assert not make_backend().supports(torch.float16, 64)
    assert not make_backend().supports(torch.float32, 257)


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found \(CXX=no-such-compiler\)"):
        CpuPagedAttention(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found \(g\+\+"):
        CpuPagedAttention(tmp_path)
