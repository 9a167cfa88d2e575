from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread_each: None) -> None:
    """Rows here are small: more threads would mostly wait for each other."""
