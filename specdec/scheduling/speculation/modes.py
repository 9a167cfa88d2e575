"""How drafting and verification share time."""

from __future__ import annotations

from typing import Literal

OverlapMode = Literal["lockstep", "ping_pong", "draft_ahead"]
"""lockstep: propose, then verify. ping_pong: two cohorts of sequences, of which one is drafted for while the
other is verified. draft_ahead: continuations of the likely verdicts are drafted during verification."""
