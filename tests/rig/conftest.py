"""The fixture ``rig``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A new rig for one test, without queues and workers."""
    with Rig() as made:
        yield made
