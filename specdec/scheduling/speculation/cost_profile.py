"""What rounds have cost when they were measured, as a value that is kept on disk."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from pathlib import Path

import msgspec

from specdec.core.errors import UNDECODABLE, ConfigError

logger = logging.getLogger(__name__)

PROFILE_FORMAT = 9
"""Raised when the meaning of anything below changes: profiles of other formats are measured anew."""
DEFAULT_PROFILE_DIR = Path("~/.cache/drafthouse/profiles")


class VerifyPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of the target took."""

    num_sequences: int
    context_tokens: int
    """Tokens in the cache, all sequences together."""
    num_rows: int
    seconds: float


class DraftPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What work on proposals took."""

    num_sequences: int
    context_tokens: int
    """Tokens that drafts attend to, all sequences together: of the context, what a budget leaves."""
    num_steps: int
    """Draft tokens per sequence."""
    num_unseen: int
    """Committed tokens per sequence that the drafter had not read."""
    wire_s: float = 0.0
    """What passed beside that work, from asking for them to having them."""
    seconds: float


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Measured costs of one target and its drafter, or drafters, where they run."""

    key: str
    """Everything that they depend on; see `profile_key`."""
    verify: tuple[VerifyPoint, ...]
    draft: tuple[DraftPoint, ...] = ()
    """None: drafting could not be measured."""
    other_drafts: tuple[tuple[DraftPoint, ...], ...] = ()
    """Of several drafters, those behind the first."""
    draft_devices: tuple[str, ...] = ()
    """What drafters ran on when drafting was measured; empty: it is not known. Not part of the key: a draft
    pool may come later than the target, or change, and steps of the target still cost the same."""
    is_draft_complete: bool = True
    """Whether that is all there will be of drafts. Where a drafter was late, or busy with others' drafts, the
    next start goes on."""
    row_buckets: tuple[int, ...] = ()
    """See `TargetDescription.row_buckets`."""
    format: int = PROFILE_FORMAT

    @property
    def drafts(self) -> tuple[tuple[DraftPoint, ...], ...]:
        """What is known of each drafter."""
        return (self.draft, *self.other_drafts)

    @property
    def has_all_drafts(self) -> bool:
        """Whether nothing of drafts is left to be measured."""
        return self.is_draft_complete and all(self.drafts)

    def fault(self) -> str | None:
        """Say what makes it unusable; None: it can be used."""
        if self.format != PROFILE_FORMAT:
            return f"format {self.format} instead of {PROFILE_FORMAT}"
        if not self.verify:
            return "no step of the target was measured"
        drafts = [point for points in self.drafts for point in points]
        seconds = [point.seconds for point in self.verify] + [point.seconds for point in drafts]
        if not all(math.isfinite(one) and one > 0.0 for one in seconds):
            return "times that are not positive"
        if not all(math.isfinite(point.wire_s) and point.wire_s >= 0.0 for point in drafts):
            return "wires that take a negative time"
        if any(min(point.num_sequences, point.num_rows) < 1 for point in self.verify):
            return "steps without rows"
        if any(min(point.num_sequences, point.num_steps) < 1 for point in drafts):
            return "proposals without tokens"
        return None


def profile_key(**facts: object) -> str:
    """Return one text for all that costs depend on: model revisions, dtypes, devices, threads, shapes,
    versions.
    """
    return " ".join(f"{name}={facts[name]}" for name in sorted(facts))


class ProfileStore:
    """Profiles in a folder, one file per key. Processes may share it: files appear by rename."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """Use `folder`; None: the default one in the user's home.

        Raises:
            ConfigError: there is no such home.
        """
        try:
            self._folder = Path(DEFAULT_PROFILE_DIR if folder is None else folder).expanduser()
        except RuntimeError as error:
            text = f"speculative_config.profile_dir: {error}: give a folder, or set HOME"
            raise ConfigError(text) from error

    def path_of(self, key: str) -> Path:
        """Return where the profile of a key is kept."""
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def load(self, key: str) -> CostProfile | None:
        """Return the profile of a key; None, with a line in the log where a file is there but of no use."""
        path = self.path_of(key)
        try:
            profile = msgspec.json.decode(path.read_bytes(), type=CostProfile)
        except FileNotFoundError:
            return None
        except (OSError, *UNDECODABLE) as error:
            logger.warning("the cost profile %s is measured anew: %s", path, error)
            return None
        fault = "it is of another key" if profile.key != key else profile.fault()
        if fault is not None:
            logger.warning("the cost profile %s is measured anew: %s", path, fault)
            return None
        return profile

    def save(self, profile: CostProfile) -> None:
        """Keep a profile. A folder that cannot be written to costs a line in the log, no more."""
        path = self.path_of(profile.key)
        written: Path | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            written = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(profile)))
            os.replace(written, path)
        except OSError as error:
            logger.warning("the cost profile cannot be kept in %s: %s", path.parent, error)
            if written is not None:
                written.unlink(missing_ok=True)
