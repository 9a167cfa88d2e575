"""All rules as the file that Prometheus reads."""

from __future__ import annotations

import yaml

from deploy.monitoring.alerts import availability_alerts, latency_alerts, speculation_alerts, worker_alerts
from deploy.monitoring.objectives import DEFAULT_OBJECTIVES, Objectives
from deploy.monitoring.recordings import recordings
from deploy.monitoring.rule import Alert, Recording, RuleGroup

DEFAULT_RUNBOOK = "docs/operations/alerts.md"
_JOB = "{{ $labels.job }}"
_JOB_AND_MODEL = _JOB + "{{ with $labels.model_name }} (model {{ . }}){{ end }}"
"""What alerts are about: of a job with several models, one of them."""


def rule_groups(objectives: Objectives = DEFAULT_OBJECTIVES) -> tuple[RuleGroup, ...]:
    """Return all rules, for these objectives."""
    return (
        RuleGroup(name="drafthouse-recorded", rules=recordings(objectives)),
        RuleGroup(name="drafthouse-availability", rules=availability_alerts(objectives)),
        RuleGroup(name="drafthouse-latency", rules=latency_alerts(objectives)),
        RuleGroup(name="drafthouse-speculation", rules=speculation_alerts()),
        RuleGroup(name="drafthouse-workers", rules=worker_alerts()),
    )


def rules_yaml(objectives: Objectives = DEFAULT_OBJECTIVES, *, runbook: str = DEFAULT_RUNBOOK) -> str:
    """Return the rules as a file that Prometheus reads.

    Args:
        objectives: what the alerts compare with.
        runbook: URL of docs/operations/alerts.md, where it is published.
    """
    groups = [
        {"name": group.name, "rules": [_as_mapping(rule, runbook) for rule in group.rules]}
        for group in rule_groups(objectives)
    ]
    text: str = yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000, allow_unicode=True)
    return text


def _as_mapping(rule: Recording | Alert, runbook: str) -> dict[str, object]:
    if isinstance(rule, Recording):
        return {"record": rule.name, "expr": rule.expression}
    return {
        "alert": rule.name,
        "expr": rule.expression,
        "for": rule.lasting,
        "labels": {"severity": rule.severity},
        "annotations": {
            "summary": rule.summary.replace(_JOB, _JOB_AND_MODEL),
            "description": rule.description.replace(_JOB, _JOB_AND_MODEL),
            "runbook_url": f"{runbook}#{rule.name.lower()}",
        },
    }
