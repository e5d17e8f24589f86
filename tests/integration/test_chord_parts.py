"""The process that counts the last part of a chord sends its body, or says that it could not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from billiard import common
from celery import Celery
from celery.canvas import Signature
from celery.exceptions import ChordError

from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.task.chords import count_parts_whole
from celery_sqs_backoff.task.handover import RUNNING, Run

pytestmark = pytest.mark.redis


@pytest.fixture
def pool_process() -> Iterator[None]:
    """This process, with the signal's handler of one of the pool's."""
    before = signal.signal(common.TERM_SIGNAL, common._shutdown_cleanup)
    yield
    signal.signal(common.TERM_SIGNAL, before)
    common._should_have_exited[0] = False


@pytest.fixture
def backend() -> Any:
    app = Celery("chord_parts", backend="redis://127.0.0.1:6379/9", set_as_current=False)
    return app.backend


def complete(
    backend: Any, state: str = "SUCCESS", result: Any = 1, *, claimed_for: int | None = None
) -> None:
    """Count the only part of a chord, which another process may have claimed for some seconds."""
    group = f"group-{uuid4()}"
    body = {"task": "body", "args": (), "kwargs": {}, "options": {}}
    backend.set_chord_size(group, 1)
    if claimed_for is not None:
        backend.client.set(backend.get_key_for_group(group, ".c"), "another's", ex=claimed_for)
    request = SimpleNamespace(id=f"part-{uuid4()}", group=group, group_index=0, chord=body)
    backend.on_chord_part_return(request, state, result)


@pytest.mark.usefixtures("pool_process")
def test_a_process_that_is_told_to_end_sends_the_body_of_a_chord_first(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def delay(body: Signature, results: Any) -> None:
        os.kill(os.getpid(), common.TERM_SIGNAL)
        sent.append(results)

    monkeypatch.setattr(Signature, "delay", delay)
    count_parts_whole(backend)
    count_parts_whole(backend)
    with pytest.raises(SystemExit):
        complete(backend)
    assert sent == [[1]]


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
