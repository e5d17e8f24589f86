"""The page of hazards says what the tests say, and leaves none out."""

import re

import pytest

from tests.hazards import HAZARDS, PAGE, REASONS, marks, render


def test_the_page_is_what_the_marks_make_of_it():
    assert PAGE.read_text() == render(), "write it anew: python -m tests.hazards"


@pytest.mark.parametrize("hazard", HAZARDS)
def test_each_hazard_has_a_test_or_a_reason(hazard):
    assert hazard in marks() or hazard in REASONS


def test_no_mark_is_for_a_hazard_that_nobody_knows():
    assert marks().keys() <= HAZARDS.keys()


def test_the_marks_are_found():
    """In several files and on functions with several decorators."""
    assert {"test_dropped_before_it_runs"} <= {name for _, name in marks()["H27"]}
    assert len({path for path, _ in marks()["H14"]}) >= 3


def test_the_hazards_are_numbered_without_a_gap():
    numbers = [int(hazard[1:]) for hazard in HAZARDS if re.fullmatch(r"H\d+", hazard)]
    assert numbers == list(range(1, 29))
