"""However a run ends, the worker settles its message once and reports the end once."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from itertools import chain

import celery
import pytest
from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_retry
from celery.worker.request import Request

from celery_sqs_backoff import (
    Outcome,
    Provider,
    Retryable,
    Schedule,
    SQSBackoffTask,
    Verdict,
)
from celery_sqs_backoff.retry.policies import Policy

from . import Rig, Run
from .bodies import raises, returns

DEAD, GONE, HIDDEN = "dead letter", "deleted", "hidden"


class Timeout(BaseException):
    """Like ``gevent.Timeout``, this is no ``Exception``."""


class Publishes(SQSBackoffTask):
    """A task whose own ``retry`` publishes a copy, as Celery's does."""

    abstract = True

    def retry(self, *args, **kwargs):
        raise Retry("elsewhere", when=42)


def retries(self):
    self.retry(countdown=42)


def fail(exc):
    """Return an end in which the pool reports an exception that the process has not reported."""
    return lambda run: run.fail(exc)


# The fate of the message, the state of its result, and Celery's last events.
DONE = "deleted", "SUCCESS", ["task-succeeded"]
RETRIED = "hidden", "RETRY", ["task-retried"]
REQUEUED = "hidden", "PENDING", ["task-rejected"]
COPIED = "deleted", "RETRY", ["task-retried"]
IGNORED = "deleted", "PENDING", []
REVOKED = "deleted", "REVOKED", ["task-revoked"]
FAILED = "dead letter", "FAILURE", ["task-failed"]
DELETED = "deleted", "FAILURE", ["task-failed"]
# Before 5.7, Celery stores no result for a rejected message.
REJECTED = (
    ("dead letter", "FAILURE", ["task-failed", "task-rejected"])
    if celery.VERSION >= (5, 7)
    else ("dead letter", "PENDING", ["task-rejected"])
)
NOT_REQUEUED = "dead letter", "PENDING", ["task-rejected"]


def case(name, body, expected, *story, end=Run.finish, **options):
    """Return the parameters of ``test_end`` for a way in which a run ends.

    They are for both pools, unless only a prefork pool can report this end.
    """
    pools = ["prefork"] if body is ANY and end is not Run.exceed_time_limit else POOLS
    body, expected = returns if body is ANY else body, (*expected, [*story])
    return [
        pytest.param(pool, body, end, options, expected, id=f"{name}, {pool}") for pool in pools
    ]


#: Stands for the body of a task whose end the pool reports. What it does makes no difference.
ANY = object()
POOLS = ["prefork", "threads"]
BAD, DOWN, RETRY = ValueError("bad"), Retryable("down"), Retry("later")
REJECT, REQUEUE = Reject("no"), Reject("not now", requeue=True)
NEVER, ONCE, NO_DLQ = {"max_retries": 0}, {"crash_budget": 1}, {"on_give_up": "fail"}
RULE = {"classify": lambda exc: Verdict(Outcome.NOT_PROCESSED)}


def up(reason):
    """Return the story of a run that may have done its work, and whose message is given up."""
    return "ran: unknown", f"given up: {reason}, unknown"


def again(reason, delay=7):
    """Return the story of a run that may have done its work, and whose message comes back."""
    return "ran: unknown", f"retried in {delay} s: {reason}, unknown"


def later(reason, delay=7):
    """Return the story of a run that has not done its work, and whose message comes back."""
    return "ran: retryable", f"retried in {delay} s: {reason}, retryable"


