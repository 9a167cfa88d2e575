"""What rows attend to, block by block: the portable pass and the C++ kernel against a loop over rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from specdec.attention import observation
from specdec.attention.base import AttentionBackend, PagedBatch
from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.attention.observation import Observation
from specdec.attention.sdpa import SdpaAttention
from specdec.tree.masks import ancestor_mask
from specdec.tree.topology import Topology
from tests.specdec.attention.contract import DTYPES, Case, Shapes, make_case

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SHAPES: Shapes = [(1, 70), (6, 9), (17, 130), (5, 700), (3, 0), (1, 1300)]


@pytest.fixture(params=["portable", "portable, three blocks at once", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    if request.param != "native":
        if request.param != "portable":
            monkeypatch.setattr(observation, "_BLOCKS_AT_ONCE", 3)
        return SdpaAttention()
    try:
        return CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"the C++ attention cannot be built here: {error}")


@pytest.fixture(params=[1, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Caches:
    """Of one layer."""

    def __init__(self, case: Case) -> None:
        self.keys, self.values = [case.keys.clone()], [case.values.clone()]


def observe(
    backend: AttentionBackend, case: Case, num_observed: list[int], *, layers: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, masses [O, H, blocks], and the keys afterwards; the layer is run `layers` times."""
    query_lens = [len(piece.token_ids) for piece in case.pieces]
    plain = case.metadata
    width = plain.block_tables.shape[1]
    observed = Observation.of(
        num_observed,
        query_lens=query_lens,
        num_blocks=width,
        layers=[case.layer],
        device=case.query.device,
    )
    metadata = replace(plain, observation=observed)
    caches = Caches(case)
    paged = PagedBatch(
        backend=backend,
        layers=[case.layer],
        caches=caches,
        metadata=metadata,
        plan=backend.begin(metadata),
    )
    for _ in range(layers):
        output = paged.attend(0, case.query, case.key, case.value)
    assert not observed.masses[:, :, width:].any(), "there are no such blocks"
    return output, observed.masses[:, :, :width], caches.keys[0]


def expected_masses(case: Case, num_observed: list[int], keys: torch.Tensor) -> torch.Tensor:
    """The same, row by row and token by token: [O, H, blocks]."""
    layer, width = case.layer, case.metadata.block_tables.shape[1]
    group = layer.num_heads // layer.num_kv_heads
    found: list[torch.Tensor] = []
    end = 0
    for piece, count in zip(case.pieces, num_observed, strict=True):
        num_rows = len(piece.token_ids)
        end += num_rows
        for row in range(num_rows - count, num_rows):
            parents = tuple(range(-1, num_rows - 1)) if piece.parents is None else tuple(piece.parents)
            topology = Topology.from_parents(parents)
            related = ancestor_mask(topology)[row]
            seen = [*range(piece.start), *(piece.start + int(one) for one in related.nonzero())]
            at = [*range(piece.start), *(piece.start - 1 + depth for depth in topology.depths)]
            own = at[piece.start + row]
            if layer.sliding_window is not None:
                seen = [one for one in seen if own - at[one] < layer.sliding_window]
            blocks = torch.tensor([at[one] for one in seen]) // case.block_size
            pages = torch.tensor([piece.block_table[one // case.block_size] for one in seen])
            offsets = torch.tensor(seen) % case.block_size
            masses = torch.zeros(layer.num_heads, width)
            for head in range(layer.num_heads):
                query = case.query[end - num_rows + row, head].double()
                logits = keys[pages, head // group, offsets].double() @ query * layer.scaling
                if layer.softcap is not None:
                    logits = layer.softcap * torch.tanh(logits / layer.softcap)
                masses[head].index_add_(0, blocks, logits.softmax(0).float())
            found.append(masses)
    return torch.stack(found)


def check(backend: AttentionBackend, case: Case, num_observed: list[int], *, layers: int = 1) -> None:
    output, masses, keys = observe(backend, case, num_observed, layers=layers)
    expected = layers * expected_masses(case, num_observed, keys)
    tolerance = layers * TOLERANCE[case.query.dtype]
    torch.testing.assert_close(masses, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(masses.sum(-1), torch.full(masses.shape[:2], float(layers)), rtol=1e-4, atol=0)
    assert torch.equal(output, observe(backend, case, [0] * len(case.pieces))[0]), "output is what it was"


@DTYPES
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_masses(backend: AttentionBackend, dtype: torch.dtype, trees: bool) -> None:
    check(backend, make_case(SHAPES, dtype=dtype, trees=trees), [1, 6, 2, 4, 0, 1])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("block_size", [1, 3, 4, 32, 48, 100, 256])
def test_any_block_size(backend: AttentionBackend, block_size: int) -> None:
    check(backend, make_case([(1, 70), (6, 9), (2, 1300)], block_size=block_size, heads=(2, 1)), [1, 3, 2])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1), (40, 1)])
@pytest.mark.parametrize("head_dim", [8, 40])
def test_any_heads(backend: AttentionBackend, heads: tuple[int, int], head_dim: int) -> None:
    check(backend, make_case([(1, 70), (12, 30)], heads=heads, head_dim=head_dim), [1, 9])


@pytest.mark.parametrize("window", [1, 7, 100])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_sliding_windows(backend: AttentionBackend, window: int, trees: bool) -> None:
    check(backend, make_case([(1, 70), (6, 9), (5, 600), (3, 0)], window=window, trees=trees), [1, 6, 5, 2])


def test_softcap(backend: AttentionBackend) -> None:
    check(backend, make_case([(1, 70), (6, 9)], softcap=3.0), [1, 2])


def test_layers_add_up(backend: AttentionBackend) -> None:
    check(backend, make_case([(1, 70), (6, 9)]), [1, 2], layers=3)


@pytest.mark.usefixtures("_threads")
def test_what_is_no_number_spoils_no_other_row(backend: AttentionBackend) -> None:
    case = make_case([(3, 1300), (2, 20)])
    expected = observe(backend, case, [3, 2])[1]
    case.query[1] = float("nan")
    masses = observe(backend, case, [3, 2])[1]
    torch.testing.assert_close(masses[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


def test_windows_are_left_out_where_other_layers_see_everything(backend: AttentionBackend) -> None:
    case = make_case([(1, 70)], window=16)
    windowed, whole = case.layer, replace(case.layer, sliding_window=None, layer_idx=1)
    for layers, is_observed in (([windowed], True), ([windowed, whole], False)):
        observation = Observation.of(
            [1], query_lens=[1], num_blocks=5, layers=layers, device=case.query.device
        )
        metadata, caches = replace(case.metadata, observation=observation), Caches(case)
        paged = PagedBatch(
            backend=backend,
            layers=[windowed],
            caches=caches,
            metadata=metadata,
            plan=backend.begin(metadata),
        )
        paged.attend(0, case.query, case.key, case.value)
        assert bool(observation.masses.any()) == is_observed


def test_control_other_rows_attend_to_other_blocks(backend: AttentionBackend) -> None:
    masses = observe(backend, make_case([(2, 70)]), [2])[1]
    assert (masses[0] - masses[1]).abs().max() > 0.05
