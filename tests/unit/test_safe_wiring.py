"""How ``SQSBackoffTask`` ends a run: refused by a guard, undone, retried, or without a store.

To undo a run is to call the task's ``on_not_processed`` and to release its guard.
"""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import celery.app.task as celery_task
import pytest
from celery import Celery, chain, chord
from celery.contrib.testing.worker import start_worker
from celery.exceptions import MaxRetriesExceededError, Retry
from kombu.transport.memory import Transport

from celery_sqs_backoff import (
    Guard,
    NonRetryable,
    Outcome,
    Retryable,
)
from celery_sqs_backoff.safe import (
    AlreadyDone,
    Compensated,
    LockLost,
    Refused,
    StepNotRecorded,
    StoreUnavailable,
)
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.task.upstream import store_refusal

from .safe_app import bare_app

GUARD = Guard(key="mail:{customer}", window=3600)


@pytest.fixture
def app(monkeypatch):
    drain = Transport.drain_events  # a worker stops only when this returns, so let it be quick
    monkeypatch.setattr(
        Transport, "drain_events", lambda self, connection, timeout: drain(self, connection, 0.05)
    )
    app = bare_app("wiring")
    app.conf.sqs_backoff = {"store": MemoryStore()}
    app.conf.broker_transport_options = {"polling_interval": 0.01}
    yield app
    app.close()


def test_refused_message(app, caplog):
    """If a guard refuses a message, its task is ignored, and its result has the reason."""
    runs = []

    @app.task(name="mail", guard=GUARD)
    def mail(customer):
        runs.append(customer)
        return "sent"

    assert mail.apply((7,), task_id="first").get() == "sent"
    assert mail.apply((7,), task_id="first").get() == "sent"
    assert runs == [7], "the second run of the same message gets the stored result"
    with caplog.at_level(logging.INFO):
        refused = mail.apply((7,), task_id="second")
    assert "sqs_backoff.refused: mail[second]" in caplog.text
    assert refused.state == "IGNORED"
    assert "another message" in refused.result.args[0]["refused"]
    assert mail(7) == "sent", "a direct call is not guarded"


def test_refused_in_chain(app):
    """If a guard refuses a message of a chain, the chain ends, and the result is the reason."""
    app.conf.result_backend = "cache+memory://"
    marked = []

    @app.task(name="mail", guard=GUARD)
    def mail(customer):
        return "sent"

    @app.task(name="mark")
    def mark(result):
        marked.append(result)

    with start_worker(app, pool="solo", perform_ping_check=False):
        chain(mail.si(7), mark.s()).delay().get(timeout=10)
        refused = chain(mail.si(7), mark.s()).delay()
        assert "another message" in refused.parent.get(timeout=10)["refused"]
    assert marked == ["sent"]


@pytest.mark.parametrize("how", ["a member", "one without result"])
def test_refused_in_chord(app, how):
    """If a guard refuses a member of a chord, the chord counts the member as ended."""
    app.conf.result_backend = "cache+memory://"
    counted = []

    @app.task(name="mail", guard=GUARD, ignore_result=how == "one without result")
    def mail(customer):
        return "sent"

    @app.task(name="mark")
    def mark(*results):
        return 1

    @app.task(name="count")
    def count(results):
        counted.append(len(results))

    mail.apply((7,))
    if how == "one without result":  # the chord's task could not read this member's result
        parts = []
        app.backend.on_chord_part_return = lambda request, *_, **__: parts.append(request.id)
        request = SimpleNamespace(
            id="a", chord={"task": "count"}, chain=None, ignore_result=True, is_eager=False
        )
        mail.push_request(**vars(request))
        store_refusal(mail, {"refused": "another message has passed"})
        assert parts == ["a"]
        return
    with start_worker(app, pool="solo", perform_ping_check=False):
        chord([mail.si(7), mark.si()], count.s()).delay().get(timeout=10)
    assert counted == [2]


@pytest.mark.skipif(
    not hasattr(celery_task, "get_actual_ignore_result"), reason="Celery 5.7 heeds the call"
)
@pytest.mark.parametrize("asked_for", [True, False])
def test_result_of_refused_message(app, asked_for):
    """``ignore_result`` of a call decides whether the reason for a refusal is stored."""
    app.conf.result_backend = "cache+memory://"

    @app.task(name="mail", guard=GUARD, ignore_result=asked_for)
    def mail(customer):
        return "sent"

    mail.apply((7,))
    with start_worker(app, pool="solo", perform_ping_check=False):
        refused = mail.apply_async((7,), ignore_result=not asked_for)
        mark = mail.apply_async((8,), ignore_result=False)
        assert mark.get(timeout=10) == "sent"
    meta = app.backend.get_task_meta(refused.id)
    assert bool(meta["result"]) is asked_for


