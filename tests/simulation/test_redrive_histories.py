"""Short form of ``python -m tests.simulation.redrive_history``: every message is accounted for."""

from __future__ import annotations

import os

from .redrive_history import first_failure
from .redrive_mutations import applied

HISTORIES = int(os.environ.get("REDRIVE_HISTORIES", "200"))


def test_every_message_is_accounted_for_and_every_duplicate_is_named() -> None:
    failure = first_failure(range(HISTORIES))
    if failure is not None:
        seed, exc = failure
        raise AssertionError(
            f"python -m tests.simulation.redrive_history --seed {seed} --histories 1: {exc!r}"
        ) from exc


def test_a_mistake_is_found() -> None:
    """One of many: ``python -m tests.simulation.redrive_mutations`` looks for all."""
    with applied("who receives a message again leaves it alone"):
        assert first_failure(range(400)) is not None
