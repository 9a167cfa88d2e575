"""What a rule of Prometheus is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info"]
"""critical: clients are hurt now; warning: they will be, or somebody should look today; info: money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """An expression whose value is stored under a name."""

    name: str
    """`job:WHAT:HOW`, as Prometheus's own guide has it."""
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that somebody should know of."""

    name: str
    expression: str
    """It fires for every job, and every one of its models, that this has a value for."""
    lasting: str
    """How long it has to be so: a Prometheus duration."""
    severity: Severity
    summary: str
    """One line, for the pager."""
    description: str
    """What it means and what to do first. `{{ $labels.job }}` (and the model, where a job has several) and
    `{{ $value }}` are Prometheus's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGroup:
    """Rules that are evaluated together."""

    name: str
    rules: tuple[Recording | Alert, ...]
