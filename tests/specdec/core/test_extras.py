"""What errors say of extras can be done."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from specdec.attention import flashinfer
from specdec.core.extras import how_to_install
from specdec.model import quantization, tokenizer

ROOT = Path(__file__).resolve().parents[3]


def sources() -> dict[str, str]:
    packages = ("specdec", "workers", "cluster", "deploy", "training", "benchmarks")
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def test_the_command_is_for_a_checkout() -> None:
    assert how_to_install("tracing").startswith("pip install -e '.[tracing]' in a checkout")


def test_every_extra_that_errors_name_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for text in sources().values() for name in re.findall(r"how_to_install\('(\w+)'\)", text)}
    assert len(named) > 3
    assert {*named, flashinfer.EXTRA, quantization.EXTRA, tokenizer.SENTENCEPIECE} <= set(extras)


def test_no_error_asks_for_a_distribution_of_an_index() -> None:
    """There is none: it is installed from a checkout."""
    assert [name for name, text in sources().items() if "drafthouse[" in text] == []