NO_RETRY = up("max_retries reached")
NOT_KEPT = "ran: unknown", "given up: not retryable, unknown, not kept"
NOT_DONE = "ran: not processed", "given up: not retryable, not processed"
ENDS = [
    # The task decides.
    case("success", returns, DONE, "ran: succeeded"),
    case("retryable", raises(DOWN), RETRIED, *later("raised")),
    case("unknown", raises(BAD), FAILED, *up("not retryable")),
    case("no dead letters", raises(BAD), DELETED, *NOT_KEPT, **NO_DLQ),
    case("no retry left", raises(RETRY), FAILED, *NO_RETRY, **NEVER),
    case("self.retry", retries, RETRIED, *later("retry asked", 42)),
    case("Retry", raises(RETRY), RETRIED, *later("retry asked")),
    case("copy published", retries, COPIED, "ran: unknown", base=Publishes),
    case("Ignore", raises(Ignore()), IGNORED, "ran: succeeded"),
    case("Reject", raises(REJECT), REJECTED, *up("rejected by the task")),
    case("requeue", raises(REQUEUE), REQUEUED, "ran: unknown", later("requeued")[1]),
    case("no requeue left", raises(REQUEUE), NOT_REQUEUED, *NO_RETRY, **NEVER),
    # The run is aborted. It may have done its work.
    case("CancelledError", raises(asyncio.CancelledError()), RETRIED, *again("aborted")),
    case("GeneratorExit", raises(GeneratorExit()), RETRIED, *again("aborted")),
    case("BaseException", raises(Timeout()), RETRIED, *again("aborted")),
    case("MemoryError", raises(MemoryError("x")), RETRIED, *again("aborted")),
    case("Ctrl-C", raises(KeyboardInterrupt()), RETRIED, *again("aborted")),
    case("last abort", raises(Timeout()), FAILED, *up("the run was aborted"), **ONCE),
    case("rule for an abort", raises(Timeout()), FAILED, *NOT_DONE, **RULE),
    case("sys.exit", raises(SystemExit(3)), FAILED, *up("not retryable")),
    # The pool decides.
    case("time limit", ANY, RETRIED, *again("hard time limit"), end=Run.exceed_time_limit),
    case("last limit", ANY, FAILED, *up("hard time limit"), end=Run.exceed_time_limit, **ONCE),
    case("process lost", ANY, RETRIED, *again("process lost"), end=Run.lose),
    case("last process lost", ANY, FAILED, *up("worker lost"), end=Run.lose, **ONCE),
    case("process exits", ANY, RETRIED, *again("aborted"), end=fail(SystemExit(1))),
    case("out of memory", ANY, RETRIED, *again("aborted"), end=fail(MemoryError())),
    case("not judged", ANY, FAILED, *up("not retryable"), end=fail(BAD)),
    case("terminated", ANY, REVOKED, "discarded", end=Run.terminate),
]


@pytest.mark.hazard("H1", "H4", "H8")
@pytest.mark.parametrize(("pool", "body", "end", "options", "expected"), [*chain(*ENDS)])
def test_end(rig, pool, body, end, options, expected):
    """The worker settles the message as the end of its run says, and reports it once."""
    rig.task(body, **{"backoff": Schedule([7]), "crash_budget": 3, **options})
    rig.start_worker(pool=pool)
    message = rig.send()
    rig.run(end)
    events = [event.type for event in rig.celery_events[2:]]
    assert (message.fate, message.result, events, rig.story()) == expected
    if message.fate == HIDDEN:
        assert message.delay == (42 if body is retries else 7)
    assert (rig.worker.places_taken, rig.worker.requests) == (0, [])


def test_dead_letter_record(rig):
    """A dead letter says which task failed, where, how often, when, and why."""
    rig.task(raises(DOWN), backoff=Schedule([7]), max_retries=1)
    rig.start_worker("mailer@here")
    sent_at = rig.timeline.now
    message = rig.send()
    rig.run()
    rig.run()
    record = message.record
    assert (record.task, record.id, record.attempts) == ("mail", message.task_id, 2)
    assert (record.reason, record.outcome) == ("max_retries reached", "RETRYABLE")
    assert record.exception_type.endswith("Retryable")
    assert "down" in record.exception_message
    assert "raise exc" in record.traceback
    assert record.first_received_at == sent_at
    assert record.failed_at == pytest.approx(sent_at + 7, abs=1)
    assert (record.origin, record.worker) == ("arn:aws:sqs:us-east-1:1:q", "mailer@here")
    assert [event.attempt for event in rig.told("DeadLettered")] == [2]


def test_queue_without_dlq(rig):
    """A worker deletes a message that it gives up if the queue has no dead-letter queue."""
    rig.queue(dlq=False)
    rig.task(raises(BAD))
    message = rig.send()
    rig.run()
    assert message.fate == GONE
    assert rig.story()[-1] == "given up: not retryable, unknown, not kept"


