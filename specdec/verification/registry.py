"""Verification rules by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specdec.core.errors import ConfigError
from specdec.verification.base import RuleCapabilities, VerificationRule
from specdec.verification.block import Block
from specdec.verification.multi_round import MultiRound
from specdec.verification.rejection import Rejection
from specdec.verification.sample_and_match import SampleAndMatch
from specdec.verification.typical import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD, Typical

RULES: Mapping[str, VerificationRule] = MappingProxyType(
    {
        rule.capabilities.name: rule
        for rule in (SampleAndMatch(), Rejection(), Block(), MultiRound(), Typical())
    }
)
"""Every rule, with its default parameters where it has any."""


def rule_named(name: str) -> VerificationRule:
    """Return the rule of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in RULES:
        raise ConfigError(f"unknown verification rule {name!r}; known are {', '.join(RULES)}")
    return RULES[name]


def make_rule(
    name: str, *, posterior_threshold: float | None = None, posterior_alpha: float | None = None
) -> VerificationRule:
    """Return the rule of this name with its parameters, None for their defaults; others ignore them.

    Raises:
        ConfigError: there is no such rule.
    """
    if name != Typical.capabilities.name:
        return rule_named(name)
    return Typical(
        POSTERIOR_THRESHOLD if posterior_threshold is None else posterior_threshold,
        POSTERIOR_ALPHA if posterior_alpha is None else posterior_alpha,
    )


def capabilities_of(name: str) -> RuleCapabilities:
    """Return what the rule of this name needs and promises.

    Raises:
        ConfigError: there is none.
    """
    return rule_named(name).capabilities
