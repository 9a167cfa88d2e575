"""Who gets a device lane with whom."""

from __future__ import annotations

import msgspec
import pytest

from specdec.core.errors import ConfigError
from specdec.transport.base import PeerId
from specdec.transport.gloo_door import Knock
from specdec.transport.lane_choice import LaneEnd, TensorLane, own_end, use_device_lane

NCCL = "nccl 2.28.9"


def end(wanted: TensorLane = "auto", *, backend: str = NCCL, device: str = "gpu 1") -> LaneEnd:
    return LaneEnd(wanted, backend, device)


@pytest.mark.parametrize("host", ["auto", "nccl"])
@pytest.mark.parametrize("guest", ["auto", "nccl"])
def test_two_ends_with_gpus_of_their_own_have_a_device_lane(host: TensorLane, guest: TensorLane) -> None:
    assert use_device_lane(end(host, device="gpu 1"), end(guest, device="gpu 2"))


UNFIT = {
    "configured for gloo": LaneEnd("gloo"),
    "without NCCL": end(backend="", device="gpu 2"),
    "(one has|the other) nccl 2.21.5": end(backend="nccl 2.21.5", device="gpu 2"),
    "has no GPU": end(device=""),
    "both are on the GPU gpu 1": end(device="gpu 1"),
}


@pytest.mark.parametrize("obstacle", UNFIT)
def test_auto_takes_gloo_where_nccl_cannot_be(obstacle: str) -> None:
    assert not use_device_lane(end(), UNFIT[obstacle])
    assert not use_device_lane(UNFIT[obstacle], end())


@pytest.mark.parametrize("obstacle", UNFIT)
def test_nccl_where_it_cannot_be_is_an_error_that_says_why(obstacle: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^cluster\.channels\.tensors: nccl .*{obstacle}.*write gloo or auto"
    ):
        use_device_lane(end("nccl"), UNFIT[obstacle])
    with pytest.raises(ConfigError, match=r"cluster\.channels\.tensors"):
        use_device_lane(UNFIT[obstacle], end("nccl"))


@pytest.mark.parametrize("wanted", ["gloo", "auto", "nccl"])
def test_a_peer_that_says_nothing_gets_gloo(wanted: TensorLane) -> None:
    assert not use_device_lane(end(wanted), None)


def test_what_a_process_says_of_itself() -> None:
    assert own_end("auto", backend=NCCL, device="gpu 1") == end()
    assert own_end("nccl", backend=NCCL, device="gpu 1") == end("nccl")
    assert own_end("auto", backend="", device="") == end(backend="", device="")
    assert own_end("gloo", backend=NCCL, device="gpu 1") == LaneEnd("gloo")


@pytest.mark.parametrize(
    ("backend", "device", "cause"), [("", "gpu 1", "build of PyTorch"), (NCCL, "", "num_gpus")]
)
def test_a_process_that_cannot_have_nccl_says_what_would_be_right(
    backend: str, device: str, cause: str
) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.channels\.tensors: nccl .*{cause}.* gloo or auto"):
        own_end("nccl", backend=backend, device=device)


class OldKnock(msgspec.Struct, frozen=True, array_like=True):
    """As it was before there were device lanes."""

    link_id: str
    peer_id: PeerId
    public_key: str
    proof: bytes


def test_knocks_of_older_and_newer_versions_are_understood() -> None:
    old = OldKnock("1", PeerId("a"), "key", b"proof")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Knock).end is None
    new = Knock("1", PeerId("a"), "key", b"proof", end())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=OldKnock) == old
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=Knock) == new
