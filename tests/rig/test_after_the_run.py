"""The end of a run decides about the message, whatever fails after the run.

That may be the result backend, a hook of the task, or the sending of a chain's next task.
"""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import types
import weakref

import billiard.einfo
import celery
import pytest

from celery_sqs_backoff import NonRetryable, Retryable, Schedule, SQSBackoffTask

from .bodies import raises, returns

# Celery warns of each failure outside of a task's body. These tests make such failures.
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")

NOT_HANDED_ON = "the rest of its workflow could not be sent"


@pytest.fixture
def told(rig, monkeypatch):
    """A list that gets an entry when ``on_failure`` or the task's chord is told of a failure."""
    told = []
    backend = type(rig.app.backend)
    monkeypatch.setattr(backend, "on_chord_part_return", lambda *_, **__: told.append("chord"))
    return told


@pytest.fixture
def mail(rig, told):
    """Return a function that defines a task with a body, and sends it.

    The message has an errback, and can be a part of a chord.
    """

    def send(body, *, in_chord=False, **options):
        hooks = {"on_failure": lambda *_: told.append("on_failure"), "backoff": Schedule([7])}
        rig.task(body, **hooks | options)
        chord = {"chord": rig.app.signature("sum")} if in_chord else {}
        return rig.send(link_error=rig.app.signature("refund"), **chord)

    return send


def always(state):
    return lambda stored, nth: stored == state


def away(state, nth):
    return True


DOWN, BAD = Retryable("down"), ValueError("bad")


@pytest.mark.parametrize(
    ("body", "fails", "fate"),
    [
        (returns, always("SUCCESS"), "deleted"),
        (raises(DOWN), always("RETRY"), "hidden"),
        (raises(DOWN), away, "hidden"),
        (raises(BAD), always("FAILURE"), "dead letter"),
    ],
    ids=["success", "retry", "retry away", "failure"],
)
def test_result_not_stored(rig, mail, told, body, fails, fate, caplog):
    """If the result of a run cannot be stored, the worker logs it, and nothing else changes."""
    message = mail(body)
    rig.fail_results(fails)
    rig.run()
    assert (message.fate, message.result) == (fate, "PENDING")
    assert (told, rig.published) == ([], ["mail"])
    if fate == "dead letter":
        assert message.record.exception_type == "builtins.ValueError"
        assert message.record.reason == "not retryable"
    assert "sqs_backoff.after_run_failed: task mail[" in caplog.text
    assert "password" not in caplog.text


def test_result_not_json(rig):
    """A task has not failed if its result cannot be written as JSON."""
    rig.task(lambda self: object())
    message = rig.send()
    rig.run()
    assert message.fate == "deleted"


@pytest.mark.parametrize("hook", ["on_retry", "on_failure", "on_success", "after_return"])
def test_hook_raises(rig, hook, caplog):
    """A user's hook that raises changes nothing for the message. The log omits its error text."""

    class BadHook(SQSBackoffTask):
        abstract = True

    def fail(self, *args, **kwargs):
        raise LookupError("in the user's hook")

    setattr(BadHook, hook, fail)
    body = {"on_retry": raises(DOWN), "on_failure": raises(BAD)}.get(hook, returns)
    rig.task(body, base=BadHook)
    message = rig.send()
    rig.run()
    fates = {"on_retry": ("hidden", "RETRY"), "on_failure": ("dead letter", "FAILURE")}
    assert (message.fate, message.result) == fates.get(hook, ("deleted", "SUCCESS"))
    assert "sqs_backoff.after_run_failed: task mail[" in caplog.text
    assert caplog.text.count("after_run_failed") == 1
    assert "in the user's hook" not in caplog.text


# Chains and chords


def test_chord_part_not_counted(rig, mail, caplog):
    """If a chord cannot count a task that succeeded, the task's message becomes a dead letter.

    Otherwise the user would not learn why the chord waits for ever.
    """
    message = mail(returns, in_chord=True)
    rig.fail_results()
    rig.run()
    assert "sqs_backoff.after_run_failed" in caplog.text
    assert (message.fate, message.record.reason) == ("dead letter", NOT_HANDED_ON)
    assert message.record.exception_type == "builtins.ConnectionError"
    assert rig.story() == ["ran: succeeded", f"given up: {NOT_HANDED_ON}, unknown"]


def test_retry_of_chord_part_not_stored(rig, mail, told):
    """If the state RETRY of a task cannot be stored, its chord does not count this as a failure."""
    message = mail(raises(DOWN), in_chord=True)
    rig.fail_results(always("RETRY"))
    rig.run()
    assert (message.fate, told) == ("hidden", [])


