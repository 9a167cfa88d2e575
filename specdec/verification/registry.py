"""Verification rules by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specdec.core.errors import ConfigError
from specdec.verification.base import VerificationRule
from specdec.verification.rejection import Rejection
from specdec.verification.sample_and_match import SampleAndMatch

RULES: Mapping[str, VerificationRule] = MappingProxyType(
    {rule.capabilities.name: rule for rule in (SampleAndMatch(), Rejection())}
)


def rule_named(name: str) -> VerificationRule:
    """Return the rule of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in RULES:
        raise ConfigError(f"unknown verification rule {name!r}; known are {', '.join(RULES)}")
    return RULES[name]
