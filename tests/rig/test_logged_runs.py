"""How much of us a user sees of a run: frames in tracebacks, and calls."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter

import pytest

import celery_sqs_backoff
from celery_sqs_backoff import Retryable, Schedule, SQSBackoffTask

from .bodies import raises, returns

OURS = os.path.dirname(celery_sqs_backoff.__file__)
BAD, DOWN = ValueError("bad"), Retryable("down")


class Transaction(SQSBackoffTask):
    """A base class with a ``__call__`` of its own."""

    abstract = True

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def frames_of_ours(traceback):
    """Return how many of our frames lie between Celery, or a ``__call__``, and the next code."""
    most = 0
    for part in traceback.split("Traceback (most recent call last)"):
        ours = [OURS in line for line in part.splitlines() if line.lstrip().startswith("File ")]
        runs = "".join("x" if is_ours else " " for is_ours in ours).split()
        most = max([most, *map(len, runs)])
    return most


@pytest.mark.parametrize("base", [SQSBackoffTask, Transaction])
@pytest.mark.parametrize("exc", [BAD, DOWN], ids=["failure", "retry"])
def test_frames(rig, caplog, base, exc):
    """A traceback shows one frame of ours: in the log, the result and the dead letter."""
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


def test_calls_of_a_success(rig):
    """A success costs the process that runs the task at most 25 calls of our functions."""
    rig.task(returns)
    rig.send()
    rig.run()  # which makes the tracer
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
