"""A task's run in the pool process: what it raises after a failure, and when it is undone.

To undo a run is to call the task's ``on_not_processed``.
"""

import threading
import time
from contextlib import contextmanager, suppress

import pytest
from celery import Celery
from celery._state import _task_stack
from celery.exceptions import MaxRetriesExceededError, Retry, WorkerLostError

from celery_sqs_backoff import (
    Guard,
    NonRetryable,
    Outcome,
    Provider,
    Retryable,
    Schedule,
    SQSBackoffTask,
    Verdict,
)
from celery_sqs_backoff.retry.budget import GiveUpReason
from celery_sqs_backoff.retry.decision import DeadLetter, Reply
from celery_sqs_backoff.safe import Busy, StoreUnavailable
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.task.handover import RUNNING, BackoffRetry, Run

URL = "https://sqs.example/1/q"


class ProviderDown(Exception):
    pass


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Unpicklable(ProviderDown):
    def __reduce__(self):
        raise TypeError("no pickle")


@pytest.fixture
def app():
    return Celery("task", broker="memory://", backend="cache+memory://", set_as_current=False)


@pytest.fixture
def undone():
    return []


@pytest.fixture
def failing(app, undone):
    """Return a function that defines a task. The task raises its argument, and notes each undo."""

    def define(**options):
        def note_undo(task, exc, args, kwargs):
            undone.append((type(exc).__name__, args, kwargs))

        @app.task(
            base=SQSBackoffTask,
            lazy=False,
            shared=False,
            **{"on_not_processed": note_undo, "retry_on": ProviderDown, "backoff": Schedule([7])}
            | options,
        )
        def mail(failure, **kwargs):
            raise failure

        return mail

    return define


@contextmanager
def received(task, *, args=(), kwargs=None, retries=0, **facts):
    """Give the task a request, so that in this block it runs for a message from SQS."""
    now = time.time()
    delivery = Delivery(**{"message_id": "m", "queue_url": URL, "received_at": now} | facts)
    task.push_request(
        id="task-id",
        args=args,
        kwargs=kwargs or {},
        retries=retries,
        called_directly=False,
        delivery_info={"routing_key": "q"},
    )
    run = Run("task-id", delivery)
    token = RUNNING.set(run)
    _task_stack.push(task)  # as Celery's tracer does
    try:
        yield run
    finally:
        _task_stack.pop()
        RUNNING.reset(token)
        task.pop_request()


def raised_by(task, *args, **facts):
    """Run the task. Return what it raises, and its decision if it gives the message up."""
    with received(task, args=args, **facts) as run:
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            task.run(*args)
        word = None if run.report is None else run.report.ended.decision
        return caught.value, word if isinstance(word, DeadLetter) else None


def error_of(task, failure):
    """Run the task. Return what its process reports about the error."""
    with received(task, args=(failure,)) as run:
        with pytest.raises((type(failure), BackoffRetry)):
            task.run(failure)
        return run.report.error


# The outcome table


