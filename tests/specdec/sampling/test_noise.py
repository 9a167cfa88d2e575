from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from subprocess import run

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specdec.core.proposal import NoiseStream
from specdec.sampling import noise, noise_rows
from specdec.sampling.noise_rows import (
    as_signed,
    gumbel_rows,
    gumbels_from_hash,
    hash_rows,
    row_keys,
    uniforms_from_hash,
)
from tests.triton_interpreter import needs_interpreter

STREAMS: tuple[NoiseStream, ...] = ("target", "accept", "residual", "draft")
LARGEST_HASH = 2**32 - 1

# (seed, position, token id): h of each of STREAMS, and g of "target". These never change while
# NOISE_VERSION does not: they are what every other implementation is held to.
GOLDEN = {
    (0, 0, 0): ((4165362643, 3821219536, 1692368528, 3766202245), "-0x1.40c2600000000p+0"),
    (1, 0, 0): ((2175244462, 2158974586, 3191998583, 3542330270), "0x1.6443f00000000p-2"),
    (0, 1, 0): ((2821588441, 3241915607, 2705845490, 4256764115), "-0x1.14b1280000000p-4"),
    (0, 0, 1): ((2224218615, 2182743417, 2448746418, 748364255), "0x1.42eb080000000p-2"),
    ((1 << 64) - 1, 1 << 20, 128255): (
        (3308124052, 1309930420, 4248726254, 2225587086),
        "-0x1.8afce40000000p-2",
    ),
    (1 << 63, 77, 4095): ((3257529274, 3402807988, 2468458384, 3018361440), "-0x1.6791e40000000p-2"),
    (0x0123456789ABCDEF, 1 << 31, 1 << 17): (
        (295726726, 1285787341, 3600098534, 1992753347),
        "0x1.51f58a0000000p+1",
    ),
}


def keys(seed: int, position: int, stream: NoiseStream) -> torch.Tensor:
    return row_keys(torch.tensor([as_signed(seed)]), torch.tensor([position]), stream)


@pytest.mark.parametrize(("place", "expected"), GOLDEN.items())
def test_golden_vectors(place: tuple[int, int, int], expected: tuple[tuple[int, ...], str]) -> None:
    assert noise.NOISE_VERSION == 1
    seed, position, token_id = place
    hashes, gumbel = expected
    assert tuple(noise.hash32(seed, position, token_id, stream) for stream in STREAMS) == hashes
    assert noise.gumbel(seed, position, token_id, "target") == float.fromhex(gumbel)
    for stream, hash_bits in zip(STREAMS, hashes, strict=True):
        assert hash_rows(keys(seed, position, stream), 1, first_token_id=token_id).item() == hash_bits


def test_golden_seeds() -> None:
    assert noise.choice_seed(0, 0) == 17784125010177318702
    assert noise.choice_seed(0, 1) == 4238808111553856497
    assert noise.choice_seed(123, 127) == 14356365735101904067
    assert noise.choice_seed(-1, 0) == noise.choice_seed((1 << 64) - 1, 0) == 12442180030496142367


@given(
    st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.sampled_from(STREAMS)
)
def test_tensors_and_plain_numbers_agree(seed: int, position: int, first: int, stream: NoiseStream) -> None:
    row_key = keys(seed, position, stream)
    assert row_key.item() == as_signed(noise.row_key(seed, position, stream))
    hashes = hash_rows(row_key, 3, first)[0].tolist()
    assert hashes == [noise.hash32(seed, position, first + i, stream) for i in range(3)]
    for value, hash_bits in zip(gumbel_rows(row_key, 3, first)[0].tolist(), hashes, strict=True):
        assert ulps_between(value, noise.gumbel_from_hash(hash_bits)) <= 1


def ulps_between(first: float, second: float) -> int:
    def ordered(value: float) -> int:
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        return int(bits if bits >= 0 else -(bits & 0x7FFFFFFF))

    return abs(ordered(first) - ordered(second))


@pytest.mark.gpu
def test_a_gpu_makes_the_same_noise() -> None:
    seeds = torch.tensor([as_signed(seed) for seed, _, _ in GOLDEN])
    positions = torch.tensor([position for _, position, _ in GOLDEN])
    for stream in STREAMS:
        here, there = row_keys(seeds, positions, stream), row_keys(seeds.cuda(), positions.cuda(), stream)
        assert torch.equal(hash_rows(here, 5000), hash_rows(there, 5000).cpu())
        torch.testing.assert_close(
            gumbel_rows(here, 5000), gumbel_rows(there, 5000).cpu(), rtol=1.2e-7, atol=1e-12
        )
        assert torch.equal(gumbel_rows(there, 5000, 7), noise_rows._gumbel_rows_by_ops(there, 5000, 7))


@needs_interpreter
def test_the_kernel_makes_the_same_noise() -> None:
    kernels = noise_rows._import_kernels()
    keys = row_keys(
        torch.tensor([as_signed(seed) for seed, _, _ in GOLDEN]),
        torch.tensor([position for _, position, _ in GOLDEN]),
        "residual",
    )
    for vocab_size, first in ((1, 0), (1500, 0), (1024, 128_000)):
        by_kernel = noise_rows._gumbel_rows_by(kernels, keys, vocab_size, first)
        torch.testing.assert_close(by_kernel, gumbel_rows(keys, vocab_size, first), rtol=1.2e-7, atol=1e-12)
    assert noise_rows._gumbel_rows_by(kernels, keys[:0], 5, 0).shape == (0, 5)