@pytest.mark.parametrize("kind", ["link", "links", "chain", "long chain"])
def test_not_handed_on(rig, kind):
    """If a task succeeds but its callback or next task cannot be sent, it becomes a dead letter."""
    rig.task(returns)
    follows = [rig.app.signature("next") for _ in range(1 + (kind in ("links", "long chain")))]
    options = {"chain": follows} if "chain" in kind else {"link": follows}
    message = rig.send(**options)
    rig.fault("SendMessage", "AccessDenied")
    rig.run()
    assert (message.fate, message.record.reason) == ("dead letter", NOT_HANDED_ON)
    # Before 5.7, Celery raises another error while it lets the chain fail.
    if "chain" not in kind or celery.VERSION >= (5, 7):
        assert message.record.exception_type == "botocore.exceptions.ClientError"


def test_errback_not_sent(rig, caplog):
    """If a failed task's errback cannot be sent, the dead letter keeps the failure's reason."""
    rig.task(raises(BAD))
    message = rig.send(link_error=rig.app.signature("refund"))
    rig.fault("SendMessage", "AccessDenied")
    rig.run()
    assert message.record.reason == "not retryable"


# Time limits of gevent, which raises a timeout in the middle of any code


class GeventTimeout(BaseException):
    def __init__(self, seconds):
        self.seconds = seconds


@pytest.fixture
def gevent(rig, monkeypatch):
    monkeypatch.setitem(sys.modules, "gevent", types.SimpleNamespace(Timeout=GeventTimeout))
    rig.pool_timeout = GeventTimeout


@pytest.mark.usefixtures("gevent")
@pytest.mark.parametrize(
    ("body", "fate"),
    [(returns, "deleted"), (raises(DOWN), "hidden"), (raises(NonRetryable("no")), "dead letter")],
    ids=["success", "retry", "failure"],
)
def test_gevent_limit_after_run(rig, body, fate):
    """gevent's time limit changes nothing if it comes while the result of a run is being stored."""
    rig.task(body, time_limit=5, backoff=Schedule([7]))
    rig.start_worker(pool="threads")
    message = rig.send()
    rig.fail_results(lambda state, nth: GeventTimeout(5))
    rig.run()
    assert (message.fate, len(rig.told("RunEnded"))) == (fate, 1)
    assert "hard time limit" not in str(rig.story())


@pytest.mark.usefixtures("gevent")
@pytest.mark.parametrize(
    ("seconds", "reason"), [(5, "hard time limit"), (3, "aborted")], ids=["of the pool", "its own"]
)
def test_gevent_limit_in_run(rig, seconds, reason):
    """gevent's timeout counts as a hard time limit only if the pool, not the task, has set it."""
    rig.task(raises(GeventTimeout(seconds)), time_limit=5, backoff=Schedule([7]))
    rig.start_worker(pool="threads")
    rig.send()
    rig.run()
    assert rig.story() == ["ran: unknown", f"retried in 7 s: {reason}, unknown"]


# What a failure leaves behind


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_failure_is_small(rig, pool):
    """A process sends the worker a small report of a failure, with the beginning of the error."""

    class Big(Exception):
        def __init__(self):
            super().__init__("y" * 50_000)
            self.response = "x" * 1_000_000

    rig.task(raises(Big()))
    rig.start_worker(pool=pool)
    rig.send()
    run = rig.run()
    info = run.result[1]
    assert len(pickle.dumps(run.result)) < 16_000
    assert repr(info.exception).startswith("Big('yyy")
    assert info.type is type(info.exception)
    assert len(repr(info.exception)) == 1_000
    assert (len(info.traceback), info.internal) == (6_000, False)


def test_frames_are_freed(rig):
    """The process frees Celery's copies of a failure's frames, about 150 KB, when the run ends."""
    rig.task(raises(BAD))
    rig.send()
    run = rig.begin()
    logging.disable(logging.CRITICAL)  # pytest would keep log records, and these keep the copies
    gc.collect()
    gc.disable()
    try:
        before = copied_frames()
        run.finish()
        assert not copied_frames() - before
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("how", ["cause", "context"])
def test_locals_are_freed(rig, how):
    """The process frees the local variables of a failure's cause when the run ends."""
    held = []

    class Held:
        pass

    def fails():
        mine = Held()
        held.append(weakref.ref(mine))
        raise LookupError

    def body(self):
        try:
            fails()
        except LookupError as exc:
            if how == "cause":
                raise ValueError from exc
            raise ValueError  # noqa: B904 - its context is what is tested

    rig.task(body)
    rig.send()
    run = rig.begin()
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        run.finish()
        assert held[0]() is None
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def copied_frames():
    return {id(thing) for thing in gc.get_objects() if type(thing) is billiard.einfo.Traceback}


def test_suspended_frames_live_on(rig):
    """A generator that hands an error to the task can go on after the failure.

    To free memory, the worker clears the frames of an error. It must not clear a suspended frame.
    """

    def client():
        answer = None
        while True:
            request = yield answer
            try:
                raise Retryable(request)
            except Retryable as exc:
                answer = exc

    calls = client()
    next(calls)

    def body(self):
        raise calls.send("down")

    rig.task(body)
    message = rig.send()
    rig.run()
    assert message.fate == "hidden"
    assert isinstance(calls.send("down again"), Retryable)