@pytest.mark.parametrize(
    ("failure", "outcome", "is_undone"),
    [
        (ProviderDown("x"), Outcome.RETRYABLE, True),
        (Retryable("x"), Outcome.RETRYABLE, True),
        (NonRetryable("x", not_processed=True), Outcome.NOT_PROCESSED, True),
        (NonRetryable("x"), Outcome.UNKNOWN, False),
        (ValueError("x"), Outcome.UNKNOWN, False),
        (Unprintable(), Outcome.UNKNOWN, False),
        (Unpicklable("x"), Outcome.RETRYABLE, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_outcome_of_failure(failing, undone, failure, outcome, is_undone):
    """The outcome of a failure decides whether the task is retried, and whether it is undone."""
    raised, give_up = raised_by(failing(), failure)
    assert undone == ([(type(failure).__name__, (failure,), {})] if is_undone else [])
    if outcome is Outcome.RETRYABLE:
        assert type(raised) is BackoffRetry
        assert raised.when == 7
        assert give_up is None
    else:
        assert raised is failure
        assert (give_up.reason, give_up.outcome) == (GiveUpReason.NOT_RETRYABLE, outcome)


class NotSent(Exception):
    """An error of a library that no rule of the task knows."""


IN_DOUBT = (lambda exc: Outcome.UNKNOWN if isinstance(exc, ProviderDown) else None,)
REFUSED = (lambda exc: Outcome.NOT_PROCESSED if isinstance(exc, ProviderDown) else None,)


@pytest.mark.parametrize(
    ("failure", "options", "reply"),
    [
        (ProviderDown(), {}, Reply.FAILED),
        (Retryable(), {}, Reply.FAILED),
        (Retryable(retry_after=5), {}, Reply.REFUSED),
        (Retryable(retry_after=0), {}, Reply.REFUSED),
        (ProviderDown(), {"classify": IN_DOUBT}, Reply.FAILED),
        (ProviderDown(), {"classify": REFUSED}, Reply.ANSWERED),
        (NonRetryable(not_processed=True), {}, Reply.ANSWERED),
        (NonRetryable(), {}, None),
        (NotSent(), {}, None),
        (
            ProviderDown(),
            {
                "retry_on": (),
                "autoretry_for": (Exception,),
                "dont_autoretry_for": (ProviderDown,),
            },
            None,
        ),
        (Busy("order:7", lease_left=1.0), {}, None),
        (ProviderDown(), {"max_retries": 0}, Reply.FAILED),
    ],
    ids=[
        "retry_on",
        "Retryable",
        "refused for a while",
        "refused for now",
        "in doubt",
        "refused",
        "NonRetryable, safe to undo",
        "NonRetryable",
        "not sent",
        "not for autoretry",
        "busy lock",
        "last retry",
    ],
)
def test_reply_of_failure(failing, failure, options, reply):
    """A run reports what its failure says about the provider, if a rule of the task knows it.

    If the provider failed too often, the worker stops calling it for a while.
    """
    task = failing(**options)
    with received(task, args=(failure,)) as run:
        with suppress(BaseException):
            task.run(failure)
        assert run.report.ended.reply is reply


@pytest.mark.parametrize(
    ("cause", "reply"), [(ProviderDown(), Reply.FAILED), (NotSent(), None), (None, None)], ids=repr
)
def test_reply_of_retry(app, cause, reply):
    """A ``self.retry(countdown=5)`` without an error says nothing about the provider.

    A task may poll a provider in this way although the provider is up.
    """

    @app.task(base=SQSBackoffTask, bind=True, lazy=False, shared=False, retry_on=ProviderDown)
    def poll(self):
        raise self.retry(exc=cause, countdown=5)

    with received(poll) as run:
        with suppress(BaseException):
            poll.run()
        assert run.report.ended.reply is reply


SAFE_TO_REPEAT = Verdict(Outcome.UNKNOWN, 30, safe_to_repeat=True)


@pytest.mark.parametrize(
    ("options", "failure", "when"),
    [
        ({}, Retryable("busy", retry_after=100), 107),
        ({"classify": lambda exc: Verdict(Outcome.RETRYABLE, 30)}, ValueError("throttled"), 37),
        ({"classify": lambda exc: SAFE_TO_REPEAT}, ValueError("timed out"), 37),
        ({"classify": lambda exc: SAFE_TO_REPEAT, "max_retries": 0}, ValueError("late"), None),
    ],
    ids=["Retryable", "verdict", "safe to repeat", "its last retry"],
)
def test_retry_after(failing, undone, options, failure, when):
    """``retry_after`` is the least delay of a retry, and jitter is added to it.

    A failure with ``safe_to_repeat`` is retried and not undone. If no retry is left, the message is
    given up with the outcome UNKNOWN.
    """
    raised, give_up = raised_by(failing(**options), failure)
    if when is None:
        assert (give_up.reason, give_up.outcome) == (GiveUpReason.MAX_RETRIES, Outcome.UNKNOWN)
    else:
        assert (raised.when, give_up) == (when, None)
    assert bool(undone) is ("classify" not in options or failure.args == ("throttled",))


@pytest.mark.parametrize(
    ("earlier", "later", "outcome"),
    [
        ("in doubt", ProviderDown("x"), Outcome.UNKNOWN),
        ("in doubt, by hand", ProviderDown("x"), Outcome.UNKNOWN),
        ("lost", ProviderDown("x"), Outcome.UNKNOWN),
        ("in doubt", PermissionError("the key was revoked"), Outcome.UNKNOWN),
        ("lost", PermissionError("the key was revoked"), Outcome.UNKNOWN),
        # With not_processed, the task vouches for all its runs, because it may have looked.
        ("in doubt", NonRetryable("declined", not_processed=True), Outcome.NOT_PROCESSED),
        ("down", PermissionError("the key was revoked"), Outcome.NOT_PROCESSED),
        ("busy", ProviderDown("x"), Outcome.RETRYABLE),
        ("down", ProviderDown("x"), Outcome.RETRYABLE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_earlier_run_in_doubt(app, undone, earlier, later, outcome):
    """If an earlier run of the message may have done the work, a failed run is not undone.

    An outage may begin with a lost answer, and go on with refused connections.
    """
    app.conf.sqs_backoff = {"store": MemoryStore()}
    failures = {"busy": Busy("held"), "down": ProviderDown("x")}

    def in_doubt(exc):
        if isinstance(exc, PermissionError):
            return Outcome.NOT_PROCESSED
        is_timeout = isinstance(exc, TimeoutError)
        return Verdict(Outcome.UNKNOWN, safe_to_repeat=True) if is_timeout else None

    @app.task(
        base=SQSBackoffTask,
        bind=True,
        lazy=False,
        shared=False,
        retry_on=ProviderDown,
        classify=in_doubt,
        max_retries=1,
        on_not_processed=lambda task, exc, args, kwargs: undone.append(type(exc).__name__),
    )
    def charge(self, failure, by_hand):
        if by_hand:
            raise self.retry(exc=failure)
        raise failure

    if earlier == "lost":
        raised_by(charge, KeyboardInterrupt(), False)  # like a kill, it leaves a run without an end
    else:
        raised_by(charge, failures.get(earlier, TimeoutError()), earlier.endswith("by hand"))
    undone.clear()
    _, give_up = raised_by(charge, later, False, retries=2)
    assert give_up.outcome is outcome
    assert undone == ([] if outcome is Outcome.UNKNOWN else [type(later).__name__])
    undone.clear()
    raised_by(charge, later, False, message_id="redriven")
    assert undone == ([] if outcome is Outcome.UNKNOWN else [type(later).__name__])


@pytest.mark.parametrize("is_lost", [True, False])
def test_second_delivery_acted(app, undone, is_lost):
    """If SQS delivers a message twice and the second run may have done the work, nothing is undone.

    The second run has ended, or was killed, before the first run fails.
    """
    app.conf.sqs_backoff = {"store": MemoryStore()}

    @app.task(
        base=SQSBackoffTask,
        lazy=False,
        shared=False,
        retry_on=ProviderDown,
        max_retries=0,
        guard=Guard(key="mail", window=3600),
        on_not_processed=lambda *each: undone.append(each),
    )
    def mail():
        if threading.current_thread() is not threading.main_thread():
            if is_lost:
                raise KeyboardInterrupt  # like a kill, it leaves the run without an end
            return
        other = threading.Thread(target=deliver_again)
        other.start()
        other.join()
        raise ProviderDown("x")

    def deliver_again():
        with received(mail), suppress(KeyboardInterrupt):
            mail.run()

    _, give_up = raised_by(mail)
    assert undone == []
    assert give_up.outcome is Outcome.UNKNOWN


def test_undo_without_store(app, failing, undone, monkeypatch):
    """If the store is away, a failed run is not undone.

    The store may know of an earlier run that has done the work.
    """
    store = MemoryStore()
    app.conf.sqs_backoff = {"store": store}
    mail = failing(max_retries=1)

    def away(*_):
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "delete", away)
    raised_by(mail, ProviderDown("x"), retries=1)
    assert undone == []


def test_undo_fails(failing, caplog):
    """If ``on_not_processed`` raises, the log has the type and place of the error, but no text."""

    def broken(task, exc, args, kwargs):
        raise RuntimeError("card 4222")

    failure = ProviderDown("card 4111, password=hunter2")
    raised, _ = raised_by(failing(on_not_processed=broken), failure)
    assert type(raised) is BackoffRetry, "the task is still retried"
    assert "sqs_backoff.on_not_processed_failed" in caplog.text
    assert "builtins.RuntimeError at " in caplog.text
    assert " in broken" in caplog.text
    assert not [text for text in ("4111", "4222", "hunter2") if text in caplog.text]


def test_error_text_masked(failing):
    """Credentials in an error are masked before its text leaves the process of the run."""
    error = error_of(failing(), ValueError("mail 7: password=hunter2"))
    assert error.exception_message == "mail 7: password=***"
    assert "password=***" in error.traceback
    assert "hunter2" not in error.traceback


def test_error_of_retry(failing):
    """If the task is retried, its error's text does not leave the process.

    Only a dead letter needs the text, and it takes 0.6 ms to format and mask it.
    """
    error = error_of(failing(), ProviderDown("password=hunter2"))
    assert (error.exception_message, error.traceback) == (None, None)


@pytest.mark.hazard("H24")
@pytest.mark.parametrize("code", [0, 1, None])
def test_sys_exit(failing, code):
    """If a task calls ``sys.exit()``, it fails with WorkerLostError and the outcome UNKNOWN.

    Otherwise the call would end the worker.
    """
    raised, give_up = raised_by(failing(), SystemExit(code))
    assert type(raised) is WorkerLostError
    assert give_up.outcome is Outcome.UNKNOWN


def test_sys_exit_other_broker(failing):
    """If the broker is not SQS, ``sys.exit()`` in a task ends the process, as in stock Celery."""
    task = failing()
    task.push_request(id="1", called_directly=False)
    try:
        with pytest.raises(SystemExit):
            task.run(SystemExit(1))
    finally:
        task.pop_request()


def test_kinds_of_task(app):
    """A task may be bound, unbound or a class with any kind of ``run`` method: it is retried."""
    options = {"base": SQSBackoffTask, "retry_on": ProviderDown, "lazy": False, "shared": False}

    @app.task(bind=True, name="bound", **options)
    def bound(self):
        raise ProviderDown

    @app.task(name="unbound", **options)
    def unbound():
        raise ProviderDown

    class Based(SQSBackoffTask):
        name = "based"
        retry_on = ProviderDown

        def run(self):
            raise ProviderDown

    class Static(SQSBackoffTask):
        name = "static"
        retry_on = ProviderDown

        @staticmethod
        def run():
            raise ProviderDown

    class OfClass(SQSBackoffTask):
        name = "of class"
        retry_on = ProviderDown
        provider = Provider("mail", key="customer")

        @classmethod
        def run(cls, customer="c-1"):
            raise ProviderDown

    app.register_task(Based())
    app.register_task(Static())
    app.register_task(OfClass())
    app.finalize()
    for name in ("bound", "unbound", "based", "static", "of class"):
        raised, _ = raised_by(app.tasks[name])
        assert type(raised) is BackoffRetry, name


def test_call_of_inherited_run(app):
    """A task may call the ``run`` of a task that it inherits from, and a retry in it works."""
    seen = []

    class First(SQSBackoffTask):
        name = "first"

        def run(self):
            seen.append(self.request.id)
            raise self.retry(exc=KeyError("x"), countdown=7)

    class Second(First):
        name = "second"

        def run(self):
            return super().run()

    app.register_task(First())
    task = app.register_task(Second())
    with received(task) as run, pytest.raises(BackoffRetry):
        task()
    assert run.report.ended.decision.seconds == 7
    assert seen == ["task-id"]


def test_inherited_class_method(app):
    """If ``run`` is an inherited class method, its ``cls`` is the class of the inheriting task."""

    class First(SQSBackoffTask):
        name = "first"

        @classmethod
        def run(cls):
            return cls.name

    class Second(First):
        name = "second"

    assert [app.register_task(task())() for task in (First, Second)] == ["first", "second"]


# self.retry()


def retry(task, **options):
    """Call ``self.retry()`` for a message with arguments. Return what it raises, and the run."""
    facts = options.pop("facts", {})
    with received(task, args=("a",), kwargs={"k": 1}, **facts) as request:
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            task.retry(**options)
        return caught.value, request


@pytest.fixture
def published(monkeypatch):
    """Keep Celery from publishing messages, and return the list of their signatures."""
    found = []
    monkeypatch.setattr(
        "celery.canvas.Signature.apply_async", lambda self, *a, **k: found.append(self)
    )
    return found


@pytest.mark.parametrize(
    ("options", "delay"),
    [
        ({}, 7),
        ({"countdown": 3}, 3),
        ({"countdown": 0}, 1),
        ({"countdown": 2.2}, 3),
        ({"args": ["a"], "kwargs": {"k": 1}, "countdown": 3}, 3),
        ({"queue": "q", "countdown": 3}, 3),
    ],
)
def test_unchanged_retry(failing, published, options, delay):
    """If ``self.retry()`` changes nothing, the message is kept and no copy is published."""
    raised, run = retry(failing(), **options)
    assert type(raised) is BackoffRetry
    assert run.asked.is_named is ("countdown" in options)
    assert raised.when == delay
    assert published == []


@pytest.mark.parametrize(
    "options",
    [
        {"args": ["b"]},
        {"kwargs": {"k": 2}},
        {"queue": "other"},
        {"priority": 9},
        {"countdown": 13 * 3600},
    ],
)
def test_changed_retry(failing, published, options):
    """If ``self.retry()`` changes the message, it publishes a changed copy, as in stock Celery."""
    raised, _ = retry(failing(), **options)
    assert type(raised) is Retry
    assert len(published) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"), [((["a"],), {}), ((), {"page": 1})], ids=["a list", "its own kwargs"]
)
def test_mutated_arguments(failing, published, args, kwargs):
    """If a run changes its arguments in place and passes them to ``retry``, a copy is published.

    The kept message would still have the old arguments.
    """
    task = failing()
    with received(task, args=args, kwargs=kwargs):
        if kwargs:
            task.request.kwargs["page"] += 1
        given = {"kwargs": task.request.kwargs} if kwargs else {"args": [*args]}
        with pytest.raises(Retry):
            task.retry(countdown=1, **given)
    assert [(copy.args, copy.kwargs) for copy in published] == [
        (args, {"page": 2} if kwargs else {})
    ]


def test_throw_false(failing, published):
    """``self.retry(throw=False)`` publishes a copy and returns, so that the run goes on."""
    task = failing()
    with received(task):
        assert type(task.retry(throw=False, countdown=1)) is Retry
    assert len(published) == 1


def test_last_retry(failing):
    """If no retry is left, ``self.retry(exc=error)`` raises the error.

    Without an error it raises MaxRetriesExceededError, as in stock Celery.
    """
    failure, task = ProviderDown("x"), failing(max_retries=1)
    assert retry(task, exc=failure, facts={"retries": 1})[0] is failure
    raised, _ = retry(task, facts={"retries": 1})
    assert type(raised) is MaxRetriesExceededError
    assert (raised.task_args, raised.task_kwargs) == (("a",), {"k": 1})


class Refused(Exception):
    """An exception that cannot be made without arguments, like botocore's ``ClientError``."""

    def __init__(self, code):
        super().__init__(code)


@pytest.mark.parametrize("args", [None, ["b"]], ids=["kept", "copy"])
def test_exception_class_with_args(failing, published, args):
    """``self.retry(exc=Class)`` works even if the class cannot be called without arguments.

    If no retry is left, it raises TypeError, as in stock Celery.
    """
    task = failing()
    raised, _ = retry(task, args=args, exc=Refused)
    assert isinstance(raised, Retry)
    raised, _ = retry(task, args=args, exc=Refused, max_retries=0)
    assert type(raised) is TypeError


class Boom(Exception):
    """An error that a task passes to ``self.retry()``."""


#: Ways to call ``self.retry(max_retries=0)``, which means "fail now" (Celery's #6436).
FAIL_NOW = {
    "class": lambda task: task.retry(exc=Boom, max_retries=0),
    "instance": lambda task: task.retry(exc=Boom("no"), max_retries=0),
    "changed arguments": lambda task: task.retry(args=["b"], exc=Boom("no"), max_retries=0),
    "no exception": lambda task: task.retry(max_retries=0),
}


@pytest.fixture(params=FAIL_NOW)
def failing_now(request, app):
    @app.task(base=SQSBackoffTask, bind=True, shared=False, lazy=False, retry_on=(Exception,))
    def mail(self):
        FAIL_NOW[request.param](self)

    return mail


def test_fail_now(failing_now, published):
    """On SQS, ``self.retry(max_retries=0)`` gives the message up."""
    raised, word = raised_by(failing_now)
    assert type(raised) in (Boom, MaxRetriesExceededError)
    assert word.reason is GiveUpReason.MAX_RETRIES
    assert published == []


def test_fail_now_other_broker(failing_now, published):
    """If the broker is not SQS, ``self.retry(max_retries=0)`` raises and publishes no copy."""
    failing_now.push_request(id="i", args=(), kwargs={}, called_directly=False, delivery_info={})
    try:
        with pytest.raises((Boom, MaxRetriesExceededError)):
            failing_now.run()
    finally:
        failing_now.pop_request()
    assert published == []


# Calls as a function, eager tasks and other brokers


@pytest.mark.hazard("H23")
def test_called_as_function(failing, undone):
    """A task that is called as a function raises its own error and is not undone."""
    failure = ProviderDown("x")
    with pytest.raises(ProviderDown) as caught:
        failing()(failure)
    assert caught.value is failure
    assert undone == []


@pytest.mark.hazard("H23")
def test_eager_task(failing, undone):
    """An eager task without ``max_retries`` fails with its own error and is undone, not retried."""
    result = failing().apply((ProviderDown("x"),))
    assert result.state == "FAILURE"
    assert isinstance(result.result, ProviderDown)
    assert len(undone) == 1


@pytest.mark.hazard("H23")
@pytest.mark.parametrize("propagates", [False, True])
def test_eager_max_retries(app, propagates):
    """An eager task with ``max_retries`` is retried at once, as in stock Celery."""
    app.conf.update(task_always_eager=True, task_eager_propagates=propagates)
    runs = []

    @app.task(base=SQSBackoffTask, bind=True, shared=False, retry_on=ProviderDown, max_retries=2)
    def mail(self):
        runs.append(self.request.retries)
        raise ProviderDown("x")

    if propagates:  # the exception Retry is raised, as in stock Celery
        with pytest.raises(Retry):
            mail.delay()
        assert runs == [0]
    else:
        assert mail.delay().state == "FAILURE"
        assert runs == [0, 1, 2]


@pytest.mark.hazard("H23")
def test_retry_on_other_broker(failing, published):
    """If the broker is not SQS, a failed task raises Celery's own Retry, with our delay."""
    task = failing()
    task.push_request(id="i", args=(), kwargs={}, called_directly=False, delivery_info={})
    try:
        with pytest.raises(Retry) as caught:
            task.run(ProviderDown("x"))
    finally:
        task.pop_request()
    assert type(caught.value) is Retry
    assert caught.value.when == 7
    assert "sqs_backoff_first_failed_at" in caught.value.sig.options["headers"]
