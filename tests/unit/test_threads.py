"""Threads: calls that may take only so long, and machines that have no thread left."""

from __future__ import annotations

import multiprocessing
import threading
import time
import weakref
from functools import partial

import pytest

from celery_sqs_backoff import threads
from celery_sqs_backoff.threads import SharedCall, call_in_time, start_daemon


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_result_of_call():
    """A call in another thread returns or raises as a call in this thread does."""
    assert call_in_time(lambda: 7, seconds=10).result() == 7
    with pytest.raises(SystemExit):
        call_in_time(partial(exit, 3), seconds=10).result()
    with pytest.raises(SystemExit):
        SharedCall(partial(exit, 3)).result(seconds=10)


def test_slow_call():
    """A call that takes too long continues and delays no other call."""
    goes_on = threading.Event()
    hangs = call_in_time(partial(goes_on.wait, 10), seconds=0.01)
    assert not hangs.done()
    assert call_in_time(lambda: 7, seconds=10).result() == 7
    goes_on.set()
    assert hangs.result(10) is True


def test_reuse_thread():
    """Successive calls share a thread."""
    who = {call_in_time(threading.get_ident, seconds=10).result() for _ in range(100)}
    assert len(who) == 1
    assert threading.get_ident() not in who


def test_no_reference_to_answer():
    """An idle thread keeps no reference to its last answer."""

    class Answer:
        pass

    answer = weakref.ref(call_in_time(Answer, seconds=10).result())
    call_in_time(lambda: None, seconds=10)
    assert answer() is None


def test_no_thread_left(monkeypatch):
    """Without a thread left, a call with a time limit is not made.

    It could block its caller for longer than the limit.
    """
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(threads, "_idle", type(threads._idle)())
    assert start_daemon("sqs-test", lambda: None) is None
    called = []
    assert call_in_time(partial(called.append, 1), seconds=10) is None
    assert not called
    with pytest.raises(SharedCall.TakesTooLong):
        SharedCall(lambda: 7).result(seconds=10)


def test_shared_call():
    """A shared call runs once for all its waiting callers, and anew after it has ended."""
    made = []
    goes_on, now = threading.Event(), [0.0]

    def call():
        made.append(1)
        assert goes_on.wait(10)
        return len(made)

    shared = SharedCall(call, clock=lambda: now[0])
    with pytest.raises(SharedCall.TakesTooLong):
        shared.result(seconds=0.01)
    now[0] = 100.0
    with pytest.raises(SharedCall.TakesTooLong):
        shared.result(seconds=60)  # it has taken longer than that already
    goes_on.set()
    now[0] = 0.0
    assert shared.result(seconds=10) in (1, 2)
    assert shared.result(seconds=10) == len(made) > 1


def test_fork():
    """A forked process does not wait for the threads of its parent."""
    call_in_time(lambda: 7, seconds=10)  # leaves one idle here
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()

    def ask():
        answers.put(call_in_time(lambda: 7, seconds=5).done())

    child = fork.Process(target=ask)
    child.start()
    child.join(10)
    assert answers.get() is True


def test_clock_during_sleep() -> None:
    """The steady clock advances while the machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert threads._CLOCK == time.CLOCK_BOOTTIME
    before = threads.steady_seconds()
    assert threads.steady_seconds() >= before
