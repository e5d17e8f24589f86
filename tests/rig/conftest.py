"""The rig as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A rig whose queue, worker and time begin with the test."""
    with Rig() as made:
        yield made
