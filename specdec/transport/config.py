"""Configuration of the channels between processes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig
from specdec.transport.base import MAX_MESSAGE_BYTES
from specdec.transport.lane_choice import TensorLane


class ChannelConfig(StrictConfig):
    """Sockets of the channels that carry rounds and token streams, and what carries tensors."""

    bind: Literal["auto", "loopback", "node"] = "auto"
    """Where sockets listen: loopback; the node's address in the cluster; auto: loopback while the cluster
    consists of one node when the application is deployed, else node."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1 << 16)
    """Longest message in bytes."""
    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between heartbeats of an idle link."""
    heartbeat_timeout_s: float = Field(default=4.0, gt=0)
    """A link that is silent for so many seconds counts as broken; at least twice the interval."""
    tensors: TensorLane = "gloo"
    """How tensors travel from target to draft workers (hidden states, with `heads_at: draft_pool`). gloo:
    through the memory of the hosts; nccl: from GPU to GPU, which needs a PyTorch with NCCL and, for each of
    the two workers, a GPU of its own; auto: nccl where that can be, else gloo. Not run on GPUs yet."""

    @model_validator(mode="after")
    def _check_heartbeats(self) -> Self:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"heartbeat_timeout_s: {self.heartbeat_timeout_s:g} s must be at least twice "
                f"heartbeat_interval_s ({self.heartbeat_interval_s:g} s): idle links would break"
            )
        return self
