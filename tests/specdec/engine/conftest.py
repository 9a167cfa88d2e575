"""What modules of tests over models ask for by name (`pytest.mark.usefixtures`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The models are tiny: more threads would mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quantizer() -> Iterator[None]:
    """Models can be quantized, with torchao or without."""
    from tests.quantizer import some_quantizer

    with some_quantizer():
        yield
