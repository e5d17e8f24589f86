"""The short form of ``make simulate-safe``, which plays 2,000 histories of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.django_app import project

from .safe import KINDS, simulate

HISTORIES = {"guard": 150, "step": 120, "workflow": 100, "outbox": 60}


@pytest.fixture
def default_database() -> Iterator[None]:
    """The histories' own, and afterwards that of whoever had one."""
    project.set_up()
    from django.db import connections

    before = connections.settings.get("default")
    if hasattr(connections._connections, "default"):
        del connections["default"]
    yield
    project.close("default")
    del connections["default"]
    if before is not None:
        connections.settings["default"] = before


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_promised_holds_wherever_a_process_ends(kind: str, default_database: None) -> None:
    happened = simulate(kind, histories=HISTORIES[kind])
    assert happened["killed"] > HISTORIES[kind] / 2
