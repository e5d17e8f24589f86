"""The page of hazards says what the tests say, and leaves none out."""

import re

import pytest

from tests.hazards import HAZARDS, PAGE, REASONS, marks, render


def test_page():
    """The page is up to date with the marks."""
    assert PAGE.read_text() == render(), "write it anew: python -m tests.hazards"


@pytest.mark.parametrize("hazard", HAZARDS)
def test_hazard_without_test(hazard):
    """Each hazard has a test, or a reason why it has none."""
    assert hazard in marks() or hazard in REASONS


def test_unknown_hazard():
    """Each mark names a known hazard."""
    assert marks().keys() <= HAZARDS.keys()


def test_marks():
    """The marks are found in several files, and on functions with several decorators."""
    assert {"test_dropped_before_it_runs"} <= {name for _, name in marks()["H27"]}
    assert len({path for path, _ in marks()["H14"]}) >= 3


def test_numbers():
    """The hazards are numbered without a gap."""
    numbers = [int(hazard[1:]) for hazard in HAZARDS if re.fullmatch(r"H\d+", hazard)]
    assert numbers == list(range(1, 29))