@pytest.mark.parametrize(
    ("error", "seconds", "fate"),
    [(ConnectionError(), 90, DEAD), ("AccessDenied", 20, DEAD), ("AccessDenied", 200, GONE)],
    ids=["unreachable", "refused at first", "refused"],
)
def test_unread_queue(rig, error, seconds, fate):
    """While a worker cannot read the queue's attributes, it holds a message that it gives up.

    It sends the dead letter when it has read them, and deletes the message if SQS goes on refusing
    the read. No other worker can receive the message in the meantime.
    """
    rig.task(raises(BAD))
    rig.fault("GetQueueAttributes", error, seconds=seconds)
    message = rig.send()
    rig.run()
    rig.pass_time(15)
    assert message.fate == HIDDEN
    rig.pass_time(135)
    assert (message.fate, message.receives, len(rig.told("RunEnded"))) == (fate, 1, 1)


@pytest.mark.parametrize(
    ("options", "message", "has_traceback"),
    [
        ({}, "password=***", True),
        ({"record_detail": "type"}, None, False),
        ({"redact": str.upper}, None, False),
    ],
    ids=["masked", "type only", "slow masking"],
)
def test_unjudged_error(rig, options, message, has_traceback):
    """The main process masks secrets in the text of an error that only the pool reports.

    It omits the text if ``record_detail`` says so. If the user has a ``redact`` function, it also
    omits the text, because the main process must not wait for that function.
    """
    rig.task(returns, **options)
    sent = rig.send()
    rig.run(fail(ValueError("password=hunter2")))
    record = sent.record
    assert (record.exception_type, record.exception_message) == ("builtins.ValueError", message)
    assert bool(record.traceback) is has_traceback
    assert "hunter2" not in (record.traceback or "")


def test_crash_delay(rig):
    """After a hard time limit a message stays hidden for 2 s, until the old process is gone."""
    rig.task(returns, backoff=Schedule([0]))
    message = rig.send()
    rig.run(Run.exceed_time_limit)
    assert message.delay == 2


def test_soft_time_limit(rig):
    """A soft time limit does not settle the message, because the task goes on."""
    rig.task(returns)
    message = rig.send()
    run = rig.begin().exceed_time_limit(is_soft=True)
    rig.pass_time(1)
    assert message.fate == "held"
    run.finish()
    assert rig.story() == ["ran: succeeded"]


@pytest.mark.parametrize("crash_budget", [1, 2])
def test_hooks_of_hard_time_limit(rig, crash_budget):
    """If a hard time limit gives a message up, the worker calls the failure hooks once.

    Celery 5.7 does the same.
    """
    told = []
    rig.task(
        returns,
        crash_budget=crash_budget,
        on_failure=lambda task, exc, *_: told.append((type(exc).__name__, task.request.id)),
        after_return=lambda task, state, *_: told.append((state, task.request.id)),
    )
    message = rig.send()
    rig.run(Run.exceed_time_limit)
    hooks = [("TimeLimitExceeded", message.task_id), ("FAILURE", message.task_id)]
    assert told == (hooks if crash_budget == 1 else [])
    assert rig.app.tasks["mail"].request_stack.top is None


def test_error_in_event(rig):
    """Celery's events of a retry and of a failure show the task's error and its traceback."""
    rig.task(raises(DOWN), backoff=Schedule([7]), max_retries=1)
    rig.send()
    rig.run()
    rig.run()
    events = [event for event in rig.celery_events if hasattr(event, "exception")]
    assert [event.type for event in events] == ["task-retried", "task-failed"]
    assert [event.exception for event in events] == ["Retryable('down')"] * 2
    assert all("raise exc" in event.traceback for event in events)


def test_budget_left(rig):
    """The event of a retry says how many seconds of ``retry_for`` are left."""
    rig.task(raises(DOWN), backoff=Schedule([7]), retry_for=100)
    rig.send()
    for _ in range(3):
        rig.run()
    assert [event.budget_left for event in rig.told("Retried")] == [100, 92, 85]
    assert [event.attempt for event in rig.told("RunEnded")] == [1, 2, 3]


@pytest.mark.parametrize("end", [Run.finish, Run.lose], ids=["requeued", "lost"])
def test_fifo_cap(end):
    """On a FIFO queue a delay is at most ``fifo_cap``, as a hidden message holds up its group."""
    with Rig(task_default_queue="q.fifo") as rig:
        rig.queue("q.fifo", FifoQueue="true", ContentBasedDeduplication="true")
        rig.task(raises(REQUEUE), backoff=Schedule([1_000]), fifo_cap=60)
        message = rig.send(MessageGroupId="g")
        rig.run(end)
        assert (message.fate, message.delay) == (HIDDEN, 60)