@pytest.mark.parametrize("waiting", ["chain", "callbacks", "chord"])
def test_done_without_result(app, waiting):
    """If a message is done but its result was not stored, a rerun fails if another task needs it.

    The worker may have been killed after the first run, before it sent the other task.
    """

    @app.task(name="mail", guard=GUARD, retry_on=(Exception,))
    def mail(customer):
        return "x" * 100_000

    mail.apply((7,), task_id="a")
    mail.push_request(
        id="a",
        called_directly=False,
        is_eager=False,
        retries=0,
        args=(7,),
        kwargs={},
        **{waiting: [dict(mail.s(7))]},
    )
    with pytest.raises(AlreadyDone, match="its result was not kept"):
        mail.run(7)


def test_mutated_arguments(app):
    """If a run changes its arguments in place, the key of its guard stays the same."""
    guard = Guard(key="mail:{payload[customer]}", window=3600)

    @app.task(name="mail", guard=guard)
    def mail(payload):
        customer = payload.pop("customer")
        if failures:
            raise failures.pop()
        return f"sent {customer}"

    failures = [NonRetryable("bad address", not_processed=True)]
    assert mail.apply(({"customer": 3},), task_id="first").state == "FAILURE"
    assert mail.apply(({"customer": 3},), task_id="second").get() == "sent 3"


