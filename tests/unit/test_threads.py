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


def test_a_call_returns_or_raises_as_if_it_were_made_here():
    assert call_in_time(lambda: 7, seconds=10).result() == 7
    with pytest.raises(SystemExit):
        call_in_time(partial(exit, 3), seconds=10).result()
    with pytest.raises(SystemExit):
        SharedCall(partial(exit, 3)).result(seconds=10)


def test_a_call_that_takes_too_long_goes_on_and_holds_up_no_other():
    goes_on = threading.Event()
    hangs = call_in_time(partial(goes_on.wait, 10), seconds=0.01)
    assert not hangs.done()
    assert call_in_time(lambda: 7, seconds=10).result() == 7
    goes_on.set()
    assert hangs.result(10) is True


def test_calls_one_after_the_other_share_a_thread():
    who = {call_in_time(threading.get_ident, seconds=10).result() for _ in range(100)}
    assert len(who) == 1
    assert threading.get_ident() not in who


def test_a_thread_keeps_no_answer_alive():
    class Answer:
        pass

    answer = weakref.ref(call_in_time(Answer, seconds=10).result())
    call_in_time(lambda: None, seconds=10)
    assert answer() is None


def test_without_a_thread_left_nothing_is_called(monkeypatch):
    """It could block for good who has asked for so many seconds at the most."""
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(threads, "_idle", type(threads._idle)())
    assert start_daemon("sqs-test", lambda: None) is None
    called = []
    assert call_in_time(partial(called.append, 1), seconds=10) is None
    assert not called
    with pytest.raises(SharedCall.TakesTooLong):
        SharedCall(lambda: 7).result(seconds=10)


def test_a_shared_call_is_made_once_for_all_who_wait_and_anew_when_it_has_ended():
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


def test_a_fork_does_not_wait_for_the_threads_of_its_parent():
    call_in_time(lambda: 7, seconds=10)  # leaves one idle here
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()

    def ask():
        answers.put(call_in_time(lambda: 7, seconds=5).done())

    child = fork.Process(target=ask)
    child.start()
    child.join(10)
    assert answers.get() is True


def test_the_clock_goes_on_while_the_machine_sleeps() -> None:
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert threads._CLOCK == time.CLOCK_BOOTTIME
    before = threads.steady_seconds()
    assert threads.steady_seconds() >= before
