"""What counts as a difference between a run of Celery's tests on stock and one with our class."""

import pytest

from tests.celery_suite.compare import KnownDifference, compare, read_known
from tests.celery_suite.environment import LINES


def known(pattern, versions="5.7"):
    return KnownDifference(frozenset(versions.split()), pattern, "a reason")


def found(stock, ours, *differences, version="5.7"):
    return compare(stock, ours, known=differences, version=version)


@pytest.mark.parametrize("outcome", ["failed", "skipped", "xfailed"])
def test_passes_on_stock_only(outcome):
    """A test that passes on stock only is a new difference."""
    assert found({"a": "passed", "b": "passed"}, {"a": outcome, "b": "passed"}).new == ("a",)


def test_not_run_with_ours():
    """A test that passes on stock and did not run with our class is a new difference."""
    assert found({"a": "passed"}, {}).new == ("a",)


def test_known_difference():
    """A known difference is not new, and keeps its reason."""
    result = found({"t.py::a[1]": "passed"}, {"t.py::a[1]": "failed"}, known("t.py::a*"))
    assert result.new == ()
    assert result.known["t.py::a[1]"].reason == "a reason"


def test_known_difference_gone():
    """A known difference whose test passes with our class is reported as gone."""
    both = {"a": "passed", "b": "passed"}
    assert found(both, both, known("a")).gone == (known("a"),)
    assert found(both, both, known("elsewhere")).gone == ()


def test_brackets(tmp_path):
    """Brackets in the list of differences are part of a test's name."""
    path = tmp_path / "differences.txt"
    path.write_text("# a comment\n\n5.6 5.7 | t.py::a[x-*] | a reason\n")
    [difference] = read_known(path)
    assert difference.covers("t.py::a[x-1]", "5.6")
    assert not difference.covers("t.py::ax", "5.6")
    assert not difference.covers("t.py::a[x-1]", "5.5")


def test_versions_in_list():
    """The list of differences names only lines of Celery that we support."""
    assert all(difference.versions <= {*LINES} for difference in read_known())
