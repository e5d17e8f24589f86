"""Doubt and workflows, as far as the end of a run decides about them."""

from __future__ import annotations

import threading

import pytest
from celery.canvas import Signature
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery_sqs_backoff.safe.identity import run_id_of
from celery_sqs_backoff.safe.scope import scope_key
from celery_sqs_backoff.safe.shared import is_in_doubt
from kombu.exceptions import EncodeError

from celery_sqs_backoff import NonRetryable, Retryable, Schedule, SQSBackoffTask
from celery_sqs_backoff.safe.errors import Refused, StoreUnavailable
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.settings import vault_of

from . import Run
from .bodies import raises, returns

# Celery warns of each failure outside of a task's body: of those that are made here, too.
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")

DOWN, LOST_ANSWER = Retryable("down"), TimeoutError("the answer was lost")
NOT_HANDED_ON = "the rest of its workflow could not be sent"


class Store(MemoryStore):
    """A store that may be away."""

    is_away = False

    def __getattribute__(self, name):
        if name in ("add", "get", "replace", "delete") and self.is_away:
            raise StoreUnavailable
        return super().__getattribute__(name)


@pytest.fixture
def store(rig):
    store = Store(clock=rig.timeline)
    rig.app.conf.sqs_backoff = {"store": store}
    return store


# Doubt: a later run that finds the provider down must not undo what an earlier one may have done


def requeues_in_handler(self):
    try:
        raise LOST_ANSWER.with_traceback(None)
    except TimeoutError:
        raise Reject("later", requeue=True) from None


def stop_and_lose(run, rig):
    rig.worker.stop()
    run.lose()


def stop_cold(run, rig):
    rig.worker.stop_cold()


def finish(run, rig):
    run.finish()


def lose(run, rig):
    run.lose()


@pytest.mark.parametrize(
    ("body", "end", "is_in_doubt"),
    [
        (returns, lose, True),
        (returns, stop_and_lose, True),
        (returns, stop_cold, True),
        (raises(Reject(LOST_ANSWER, requeue=True)), finish, True),
        (requeues_in_handler, finish, True),
        (raises(Reject("not its turn", requeue=True)), finish, False),
        (raises(Reject(DOWN, requeue=True)), finish, False),
        (raises(Reject(StoreUnavailable(), requeue=True)), finish, False),
        (raises(DOWN), finish, False),
    ],
    ids=[
        *("lost", "lost at a stop", "cold shutdown", "requeued for it", "requeued after it"),
        *("requeued", "requeued unprocessed", "requeued for the store", "retried"),
    ],
)
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_doubt(rig, store, body, end, is_in_doubt, pool):
    """After a run that may have done its work, a refused one undoes nothing."""
    runs, undone = [], []

    def runs_twice(self):
        runs.append(1)
        body(self) if len(runs) == 1 else raises(DOWN)(self)

    rig.task(runs_twice, backoff=Schedule([7]), undo=lambda *_: undone.append(len(runs)))
    rig.start_worker(pool=pool)
    rig.send()
    end(rig.begin(), rig)
    rig.pass_time(1)
    if not rig.worker.is_alive:
        rig.start_worker(pool=pool)
    runs.append(1)
    undone.clear()
    rig.run()
    assert bool(undone) is not is_in_doubt


@pytest.mark.parametrize("cause", [LOST_ANSWER, DOWN], ids=["in doubt", "down"])
def test_outcome_of_last_requeue(rig, store, cause):
    """A message that is requeued for the last time says whether it may have been done."""
    rig.task(raises(Reject(cause, requeue=True)), max_retries=0)
    message = rig.send()
    rig.run()
    assert message.record.outcome == "UNKNOWN"


def test_soft_limit_before_run(rig, store):
    """A soft time limit before the run leaves nothing in doubt."""
    undone = []
    rig.task(
        raises(DOWN), track_started=True, backoff=Schedule([7]), undo=lambda *_: undone.append(1)
    )
    rig.send()
    rig.fail_results(lambda state, nth: (state, nth) == ("STARTED", 1) and SoftTimeLimitExceeded(1))
    rig.run()
    assert undone == []
    rig.run()
    assert undone == [1]


