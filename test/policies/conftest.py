"""Fixtures for the tests of all model families."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """One thread: tiny matrices gain nothing from more, and on a busy machine threads wait for each other."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)
