"""Calls in other threads with a time limit, also if the system allows no further thread."""

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
    """A call in another thread gives the caller its result, or raises its exception."""
    assert call_in_time(lambda: 7, seconds=10).result() == 7
    with pytest.raises(SystemExit):
        call_in_time(partial(exit, 3), seconds=10).result()
    with pytest.raises(SystemExit):
        SharedCall(partial(exit, 3)).result(seconds=10)


def test_slow_call():
    """A call that takes too long goes on in its thread and does not delay other calls."""
    goes_on = threading.Event()
    hangs = call_in_time(partial(goes_on.wait, 10), seconds=0.01)
    assert not hangs.done()
    assert call_in_time(lambda: 7, seconds=10).result() == 7
    goes_on.set()
    assert hangs.result(10) is True


def test_reuse_thread():
    """Calls that are made one after the other use the same thread."""
    who = {call_in_time(threading.get_ident, seconds=10).result() for _ in range(100)}
    assert len(who) == 1
    assert threading.get_ident() not in who


def test_no_reference_to_answer():
    """An idle thread keeps no reference to the result of its last call."""

    class Answer:
        pass

    answer = weakref.ref(call_in_time(Answer, seconds=10).result())
    call_in_time(lambda: None, seconds=10)
    assert answer() is None


def test_no_thread_left(monkeypatch):
    """If the system allows no further thread, a call with a time limit is not made.

    In the caller's own thread it could take longer than the limit.
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
    """Callers wait for the same shared call. After its end, the next caller starts another."""
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
        shared.result(seconds=60)  # by the clock, the call has already taken 100 seconds
    goes_on.set()
    now[0] = 0.0
    assert shared.result(seconds=10) in (1, 2)
    assert shared.result(seconds=10) == len(made) > 1


def test_fork():
    """A forked process does not wait for an idle thread, which exists only in its parent."""
    call_in_time(lambda: 7, seconds=10)  # its thread is idle afterwards
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()

    def ask():
        answers.put(call_in_time(lambda: 7, seconds=5).done())

    child = fork.Process(target=ask)
    child.start()
    child.join(10)
    assert answers.get() is True


def test_clock_during_sleep() -> None:
    """The clock of ``steady_seconds`` goes on while the machine sleeps, if the system has one."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert threads._CLOCK == time.CLOCK_BOOTTIME
    before = threads.steady_seconds()
    assert threads.steady_seconds() >= before
