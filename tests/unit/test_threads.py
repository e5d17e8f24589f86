"""Calls that are waited for but so long, and machines without a thread left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_sqs_backoff.observe.waiting import Waiting
from celery_sqs_backoff.threads import NotInTime, call_in_time, start_daemon
from celery_sqs_backoff.worker.bulletin import Bulletin
from celery_sqs_backoff.worker.check_up import start_check_up
from celery_sqs_backoff.worker.upstream import give_back_before_soft_shutdown


@pytest.fixture
def no_thread_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        yield


def test_what_a_call_returns_is_returned() -> None:
    assert call_in_time("t", lambda: threading.current_thread().name, 10) == "t"


def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        call_in_time("t", lambda: 1 / 0, 10)


def test_a_call_that_takes_too_long_goes_on_in_its_thread() -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def call() -> None:
        goes_on.wait(10)
        ended.set()

    with pytest.raises(NotInTime) as late:
        call_in_time("t", call, 0.01)
    thread = late.value.thread
    assert thread is not None
    assert thread.is_alive()
    goes_on.set()
    thread.join(10)
    assert ended.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_that_ends_its_thread_ends_no_other() -> None:
    def leave() -> None:
        raise SystemExit

    with pytest.raises(NotInTime) as ended:
        call_in_time("t", leave, 10)
    assert ended.value.thread is not None


@pytest.mark.usefixtures("no_thread_left")
def test_without_a_thread_left_nothing_is_called() -> None:
    called: list[int] = []
    with pytest.raises(NotInTime) as late:
        call_in_time("t", lambda: called.append(1), 10)
    assert (late.value.thread, called) == (None, [])
    assert start_daemon("t", lambda: None) is None


@pytest.mark.usefixtures("no_thread_left")
def test_a_worker_starts_without_what_it_has_no_thread_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = Celery("full", set_as_current=False)
    start_check_up(app, [])
    bulletin = Bulletin(app, "w", waiting=Waiting(), running=lambda queue: 0, held=tuple)
    bulletin.start()
    bulletin.stop()
    assert caplog.text.count("sqs_backoff.no_thread_left") == 2


@pytest.mark.usefixtures("no_thread_left")
def test_a_soft_shutdown_waits_although_no_thread_is_left() -> None:
    waited: list[int] = []
    controller = SimpleNamespace(wait_for_soft_shutdown=lambda: waited.append(1))
    give_back_before_soft_shutdown(SimpleNamespace(controller=controller), lambda: None)
    controller.wait_for_soft_shutdown()
    assert waited == [1]
