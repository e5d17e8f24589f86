"""Workers are killed and calls to SQS spoiled at random: no message is lost."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.runner import run_chaos

#: What tasks do, the faults and the kills; what they coincide with differs from run to run.
SEED = 1


def test_in_chaos_every_message_is_done_or_a_dead_letter_and_no_run_is_unexplained(
    tmp_path: Path,
) -> None:
    report = run_chaos(tasks=300, seed=SEED, directory=tmp_path, chaos_seconds=14)
    print("\n".join(report.lines()))  # noqa: T201  # pytest shows it when the test fails
    assert report.is_good
    assert len(report.done) > 200
    assert report.faults.keys() == {"delay", "drop-after", "drop-before", "error", "fail-entries"}
    assert {"kill_child", "kill_worker", "pull_plug"} <= report.deeds.keys()
