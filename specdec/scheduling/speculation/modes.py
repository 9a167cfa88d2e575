"""How drafting and verification follow each other."""

from __future__ import annotations

from typing import Literal

OverlapMode = Literal["lockstep", "ping_pong", "draft_ahead"]
"""lockstep: drafts, then their verification, then the next drafts: one side always waits.

ping_pong: two cohorts of requests; one is drafted for while the other is verified.

draft_ahead: while a round is verified, continuations are drafted for its likely verdicts; where the real one
is among them, the next round begins at once, elsewhere it goes on without drafts.

None of them changes a token: drafts belong to one committed prefix, whenever they were made."""
