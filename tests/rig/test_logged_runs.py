"""A run shows users little of our code: few frames in tracebacks, few lines in the log."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter

import pytest
from celery.exceptions import Reject

import celery_sqs_backoff
from celery_sqs_backoff import NonRetryable, Retryable, Schedule, SQSBackoffTask

from .bodies import raises, returns

OURS = os.path.dirname(celery_sqs_backoff.__file__)
BAD, DOWN, DECLINED = ValueError("bad"), Retryable("down"), NonRetryable("declined")


class Transaction(SQSBackoffTask):
    """A base class with a ``__call__`` of its own."""

    abstract = True

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def frames_of_ours(traceback):
    """Return the length of the longest row of our package's frames in a traceback."""
    most = 0
    for part in traceback.split("Traceback (most recent call last)"):
        ours = [OURS in line for line in part.splitlines() if line.lstrip().startswith("File ")]
        runs = "".join("x" if is_ours else " " for is_ours in ours).split()
        most = max([most, *map(len, runs)])
    return most


@pytest.mark.parametrize("base", [SQSBackoffTask, Transaction])
@pytest.mark.parametrize("exc", [BAD, DOWN], ids=["failure", "retry"])
def test_frames(rig, caplog, base, exc):
    """No traceback in log, result or dead letter has two frames of our package in a row."""
    rig.task(raises(exc), base=base, max_retries=1, backoff=Schedule([7]))
    message = rig.send()
    rig.run()
    shown = [rig.app.AsyncResult(message.task_id).traceback]
    shown += [event.traceback for event in rig.celery_events if hasattr(event, "traceback")]
    if exc is DOWN:
        rig.run()
    shown += [message.record.traceback, rig.app.AsyncResult(message.task_id).traceback]
    format_exception = logging.Formatter().formatException
    shown += [format_exception(each.exc_info) for each in caplog.records if each.exc_info]
    assert all("raise exc" in text for text in shown)
    assert [frames_of_ours(text) for text in shown] == [1] * len(shown)


def lines_about(caplog, message):
    lines = [each for each in caplog.records if message.task_id in each.getMessage()]
    return [each for each in lines if not each.getMessage().endswith(" received")]


@pytest.mark.parametrize(
    ("body", "event", "facts"),
    [
        (raises(DOWN), "retry", "attempt=1 outcome=RETRYABLE reason=raised"),
        (
            lambda self: self.retry(countdown=5),
            "retry",
            'attempt=1 outcome=RETRYABLE reason="retry',
        ),
        (raises(DECLINED), "dead_letter", 'attempt=1 outcome=UNKNOWN reason="not retryable"'),
        (raises(Reject("no")), "dead_letter", 'attempt=1 outcome=UNKNOWN reason="rejected by'),
    ],
    ids=["retry", "asked retry", "dead letter", "rejected"],
)
def test_known_failure(rig, caplog, body, event, facts):
    """If a rule knows the error, the log has one line about the failure, without a traceback."""
    caplog.set_level("INFO")
    rig.task(body)
    message = rig.send()
    rig.run()
    [line] = lines_about(caplog, message)
    assert line.getMessage().startswith(f"sqs_backoff.{event}: task=mail id={message.task_id} ")
    assert facts in line.getMessage()
    assert line.exc_info is None


def test_last_retry(rig, caplog):
    """The log also has one line if a rule knows the error and no retry is left."""
    caplog.set_level("INFO")
    rig.task(raises(DOWN), max_retries=0)
    message = rig.send()
    rig.run()
    [line] = lines_about(caplog, message)
    assert 'outcome=RETRYABLE reason="max_retries reached"' in line.getMessage()


def test_unknown_failure(rig, caplog):
    """If no rule knows the error, the log also has Celery's line with the traceback."""
    rig.task(raises(BAD))
    message = rig.send()
    rig.run()
    celerys, ours = lines_about(caplog, message)
    assert "raised unexpected: ValueError('bad')" in celerys.getMessage()
    assert celerys.exc_info[0] is ValueError
    assert ours.getMessage().startswith("sqs_backoff.dead_letter: ")


def test_calls_of_a_success(rig):
    """A success costs the process that runs the task at most 25 calls of our functions."""
    rig.task(returns)
    rig.send()
    rig.run()  # the first run also makes the task's tracer
    rig.send()
    calls, is_inside = Counter(), False

    def count(frame, event, arg):
        nonlocal is_inside
        if event not in ("call", "return"):
            return
        if frame.f_code.co_name == "trace_task_ret":  # Celery's entry into the process
            is_inside = event == "call"
        elif is_inside and event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        rig.run()
    finally:
        sys.setprofile(None)
    assert 0 < calls.total() <= 25, calls
