"""How much memory the KV pool may take, when the configuration does not say: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.kv.config import CacheConfig

_FRACTION = {"cuda": 0.9, "cpu": 0.5}
_OTHER_FRACTION = 0.5
_MOST_HOST_BYTES = 4 << 30
"""Where nobody has named a share: memory of a machine is for others as well."""
_UNKNOWN_BYTES = 1 << 30
"""Where the system does not say what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes for the KV pool, and where the number comes from."""

    num_bytes: int
    origin: str
    """For people, after "the KV cache gets N bytes: "."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What was measured with the weights in place."""

    device_type: str
    """As in `torch.device.type`."""
    available_bytes: int | None
    """Left on the device; None: unknown."""
    forward_bytes: int
    """What the largest forward takes while it runs."""
    reserved_bytes: int
    """What will be taken later: the packed weights of a compiled forward."""
    num_sharers: int = 1
    """Processes that each take such a pool out of `available_bytes`."""


def budget_of(config: CacheConfig, profile: MemoryProfile) -> MemoryBudget:
    """Return the share of what is left that `config` asks for, never below 0 bytes."""
    if profile.available_bytes is None:
        return MemoryBudget(num_bytes=_UNKNOWN_BYTES, origin="the system does not say how much memory it has")
    left = profile.available_bytes // profile.num_sharers - profile.forward_bytes - profile.reserved_bytes
    fraction = config.memory_fraction
    if fraction is None:
        fraction = _FRACTION.get(profile.device_type, _OTHER_FRACTION)
    num_bytes = int(max(0, left) * fraction)
    limit = ""
    if config.memory_fraction is None and profile.device_type == "cpu" and num_bytes > _MOST_HOST_BYTES:
        num_bytes, limit = _MOST_HOST_BYTES, ", and no more than 4 GiB unless that is asked for"
    shared = f" for {profile.num_sharers} ranks" if profile.num_sharers > 1 else ""
    return MemoryBudget(
        num_bytes=num_bytes,
        origin=(
            f"{fraction:g} of what is left of {_mib(profile.available_bytes)} MiB{shared} after the largest "
            f"forward ({_mib(profile.forward_bytes)} MiB) and packed weights "
            f"({_mib(profile.reserved_bytes)} MiB){limit}"
        ),
    )


def _mib(num_bytes: int) -> int:
    return num_bytes >> 20
