"""A comparison of two runs of Celery's own tests: with stock Celery and with our task class."""

import pytest

from tests.celery_suite.compare import KnownDifference, compare, read_known
from tests.celery_suite.environment import LINES


def known_difference(pattern, versions="5.7"):
    return KnownDifference(frozenset(versions.split()), pattern, "a reason")


def compare_runs(stock, ours, *differences, version="5.7"):
    return compare(stock, ours, known=differences, version=version)


@pytest.mark.parametrize("outcome", ["failed", "skipped", "xfailed"])
def test_passes_on_stock_only(outcome):
    """A test that passes with stock Celery but not with our class is a new difference."""
    assert compare_runs({"a": "passed", "b": "passed"}, {"a": outcome, "b": "passed"}).new == ("a",)


def test_not_run_with_ours():
    """A test that passes with stock Celery and did not run with our class is a new difference."""
    assert compare_runs({"a": "passed"}, {}).new == ("a",)


def test_known_difference():
    """A listed difference is reported as known, with the reason from the list."""
    result = compare_runs(
        {"t.py::a[1]": "passed"}, {"t.py::a[1]": "failed"}, known_difference("t.py::a*")
    )
    assert result.new == ()
    assert result.known["t.py::a[1]"].reason == "a reason"


def test_known_difference_gone():
    """If a test on the list passes with our class, its difference is reported as gone."""
    both = {"a": "passed", "b": "passed"}
    assert compare_runs(both, both, known_difference("a")).gone == (known_difference("a"),)
    assert compare_runs(both, both, known_difference("elsewhere")).gone == ()


def test_brackets(tmp_path):
    """Brackets in the list of differences are part of a test's name."""
    path = tmp_path / "differences.txt"
    path.write_text("# a comment\n\n5.6 5.7 | t.py::a[x-*] | a reason\n")
    [difference] = read_known(path)
    assert difference.covers("t.py::a[x-1]", "5.6")
    assert not difference.covers("t.py::ax", "5.6")
    assert not difference.covers("t.py::a[x-1]", "5.5")


def test_versions_in_list():
    """The list of differences names only versions of Celery that we support."""
    assert all(difference.versions <= {*LINES} for difference in read_known())
