"""Promises that go with their features: delete each test together with what it tests."""

from __future__ import annotations

import sys

import pytest
from celery.canvas import Signature
from celery.exceptions import ChordError
from kombu.exceptions import EncodeError

from celery_sqs_backoff import Retryable, Schedule
from celery_sqs_backoff.safe.shared import is_in_doubt
from celery_sqs_backoff.safe.stores.memory import MemoryStore
from celery_sqs_backoff.task import wrapping

from . import Run
from .bodies import raises, returns

# Celery warns of each failure outside of a task's body: of those that are made here, too.
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")

NOT_HANDED_ON = "the rest of its workflow could not be sent"


def exits(run):
    return run.fail(SystemExit(3))


def send_and_store(rig, *, after=60, forged=None, **options):
    """Send a message, and store a success of its task some seconds later, or before."""
    message = rig.send(**options)
    message.forge(**(forged or {}))
    if after > 0:
        rig.begin()
        rig.pass_time(after)
    rig.app.backend.store_result(message.task_id, 1, "SUCCESS")
    return message


# The search for a stored success after a crash


@pytest.mark.parametrize("end", [Run.lose, exits])
@pytest.mark.parametrize(
    ("options", "fate"),
    [
        ({}, "deleted"),
        ({"chord": {"task": "body", "args": [], "kwargs": {}}}, "hidden"),
        ({"forged": {"retries": 1}}, "hidden"),
    ],
    ids=["alone", "part of a chord", "copy"],
)
def test_stored_success(rig, end, options, fate):
    """A process that is lost after it has stored a success is done, but not in a chord.

    Celery stores a result first, and counts the part of a chord then. A copy that ``retry`` has
    published has the ID of its original.
    """
    rig.task(returns, backoff=Schedule([7]))
    if "chord" in options:
        options = {"chord": rig.app.signature("body")}
    message = send_and_store(rig, **options)
    end(rig.worker.runs[0])
    rig.pass_time(1)
    assert message.fate == fate


def test_stored_success_of_older_message(rig):
    """A success that an older message with the same ID has stored does not count."""
    rig.task(returns, backoff=Schedule([7]))
    rig.app.backend.store_result("an id", 1, "SUCCESS")
    rig.pass_time(86_400)
    message = rig.send(task_id="an id")
    rig.run(Run.lose)
    assert message.fate == "hidden"


def test_stored_success_is_looked_up_once(rig, monkeypatch):
    """Two answers would make a dead letter of a task that Celery calls done."""
    rig.task(returns, crash_budget=1)
    message = rig.send()
    run = rig.begin()
    answers = [{"status": "PENDING"}, {"status": "SUCCESS", "date_done": "2100-01-01T00:00:00"}]
    backend = type(rig.app.backend)
    monkeypatch.setattr(backend, "_get_task_meta_for", lambda *_: answers.pop(0))
    run.lose()
    monkeypatch.undo()
    rig.pass_time(1)
    assert (message.fate, message.result) == ("dead letter", "FAILURE")


def test_stored_success_cannot_be_looked_up(rig, monkeypatch, caplog):
    """A message is not held for good because its result backend cannot be made, or is away."""
    rig.task(returns)
    message = rig.send()
    run = rig.begin()
    monkeypatch.setattr(
        "celery.worker.request.Request._success_was_stored", raises(LookupError()), raising=False
    )
    run.lose()
    rig.pass_time(1)
    assert message.fate == "hidden"
    assert "sqs_backoff.result_backend_hangs" in caplog.text


# Chords, and a process that is told to end


def test_chord_body_not_sent(rig, monkeypatch):
    """A success that completed a chord whose body was not sent is a dead letter."""
    backend, failed = type(rig.app.backend), []

    def count(self, *_, **__):
        """Count as Celery's backends do, which contain the error."""
        self.chord_error_from_stack("body", ChordError("Callback error: Down()"))

    monkeypatch.setattr(backend, "on_chord_part_return", count)
    monkeypatch.setattr(backend, "chord_error_from_stack", lambda self, *_: failed.append(1))
    rig.task(returns)
    message = rig.send(chord=rig.app.signature("sum"))
    rig.run()
    assert (message.fate, message.record.reason) == ("dead letter", NOT_HANDED_ON)
    assert message.record.exception_message == "Callback error: Down()"
    assert failed  # the chord itself ends all the same


def test_told_to_end(rig, monkeypatch):
    """A process that has been told to end begins no run."""
    ran = []
    rig.task(lambda self: ran.append(1))
    rig.send()
    run = rig.begin()
    monkeypatch.setattr(wrapping, "end_if_told", sys.exit)
    with pytest.raises(SystemExit):
        run.finish()
    assert ran == []


# The copy of a retry with other arguments


@pytest.mark.parametrize("throw", [True, False])
@pytest.mark.parametrize("cause", [TimeoutError("the answer was lost"), Retryable("down")])
def test_copy_refused(rig, monkeypatch, cause, throw):
    """A copy that the broker refuses leaves the message in doubt only if its retry did."""

    def body(self):
        try:
            raise cause.with_traceback(None)
        except type(cause) as exc:
            raise self.retry(args=(7,), exc=exc, throw=throw) from exc

    def refuse(*args, **options):
        raise EncodeError("not JSON")

    rig.app.conf.sqs_backoff = {"store": MemoryStore()}
    rig.task(body, undo=lambda *_: None)
    message = rig.send()
    monkeypatch.setattr(Signature, "apply_async", refuse)
    rig.run()
    assert message.fate == "dead letter"
    assert is_in_doubt(rig.app, "mail", message.task_id) is isinstance(cause, TimeoutError)
