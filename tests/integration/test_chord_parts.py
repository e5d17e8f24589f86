"""A process of the pool that is told to end counts its part of a chord once, and sends the body."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import celery._state
import pytest
from billiard import common
from celery import Celery
from celery.canvas import Signature
from celery.exceptions import ChordError

from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.task import late_end
from celery_sqs_backoff.task.chords import count_parts_whole
from celery_sqs_backoff.task.handover import RUNNING, Run
from tests.support.processes import eventually
from tests.support.redis_database import redis_url

pytestmark = pytest.mark.redis


@pytest.fixture
def pool_process() -> Iterator[None]:
    """This process, with the signal's handler of one of the pool's."""
    before = signal.signal(common.TERM_SIGNAL, common._shutdown_cleanup)
    yield
    late_end._LateEnd.waiting = None
    signal.signal(common.TERM_SIGNAL, before)
    common._should_have_exited[0] = False


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    app = Celery("chord_parts", backend=redis_url(), set_as_current=False)
    # Celery before 5.7 asks the current app for the group.
    monkeypatch.setattr(celery._state._tls, "current_app", app)
    return app.backend


def complete(
    backend: Any, state: str = "SUCCESS", result: Any = 1, *, claimed_for: int | None = None
) -> None:
    """Count the only part of a chord, which another process may have claimed for some seconds."""
    group = f"group-{uuid4()}"
    body = {"task": "body", "args": (), "kwargs": {}, "options": {"task_id": f"body-{uuid4()}"}}
    backend.set_chord_size(group, 1)
    if claimed_for is not None:
        backend.client.set(backend.get_key_for_group(group, ".c"), "another's", ex=claimed_for)
    request = SimpleNamespace(id=f"part-{uuid4()}", group=group, group_index=0, chord=body)
    backend.on_chord_part_return(request, state, result)


def end_this_process() -> None:
    os.kill(os.getpid(), common.TERM_SIGNAL)


def wait_for_the_end() -> None:
    with pytest.raises(SystemExit):
        time.sleep(10)


@pytest.mark.usefixtures("pool_process")
@pytest.mark.parametrize("signals", [1, 2])
def test_a_process_that_is_told_to_end_sends_the_body_of_a_chord_and_reports_first(
    backend: Any, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    sent: list[Any] = []

    def delay(body: Signature, results: Any) -> None:
        for _ in range(signals):
            end_this_process()
        sent.append(results)

    monkeypatch.setattr(Signature, "delay", delay)
    count_parts_whole(backend)
    count_parts_whole(backend)
    complete(backend)
    assert sent == [[1]]
    wait_for_the_end()


@pytest.mark.usefixtures("pool_process")
def test_a_process_that_is_told_to_end_after_the_count_reports_first(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signature, "delay", lambda *_: None)
    count_parts_whole(backend)
    complete(backend)
    end_this_process()
    wait_for_the_end()


@pytest.mark.usefixtures("pool_process")
def test_a_process_that_is_told_to_end_begins_no_other_run(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be cut off midway."""
    monkeypatch.setattr(Signature, "delay", lambda *_: None)
    count_parts_whole(backend)
    complete(backend)
    late_end.end_if_told()
    end_this_process()
    with pytest.raises(SystemExit):
        late_end.end_if_told()
    signals: list[int] = []
    signal.signal(common.TERM_SIGNAL, lambda number, _: signals.append(number))
    eventually(lambda: "sqs-end" not in [thread.name for thread in threading.enumerate()])
    assert not signals, "its own end is not cut short"


@pytest.mark.usefixtures("pool_process")
def test_a_count_that_hangs_does_not_keep_a_process_from_its_end(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(body: Signature, results: Any) -> None:
        end_this_process()
        time.sleep(10)
        pytest.fail("it goes on")

    monkeypatch.setattr(late_end, "_LONGEST_COUNT_SECONDS", 0.1)
    monkeypatch.setattr(Signature, "delay", hang)
    count_parts_whole(backend)
    with pytest.raises(SystemExit):
        complete(backend)


@pytest.mark.usefixtures("pool_process")
def test_a_process_that_counts_no_part_ends_at_once(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signature, "delay", lambda *_: None)
    monkeypatch.setattr(late_end, "_REPORT_SECONDS", 0.0)
    count_parts_whole(backend)
    complete(backend)
    with pytest.raises(SystemExit):
        end_this_process()


@pytest.mark.usefixtures("pool_process")
def test_without_a_thread_left_a_process_ends_at_once(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_thread: Callable[..., None] = lambda name, run: None  # noqa: E731
    monkeypatch.setattr(late_end, "start_daemon", no_thread)
    monkeypatch.setattr(Signature, "delay", lambda *_: None)
    count_parts_whole(backend)
    complete(backend)
    with pytest.raises(SystemExit):
        end_this_process()


def test_a_body_that_cannot_be_sent_is_raised(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delay(body: Signature, results: Any) -> None:
        raise ConnectionError("SQS is away")

    monkeypatch.setattr(Signature, "delay", delay)
    count_parts_whole(backend)
    with pytest.raises(ChordError, match="SQS is away"):
        complete(backend)


@pytest.fixture
def run_again() -> Iterator[None]:
    """As in a run of a message that has been received before."""
    delivery = Delivery(message_id="m", queue_url="q", received_at=0.0, receive_count=2)
    token = RUNNING.set(Run("part", delivery))
    yield
    RUNNING.reset(token)


@pytest.mark.usefixtures("run_again")
def test_a_part_whose_process_was_killed_while_it_sent_the_body_sends_it_when_it_runs_again(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(backend, "_chord_claim_extend_script"):
        pytest.skip("Celery before 5.7 claims nothing")
    sent: list[Any] = []
    monkeypatch.setattr(Signature, "delay", lambda body, results: sent.append(results))
    count_parts_whole(backend)
    complete(backend, claimed_for=1)
    assert sent == [[1]]


def test_a_part_that_failed_ends_its_chord_and_is_not_raised(backend: Any) -> None:
    count_parts_whole(backend)
    complete(backend, "FAILURE", ValueError("bad"))


def test_what_is_no_process_of_the_pool_keeps_its_handler(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: list[Any] = []
    monkeypatch.setattr(
        Signature, "delay", lambda *_: handlers.append(signal.getsignal(common.TERM_SIGNAL))
    )
    count_parts_whole(backend)
    complete(backend)
    assert handlers == [signal.getsignal(common.TERM_SIGNAL)]
