"""The chaos test names the injected fault that explains an extra run of a task.

It kills workers and spoils calls to SQS. A run is extra if an earlier run settled the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.chaos.explain import Call, History, Kill, Run, explain, explains_copies, extra_runs
from tests.chaos.report import Extra, Report
from tests.support.cases import cases

DELETE, HIDE, DEAD_LETTER = "DeleteMessageBatch", "ChangeMessageVisibilityBatch", "SendMessageBatch"

WORKER, CHILD, OTHER = 100, 101, 200


def run(**facts: Any) -> Run:
    return Run(**{"message_id": "m", "worker": WORKER, "pid": CHILD, "outcome": "success"} | facts)


#: The run that settled the message, and an extra run on another worker.
SETTLED = run(received_at=10.0, started_at=11.0, ended_at=12.0)
EXTRA = run(received_at=20.0, started_at=20.5, ended_at=21.0, worker=OTHER, pid=OTHER)


def call(action: str, at: float, **facts: Any) -> Call:
    return Call(**{"action": action, "worker": WORKER, "at": at, "answered_at": at + 0.1} | facts)


def explain_extra(
    *,
    calls: Sequence[Call] = (),
    slow_calls: Sequence[Call] = (),
    kills: Sequence[Kill] = (),
    outages: Sequence[tuple[float, float]] = (),
    received_at: Sequence[float] = (10.0, 20.0),
) -> str | None:
    history = History(
        visibility_timeout_seconds=6,
        received_at=received_at,
        calls=calls,
        slow_calls=slow_calls,
        kills=kills,
        outages=outages,
    )
    return explain(EXTRA, SETTLED, history)


def kill(pid: int, at: float) -> Kill:
    return Kill(at=at, signal="SIGKILL", pid=pid)


@cases(
    "found facts",
    {
        "worker-killed": ("SIGKILL before the delete", {"kills": [kill(WORKER, 12.05)]}),
        "child-killed": ("SIGKILL before the delete", {"kills": [kill(CHILD, 12.05)]}),
        "delete-spoiled": (
            "delete or dead letter spoiled",
            {"calls": [call(DELETE, 12.1, fault="error", reached=False)]},
        ),
        "answer-to-dead-letter-lost": (
            "delete or dead letter spoiled",
            {"calls": [call(DEAD_LETTER, 12.1, fault="drop-after")]},
        ),
        "delete-held-up": (
            "delete held up by a slow answer",
            {"slow_calls": [call(DELETE, 9, answered_at=21)]},
        ),
        "unreachable": ("SQS was unreachable at the delete", {"outages": [(11.5, 12.5)]}),
        "renewals-spoiled": (
            "renewal spoiled for longer than the visibility timeout",
            {
                "calls": [
                    call(HIDE, at, seconds=10, fault="error", reached=False)
                    for at in (12.1, 13.2, 14.3)
                ]
            },
        ),
        "renewal-held-up": (
            "renewal spoiled for longer than the visibility timeout",
            {"slow_calls": [call(HIDE, 11, answered_at=17)]},
        ),
    },
)
def test_injected_fault(found, facts):
    """An injected fault that kept a worker from settling its message explains an extra run."""
    assert explain_extra(**facts) == found


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({}, id="nothing-happened"),
        pytest.param({"kills": [kill(OTHER, 12.05)]}, id="another-was-killed"),
        pytest.param({"kills": [kill(WORKER, 20.1)]}, id="killed-too-late"),
        pytest.param({"kills": [kill(WORKER, 18)]}, id="killed-long-after-it-could-have-deleted"),
        pytest.param({"kills": [kill(CHILD, 10.5)]}, id="killed-before-it-ran"),
        pytest.param({"calls": [call(DELETE, 21, fault="error", reached=False)]}, id="later-fault"),
        pytest.param({"calls": [call(DELETE, 12.1)], "kills": [kill(WORKER, 13)]}, id="deleted"),
        pytest.param({"outages": [(2, 3), (21, 22)]}, id="unreachable-at-another-time"),
        pytest.param(
            {"slow_calls": [call(DELETE, 9, answered_at=21, worker=OTHER)]},
            id="another-worker-was-held-up",
        ),
        pytest.param({"outages": [(14.5, 15.9)]}, id="unreachable-long-after-the-end"),
        pytest.param(
            {"calls": [call(HIDE, 12.1, seconds=10, fault="error", reached=False)]},
            id="one-renewal-of-several",
        ),
        pytest.param(
            {
                "calls": [
                    *(call(HIDE, at, seconds=10, fault="error") for at in (12.1, 13.2, 14.3)),
                    call(HIDE, 15.0, seconds=10),
                ],
            },
            id="hidden-all-the-time",
        ),
    ],
)
def test_unrelated_fault(facts):
    """A fault that cannot have caused the extra run does not explain it."""
    assert explain_extra(**facts) is None


def test_extra_runs():
    """Only the runs after the run that settled the message are extra."""
    failed = run(received_at=1.0, started_at=1.0, ended_at=2.0, outcome="retry")
    killed = run(received_at=5.0, started_at=5.0, outcome=None)
    assert extra_runs([EXTRA, SETTLED, failed, killed]) == (SETTLED, [EXTRA])
    assert extra_runs([failed, killed]) == (None, [])


GOOD: dict[str, Any] = {
    "seed": 1,
    "sent": ["a", "b"],
    "done": {"a"},
    "letters": {"b": ["worker lost"]},
    "runs": 2,
    "extras": [],
    "copies_of_nothing": [],
    "faults": {},
    "deeds": {},
    "workers": 3,
    "deserted": [],
    "left": (),
}


@cases(
    "facts line",
    {
        "lost": ({"sent": ["a", "b", "c"]}, "LOST c"),
        "no-reason": ({"letters": {"b": [None]}}, "None"),
        "?": ({"extras": [Extra("a", None, ["10.000  received"])]}, "UNEXPLAINED a"),
        "deserted": ({"deserted": ["Unrecoverable error"]}, "Unrecoverable error"),
        "copied": ({"copies_of_nothing": ["b"]}, "COPIED b"),
        "left": ({"left": (1, 0)}, "left on the queue"),
    },
)
def test_bad_report(facts, line):
    """If something forbidden happened, the report is bad and names the message or the cause."""
    assert Report(**GOOD).is_good
    report = Report(**GOOD | facts)
    assert not report.is_good
    assert line in "\n".join(report.lines())


def test_explained_run():
    """The report stays good if all extra runs are explained, and counts them by explanation."""
    report = Report(**GOOD | {"extras": [Extra("a", "SIGKILL before the delete")]})
    assert report.is_good
    [line] = [line for line in report.lines() if "SIGKILL before the delete" in line]
    assert line.split()[-1] == "1"


def test_job_begun_again():
    """The death of a pool process explains a second run although the message came only once.

    The pool gave the job of the dead process to another process.
    """
    again = run(received_at=10.0, started_at=12.2, pid=102)
    history = History(visibility_timeout_seconds=6, received_at=[10.0], kills=[kill(CHILD, 12.1)])
    assert explain(again, SETTLED, history) == "SIGKILL before the pool knew"
    unharmed = History(visibility_timeout_seconds=6, received_at=[10.0])
    assert explain(again, SETTLED, unharmed) is None


def test_run_outlives_lease():
    """Failed renewals of the visibility timeout explain a run that started after its end.

    The first worker to receive the message was the last to start its task.
    """
    late = run(received_at=1.0, started_at=11.5, ended_at=13.0, worker=OTHER, pid=OTHER)
    facts = {"visibility_timeout_seconds": 6, "received_at": [1.0, 10.0]}
    spoiled = [
        call(HIDE, at, seconds=10, fault="error", reached=False, worker=OTHER) for at in (3, 4, 5)
    ]
    assert explain(late, SETTLED, History(**facts)) is None
    found = explain(late, SETTLED, History(**facts, calls=spoiled))
    assert found == "renewal spoiled for longer than the visibility timeout"


def test_late_receive():
    """If SQS's answer to a receive came after the visibility timeout, it explains an extra run."""
    late = run(received_at=1.0, arrived_at=12.0, started_at=12.0, worker=OTHER, pid=OTHER)
    history = History(visibility_timeout_seconds=6, received_at=[1.0, 10.0])
    found = explain(late, SETTLED, history)
    assert found == "renewal spoiled for longer than the visibility timeout"


@cases(
    "explains facts",
    {
        "lost-answer": (True, {"calls": [call(DEAD_LETTER, 5, fault="drop-after")]}),
        "killed": (True, {"calls": [call(DEAD_LETTER, 5)], "kills": [kill(WORKER, 5.2)]}),
        "unreachable": (True, {"calls": [call(DEAD_LETTER, 5)], "outages": [(5.05, 6)]}),
        "nothing": (False, {"calls": [call(DEAD_LETTER, 5), call(DEAD_LETTER, 6)]}),
    },
)
def test_second_dead_letter(explains, facts):
    """A second dead letter of one message is explained only by an injected fault."""
    assert explains_copies(History(visibility_timeout_seconds=6, **facts)) is explains
