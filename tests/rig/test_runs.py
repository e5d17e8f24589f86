"""What a task sees of its request, and what hooks and ``__call__`` of a task may do."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import celery
import pytest
from celery.exceptions import MaxRetriesExceededError, Retry, SoftTimeLimitExceeded

from celery_sqs_backoff import Retryable, Schedule, SQSBackoffTask
from celery_sqs_backoff.task.handover import DELIVERY_KEY

from .bodies import raises, returns

# Celery warns of each failure outside of a task's body. These tests make such failures.
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")

DOWN = Retryable("down")


class Away(Exception):
    """A database that does not work."""


def test_request_is_celerys(rig):
    """``self.request`` does not show what the worker has added to the request for its own use."""
    seen = {}

    def body(self):
        seen.update(vars(self.request))

    rig.task(body)
    rig.send()
    rig.run()
    assert not [name for name in seen if name.startswith("sqs_delivery") or name == DELIVERY_KEY]
    assert seen["headers"] is None
    assert json.loads(json.dumps(seen["properties"])) == seen["properties"]


def test_forged_delivery(rig):
    """The worker ignores a message header that pretends to be its own addition to the request."""
    rig.task(raises(DOWN), backoff=Schedule([7]))
    message = rig.send()
    message.forge(**{DELIVERY_KEY: {"message_id": "m", "queue_url": "u"}})
    rig.run()
    assert (message.fate, message.delay) == ("hidden", 7)


def test_called_as_function(rig):
    """A task that another task calls as a function does not decide about the message."""

    class Calls(SQSBackoffTask):
        abstract = True

        def before_start(self, *args):
            self.app.tasks["other"]()

        on_failure = before_start

    def body(self):
        self.app.tasks["other"]()
        raise ValueError("bad")

    rig.task(returns, name="other")
    rig.task(body, base=Calls)
    message = rig.send()
    rig.run()
    assert message.record.outcome == "UNKNOWN"


# Before the run


@pytest.mark.parametrize(
    ("option", "header", "seen"),
    [
        ({}, {}, "STARTED"),
        ({"track_started": False}, {}, "PENDING"),
        pytest.param(
            *({}, {"ignore_result": True}, "PENDING"),
            marks=pytest.mark.skipif(celery.VERSION < (5, 7), reason="new in Celery 5.7"),
        ),
        # A message from another language or an old Celery may not have this header.
        ({"ignore_result": True}, {"ignore_result": None}, "PENDING"),
    ],
    ids=["tracked", "not tracked", "message ignores results", "task ignores results"],
)
def test_started(rig, option, header, seen):
    """A task with ``track_started`` has the state STARTED while it runs, if it stores results."""
    states = []

    def body(self):
        states.append(self.AsyncResult(self.request.id).state)

    rig.task(body, **{"track_started": True} | option)
    rig.send().forge(**header)
    rig.run()
    assert states == [seen]


@pytest.mark.parametrize("tracks", [True, False])
def test_started_is_inherited(rig, tracks):
    """A task inherits ``track_started`` from its base class, and may turn it off."""
    states = []

    def body(self):
        states.append(self.AsyncResult(self.request.id).state)

    parent = type(rig.task(returns, name="parent", track_started=True))
    rig.task(body, base=parent, **({} if tracks else {"track_started": False}))
    rig.send()
    rig.run()
    assert states == ["STARTED" if tracks else "PENDING"]


def test_start_not_stored(rig, caplog):
    """A task with ``track_started`` runs even if the result backend is away."""
    ran = []
    rig.task(lambda self: ran.append(1), track_started=True)
    message = rig.send()
    rig.fail_results()
    rig.run()
    assert (message.fate, ran) == ("deleted", [1])
    assert "start_not_stored" in caplog.text


def test_soft_limit_while_storing_start(rig):
    """If a soft time limit comes while STARTED is stored, the task does not run and is retried."""
    ran = []
    rig.task(lambda self: ran.append(1), track_started=True, backoff=Schedule([7]))
    message = rig.send()
    rig.fail_results(lambda state, nth: state == "STARTED" and SoftTimeLimitExceeded(1))
    rig.run()
    assert (message.fate, message.delay, ran) == ("hidden", 7, [])


@pytest.mark.parametrize("can_ask", [True, False], ids=["stored", "backend away"])
def test_deduplicated(rig, monkeypatch, can_ask):
    """With ``worker_deduplicate_successful_tasks``, a task that has succeeded does not run again.

    If the result backend is away, the worker cannot know whether the task has succeeded. Then the
    message comes back.
    """
    ran = []
    rig.app.conf.worker_deduplicate_successful_tasks = True
    monkeypatch.setattr("celery.app.trace.successful_requests", set())
    rig.task(lambda self: ran.append(1), track_started=True, backoff=Schedule([7]))
    message = rig.send()
    rig.begin().lose()
    rig.pass_time(1)
    rig.app.backend.store_result(message.task_id, None, "SUCCESS")
    seen = rig.fail_results(lambda state, nth: not can_ask)
    if not can_ask:
        monkeypatch.setattr(type(rig.app.backend), "_get_task_meta_for", raises(Away()))
    rig.run()
    assert (message.fate, ran) == ("deleted" if can_ask else "hidden", [])
    assert seen == ([] if can_ask else ["FAILURE"])


@pytest.mark.parametrize(
    ("exc", "end"), [(Away(), "not begun, retryable"), (GeneratorExit(), "aborted, unknown")]
)
def test_celery_fails_to_begin(rig, monkeypatch, exc, end, caplog):
    """A message comes back if Celery fails before it begins the task, and the backend is away."""
    ran = []
    rig.task(lambda self: ran.append(1), backoff=Schedule([7]))
    monkeypatch.setattr(type(rig.app.loader), "on_task_init", raises(exc))
    message = rig.send()
    rig.fail_results()
    rig.run()
    assert (message.fate, message.delay, ran) == ("hidden", 7, [])
    assert rig.story()[-1] == f"retried in 7 s: {end}"
    assert ("sqs_backoff.after_run_failed" in caplog.text) is isinstance(exc, Exception)


# Hooks and ``__call__`` of a task


class InTransaction(SQSBackoffTask):
    """A base class that runs the task in a database transaction, as Django projects do.

    The beginning and the commit of the transaction may fail.
    """

    abstract = True
    begins = commits = staticmethod(lambda: None)

    def __call__(self, *args, **kwargs):
        self.begins()
        result = super().__call__(*args, **kwargs)
        self.commits()
        return result


@pytest.mark.parametrize("where", ["before_start", "begins", "run", "commits"])
@pytest.mark.parametrize(("retry_on", "fate"), [((), "dead letter"), ((Away,), "hidden")])
def test_failure_around_run(rig, where, retry_on, fate):
    """A failure in ``before_start`` or ``__call__`` counts as a failure of the run."""

    def fail(*args):
        raise Away("the database is away")

    body = fail if where == "run" else returns
    options = {} if where == "run" else {where: staticmethod(fail)}
    rig.task(body, base=InTransaction, retry_on=retry_on, **options)
    message = rig.send()
    rig.run()
    assert message.fate == fate


def test_call_of_its_own(rig):
    """A task with its own ``__call__`` runs once, and may call ``self.retry``."""
    runs = []

    def body(self):
        runs.append(self.request.id)
        self.retry(countdown=9) if len(runs) == 1 else None

    rig.task(body, base=InTransaction)
    message = rig.send()
    rig.run()
    assert message.delay == 9
    rig.run()
    assert (message.fate, runs) == ("deleted", [message.task_id] * 2)


def test_call_that_translates(rig):
    """A ``__call__`` may catch the error of the run and raise another error."""

    class Translates(SQSBackoffTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            try:
                return super().__call__(*args, **kwargs)
            except Away as exc:
                raise Retryable("later") from exc

    rig.task(raises(Away()), base=Translates)
    message = rig.send()
    rig.run()
    assert message.fate == "hidden"


@pytest.mark.parametrize("by", ["run", "__call__"])
def test_call_that_runs_twice(rig, by):
    """A ``__call__`` may run the task again, for example after a lost database connection."""
    ids = []

    class Again(SQSBackoffTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            again = self.run if by == "run" else super().__call__
            try:
                return again(*args, **kwargs)
            except Away:
                return again(*args, **kwargs)

    def body(self):
        ids.append(self.request.id)
        if len(ids) == 1:
            raise Away("the connection was closed")
        self.retry(countdown=5)

    rig.task(body, base=Again)
    message = rig.send()
    rig.run()
    assert (message.fate, message.delay, ids) == ("hidden", 5, [message.task_id] * 2)


def test_plain_call_raises(rig):
    """A task that is called as a function raises its own error, and no error of our package."""
    task = rig.task(raises(Away()), base=InTransaction, retry_on=(Away,))
    rig.send()
    rig.run()
    for call in (task, task.run):
        with pytest.raises(Away):
            call()


@pytest.mark.parametrize("kind", [staticmethod, classmethod, lambda hook: hook])
def test_kinds_of_hooks(rig, kind):
    """A hook may be a method, a static method or a class method."""
    called, is_static = [], kind is staticmethod
    hooks = {
        name: kind(lambda *args, name=name: called.append((name, len(args) + is_static)))
        for name in ("before_start", "on_failure", "after_return")
    }
    rig.task(raises(Away()), base=type("Hooks", (SQSBackoffTask,), {"abstract": True, **hooks}))
    rig.send()
    rig.run()
    assert called == [("before_start", 4), ("on_failure", 6), ("after_return", 7)]


# Retries by hand


@pytest.mark.parametrize("exc", [None, Away("x")], ids=["without exc", "with exc"])
def test_retry_in_inner_task(rig, exc):
    """If a task that was called as a function calls ``self.retry``, the message is retried."""

    def inner(self):
        try:
            raise Away("x")
        except Away:
            self.retry(exc=exc, countdown=3)

    rig.task(inner, name="inner")
    rig.task(lambda self: self.app.tasks["inner"](), retry_on=(Away,), backoff=Schedule([7]))
    message = rig.send()
    rig.run()
    assert (message.fate, message.delay, rig.published) == ("hidden", 7, ["mail"])
    assert rig.told("Retried")[0].error.endswith("Away")


@pytest.mark.parametrize(
    ("when", "delay"),
    [(None, 7), (30, 30), (timedelta(seconds=90), 90)],
    ids=["no time", "seconds", "a time"],
)
def test_retry_raised(rig, when, delay):
    """A task that raises Celery's ``Retry`` is retried with the same message, at its time."""

    def body(self):
        at = datetime.now(timezone.utc) + when if isinstance(when, timedelta) else when
        raise Retry("later", when=at)

    rig.task(body, backoff=Schedule([7]))
    message = rig.send()
    rig.run()
    assert (message.fate, message.delay) == ("hidden", pytest.approx(delay, abs=1))


def test_last_retry_raised(rig):
    """``max_retries`` also limits a task that raises Celery's ``Retry``."""
    rig.task(raises(Retry("later")), max_retries=0)
    message = rig.send()
    rig.run()
    assert message.record.exception_type.endswith(MaxRetriesExceededError.__name__)


def test_tracer_can_be_deleted(rig):
    """A program can delete a task's ``__trace__``, as Celery's own tests do."""
    task = rig.task(returns)
    rig.send()
    rig.run()
    assert task.__trace__ is not None
    del task.__trace__
    assert task.__trace__ is None
