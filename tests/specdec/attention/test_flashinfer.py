"""The FlashInfer attention without a GPU: what it tells the library, who gets it, and what is refused.

The library cannot run here. In its place is `flashinfer_double`, which computes what the library's
documentation says of the arguments that it is given, so that the suite of all backends shows that ours mean
the right attention. The library itself goes through the same suite in tests/gpu.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from specdec.attention import registry
from specdec.attention.agreement import LARGEST_DIFFERENCE, largest_difference
from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.config import FLASHINFER_HEAD_DIMS, flashinfer_refusal
from specdec.attention.flashinfer import FlashInferAttention, FlashInferUnavailable, load_flashinfer
from specdec.attention.flashinfer_steps import LayerKind, plan_arguments, step_pages, tree_mask
from specdec.attention.metadata import build_metadata
from specdec.attention.registry import choose_backend
from specdec.attention.sdpa import SdpaAttention
from specdec.core.errors import ConfigError, ResourceError
from tests.specdec.attention.contract import CPU, AttentionContract, attend, make_case, make_pieces
from tests.specdec.attention.flashinfer_double import Doubles, PrefillDouble

CUDA = torch.device("cuda")
LAYER = LayerAttention(layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=64, scaling=0.2)


class TestFlashInferArguments(AttentionContract):
    """The double runs any dtype and head size, so that the arrays are compared in fp32 too."""

    rows_are_bitwise = False
    paths_are_bitwise = False

    def make_backend(self) -> AttentionBackend:
        return FlashInferAttention(CPU, Doubles())

    def test_half_precision(self, backend: AttentionBackend) -> None:
        self.check(backend, self.make_case([(1, 70), (4, 9)], dtype=torch.float16))

    def test_softcap_in_a_windowed_tree(self, backend: AttentionBackend) -> None:
        self.check(backend, self.make_case([(7, 70), (1, 9)], softcap=3.0, window=5, trees=True))

    def test_another_scale_than_the_usual(self, backend: AttentionBackend) -> None:
        case = self.make_case([(1, 70), (4, 9)])
        object.__setattr__(case.layer, "scaling", 0.7)
        self.check(backend, case)


# --- what the planner is told


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, bool, int]:
    """Rows and cached tokens of each sequence, block size, whether there are trees, a seed."""
    shapes = st.tuples(st.sampled_from((1, 1, 3, 8, 20)), st.integers(0, 70))
    return (
        draw(st.lists(shapes, min_size=1, max_size=6)),
        draw(st.sampled_from((1, 4, 16))),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


@hypothesis.given(batch=batches())
def test_every_sequence_has_its_own_rows_and_pages(batch: Any) -> None:
    shapes, block_size, trees, seed = batch
    pieces, _ = make_pieces(shapes, block_size, trees=trees, rng=random.Random(seed))
    pages = step_pages(build_metadata(pieces, block_size=block_size))
    assert pages.num_rows == sum(rows for rows, _ in shapes)
    for number, (piece, (rows, start)) in enumerate(zip(pieces, shapes, strict=True)):
        assert int(pages.query_start[number + 1] - pages.query_start[number]) == rows
        first, end = pages.page_start[number : number + 2].tolist()
        assert pages.pages[first:end].tolist() == list(piece.block_table)
        assert (end - first - 1) * block_size + int(pages.last_page_lens[number]) == rows + start


@hypothesis.given(batch=batches(), window=st.sampled_from((None, 1, 3, 30)))
def test_masks_hold_a_bit_for_every_row_and_key(batch: Any, window: int | None) -> None:
    shapes, block_size, trees, seed = batch
    pieces, _ = make_pieces(shapes, block_size, trees=trees, rng=random.Random(seed))
    metadata = build_metadata(pieces, block_size=block_size)
    mask = tree_mask(metadata, window)
    if all(piece.parents is None for piece in pieces):
        assert mask is None
        return
    assert mask is not None
    bits = iter(mask.tolist())
    for piece, (rows, start) in zip(pieces, shapes, strict=True):
        parents = range(-1, rows - 1) if piece.parents is None else piece.parents
        for row in range(rows):
            ancestors, node = set(), row
            while node >= 0:
                ancestors.add(node)
                node = parents[node]
            depth = start + len(ancestors) - 1  # this row's position
            for key in range(start + rows):
                seen, position = key < start, key
                if key >= start:
                    seen = key - start in ancestors
                    position = start + sum(1 for other in ancestors if other < key - start)
                inside = window is None or depth - position < window
                assert next(bits) == (seen and inside)
    assert next(bits, None) is None


@pytest.mark.parametrize(("window", "window_left"), [(None, -1), (1, 0), (4096, 4095)])
@pytest.mark.parametrize(("softcap", "told"), [(None, 0.0), (30.0, 30.0)])
def test_window_scale_and_soft_cap_as_flashinfer_has_them(
    window: int | None, window_left: int, softcap: float | None, told: float
) -> None:
    case = make_case([(1, 9)], window=window, softcap=softcap)
    kind = LayerKind.of(case.layer, torch.bfloat16)
    arguments = plan_arguments(step_pages(case.metadata), kind, block_size=16, mask=None)
    assert arguments["window_left"] == window_left
    assert arguments["logits_soft_cap"] == told
    assert arguments["sm_scale"] == case.layer.scaling
    assert arguments["causal"] is True
    assert arguments["custom_mask"] is None
    assert (arguments["q_data_type"], arguments["kv_data_type"]) == (torch.bfloat16, torch.bfloat16)
    assert (arguments["num_qo_heads"], arguments["num_kv_heads"], arguments["head_dim_qk"]) == (4, 2, 64)
    for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"):
        assert arguments[name].device == CPU  # the planner reads them: from a device, it would wait for it


def test_windows_of_trees_are_in_the_mask_alone() -> None:
    case = make_case([(5, 9)], window=3, trees=True)
    kind = LayerKind.of(case.layer, torch.bfloat16)
    mask = tree_mask(case.metadata, 3)
    arguments = plan_arguments(step_pages(case.metadata), kind, block_size=16, mask=mask)
    assert arguments["window_left"] == -1
    assert arguments["causal"] is False
    assert arguments["custom_mask"] is mask


# --- plans and steps


def run_layers(
    backend: FlashInferAttention, case: Any, layers: list[LayerAttention], plan: Any
) -> torch.Tensor:
    outputs = [
        backend.attend(
            case.query,
            case.key,
            case.value,
            key_cache=case.keys.clone(),
            value_cache=case.values.clone(),
            metadata=case.metadata,
            plan=plan,
            layer=layer,
        )
        for layer in layers
    ]
    return torch.stack(outputs)


def test_a_step_is_planned_once_for_all_layers_of_a_kind() -> None:
    doubles = Doubles()
    backend = FlashInferAttention(CPU, doubles)
    case, windowed = make_case([(1, 70), (5, 9)]), make_case([(1, 70), (5, 9)], window=8)
    layers = [case.layer, windowed.layer] * 3
    for step in range(1, 4):
        run_layers(backend, case, layers, backend.begin(case.metadata))
        assert len(doubles.made) == 2  # one workspace of its own for each kind, kept
        assert doubles.num_plans == 2 * step
        assert doubles.num_runs == 6 * step


def test_steps_that_interleave_do_not_see_each_others_plans() -> None:
    """As micro-batches might: a second step begins before the layers of the first have run."""
    backend = FlashInferAttention(CPU, Doubles())
    cases = [make_case([(1, 70), (5, 9)]), make_case([(3, 40)], trees=True, seed=1)]
    plans = [backend.begin(case.metadata) for case in cases]
    for _ in range(2):
        for case, plan in zip(cases, plans, strict=True):
            expected = attend(SdpaAttention(), case)[0]
            output = run_layers(backend, case, [case.layer], plan)[0]
            torch.testing.assert_close(output, expected, rtol=5e-6, atol=5e-6)


def test_a_plan_that_fails_is_not_taken_for_one() -> None:
    class Failing(PrefillDouble):
        def plan(self, *positional: Any, **named: Any) -> None:
            super().plan(*positional, **named)
            if len(self.plans) == 2:
                raise RuntimeError("no workspace left")

    backend = FlashInferAttention(CPU, Doubles(Failing))
    first, second = make_case([(1, 70)]), make_case([(1, 90)], seed=1)
    attend(backend, first)
    plan = backend.begin(second.metadata)
    with pytest.raises(RuntimeError, match="no workspace left"):
        run_layers(backend, second, [second.layer], plan)
    output = run_layers(backend, second, [second.layer], plan)[0]
    torch.testing.assert_close(output, attend(SdpaAttention(), second)[0], rtol=5e-6, atol=5e-6)


# --- the library's own signatures


@pytest.fixture
def library() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        pytest.skip(f"flashinfer is not installed ({error}): pip install -e '.[flashinfer]'")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_double_is_called_as_the_library_is(method: str, library: ModuleType) -> None:
    """Same names, defaults and order; what the double leaves out, the library does not ask for."""
    theirs = inspect.signature(getattr(library.BatchPrefillWithPagedKVCacheWrapper, method)).parameters
    ours = inspect.signature(getattr(PrefillDouble, method)).parameters
    for name, parameter in ours.items():
        assert name in theirs
        assert parameter.default == theirs[name].default, name
    positional = [
        name for name, parameter in ours.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    required = [name for name in positional if ours[name].default is inspect.Parameter.empty]
    assert list(theirs)[: len(required)] == required
    for name, parameter in theirs.items():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert name in ours or is_variadic or parameter.default is not inspect.Parameter.empty, name


def test_what_is_planned_with_are_parameters_of_the_double() -> None:
    case = make_case([(1, 9)])
    kind = LayerKind.of(case.layer, torch.bfloat16)
    arguments = plan_arguments(step_pages(case.metadata), kind, block_size=16, mask=None)
    assert set(arguments) == set(inspect.signature(PrefillDouble.plan).parameters) - {"self"}


# --- who gets it


def test_auto_never_means_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(device: torch.device) -> None:
        raise AssertionError("auto looked for FlashInfer")

    class Triton:
        name = "triton"

        def __init__(self, device: torch.device, **facts: Any) -> None: ...

        def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
            return True

    monkeypatch.setattr(registry, "load_flashinfer", asked)
    monkeypatch.setattr(registry, "TritonPagedAttention", Triton)
    facts: dict[str, Any] = {"dtype": torch.bfloat16, "layers": [LAYER], "max_context": 64}
    assert choose_backend("auto", device=CUDA, **facts).name == "triton"
    assert choose_backend("auto", device=CPU, **facts).name == "sdpa"
    with pytest.raises(AssertionError, match="looked for FlashInfer"):
        choose_backend("flashinfer", device=CUDA, **facts)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device": CPU}, "runs on CUDA devices, and the device is cpu: set device to cuda"),
        ({"dtype": torch.float32}, "does not run float32: set dtype to bfloat16 or float16"),
        ({"head_dim": 80}, "runs heads of 64, 128 and 256, and the model's are of 80"),
        ({"head_dim": 512}, "and the model's are of 512: leave attention_backend out"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    wanted = {"device": CUDA, "dtype": torch.bfloat16, "head_dim": 64} | changes
    layer = LayerAttention(layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=wanted["head_dim"], scaling=1.0)
    with pytest.raises(ConfigError, match=f"attention_backend flashinfer: it .*{text}"):
        choose_backend(
            "flashinfer", device=wanted["device"], dtype=wanted["dtype"], layers=[layer], max_context=64
        )


@pytest.mark.parametrize("head_dim", FLASHINFER_HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_what_it_can_do_is_not(device: str, dtype: str, head_dim: int) -> None:
    assert flashinfer_refusal(device=device, dtype=dtype, head_dims=[head_dim]) is None


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(FlashInferUnavailable, match=r"`flashinfer`: pip install -e '\.\[flashinfer\]'"):
        load_flashinfer(CUDA)
    with pytest.raises(ResourceError, match=r"attention_backend flashinfer: it needs the package"):
        choose_backend("flashinfer", device=CUDA, dtype=torch.bfloat16, layers=[LAYER], max_context=64)


def test_a_library_that_does_not_load_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))  # one without the class
    with pytest.raises(FlashInferUnavailable, match=r"does not load .*BatchPrefillWithPagedKVCacheWrapper"):
        load_flashinfer(CUDA)


def test_on_a_cpu_it_is_not_even_looked_for() -> None:
    with pytest.raises(FlashInferUnavailable, match="runs on CUDA devices, not on cpu"):
        load_flashinfer(CPU)


# --- the comparison at start

KINDS = {
    "plain": LAYER,
    "window": LayerAttention(
        layer_idx=1, num_heads=4, num_kv_heads=2, head_dim=64, scaling=0.125, sliding_window=30
    ),
    "softcap": LayerAttention(
        layer_idx=2, num_heads=4, num_kv_heads=4, head_dim=128, scaling=0.1, softcap=20.0
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_library_passes_with_room(kind: str, dtype: torch.dtype) -> None:
    backend = FlashInferAttention(CPU, Doubles())
    difference = largest_difference(backend, KINDS[kind], dtype=dtype, device=CPU)
    assert difference < LARGEST_DIFFERENCE / 3


def changed(**changes: Any) -> type[PrefillDouble]:
    """A library that takes some arguments for others."""

    class Wrong(PrefillDouble):
        def plan(self, **named: Any) -> None:
            super().plan(**{**named, **changes})

    return Wrong


class Transposed(PrefillDouble):
    """Reads a page's keys in another order than its values."""

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
        keys, values = paged_kv_cache
        return super().run(q, (keys.flip(2), values), out=out)


