"""A guard lets only one message with its key pass within a time, the window.

B1 to B6 are rows of tests/field-stories.md.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff import Guard, NonRetryable, Outcome, Retryable, SQSBackoffTask
from celery_sqs_backoff.safe import Busy, Refused
from celery_sqs_backoff.safe.guard import enter, finish, release
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.records import Records
from tests.support.cases import cases
from tests.support.fake_sqs import Clock

from .safe_app import make_app, store_of


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def records(clock):
    return Records(MemoryStore(clock=clock.time), secrets=["secret"])


def enter_guard(records: Records, message: str, run: str) -> Any:
    return enter(records, "mail:7", message, run, 3600)


def test_b6_one_message_passes(records):
    """If a message has passed a guard, its next runs pass too, and other messages are refused.

    The error does not name the message that has passed.
    """
    assert enter_guard(records, "A", "run 1").is_first
    assert not enter_guard(records, "A", "run 2").is_first
    with pytest.raises(Refused) as refused:
        enter_guard(records, "B", "run 3")
    assert "A" not in str(refused.value)


def test_window_ends(records, clock):
    """When the window is over, another message may pass.

    A second run of the first message does not extend the window.
    """
    enter_guard(records, "A", "run 1")
    clock.now += 3000
    enter_guard(records, "A", "run 2")
    clock.now += 700
    assert enter_guard(records, "B", "run 3").is_first


@pytest.mark.parametrize("releasing", ["first", "second"])
def test_shared_guard(records, releasing):
    """If two runs of a message have passed a guard, a failure of one does not release the guard.

    The other run may have done the work.
    """
    runs = {
        "first": enter_guard(records, "A", "run 1"),
        "second": enter_guard(records, "A", "run 2"),
    }
    assert not release(records, runs[releasing])
    with pytest.raises(Refused):
        enter_guard(records, "B", "run 3")


@pytest.mark.parametrize("result", [object(), "x" * 70_000], ids=["no JSON", "too large"])
def test_result_not_kept(records, result):
    """A message counts as done even if its result cannot be stored."""
    finish(records, enter_guard(records, "A", "run 1"), result)
    again = enter_guard(records, "A", "run 2")
    assert (again.is_done, again.has_result) == (True, False)


def test_two_runs(records):
    """If two runs of a message pass the guard, the success of one marks the message as done."""
    first = enter_guard(records, "A", "run 1")
    enter_guard(records, "A", "run 2")
    finish(records, first, "sent")
    assert enter_guard(records, "A", "run 3").is_done


# The task option ``guard``


def mail(customer: Any, template: str = "welcome") -> None: ...


@pytest.mark.parametrize(
    ("key", "args", "kwargs", "made"),
    [
        ("mail:{customer}", (7,), {}, "mail:7"),
        ("mail:{customer}:{template}", (7,), {"template": "bill"}, "mail:7:bill"),
        ("{customer[id]}", ({"id": 7},), {}, "7"),
        (lambda customer, template="": customer, (7,), {}, "7"),
    ],
)
def test_key_of_arguments(key, args, kwargs, made):
    """A guard makes its key from the task's arguments."""
    guard = Guard(key=key, window=timedelta(hours=1))
    guard.check(signature(mail))
    assert guard.key_for(signature(mail), args, kwargs) == made
    assert guard.window == 3600


@pytest.mark.parametrize("key", ["mail:{order}", "mail:{", "mail:{}", "", 7])
def test_invalid_key(key):
    """A guard refuses a key that the task's arguments cannot fill."""
    with pytest.raises(ImproperlyConfigured, match="guard"):
        Guard(key=key, window=60).check(signature(mail))


@pytest.mark.parametrize("customer", [None, ""])
def test_empty_argument(customer):
    """A guard refuses to make a key from an empty argument.

    Otherwise all mails without a customer would share one guard.
    """
    with pytest.raises((TypeError, ValueError), match="guard key"):
        Guard(key="mail:{customer}", window=60).key_for(signature(mail), (customer,), {})


@pytest.fixture
def app():
    return make_app()


def define_guarded(app: Celery, *ends: Any, **options: Any) -> tuple[Any, list[str]]:
    """Return a guarded task, and a list that gets the ID of each message that runs.

    ``ends`` has the results or exceptions of its runs, in order.
    """
    ran, left = list[str](), list(ends)

    @app.task(bind=True, guard=Guard(key="k", window=60), **options)
    def work(self: Any) -> Any:
        ran.append(self.request.id)
        end = left.pop(0) if left else "done"
        if isinstance(end, BaseException):
            raise end
        return end

    return work, ran


@cases(
    "failure is_released",
    {
        "B1 retryable": (Retryable("down"), True),
        "B2 not processed": (NonRetryable("no", not_processed=True), True),
        "B3 may have been processed": (NonRetryable("timeout"), False),
        "B4 not classified": (ValueError(), False),
    },
)
def test_b1_to_b4_failure(app, failure, is_released):
    """A failed run is undone and releases its guard only if surely nothing was processed."""
    undone = []
    work, ran = define_guarded(
        app, failure, max_retries=0, on_not_processed=lambda *_: undone.append(1)
    )
    work.apply(task_id="A")
    work.apply(task_id="B")
    assert ran == (["A", "B"] if is_released else ["A"])
    assert bool(undone) is is_released


