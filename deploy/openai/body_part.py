"""What all bodies and their parts have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class BodyPart(BaseModel):
    """A JSON object that a client sends: unknown fields are refused, `null` means the default."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that clients write and that mean nothing here, whatever they hold."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None and name not in cls.ignored}
        if len(given) <= len(cls.model_fields):
            return given
        # Some are unknown. Pydantic would list each of half a million, where the first is all that is told.
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in given if name not in known)
        return {name: value for name, value in given.items() if name in known or name == unknown}
