"""The base of every configuration model: immutable, and strict about unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictConfig(BaseModel):
    """Immutable configuration block in which an unknown key is an error, and numbers are finite.

    Every field's docstring is its documentation (it reaches the JSON schema); units are in the names.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        strict=False,
        allow_inf_nan=False,
    )
