"""``tests/hazards.md`` lists the known ways to lose a message, and the tests that guard against it.

A test names its hazard by a mark, such as ``@pytest.mark.hazard("H4")``.
"""

import re

import pytest

from tests.hazards import HAZARDS, PAGE, REASONS, marks, render


def test_page():
    """The page is up to date with the marks of the tests."""
    assert PAGE.read_text() == render(), "run: python -m tests.hazards"


@pytest.mark.parametrize("hazard", HAZARDS)
def test_hazard_without_test(hazard):
    """Each hazard has a test, or a reason why it has none."""
    assert hazard in marks() or hazard in REASONS


def test_unknown_hazard():
    """Each mark names a known hazard."""
    assert marks().keys() <= HAZARDS.keys()


def test_marks():
    """``marks`` finds marks in several files, and on functions with several decorators."""
    assert {"test_dropped_before_it_runs"} <= {name for _, name in marks()["H27"]}
    assert len({path for path, _ in marks()["H14"]}) >= 3


def test_numbers():
    """The hazards are numbered without a gap."""
    numbers = [int(hazard[1:]) for hazard in HAZARDS if re.fullmatch(r"H\d+", hazard)]
    assert numbers == list(range(1, 29))
