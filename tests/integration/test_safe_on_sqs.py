"""Guard, lock and crash counter as a task's message meets them, on a real worker and SQS."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff import Guard, NonRetryable, Retryable, Schedule, SQSBackoffTask
from celery_sqs_backoff.safe import Busy
from celery_sqs_backoff.store.memory import MemoryStore

WorkerFactory = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def app(sqs_celery_app: Celery) -> Celery:
    sqs_celery_app.conf.sqs_backoff = {"store": MemoryStore(), "backoff": Schedule([1])}
    return sqs_celery_app


def task(app: Celery, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    return app.task(base=SQSBackoffTask, bind=True, shared=False, **options)


def test_one_mail_per_customer_and_window(app: Celery, sqs_worker: WorkerFactory) -> None:
    sent: list[int] = []

    @task(app, name="mail", guard=Guard(key="mail:{customer}", window=3600))
    def mail(self: Any, customer: int) -> str:
        sent.append(customer)
        return "sent"

    with sqs_worker():
        assert mail.delay(7).get(timeout=10) == "sent"
        refused = mail.delay(7).get(timeout=10)
        assert mail.delay(8).get(timeout=10) == "sent"
    assert sent == [7, 8]
    assert "another message" in refused["refused"]


@pytest.mark.parametrize(
    ("failure", "sent_after"),
    [
        pytest.param(NonRetryable("bad address", safe_to_undo=True), True, id="not processed"),
        pytest.param(NonRetryable("timeout"), False, id="may have been processed"),
    ],
)
def test_a_failure_lets_another_message_pass_only_if_nothing_was_processed(
    app: Celery, sqs_worker: WorkerFactory, failure: Exception, sent_after: bool
) -> None:
    failures = [failure]
    sent: list[int] = []

    @task(app, name="mail", guard=Guard(key="mail:{customer}", window=3600))
    def mail(self: Any, customer: int) -> None:
        if failures:
            raise failures.pop()
        sent.append(customer)

    with sqs_worker():
        with pytest.raises(NonRetryable):
            mail.delay(7).get(timeout=10)
        mail.delay(7).get(timeout=10)
    assert bool(sent) is sent_after


def test_the_same_message_passes_its_guard_again(app: Celery, sqs_worker: WorkerFactory) -> None:
    runs: list[int] = []

    @task(app, name="mail", guard=Guard(key="mail:{customer}", window=3600))
    def mail(self: Any, customer: int) -> str:
        runs.append(self.request.retries)
        if len(runs) < 3:
            raise Retryable("the provider is down")
        return "sent"

    with sqs_worker():
        assert mail.delay(7).get(timeout=15) == "sent"
    assert runs == [0, 1, 2]


def test_a_run_that_found_the_lock_held_undoes_nothing(
    app: Celery, sqs_worker: WorkerFactory
) -> None:
    undone: list[str] = []
    tries: list[str] = []

    def undo(task: Any, exc: Exception, args: Any, kwargs: Any) -> None:
        undone.append(type(exc).__name__)

    @task(app, name="workflow", undo=undo)
    def workflow(self: Any) -> None:
        tries.append("try")
        if len(tries) == 1:
            raise Busy("held")
        if len(tries) == 2:
            raise Retryable("once")

    with sqs_worker():
        workflow.delay().get(timeout=15)
    assert undone == ["Retryable"]


def test_a_guard_without_a_store_is_refused_when_the_task_is_defined() -> None:
    app = Celery("no store", broker="memory://", set_as_current=False)
    with pytest.raises(ImproperlyConfigured, match=r"mail: .*need a store"):
        task(app, name="mail", lazy=False, guard=Guard(key="mail", window=1))(mail)


def mail(self: Any) -> None: ...


def test_a_guard_is_not_asked_when_the_task_is_called_as_a_function(app: Celery) -> None:
    @task(app, name="mail", guard=Guard(key="mail", window=3600))
    def mail(self: Any) -> str:
        return "sent"

    assert [mail(), mail()] == ["sent", "sent"]