class Silent(PrefillDouble):
    """Computes numbers that are not finite."""

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().run(q, paged_kv_cache, out=out).fill_(float("nan"))


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (changed(causal=False), "plain"),
        (changed(sm_scale=None), "plain"),
        (changed(window_left=-1), "window"),
        (changed(window_left=30), "window"),  # one key too many
        (changed(logits_soft_cap=0.0), "softcap"),
        (Transposed, "plain"),
        (Silent, "plain"),
    ],
    ids=["not causal", "other scale", "no window", "window off by one", "no cap", "other layout", "nan"],
)
def test_a_wrong_library_is_refused_at_start(wrong: type[PrefillDouble], kind: str) -> None:
    """Negative controls, of the comparison and of the suite above alike."""
    with pytest.raises(ResourceError, match=r"differs from the reference's by .*leave attention_backend out"):
        registry._flashinfer(CPU, torch.bfloat16, [KINDS[kind]], Doubles(wrong))


def test_kernels_that_do_not_compile_are_an_error_at_start() -> None:
    class Uncompiled(PrefillDouble):
        def plan(self, **named: Any) -> None:
            raise FileNotFoundError("nvcc")

    with pytest.raises(ResourceError, match=r"with nvcc .* do not run here: FileNotFoundError: nvcc"):
        registry._flashinfer(CPU, torch.bfloat16, [LAYER], Doubles(Uncompiled))


def test_every_kind_of_layer_is_compared_once() -> None:
    doubles = Doubles()
    registry._flashinfer(CPU, torch.bfloat16, [*KINDS.values(), *KINDS.values()], doubles)
    assert len(doubles.made) == doubles.num_runs == len(KINDS)
