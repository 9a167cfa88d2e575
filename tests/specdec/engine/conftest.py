"""What modules of tests over models ask for by name (`pytest.mark.usefixtures`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quantizer() -> Iterator[None]:
    """Models can be quantized, with torchao or without."""
    from tests.quantizer import some_quantizer

    with some_quantizer():
        yield