def test_the_extremes_are_finite() -> None:
    values = gumbels_from_hash(torch.tensor([0, 1, LARGEST_HASH - 1, LARGEST_HASH]))
    assert values.isfinite().all()
    assert values.tolist() == sorted(values.tolist(), reverse=True)
    assert values[0].item() == noise.gumbel_from_hash(0) == pytest.approx(33 * math.log(2), rel=1e-7)
    assert values[3].item() == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6)
    uniforms = uniforms_from_hash(torch.tensor([0, LARGEST_HASH]))
    assert 0.0 < uniforms[0].item() < uniforms[1].item() < 1.0
    assert noise.uniform_from_hash(0) == uniforms[0].item()


def test_the_naive_float32_form_would_be_infinite() -> None:
    u = uniforms_from_hash(torch.tensor([LARGEST_HASH])).float()
    assert not (-torch.log(-torch.log(u))).isfinite().all()


def test_gumbel_distribution_and_tails() -> None:
    num_rows, vocab_size = 64, 1 << 16
    rows = row_keys(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64), "target")
    values = gumbel_rows(rows, vocab_size).double().flatten()
    assert stats.kstest(values[: 1 << 18].numpy(), stats.gumbel_r.cdf).pvalue > 1e-4
    for threshold in (8.0, 10.0, 12.0):
        assert_poisson(int((values > threshold).sum()), values.numel() * stats.gumbel_r.sf(threshold))
    for threshold in (-2.0, -2.4):
        assert_poisson(int((values < threshold).sum()), values.numel() * stats.gumbel_r.cdf(threshold))


def assert_poisson(seen: int, expected: float) -> None:
    assert stats.poisson.cdf(seen, expected) > 1e-5
    assert stats.poisson.sf(seen - 1, expected) > 1e-5


Hash = Callable[[torch.Tensor, torch.Tensor, NoiseStream], torch.Tensor]
GRID = 256


def our_hash(seeds: torch.Tensor, positions: torch.Tensor, stream: NoiseStream) -> torch.Tensor:
    return hash_rows(row_keys(seeds, positions, stream), GRID)


def hash_without_mixing(seeds: torch.Tensor, positions: torch.Tensor, stream: NoiseStream) -> torch.Tensor:
    start = (seeds * 0x9E3779B1 + positions * 0x85EBCA77 + STREAMS.index(stream))[:, None]
    return (start + torch.arange(GRID) * 0xC2B2AE3D) & 0xFFFFFFFF


def neighbours(hash_of: Hash) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of hashes whose places differ by one in one coordinate."""
    counters, fixed = torch.arange(1000, 1000 + GRID), torch.full((GRID,), 7)
    base = hash_of(counters, fixed, "target")
    positions = hash_of(fixed, counters, "target")
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "seed": (base[:-1], base[1:]),
        "position": (positions[:-1], positions[1:]),
        "token id": (base[:, :-1], base[:, 1:]),
        "seed and position": (base[1:], hash_of(counters - 1, fixed + 1, "target")[1:]),
        "position and token id": (positions[1:, :-1], positions[:-1, 1:]),
        "upper half of the seed": (base, hash_of(counters + (1 << 32), fixed, "target")),
    }
    for stream in STREAMS[1:]:
        pairs[f"stream {stream}"] = (base, hash_of(counters, fixed, stream))
    return pairs


def dependence_p_value(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of the joint distribution over 16 x 16 cells against uniform and independent."""
    cells = ((first >> 28) * 16 + (second >> 28)).flatten()
    return float(stats.chisquare(cells.bincount(minlength=256).numpy()).pvalue)


def test_neighbouring_places_are_independent() -> None:
    for name, (first, second) in neighbours(our_hash).items():
        assert dependence_p_value(first, second) > 1e-4, name
        correlation = torch.corrcoef(torch.stack((first.flatten(), second.flatten())).double())[0, 1]
        assert abs(correlation.item()) < 5 / math.sqrt(first.numel()), name


def test_the_independence_test_can_fail() -> None:
    p_values = [dependence_p_value(*pair) for pair in neighbours(hash_without_mixing).values()]
    assert sum(p_value < 1e-10 for p_value in p_values) >= len(p_values) // 2


@pytest.mark.parametrize("bit", range(0, 64, 7))
def test_every_seed_bit_reaches_every_hash_bit(bit: int) -> None:
    seeds = torch.arange(64) * 0x9E3779B1
    flipped = seeds ^ as_signed(1 << bit)
    positions = torch.zeros(64, dtype=torch.int64)
    changes = our_hash(seeds, positions, "target") ^ our_hash(flipped, positions, "target")
    for hash_bit in range(32):
        share = ((changes >> hash_bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(changes.numel())


def test_choices_and_minted_seeds() -> None:
    seeds = {noise.choice_seed(seed, choice) for seed in range(100) for choice in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    with pytest.raises(ValueError, match="negative"):
        noise.choice_seed(0, -1)
    minted = {noise.mint_seed() for _ in range(100)}
    assert len(minted) == 100
    assert all(0 <= seed < 1 << 64 for seed in minted)
    assert max(minted) > 1 << 60


def test_noise_does_not_need_torch() -> None:
    code = "import sys, specdec.sampling.noise; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
