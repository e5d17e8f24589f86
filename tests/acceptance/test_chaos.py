"""No message is lost while workers are killed and calls to SQS fail at random moments."""

import pytest

from tests.chaos.runner import run_chaos

#: The seed decides what each task does, which calls fail, and when a worker is killed. Which tasks
#: are running at that moment still differs from run to run.
SEED = 1

FAULTS = {"delay", "drop-after", "drop-before", "error", "fail-entries"}


@pytest.mark.parametrize(
    ("tasks", "seconds"),
    [pytest.param(100, 8, id="100"), pytest.param(300, 14, id="300", marks=pytest.mark.long)],
)
def test_chaos(tmp_path, tasks, seconds):
    """Each message is done or a dead letter.

    If a task ran again after its message was settled, a fault or a kill explains why.
    """
    report = run_chaos(tasks=tasks, seed=SEED, directory=tmp_path, chaos_seconds=seconds)
    print("\n".join(report.lines()))  # noqa: T201  # pytest shows it when the test fails
    assert report.is_good
    assert len(report.done) > 2 * tasks / 3
    assert report.faults or report.deeds
    if tasks == 300:  # enough to meet each kind of fault at least once
        assert report.faults.keys() == FAULTS
        assert {"kill_child", "kill_worker", "pull_plug"} <= report.deeds.keys()