def test_b5_shared_classifier(app):
    """Two tasks can share a classifier. It knows the errors after which a guard is released.

    The call of an error that it does not know may have been processed, so the guard stays.
    """
    means = {"421": Outcome.RETRYABLE, "550": Outcome.NOT_PROCESSED}
    passed = {}

    def classify(exc):
        return means.get(str(exc))

    for name in ("mail", "sms"):
        guard = Guard(key=f"{name}:{{code}}", window=60)

        @app.task(bind=True, name=name, guard=guard, classify=classify, max_retries=0)
        def send(self, code):
            passed[f"{self.name} {code}"] = self.request.id == "B"
            raise OSError(code)

        for message in "AB":
            for code in ("421", "550", "999"):
                send.apply((code,), task_id=message)
    codes = [(name, code) for name in ("mail", "sms") for code in ("421", "550", "999")]
    assert passed == {f"{name} {code}": code in means for name, code in codes}


def test_earlier_run_in_doubt(app):
    """If an earlier run of the message may have done the work, a failed run is not undone.

    A task with ``on_not_processed`` records its runs, even without a guard.
    """
    undone = []
    ends = [KeyboardInterrupt(), Retryable("down"), NonRetryable("no", not_processed=True)]

    @app.task(max_retries=0, on_not_processed=lambda *_: undone.append(1))
    def work():
        raise ends.pop(0)

    with pytest.raises(KeyboardInterrupt):  # like a kill, it leaves the run without an end
        work.apply(task_id="A")
    work.apply(task_id="A")
    assert undone == []
    work.apply(task_id="A")
    assert undone == [1], "with not_processed, the task vouches for all its runs"


def test_busy_lock(app):
    """A run that ended because its lock was busy has surely done nothing."""
    undone = []
    work, _ = define_guarded(
        app, Busy(), Retryable("down"), max_retries=0, on_not_processed=lambda *_: undone.append(1)
    )
    work.apply(task_id="A")
    work.apply(task_id="A")
    assert undone == [1]


def test_replace_with_other_args(app):
    """A guarded task may replace itself with other arguments.

    Celery sends a new message with the same ID, so the guard lets it pass.
    """
    pages = []

    @app.task(bind=True, guard=Guard(key="{day}", window=60))
    def report(self, day, page=1):
        pages.append(page)
        if page < 3:
            raise self.replace(self.s(day, page + 1))
        return "done"

    report.apply(("Monday",), task_id="A")
    assert pages == [1, 2, 3]


@cases(
    "ends calls",
    {
        "sent": ([], 2),
        "failed": ([Retryable("down")], 2),
        "killed": ([KeyboardInterrupt()], 1),
        "killed, then sent": ([KeyboardInterrupt(), "sent"], 1 + 3),
        "done": (["sent", "done"], 2 + 1),
    },
)
def test_cost_of_guard(app, ends, calls):
    """A guard makes at most three calls to the store per run.

    On Redis each call is one round trip.
    """
    work, _ = define_guarded(app, *ends, max_retries=0)
    for _ in ends or ["sent"]:
        with suppress(KeyboardInterrupt):  # like a kill, it leaves the run without an end
            work.apply(task_id="A")
    assert store_of(app).calls.total() == calls


def test_store_away_after_run(app):
    """If the store cannot record the end of a run, the task still succeeds."""
    work, _ = define_guarded(app)
    store_of(app).is_away = {"replace"}
    assert work.apply(task_id="A").result == "done"


def test_store_away_before_run(app):
    """A guarded task does not run while the store is away."""
    work, ran = define_guarded(app, max_retries=0)
    store_of(app).is_away = True
    assert work.apply(task_id="A").state == "FAILURE"
    assert ran == []


def test_guarded_block(app):
    """A ``guarded`` block lets all runs of one message pass.

    Another message passes only if the block did nothing for the first.
    """
    ran = []

    @app.task(bind=True)
    def remind(self, end=None):
        with self.guarded("reminder:7", window=60):
            ran.append(self.request.id)
            if end is not None:
                raise end

    remind.apply((NonRetryable("no", not_processed=True),), task_id="A")
    for message in "BBC":
        remind.apply(task_id=message)
    assert ran == ["A", "B", "B"]


@pytest.mark.parametrize("guard", ["k", Guard(key="{order}", window=60)])
def test_invalid_guard(app, guard):
    """A task is refused if its guard is no ``Guard``, or has a key of unknown arguments."""
    with pytest.raises(ImproperlyConfigured, match="guard"):
        app.task(base=SQSBackoffTask, shared=False, lazy=False, guard=guard)(mail)


def test_no_store():
    """A task with a guard is refused if its app has no store."""
    app = Celery("no store", broker="memory://", set_as_current=False)
    options = {"base": SQSBackoffTask, "shared": False, "lazy": False}
    with pytest.raises(ImproperlyConfigured, match="need a store"):
        app.task(guard=Guard(key="k", window=60), **options)(mail)