@pytest.mark.parametrize(
    "error",
    [
        StepNotRecorded("done"),
        LockLost("late"),
        Refused({"refused": "nested"}),
        Compensated("over"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_own_errors(app, error):
    """Our own errors are neither retried nor undone, whatever the task's options say.

    Many tasks have ``autoretry_for=(Exception,)``, which would match our errors too.
    """
    undone = []
    runs = []

    @app.task(
        name="mail",
        max_retries=3,
        autoretry_for=(Exception,),
        retry_backoff=0,
        classify=lambda exc: Outcome.RETRYABLE,
        on_not_processed=lambda *_: undone.append(1),
    )
    def mail():
        runs.append(1)
        raise error

    mail.apply()
    assert (len(runs), undone) == (1, [])


def define_publishing(
    app: Celery, monkeypatch: pytest.MonkeyPatch, run: Any, *, publish: Any = lambda: None
) -> tuple[Any, list[Any]]:
    """Make a task with a guard and ``on_not_processed``, and list what happens in its runs.

    A copy is the message that ``retry(args=...)`` publishes. ``publish`` is called for each.
    """
    happened: list[Any] = []

    def undo(_: Any, exc: Exception, args: Any, kwargs: Any) -> None:
        happened.append(("undo", Retry if isinstance(exc, Retry) else type(exc), args, kwargs))

    @app.task(bind=True, name="mail", guard=GUARD, on_not_processed=undo)
    def mail(self: Any, customer: int, page: int) -> object:
        return run(self, customer, page)

    def published(self: Any, args: Any, kwargs: Any, **options: Any) -> None:
        happened.append(("copy", args, options["retries"]))
        publish()

    monkeypatch.setattr(type(mail), "apply_async", published)
    return mail, happened


@pytest.mark.parametrize(
    ("how", "error"),
    [("given", Retryable), ("caught", Retryable), ("bare", Retry), ("given", TimeoutError)],
    ids=["given", "caught", "bare", "in doubt"],
)
def test_undo_with_copy(app, monkeypatch, how, error):
    """If a run surely did nothing and calls ``retry(args=...)``, it is undone.

    ``retry(args=...)`` publishes a copy of the message with other arguments.
    """

    def run(self, customer, page):
        if self.request.id == "another":
            return
        if how == "bare":
            self.retry(args=(customer, page + 1), countdown=0)
        try:
            raise error("down")
        except (Retryable, TimeoutError) as exc:
            self.retry(args=(customer, page + 1), exc=exc if how == "given" else None)

    mail, happened = define_publishing(app, monkeypatch, run)
    with pytest.raises(Retry):
        with_request(mail, args=(7, 1), kwargs={}).run(7, 1)
    mail.pop_request()
    undone = [] if error is TimeoutError else [("undo", error, (7, 1), {})]
    assert happened == [("copy", (7, 2), 1), *undone]
    is_refused = mail.apply((7, 1), task_id="another").state == "IGNORED"
    assert is_refused is (error is TimeoutError)


def test_undo_after_blocks(app, monkeypatch):
    """A run is undone only after the task has left its ``with`` blocks.

    Inside a transaction of the task, all that ``on_not_processed`` writes would be rolled back.
    """

    def run(self, customer, page):
        with contextlib.ExitStack() as transaction:
            transaction.callback(happened.append, ("rollback",))
            self.retry(args=(customer, page + 1))

    mail, happened = define_publishing(app, monkeypatch, run)
    with pytest.raises(Retry):
        with_request(mail, args=(7, 1), kwargs={}).run(7, 1)
    mail.pop_request()
    assert [what for what, *_ in happened] == ["copy", "rollback", "undo"]


@pytest.mark.parametrize("end", ["returned", "failed", "caught"])
def test_run_continues_beside_copy(app, monkeypatch, end):
    """If a run goes on after it has published a copy of its message, it is not undone.

    It goes on after ``retry(throw=False)``, or if it catches the exception of ``retry()``.
    """

    def run(self, customer, page):
        if self.request.retries:
            return "done"
        try:
            self.retry(args=(customer, page + 1), throw=end == "caught")
        except Retry:
            return "caught"
        if end == "failed":
            raise Retryable("down")
        return "returned"

    mail, happened = define_publishing(app, monkeypatch, run)
    task = with_request(mail, args=(7, 1), kwargs={})
    with contextlib.suppress(Retry, Retryable):
        task.run(7, 1)
    task.pop_request()
    assert happened[0] == ("copy", (7, 2), 1)
    assert [what for what, *_ in happened[1:]] == (["copy"] if end == "failed" else [])
    assert mail.apply((7, 1), task_id="message", retries=1).get() == "done"


class ProviderDown(Exception):
    """An error after which the task is retried, because nothing was done."""


class ChargeTimedOut(ProviderDown):
    """An error that cannot be unpickled, as in many libraries.

    Celery replaces it by an error of its parent class.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)


@pytest.mark.parametrize("how", ["option", "block"])
def test_verdict_of_retry(app, how):
    """If a task calls ``retry(exc=error)``, this error decides whether the run is undone.

    Celery may replace it by an error of its parent class. Here that would say that nothing was
    done, although the charge may have been made.
    """
    charged = []

    @app.task(
        bind=True,
        name="charge",
        guard=GUARD if how == "option" else None,
        retry_on=(ProviderDown,),
        classify=lambda exc: Outcome.UNKNOWN if isinstance(exc, ChargeTimedOut) else None,
    )
    def charge(self, customer):
        with contextlib.nullcontext() if how == "option" else self.guarded(customer, window=60):
            charged.append(customer)
            self.retry(exc=ChargeTimedOut("no answer", 408))

    with pytest.raises(Retry):
        with_request(charge, args=(7,), kwargs={}).run(7)
    charge.pop_request()
    charge.apply((7,), task_id="another message")
    assert charged == [7]


@pytest.mark.parametrize("max_retries", [1, 0], ids=["one left", "none left"])
@pytest.mark.parametrize("caught", [False, True], ids=["given", "caught"])
@pytest.mark.parametrize(("cause", "is_undone"), [(TimeoutError(), 0), (Retryable("down"), 1)])
def test_last_retry_by_hand(app, cause, is_undone, caught, max_retries):
    """If a task calls ``retry()`` and no retry is left, the cause still decides about the undo.

    ``MaxRetriesExceededError`` does not prove that a charge that timed out was not made.
    """
    undone = []
    charged = []

    @app.task(bind=True, name="charge", guard=GUARD, on_not_processed=lambda *_: undone.append(1))
    def charge(self, customer):
        charged.append(self.request.id)
        try:
            raise cause
        except (TimeoutError, Retryable) as exc:
            self.retry(exc=None if caught else exc, max_retries=max_retries)

    task = with_request(charge, args=(7,), kwargs={})
    with pytest.raises((Retry, MaxRetriesExceededError, TimeoutError, Retryable)):
        task.run(7)
    task.pop_request()
    assert len(undone) == is_undone
    charge.apply((7,), task_id="another message")
    assert ("another message" in charged) is bool(is_undone)


@pytest.mark.parametrize("how", ["option", "block"])
def test_guard_after_step(app, how):
    """If a step inside a guard is done, a later failure does not release the guard.

    The first message has sent its mail, so the second message must not send another.
    """
    sent = []

    def work(self):
        self.step("mail", sent.append, "mail")
        raise Retryable("the next call was refused")

    @app.task(bind=True, name="mail", guard=GUARD if how == "option" else None)
    def mail(self, customer):
        if how == "option":
            work(self)
        with self.guarded("mail:7", window=3600):
            work(self)

    for message in ("first", "second"):
        mail.apply((7,), task_id=message)
    assert sent == ["mail"]


def test_step_before_block(app):
    """If a call in a ``guarded`` block is refused, the block is released.

    A step that was done before the block does not matter.
    """
    asked = []

    @app.task(bind=True, name="mail")
    def mail(self):
        self.step("account", list)
        with self.guarded("mail:7", window=3600):
            asked.append(self.request.id)
            raise Retryable("refused")

    for message in ("first", "second"):
        mail.apply(task_id=message)
    assert asked == ["first", "second"]


def with_request(task: Any, **request: Any) -> Any:
    """Give the task a request, as a worker does for a message of a broker that is not SQS."""
    task.push_request(
        **{"id": "message", "called_directly": False, "is_eager": False, "retries": 0} | request
    )
    return task


def test_store_away(app):
    """If the store is away, the task is retried, which counts as a retry. Nothing is undone."""
    undone = []

    @app.task(name="steps", bind=True, max_retries=1, on_not_processed=lambda *_: undone.append(1))
    def steps(self):
        raise StoreUnavailable("away")

    with pytest.raises(Retry) as retried:
        with_request(steps).run()
    assert retried.value.sig.options["retries"] == 1
    with pytest.raises(StoreUnavailable):
        with_request(steps, retries=1).run()
    assert undone == []
