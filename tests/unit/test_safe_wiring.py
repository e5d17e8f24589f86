"""What ``SQSBackoffTask`` makes of guards, busy locks and stores that are away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured, Retry

from celery_sqs_backoff import Guard, Retryable, SQSBackoffTask
from celery_sqs_backoff.safe import StoreInTransaction, StoreUnavailable
from celery_sqs_backoff.safe.stores.memory import MemoryStore

GUARD = Guard(key="mail:{customer}", window=3600)


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("wiring", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.sqs_backoff = {"store": MemoryStore()}
    yield app
    app.close()


def test_a_refused_message_succeeds_with_a_result_that_says_so(app: Celery) -> None:
    @app.task(shared=False, base=SQSBackoffTask, name="mail", guard=GUARD)
    def mail(customer: int) -> str:
        return "sent"

    assert mail.apply((7,), task_id="first").get() == "sent"
    assert mail.apply((7,), task_id="first").get() == "sent"
    refused = mail.apply((7,), task_id="second")
    assert refused.state == "SUCCESS"
    assert refused.get()["passed"] == "first"
    assert mail(7) == "sent", "a direct call is not guarded"


@pytest.mark.parametrize(
    ("failure", "passes"), [(Retryable("down"), True), (ValueError("what?"), False)]
)
def test_a_guard_is_unset_with_undo(app: Celery, failure: Exception, passes: bool) -> None:
    @app.task(shared=False, base=SQSBackoffTask, name="mail", guard=GUARD)
    def mail(customer: int) -> str:
        if failures:
            raise failures.pop()
        return "sent"

    failures = [failure]
    assert mail.apply((7,), task_id="first").state == "FAILURE"
    assert (mail.apply((7,), task_id="second").get() == "sent") is passes


def test_a_guard_that_cannot_be_unset_does_not_hide_why_the_task_failed(app: Celery) -> None:
    """Neither a key that fails now, nor a transaction that the task has left open."""
    keys = ["mail:7"]
    store = app.conf.sqs_backoff["store"]

    def inside(*_: object) -> bool:
        raise StoreInTransaction("inside")

    @app.task(
        shared=False,
        base=SQSBackoffTask,
        name="mail",
        max_retries=3,
        guard=Guard(key=lambda customer: keys.pop(), window=3600),
    )
    def mail(customer: int) -> None:
        raise Retryable("down")

    with pytest.raises(Retry):
        _delivered(mail, args=(7,), kwargs={}).run(7)
    keys += ["mail:7"] * 2
    store.delete = inside
    with pytest.raises(Retry):
        _delivered(mail, args=(7,), kwargs={}).run(7)


def test_a_guard_without_a_store_is_refused_when_the_task_is_defined(app: Celery) -> None:
    app.conf.sqs_backoff = {}
    with pytest.raises(ImproperlyConfigured, match=r"\['store'\]"):

        @app.task(shared=False, base=SQSBackoffTask, name="mail", guard=GUARD)
        def mail(customer: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "why"), [({"guard": "mail"}, "guard"), ({"guard": Guard(key="{x}", window=1)}, "x")]
)
def test_a_guard_that_is_none_is_refused(app: Celery, options: Any, why: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=why):

        @app.task(shared=False, base=SQSBackoffTask, name="mail", **options)
        def mail(customer: int) -> None: ...


def test_an_unknown_store_is_refused_by_every_task(app: Celery) -> None:
    app.conf.sqs_backoff = {"store": "postgres://"}
    with pytest.raises(ImproperlyConfigured, match="postgres"):

        @app.task(shared=False, base=SQSBackoffTask, name="mail")
        def mail() -> None: ...


def _delivered(task: Any, **request: Any) -> Any:
    """As if a worker ran a message from a broker that is not SQS."""
    task.push_request(
        **{"id": "message", "called_directly": False, "is_eager": False, "retries": 0} | request
    )
    return task


def test_a_busy_lock_is_not_counted_as_a_retry(app: Celery) -> None:
    undone: list[object] = []

    @app.task(
        shared=False,
        base=SQSBackoffTask,
        name="exclusive",
        bind=True,
        max_retries=2,
        undo=lambda *_: undone.append(1),
    )
    def exclusive(self: Any) -> str:
        with self.exclusive("account:7"):
            return "done"

    task = _delivered(exclusive, retries=2)
    with task.exclusive("account:7"), pytest.raises(Retry) as retried:
        task.run()
    assert retried.value.when <= 2
    assert retried.value.sig.options["retries"] == 2
    assert undone == []
    assert task.run() == "done"


def test_a_store_that_is_away_is_a_counted_retry_and_nothing_is_undone(app: Celery) -> None:
    undone: list[object] = []

    @app.task(
        shared=False,
        base=SQSBackoffTask,
        name="steps",
        bind=True,
        max_retries=1,
        undo=lambda *_: undone.append(1),
    )
    def steps(self: Any) -> None:
        raise StoreUnavailable("away")

    with pytest.raises(Retry) as retried:
        _delivered(steps).run()
    assert retried.value.sig.options["retries"] == 1
    with pytest.raises(StoreUnavailable):
        _delivered(steps, retries=1).run()
    assert undone == []


def test_a_busy_lock_fails_an_eager_task(app: Celery) -> None:
    """No time passes there: it would be busy for ever."""

    @app.task(shared=False, base=SQSBackoffTask, name="exclusive", bind=True)
    def exclusive(self: Any) -> None:
        with self.exclusive("account:7"), self.exclusive("account:7"):
            pytest.fail("not reentrant")

    assert exclusive.apply().state == "FAILURE"