def test_busy_runs_are_no_attempts(rig, store):
    """A run that found a lock held counts for no attempt, also when a later one is lost."""
    runs = []

    def body(self):
        runs.append(1)
        with self.exclusive("order:7"):
            if len(runs) == 1:
                rig.pass_time(1)
                for _ in range(2):
                    rig.run()

    rig.task(body, backoff=Schedule([7, 60, 600]))
    rig.start_worker(processes=2)
    first, busy = rig.send(), rig.send()
    rig.run()
    assert (first.fate, busy.receives, len(runs)) == ("deleted", 2, 3)
    rig.pass_time(120, until=lambda: bool(rig.worker.runs))
    rig.run(Run.lose)
    assert (busy.delay, rig.told("Retried")[-1].attempt) == (7, 1)


# Workflows of a message that is given up


@pytest.fixture
def order(rig, store):
    """Send a task whose first run did a step of a workflow, and whose message has come back."""

    def send(*, then=returns, max_receive_count=100, **options):
        expires = options.pop("expires", None)
        rig.queue(max_receive_count=max_receive_count)
        runs = []

        def body(self):
            runs.append(1)
            with self.workflow("order:7") as order:
                if len(runs) == 1:
                    order.step("pay", str, 7, undo=take_back.s())
                    raise DOWN.with_traceback(None)
                then(self)

        take_back = rig.task(lambda self, done: None, name="take_back")
        rig.task(body, base=SQSBackoffTask, backoff=Schedule([7]), **options)
        message = rig.send(expires=expires)
        rig.run()
        assert (message.fate, rig.published) == ("hidden", ["mail"])
        return message

    return send


def revoke(rig, message):
    rig.worker.revoke(message.task_id)
    rig.pass_time(8)


def expire(rig, message):
    rig.worker.freeze(60)
    rig.pass_time(1)


def terminate(rig, message):
    rig.begin()
    rig.worker.revoke(message.task_id, terminate=True)
    rig.pass_time(1)


def lose_process(rig, message):
    rig.run(Run.lose)


def report_error(rig, message):
    rig.run(lambda run: run.fail(ValueError("bad")))


DROPPED = [revoke, expire, terminate]


@pytest.mark.parametrize("is_away", [False, True], ids=["store answers", "store away"])
@pytest.mark.parametrize("end", [*DROPPED, lose_process], ids=lambda end: end.__name__)
def test_workflow_is_taken_back(rig, store, order, end, is_away):
    """What an earlier run has done is taken back before a message is dropped or given up.

    While the store is away the message comes back, and nobody is told that it has ended.
    """
    failed = []
    options = {"crash_budget": 1, "on_failure": lambda *_: failed.append(1)}
    message = order(expires=20 if end is expire else None, **options)
    store.is_away = is_away
    end(rig, message)
    fates = {lose_process: ("dead letter", "FAILURE")}
    if is_away:
        assert (message.fate, message.delay, failed) == ("hidden", 30, [])
        assert message.result in ("RETRY", "PENDING")
        store.is_away = False
        rig.pass_time(40)
        while [run for run in rig.worker.runs if run.task_id == message.task_id]:
            rig.run()
    assert (message.fate, message.result) == fates.get(end, ("deleted", "REVOKED"))
    assert rig.published == ["mail", "take_back"]
    ended = [line for line in rig.story() if line == "discarded" or line.startswith("given up")]
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("end", "options", "reason"),
    [
        (lose_process, {"crash_budget": 1, "max_receive_count": 2}, "worker lost"),
        (report_error, {}, "not retryable"),
    ],
    ids=["last receive", "not judged"],
)
def test_given_up_without_store(rig, store, order, end, options, reason):
    """A message that must not run again is given up although the store is away."""
    message = order(**options)
    store.is_away = True
    end(rig, message)
    assert (message.fate, message.record.reason) == ("dead letter", reason)


@pytest.mark.parametrize(
    ("body", "reason"),
    [(raises(Reject("no")), "rejected by the task"), (returns, NOT_HANDED_ON)],
    ids=["rejected", "chord not told"],
)
def test_settled_without_store(rig, store, body, reason):
    """A message whose run has said how it ended is not repeated because the store is away."""
    rig.task(body)
    message = rig.send(chord=rig.app.signature("sum"))
    run = rig.begin()
    store.is_away = True
    rig.fail_results()
    run.finish()
    rig.pass_time(1)
    assert (message.fate, message.record.reason) == ("dead letter", reason)


def test_undo_that_cannot_be_sent(rig, order):
    """A rejected message comes back for the undoing task that could not be sent."""
    message = order(then=raises(Reject("no")))
    run = rig.begin()
    rig.fault("SendMessage", "AccessDenied", times=5)
    run.finish()
    rig.pass_time(1)
    assert (message.fate, message.delay) == ("hidden", 30)


