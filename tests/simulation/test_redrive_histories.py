"""Redrives lose no message in random histories: the short form of ``make simulate-redrive``."""

from __future__ import annotations

import os

import pytest

from .redrive_history import first_failure
from .redrive_mutations import MUTATIONS

HISTORIES = int(os.environ.get("REDRIVE_HISTORIES", "200"))


#: The histories of one test. They are few, because ``make mutants`` leaves slow tests out.
AT_A_TIME = 5


@pytest.mark.parametrize("seed", range(0, HISTORIES, AT_A_TIME))
def test_random_histories(seed: int) -> None:
    """A redrive loses no message, and names each message that it may have sent twice."""
    failure = first_failure(range(seed, seed + AT_A_TIME))
    if failure is not None:
        seed, exc = failure
        raise AssertionError(
            f"python -m tests.simulation.redrive_history --seed {seed} --histories 1: {exc!r}"
        ) from exc


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_mistakes(mistake: str) -> None:
    """The histories find each deliberate mistake in the redrive, in at most 400 of them."""
    with MUTATIONS[mistake]():
        assert first_failure(range(400)) is not None
