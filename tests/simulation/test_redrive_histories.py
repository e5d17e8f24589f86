"""Short form of ``python -m tests.simulation.redrive_history``: every message is accounted for."""

from __future__ import annotations

import os

import pytest

from .redrive_history import first_failure
from .redrive_mutations import MUTATIONS

HISTORIES = int(os.environ.get("REDRIVE_HISTORIES", "200"))


#: In one test: few enough for `make mutants`, which leaves slow tests out.
AT_A_TIME = 5


@pytest.mark.parametrize("seed", range(0, HISTORIES, AT_A_TIME))
def test_random_histories(seed: int) -> None:
    """A redrive accounts for every message and names every duplicate."""
    failure = first_failure(range(seed, seed + AT_A_TIME))
    if failure is not None:
        seed, exc = failure
        raise AssertionError(
            f"python -m tests.simulation.redrive_history --seed {seed} --histories 1: {exc!r}"
        ) from exc


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_mistakes(mistake: str) -> None:
    """The simulation finds each deliberate mistake within 400 histories."""
    with MUTATIONS[mistake]():
        assert first_failure(range(400)) is not None