def test_soft_limit_while_judging(rig, order, monkeypatch):
    """A failed run takes its workflow back although a soft time limit comes while it is judged."""
    limits = [SoftTimeLimitExceeded(1)]

    def classify(exc):
        if isinstance(exc, TimeoutError) and limits:
            raise limits.pop()

    message = order(then=raises(TimeoutError()), classify=classify)
    rig.run()
    assert (message.fate, rig.published) == ("dead letter", ["mail", "take_back"])


def test_next_run_in_workflow(rig, store):
    """A run whose message was run again meanwhile, in its workflow, leaves it to that run."""
    runs = []

    def body(self):
        runs.append(1)
        with self.workflow("order:7", lease=5) as order:
            order.step("pay", str, 7)
            if len(runs) == 1:
                first.freeze(60)
                second.runs[0].finish()
            order.step("release", str, 7)

    rig.task(body, backoff=Schedule([7]))
    first, second = rig.start_worker(), rig.start_worker()
    message = rig.send()
    rig.pass_time(1)
    first.runs[0].finish()
    rig.pass_time(1)
    assert message.fate == "deleted"
    assert not [line for line in rig.story() if line.startswith("given up")]


def test_workflow_entered_twice(rig, store):
    """A run that enters its workflow again is not taken for the next run of its message."""

    def body(self):
        order = self.workflow("order:7")
        with self.workflow("order:7") as prepared:
            prepared.step("pay", str, 7)
        with order:
            order.step("release", str, 7)
            raise NonRetryable("no such account")

    rig.task(body, base=SQSBackoffTask)
    message = rig.send()
    rig.run()
    assert message.fate == "dead letter"


@pytest.mark.parametrize("kind", ["chord", "chain into a chord", "alone"])
def test_refused_and_not_counted(rig, store, kind):
    """A message that its guard refuses, and whose chord was not told, is a dead letter."""
    total = rig.app.signature("sum")
    options = {
        "chord": {"chord": total},
        "chain into a chord": {"chain": [rig.app.signature("next", options={"task_id": "2"})]},
        "alone": {},
    }[kind]
    if kind == "chain into a chord":
        options["chain"][0]["chord"] = total
    rig.task(raises(Refused({"refused": "another message has passed"})))
    message = rig.send(**options)
    rig.fail_results()
    rig.run()
    if kind == "alone":
        assert message.fate == "deleted"
    else:
        assert message.record.reason == NOT_HANDED_ON
        assert message.record.exception_type == "builtins.ConnectionError"


@pytest.mark.parametrize("crash_budget", [5, 1])
def test_store_hangs(rig, crash_budget, monkeypatch):
    """A store that hangs holds up the worker's event loop only briefly."""
    goes_on = threading.Event()

    class Hanging(MemoryStore):
        def __getattribute__(self, name):
            if name in ("add", "get", "replace", "delete"):
                goes_on.wait(60)
            return super().__getattribute__(name)

    monkeypatch.setattr("celery_sqs_backoff.safe.shared._WAIT_SECONDS", 0.05)
    monkeypatch.setattr("celery_sqs_backoff.safe.shared._HANGS_SECONDS", 0.0)
    rig.task(returns, crash_budget=crash_budget)
    message = rig.send()
    run = rig.begin()
    rig.app.conf.sqs_backoff = {"store": Hanging()}
    run.lose()
    assert not goes_on.is_set()
    goes_on.set()
    rig.pass_time(1)
    assert message.fate == "hidden"


def test_freed_workflow(rig, store, caplog):
    """A workflow that an operator has freed, and in which nothing was done, calls for nobody."""

    def body(self):
        with self.workflow("order:7"):
            vault_of(self.app).discard(scope_key("scope:order:7"))
            raise NonRetryable("no such account")

    rig.task(body)
    message = rig.send()
    rig.run()
    assert message.fate == "dead letter"
    assert "undo_by_hand" not in caplog.text


def test_run_id(rig):
    """Each receive of a message is a run with an ID of its own."""
    seen = []

    class Looks(SQSBackoffTask):
        abstract = True

        def before_start(self, *_):
            seen.append(run_id_of(self.request))

    def body(self):
        seen.append(run_id_of(self.request))
        raise DOWN.with_traceback(None)

    rig.task(body, base=Looks, backoff=Schedule([7]))
    rig.send(), rig.send()
    for _ in range(4):
        rig.run()
    assert seen[::2] == seen[1::2]
    assert len({*seen}) == 4


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
