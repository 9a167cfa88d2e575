"""Rules by name, and what they promise."""

from __future__ import annotations

from subprocess import run
from sys import executable

import pytest

from specdec.core.errors import ConfigError
from specdec.verification.registry import RULES, capabilities_of, make_rule, rule_named
from specdec.verification.typical import Typical


def test_rules_by_name() -> None:
    assert list(RULES) == ["sample_and_match", "rejection", "block", "multi_round", "typical"]
    assert all(rule_named(name).capabilities.name == name for name in RULES)
    with pytest.raises(ConfigError, match="unknown verification rule 'standard'; known are sample_and_match"):
        rule_named("standard")


def test_only_typical_is_lossy() -> None:
    assert [name for name in RULES if not capabilities_of(name).exact] == ["typical"]


def test_only_the_default_drafts_with_the_targets_noise() -> None:
    shared = [name for name in RULES if capabilities_of(name).draft_stream == "target"]
    assert shared == ["sample_and_match"]


def test_parameters_reach_the_rule() -> None:
    made = make_rule("typical", posterior_threshold=0.5)
    assert isinstance(made, Typical)
    assert (made.epsilon, made.delta) == (0.5, 0.3)
    assert make_rule("block") is rule_named("block")
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="must be in"):
            Typical(posterior_alpha=wrong)


def test_names_cost_no_torch() -> None:
    """A coordinator looks rules up, and has no model in its process."""
    program = "import sys, specdec.verification.registry; assert 'torch' not in sys.modules"
    assert run([executable, "-c", program], check=False).returncode == 0
