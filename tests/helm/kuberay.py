"""KubeRay's own definition of a RayService, and the check of a manifest against it, without an API server.

The definitions are a megabyte and not kept here: `DRAFTHOUSE_KUBERAY_CRDS` names a folder that holds
`ray.io_rayservices.yaml` (KubeRay's `helm-chart/kuberay-operator/crds`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FILE = "ray.io_rayservices.yaml"
ROOT = Path(__file__).parents[2]


def folder() -> Path | None:
    """Return where the definitions are, if they are."""
    named = os.environ.get("DRAFTHOUSE_KUBERAY_CRDS")
    candidates = [Path(named)] if named else [ROOT.parent / "shared" / "data" / "crds"]
    return next((place for place in candidates if (place / FILE).is_file()), None)


def load_schema(place: Path) -> dict[str, Any]:
    """Return the schema of ray.io/v1, in which unknown keys are errors."""
    definition = yaml.load((place / FILE).read_text(), Loader=yaml.CSafeLoader)
    version = next(version for version in definition["spec"]["versions"] if version["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    _tighten(schema)
    return schema


def problems(manifest: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Return what the API server would refuse. Its defaults are applied first, as it does."""
    complete = _with_defaults(manifest, schema)
    errors = jsonschema.Draft7Validator(schema).iter_errors(complete)
    return [
        *(f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors),
        *_repeated(complete, schema, ""),
    ]


def _tighten(schema: Any) -> None:
    """In place: int-or-string as JSON schema knows it, and no keys that are not declared."""
    if isinstance(schema, list):
        for part in schema:
            _tighten(part)
        return
    if not isinstance(schema, dict):
        return
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not is_open and schema.get("type") == "object":
        schema["additionalProperties"] = False
    for part in schema.values():
        _tighten(part)


def _repeated(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    """Lists that are maps have each key once, which JSON schema cannot say."""
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        there = Counter(tuple(item.get(key) for key in keys) for item in value) if keys else Counter()
        yield from (f"{at}: {named} {count} times" for named, count in there.items() if count > 1)
        for index, item in enumerate(value):
            yield from _repeated(item, schema.get("items", {}), f"{at}.{index}")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _repeated(item, schema.get("properties", {}).get(name, {}), f"{at}.{name}")


def _with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_with_defaults(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    defaults = {name: part["default"] for name, part in properties.items() if "default" in part}
    merged = defaults | value
    return {name: _with_defaults(item, properties.get(name, {})) for name, item in merged.items()}