@pytest.mark.parametrize("exc", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_hooks_of_lost_process(rig, exc, caplog):
    """If a process ends itself, result, hook and signal show a retry after a WorkerLostError."""
    hooks, sent = [], []

    def on_retry(self, *args):
        hooks.append((self.request.id, *args))

    task = rig.task(returns, on_retry=on_retry)
    message = rig.send()

    def on_signal(sender, request, reason, einfo, **_):
        sent.append((sender, request.id, reason.when))

    with connected(task_retry, on_signal):
        rig.run(fail(exc))
    [(request_id, failure, task_id, args, kwargs, _)] = hooks
    assert repr(failure) == f"WorkerLostError('The run was aborted: {type(exc).__name__}')"
    assert (request_id, task_id) == (message.task_id, message.task_id)
    assert ([*args], kwargs) == ([], {})
    assert repr(message.stored) == repr(failure)
    assert sent == [(task, message.task_id, message.delay)]
    assert task.request_stack.top is None
    assert "callback_failed" not in caplog.text


@contextmanager
def connected(signal, receiver):
    signal.connect(receiver)
    yield
    signal.disconnect(receiver)


def test_unjudged_error_not_stored(rig):
    """A task with ``ignore_result`` does not get the result RETRY when its process is lost."""
    rig.task(returns, ignore_result=True)
    message = rig.send()
    rig.run(Run.lose)
    assert (message.fate, message.result) == (HIDDEN, "PENDING")


# Runs that the worker ends


@pytest.mark.skipif(celery.VERSION < (5, 6), reason="Celery 5.5 cancels in another way")
@pytest.mark.hazard("H8")
@pytest.mark.parametrize("pool", ["prefork", "threads", "greenlets"])
def test_cold_shutdown(rig, pool):
    """A cold shutdown gives running messages back, and does not count this as a crash."""
    rig.task(returns, crash_budget=1)
    rig.start_worker(pool=pool)
    message = rig.send()
    rig.begin()
    rig.worker.stop_cold()
    assert (message.fate, message.delay) == ("visible", 0)
    assert rig.story() == ["retried in 0 s: cancelled, unknown"]


@pytest.mark.parametrize("end", [Run.lose, Run.exceed_time_limit])
def test_end_while_worker_stops(rig, end):
    """A process that is lost while the worker stops does not count as a crash.

    A supervisor may send its signal also to the pool's processes. A hard time limit still counts as
    a crash.
    """
    rig.task(returns, crash_budget=1)
    message = rig.send()
    run = rig.begin()
    rig.worker.stop()
    end(run)
    if end is Run.lose:
        assert (message.fate, rig.story()) == ("visible", ["retried in 0 s: cancelled, unknown"])
    else:
        assert (message.fate, message.record.reason) == (DEAD, "hard time limit")


def test_cancelled_by_reconnect(rig, caplog):
    """If Celery cancels tasks because it lost its connection, their messages come back at once.

    This also holds while the result backend is away. Celery 5.5 and 5.6 do not catch the backend's
    error.
    """
    rig.app.conf.worker_cancel_long_running_tasks_on_connection_loss = True
    rig.task(returns)
    rig.start_worker(processes=2)
    messages = [rig.send(), rig.send()]
    rig.begin(), rig.begin()
    rig.fail_results()
    rig.worker.lose_connection()
    rig.pass_time(0.2)
    assert [message.delay for message in messages] == [0, 0]
    assert rig.story() == ["retried in 0 s: cancelled, unknown"] * 2
    assert "callback_failed" in caplog.text
    assert "password" not in caplog.text


@pytest.mark.hazard("H8", "H26", "H27")
@pytest.mark.parametrize("how", ["revoked", "expired"])
@pytest.mark.parametrize("is_waiting", [True, False], ids=["waiting", "arriving"])
def test_dropped_before_it_runs(rig, how, is_waiting):
    """A worker deletes a message that is revoked or expires before it runs, as discarded."""
    ran = []
    rig.task(lambda self: ran.append(1))
    other = rig.send()
    message = rig.send(expires=10 if how == "expired" else None)
    run = rig.begin() if is_waiting else None
    if how == "revoked":
        rig.worker.revoke(message.task_id)
    if run is None:
        rig.worker.freeze(20)
    else:
        rig.pass_time(20)
        run.finish()
    rig.pass_time(1)
    while rig.worker.runs:
        rig.run()
    assert (message.fate, message.result, ran) == (GONE, "REVOKED", [1])
    assert sorted(rig.story()) == ["discarded", "ran: succeeded"]
    assert other.fate == GONE


# Failures while the worker settles a message


@pytest.mark.hazard("H5")
@pytest.mark.parametrize("end", [Run.lose, Run.exceed_time_limit])
def test_result_backend_away(rig, end, caplog):
    """A worker settles a message even if the result backend is away."""
    rig.task(returns, backoff=Schedule([7]))
    rig.fail_results()
    message = rig.send()
    rig.run(end)
    assert (message.fate, message.delay) == (HIDDEN, 7)
    assert "sqs_backoff.callback_failed" in caplog.text
    assert "password" not in caplog.text


class BrokenPolicy(Policy):
    """A user's delay policy that raises an error, for example after many attempts."""

    def ceiling(self, attempt):
        raise IndexError(attempt)


@pytest.mark.parametrize(
    ("body", "end", "fate"),
    [
        (returns, Run.finish, GONE),
        (raises(BAD), Run.finish, DEAD),
        (raises(Reject(requeue=True)), Run.finish, HIDDEN),
        (returns, Run.lose, HIDDEN),
    ],
    ids=["success", "failure", "requeue", "lost"],
)
def test_broken_policy(rig, body, end, fate, caplog):
    """A worker settles a message even if its delay policy raises an error, and logs the error."""
    rig.task(body, backoff=BrokenPolicy())
    message = rig.send()
    rig.run(end)
    assert message.fate == fate
    if fate == HIDDEN:
        assert "sqs_backoff.backoff_broken" in caplog.text


@pytest.mark.parametrize(("end", "fate"), [(Run.finish, GONE), (Run.lose, HIDDEN)])
def test_settling_fails(rig, end, fate, caplog):
    """A worker settles a message even if its own code raises an error.

    Otherwise it would hold the message for 12 hours.
    """
    rig.task(returns, provider=Provider("mail"))
    message = rig.send()
    run = rig.begin()
    rig.worker.break_provider(LookupError("secret"))
    end(run)
    rig.pass_time(1)
    assert message.fate == fate
    if fate == HIDDEN:
        assert message.delay == 30
    assert "settle_failed" in caplog.text
    assert "secret" not in caplog.text


def test_hostile_id(rig, caplog):
    """A task ID cannot forge or flood lines of the log, because the worker escapes and cuts it."""
    caplog.set_level("INFO")
    rig.task(returns)
    rig.send().forge(id="id\n[ERROR] forged line " + "x" * 10_000)
    rig.run(Run.exceed_time_limit)
    lines = [r.getMessage() for r in caplog.records if "celery_sqs_backoff" in r.name]
    assert len(lines) > 1
    assert not [line for line in lines if "\n" in line or len(line) > 1_000]


# Before the run


@pytest.mark.hazard("H2")
@pytest.mark.parametrize("sent_with", [None, 0, 3])
def test_run_count(rig, sent_with):
    """``retries`` and ``redelivered`` show earlier runs, although the headers never change."""
    seen, first = [], sent_with or 0

    def body(self):
        seen.append((self.request.retries, self.request.delivery_info["redelivered"]))
        raise DOWN

    rig.task(body, backoff=Schedule([7]))
    rig.send().forge(retries=sent_with)
    for _ in range(3):
        rig.run()
    assert seen == [(first, False), (first + 1, True), (first + 2, True)]


def test_body_travels_once(rig):
    """The worker sends a process the task's arguments only once, without the message's body."""
    rig.task(returns)
    rig.send()
    assert b'"body"' not in rig.begin().sent


def test_exhausted_before_run(rig):
    """If ``retry_for`` ends while a message is hidden, it becomes a dead letter without a run."""
    told = []
    rig.task(returns, retry_for=60, backoff=Schedule([7]), on_failure=lambda *_: told.append(1))
    message = rig.send()
    rig.run(Run.lose)
    rig.worker.freeze(100)
    rig.pass_time(10)
    assert (message.fate, message.result, told) == (DEAD, "FAILURE", [])
    assert rig.story()[2:] == ["given up: retry_for is over, unknown"]
    assert "was not run" in message.record.exception_message


def test_revoked_and_exhausted(rig):
    """A revoked or expired message is deleted, even if its ``retry_for`` has also ended."""
    rig.task(returns, retry_for=60, backoff=Schedule([7]))
    revoked, expired = rig.send(), rig.send(expires=50)
    rig.run(Run.lose), rig.run(Run.lose)
    rig.worker.revoke(revoked.task_id)
    rig.worker.freeze(100)
    rig.pass_time(10)
    assert [message.fate for message in (revoked, expired)] == [GONE, GONE]
    assert rig.story()[-2:] == ["discarded", "discarded"]


@pytest.mark.story("Q3")
def test_receives_without_run(rig):
    """A message that was received often but never began still runs, even with ``max_retries=0``."""
    rig.queue(max_receive_count=5)
    rig.task(returns, name="other")
    rig.task(returns, max_retries=0)
    _, message = rig.send("other"), rig.send()
    for _ in range(3):
        rig.start_worker()
        rig.begin()
        rig.worker.kill()
        rig.pass_time(31)
    rig.start_worker()
    rig.run()
    rig.run()
    assert (message.receives, message.fate) == (4, GONE)


# A lease that was lost


@pytest.mark.parametrize(
    ("body", "outcome"),
    [(raises(DOWN), "retryable"), (raises(BAD), "unknown"), (returns, "succeeded")],
    ids=["retry", "give up", "success"],
)
def test_lost_while_it_runs(body, outcome):
    """A worker does not settle a message that another worker has received during the run.

    Observers only get the end of the run.
    """
    with Rig(task_default_queue="q.fifo") as rig:
        rig.queue("q.fifo", FifoQueue="true", ContentBasedDeduplication="true")
        rig.task(body, backoff=Schedule([7]))
        frozen, other = rig.start_worker(), rig.start_worker()
        message = rig.send(MessageGroupId="g")
        rig.pass_time(1)
        [run] = frozen.runs
        run.begin()
        frozen.freeze(60)
        rig.pass_time(5)
        assert [len(frozen.runs), len(other.runs), rig.story()] == [1, 1, ["lost"]]
        run.finish()
        rig.pass_time(1)
        assert (rig.story()[1:], message.fate) == ([f"ran: {outcome}"], "held")


@pytest.mark.parametrize("base", [SQSBackoffTask, Task])
@pytest.mark.parametrize("pool", [*POOLS, "greenlets"])
def test_lost_before_it_runs(rig, pool, base):
    """A waiting task does not begin if the worker was suspended until its lease had ended.

    Another worker may have the message. The task runs when the worker receives it again. In the
    prefork pool the task does begin, because the main process cannot stop the pool process in time.
    """
    ran = []
    rig.task(returns, name="other")
    rig.task(lambda self: ran.append(1), base=base)
    message = rig.send()
    rig.start_worker(pool=pool)
    rig.pass_time(1)
    [waiting] = rig.worker.runs
    rig.worker.freeze(60)
    waiting.finish()
    if pool != "prefork":
        assert (ran, rig.worker.runs) == ([], [])
        rig.run()
        assert message.receives == 2
    rig.pass_time(1)
    assert ran == [1]
    assert message.fate == GONE


@pytest.mark.parametrize("pool", POOLS)
def test_lost_before_the_pool_has_it(rig, pool):
    """If a task's lease is lost while it waits for a process, it does not go to the pool."""
    ran = []
    rig.task(lambda self: ran.append(self.request.id))
    rig.start_worker(pool=pool)
    first, second = rig.send(), rig.send()
    run = rig.begin()
    rig.worker.freeze(60)
    run.finish()
    rig.pass_time(1)
    while rig.worker.runs:
        rig.run()
    assert (first.fate, second.fate, second.receives) == (GONE, GONE, 2)
    assert ran.count(second.task_id) == 1


@pytest.mark.parametrize("pool", POOLS)
def test_celery_fails_to_begin(rig, pool, monkeypatch):
    """If Celery raises an error as a task begins, a threads pool drops the task.

    The message comes back. In the prefork pool, the process runs the task despite the error.
    """

    def fails(request, *args):
        raise NotImplementedError

    rig.task(returns, backoff=Schedule([7]))
    rig.start_worker(pool=pool)
    message = rig.send()
    with monkeypatch.context() as patched:
        patched.setattr(Request, "on_accepted", fails)
        rig.begin()
    rig.pass_time(0.5)
    assert message.fate == (HIDDEN if pool == "threads" else "held")
