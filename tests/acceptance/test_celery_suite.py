"""The short form of ``make celery-suite``: Celery's own tests of traces and requests."""

import subprocess
import sys

import pytest

from tests.celery_suite.environment import ROOT, installed

PATHS = ("t/unit/tasks/test_trace.py", "t/unit/worker/test_request.py")


@pytest.mark.timeout(300)
def test_celery_suite():
    """Celery's own tests of traces and requests pass with our task class.

    Tests that fail with stock tasks do not count, and known differences are allowed.
    """
    try:
        installed().source("celery")
    except subprocess.CalledProcessError:
        pytest.skip("cannot reach the package index, from which Celery's tests come")
    done = subprocess.run(
        [sys.executable, "-m", "tests.celery_suite", "--here", "--part", "unit", "--paths", *PATHS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 new" in done.stdout
