"""What counts as a difference between a run of Celery's tests on stock and one with our class."""

import pytest

from tests.celery_suite.compare import KnownDifference, compare, read_known
from tests.celery_suite.environment import LINES


def known(pattern, versions="5.7"):
    return KnownDifference(frozenset(versions.split()), pattern, "a reason")


def found(stock, ours, *differences, version="5.7"):
    return compare(stock, ours, known=differences, version=version)


@pytest.mark.parametrize("outcome", ["failed", "skipped", "xfailed"])
def test_a_test_that_passes_on_stock_only_is_new(outcome):
    assert found({"a": "passed", "b": "passed"}, {"a": outcome, "b": "passed"}).new == ("a",)


def test_a_test_that_did_not_run_with_ours_is_new():
    assert found({"a": "passed"}, {}).new == ("a",)


def test_a_known_difference_is_not_new():
    result = found({"t.py::a[1]": "passed"}, {"t.py::a[1]": "failed"}, known("t.py::a*"))
    assert result.new == ()
    assert result.known["t.py::a[1]"].reason == "a reason"


def test_a_known_difference_that_does_not_show_is_reported():
    both = {"a": "passed", "b": "passed"}
    assert found(both, both, known("a")).gone == (known("a"),)
    assert found(both, both, known("elsewhere")).gone == ()


def test_brackets_in_the_list_are_part_of_a_tests_name(tmp_path):
    path = tmp_path / "differences.txt"
    path.write_text("# a comment\n\n5.6 5.7 | t.py::a[x-*] | a reason\n")
    [difference] = read_known(path)
    assert difference.covers("t.py::a[x-1]", "5.6")
    assert not difference.covers("t.py::ax", "5.6")
    assert not difference.covers("t.py::a[x-1]", "5.5")


def test_each_line_of_the_list_is_about_lines_of_celery_that_we_support():
    assert all(difference.versions <= {*LINES} for difference in read_known())
