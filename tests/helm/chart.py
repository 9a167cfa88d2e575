"""The chart, rendered by Helm's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "drafthouse"
FLAVOURS = ("cpu-dev", "gpu", "multi-host", "magicdec")
Values = dict[str, Any]


def values_of(flavour: str | None) -> Values:
    """Return a values file; None: none, the defaults alone."""
    return yaml.safe_load((CHART / f"values-{flavour}.yaml").read_text()) if flavour else {}


def merged(values: Values, more: Values) -> Values:
    """As several -f of helm: maps are merged, all else replaced."""
    both = dict(values)
    for name, value in more.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def render_texts(values: Values, chart: Path = CHART, name: str = "llm") -> dict[str, str]:
    """Return template -> text; empty ones left out."""
    loaded = helm_python.Chart.load(chart)
    loaded.validate_schema(values)
    texts = loaded.render(values, name=name, namespace="serving")
    return {file.removeprefix("drafthouse/templates/"): text for file, text in texts.items() if text.strip()}


def render(values: Values, chart: Path = CHART, name: str = "llm") -> list[dict[str, Any]]:
    """Return the manifests."""
    texts = render_texts(values, chart, name)
    return [
        manifest
        for file, text in sorted(texts.items())
        if not file.endswith(".txt")
        for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if manifest
    ]


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the manifests of a kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def ray_service(values: Values) -> dict[str, Any]:
    """Return the RayService."""
    (service,) = of_kind(render(values), "RayService")
    return service


def groups_of(service: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return pod groups by name, the head's too."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **groups}
