"""The body of `GET /v1/status`: what the door gives and `drafthouse status` reads."""

from __future__ import annotations

import msgspec

from specdec.transport.status import DraftWorkerStatus, TargetGroupStatus

STATUS_PATH = "/v1/status"
"""Under /v1, so that it takes an API key where the server has keys."""
OBJECT = "drafthouse.status"


class ApplicationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The application, and the model as its clients know it."""

    version: str
    """Of Drafthouse, at the door."""
    since: float
    """When the door was opened, in seconds since the epoch."""
    is_ready: bool
    """Whether a request would be tried: of several models, for one at least."""
    model: str | None = None
    """The first; None: it is not loaded. So are those that follow."""
    revision: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    parallelism: str | None = None
    rule: str | None = None
    """Verification rule."""
    max_model_len: int | None = None
    further_models: tuple[str, ...] = ()
    """Names of the others that are loaded, where there are several."""
    missing_models: tuple[str, ...] = ()
    """Where there are several: those that take no requests now. The first may be known by its folder only,
    which nobody has said yet: it is "" then."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    object: str = OBJECT
    now: float
    """The door's clock, in seconds since the epoch."""
    application: ApplicationStatus
    target_groups: tuple[TargetGroupStatus, ...]
    draft_workers: tuple[DraftWorkerStatus, ...]
