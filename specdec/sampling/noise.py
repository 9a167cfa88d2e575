"""Counter-based noise: the same number for the same (seed, position, token id, stream), everywhere.

There is no generator state. A 32-bit hash h of all four gives a uniform u = (h + 0.5) 2^-32, which is
never 0 or 1, and Gumbel noise g = float32(-log(-log1p(-u))) evaluated in float64, which is never
infinite. The integer part is equal on every machine; the float part is within one unit in the last place.

The hash is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014) used
as a keyed counter: the row key, itself a hash of seed, stream and position, is the start of a Weyl
sequence that is indexed by the token id. Changing anything in this file changes what users get for a
given seed: raise `NOISE_VERSION` with it.

This module is the definition, over plain Python numbers, and needs no torch; `noise_rows` computes the
same for whole rows of tensors.
"""

from __future__ import annotations

import math
import os
import struct

from specdec.core.proposal import NoiseStream

NOISE_VERSION = 1
"""Part of what must be equal for a stream to be continued elsewhere with the same seed."""

MASK_64 = (1 << 64) - 1
WEYL = 0x9E3779B97F4A7C15
"""Increment of the Weyl sequences: 2^64 divided by the golden ratio, odd."""
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
STREAM_TAGS: dict[NoiseStream, int] = {
    "target": 0x243F6A8885A308D3,
    "accept": 0x13198A2E03707344,
    "residual": 0xA4093822299F31D0,
    "draft": 0x082EFA98EC4E6C89,
}
"""What keeps the streams of one seed apart: the first fractional digits of pi."""
_CHOICE_TAG = 0x452821E638D01377
_ROUND_TAG = 0xBE5466CF34E90C6C


def mix64(value: int) -> int:
    """Return the SplitMix64 finaliser of an unsigned 64-bit number (a bijection)."""
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK_64
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK_64
    return value ^ (value >> 31)


def stream_key(seed: int, stream: NoiseStream) -> int:
    """Return the 64-bit key of one stream of one seed. `seed` is taken modulo 2^64."""
    return mix64(mix64((seed + WEYL) & MASK_64) ^ STREAM_TAGS[stream])


def row_key(seed: int, position: int, stream: NoiseStream) -> int:
    """Return the 64-bit key of the noise at one absolute token position."""
    return mix64((stream_key(seed, stream) + WEYL * (position + 1)) & MASK_64)


def hash32(seed: int, position: int, token_id: int, stream: NoiseStream) -> int:
    """Return h, an unsigned 32-bit number."""
    return mix64((row_key(seed, position, stream) + WEYL * (token_id + 1)) & MASK_64) >> 32


def uniform(seed: int, position: int, token_id: int, stream: NoiseStream) -> float:
    """Return u = (h + 0.5) 2^-32, in (0, 1), exact in float64.

    Accept tests use stream "accept" with the number of the test at that position in place of a token id.
    """
    return uniform_from_hash(hash32(seed, position, token_id, stream))


def gumbel(seed: int, position: int, token_id: int, stream: NoiseStream) -> float:
    """Return Gumbel noise g, a float32 value, between -3.13 and 22.88."""
    return gumbel_from_hash(hash32(seed, position, token_id, stream))


def uniform_from_hash(hash_bits: int) -> float:
    """Return u for a given h."""
    return (hash_bits + 0.5) * 2.0**-32


def gumbel_from_hash(hash_bits: int) -> float:
    """Return g for a given h, rounded to float32."""
    wide = -math.log(-math.log1p(-uniform_from_hash(hash_bits)))
    narrow: float = struct.unpack("<f", struct.pack("<f", wide))[0]
    return narrow


def choice_seed(seed: int, choice: int) -> int:
    """Return the unsigned 64-bit noise key of choice number `choice` of a request with this seed.

    `seed` may be negative: it is taken modulo 2^64.
    """
    if choice < 0:
        raise ValueError(f"choice must not be negative, got {choice}")
    return mix64((mix64((seed + WEYL) & MASK_64) ^ _CHOICE_TAG) + WEYL * (choice + 1) & MASK_64)


def round_seed(seed: int, committed_len: int) -> int:
    """Return the noise key of the draft that continues `committed_len` tokens of a stream with this seed.

    Drafts that are judged by their probabilities draw from it, so that a position at which a draft token was
    discarded has fresh noise in the next round: under the rule `block` the discarded ones are selected.
    """
    return mix64((mix64((seed + WEYL) & MASK_64) ^ _ROUND_TAG) + WEYL * (committed_len + 1) & MASK_64)


def mint_seed() -> int:
    """Return a fresh unsigned 64-bit seed from the operating system's entropy."""
    return int.from_bytes(os.urandom(8), "little")
