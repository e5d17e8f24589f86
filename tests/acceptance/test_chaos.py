"""Workers are killed and calls to SQS spoiled at random: no message is lost."""

import pytest

from tests.chaos.runner import run_chaos

#: What tasks do, the faults and the kills; what they coincide with differs from run to run.
SEED = 1

FAULTS = {"delay", "drop-after", "drop-before", "error", "fail-entries"}


@pytest.mark.parametrize(
    ("tasks", "seconds"),
    [pytest.param(100, 8, id="100"), pytest.param(300, 14, id="300", marks=pytest.mark.long)],
)
def test_chaos(tmp_path, tasks, seconds):
    """Every message is done or a dead letter, and no further run is without an explanation."""
    report = run_chaos(tasks=tasks, seed=SEED, directory=tmp_path, chaos_seconds=seconds)
    print("\n".join(report.lines()))  # noqa: T201  # pytest shows it when the test fails
    assert report.is_good
    assert len(report.done) > 2 * tasks / 3
    assert report.faults or report.deeds
    if tasks == 300:  # enough for one of each kind
        assert report.faults.keys() == FAULTS
        assert {"kill_child", "kill_worker", "pull_plug"} <= report.deeds.keys()
