"""What the end of a run means for work that may be done, and for the steps of a workflow."""

from __future__ import annotations

import pytest
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError

from celery_sqs_backoff import NonRetryable, Retryable, Schedule, WorkflowTask
from celery_sqs_backoff.safe import Refused, StoreUnavailable
from celery_sqs_backoff.safe.lock import Lock
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.settings import records_of

from . import Rig, Run
from .bodies import raises, returns

# Celery warns of each failure outside of a task's body. These tests make such failures.
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")

DOWN, LOST_ANSWER = Retryable("down"), TimeoutError("the answer was lost")
TAKE_BACK = "celery_sqs_backoff.take_back"
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


# A run in doubt may have done its work. A later run that fails must not undo that work


def requeues_in_handler(self):
    try:
        raise LOST_ANSWER.with_traceback(None)
    except TimeoutError:
        raise Reject("later", requeue=True) from None


@pytest.mark.parametrize(
    ("body", "is_in_doubt"),
    [
        (raises(Reject(LOST_ANSWER, requeue=True)), True),
        (requeues_in_handler, True),
        (raises(Reject("not its turn", requeue=True)), False),
        (raises(Reject(DOWN, requeue=True)), False),
        (raises(Reject(StoreUnavailable(), requeue=True)), False),
        (raises(DOWN), False),
    ],
    ids=[
        *("requeued for it", "requeued after it"),
        *("requeued", "requeued unprocessed", "requeued for the store", "retried"),
    ],
)
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_doubt(rig, store, body, is_in_doubt, pool):
    """``on_not_processed`` is not called if an earlier run may have done the task's work."""
    runs, undone = [], []

    def runs_twice(self):
        runs.append(1)
        body(self) if len(runs) == 1 else raises(DOWN)(self)

    rig.task(
        runs_twice, backoff=Schedule([7]), on_not_processed=lambda *_: undone.append(len(runs))
    )
    rig.start_worker(pool=pool)
    rig.send()
    rig.begin().finish()
    rig.pass_time(1)
    runs.append(1)
    undone.clear()
    rig.run()
    assert bool(undone) is not is_in_doubt


@pytest.mark.parametrize("cause", [LOST_ANSWER, DOWN], ids=["in doubt", "down"])
def test_outcome_of_last_requeue(rig, store, cause):
    """If no retry is left for a requeued message, its dead letter has the outcome UNKNOWN."""
    rig.task(raises(Reject(cause, requeue=True)), max_retries=0)
    message = rig.send()
    rig.run()
    assert message.record.outcome == "UNKNOWN"


def test_soft_limit_before_run(rig, store):
    """If a soft time limit comes before the run, the task cannot have done its work.

    So ``on_not_processed`` is called when the next run fails.
    """
    undone = []
    rig.task(
        raises(DOWN),
        track_started=True,
        backoff=Schedule([7]),
        on_not_processed=lambda *_: undone.append(1),
    )
    rig.send()
    rig.fail_results(lambda state, nth: (state, nth) == ("STARTED", 1) and SoftTimeLimitExceeded(1))
    rig.run()
    assert undone == []
    rig.run()
    assert undone == [1]


# Workflows of a message that is given up


@pytest.fixture
def order(rig, store):
    """Return a function that sends a task of a workflow, and runs it once.

    The first run does a step and is then retried.
    """

    def send(*, then=returns, **options):
        sent = {name: options.pop(name, None) for name in ("expires", "chain")}
        runs = []

        def body(self):
            runs.append(1)
            with self.workflow("order:7") as order:
                if len(runs) == 1:
                    order.step("pay", str, 7, undo=refund.s())
                    raise DOWN.with_traceback(None)
                then(self)

        refund = rig.task(lambda self, done: None, name="refund")
        rig.task(body, base=WorkflowTask, backoff=Schedule([7]), **options)
        message = rig.send(**{name: given for name, given in sent.items() if given})
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


@pytest.mark.parametrize("is_away", [False, True], ids=["store answers", "store away"])
@pytest.mark.parametrize(
    "end", [revoke, expire, terminate, lose_process, report_error], ids=lambda end: end.__name__
)
def test_workflow_is_taken_back(rig, store, order, end, is_away):
    """When a message is deleted or given up, the steps of its workflow are undone.

    This holds even if the store is away at that time. The worker only sends the task ``take_back``,
    which uses the store later.
    """
    message = order(expires=20 if end is expire else None, crash_budget=1)
    store.is_away = is_away
    end(rig, message)
    is_failed = end in (lose_process, report_error)
    fate = ("dead letter", "FAILURE") if is_failed else ("deleted", "REVOKED")
    assert (message.fate, message.result) == fate
    assert rig.published == ["mail", TAKE_BACK]
    store.is_away = False
    rig.pass_time(120, until=lambda: any(run.task_id != message.task_id for run in rig.worker.runs))
    rig.run()
    assert "refund" in rig.published


@pytest.mark.parametrize("is_replaced", [False, True], ids=["ignored", "replaced"])
def test_undo_that_ends_by_ignore(rig, store, is_replaced):
    """If an undoing task raises Ignore, the next step is undone.

    If the task replaces itself, the next step is undone after the replacement has ended.
    """

    def body(self):
        with self.workflow("order:7") as order:
            for name in ("pay", "ship"):
                order.step(name, str, name, undo=refund.s())
            raise NonRetryable("no")

    def ignore(self, done):
        undone.append(done)
        raise self.replace(other.si()) if is_replaced else Ignore

    undone = []
    other = rig.task(returns, name="other")
    refund = rig.task(ignore, name="refund")
    rig.task(body, base=WorkflowTask)
    rig.send()
    parts = ["refund", "other"] if is_replaced else ["refund"]
    published = ["mail", TAKE_BACK, *parts, TAKE_BACK, *parts, TAKE_BACK]
    for _ in published:
        rig.run()
    assert undone == ["ship", "pay"]
    assert rig.published == published


def test_taking_back_on_fifo():
    """On a FIFO queue, a locked workflow does not hold up the undoing of another workflow."""
    refunded = []

    def body(self, number):
        with self.workflow(f"order:{number}") as order:
            order.step("pay", str, number, undo=refund.s().set(MessageGroupId="r"))
            raise NonRetryable("no")

    with Rig(task_default_queue="q.fifo") as rig:
        rig.queue("q.fifo", FifoQueue="true", ContentBasedDeduplication="true")
        rig.app.conf.sqs_backoff = {"store": MemoryStore(clock=rig.timeline)}
        refund = rig.task(lambda self, paid: refunded.append(paid), name="refund")
        rig.task(body, base=WorkflowTask)
        for number in (1, 2):
            rig.send(args=[number], MessageGroupId=f"order {number}")
        for _ in range(2):
            rig.run()
        Lock(records_of(rig.app), "order:1").acquire()  # as a killed run leaves it
        for _ in range(4):
            rig.run()
        assert refunded == ["2"]


@pytest.mark.parametrize(
    ("then", "published"),
    [(returns, ["mail", "next"]), (raises(NonRetryable("no")), ["mail", TAKE_BACK])],
    ids=["ends well", "given up"],
)
def test_chain_after_workflow(rig, order, then, published):
    """The next task of a chain is sent if the workflow ends well, and not if it is given up."""
    order(then=then, chain=[rig.app.signature("next", options={"task_id": "2"})])
    rig.run()
    rig.pass_time(1)
    assert rig.published == published


@pytest.mark.parametrize(
    ("body", "reason"),
    [(raises(Reject("no")), "rejected by the task"), (returns, NOT_HANDED_ON)],
    ids=["rejected", "chord not told"],
)
def test_settled_without_store(rig, store, body, reason):
    """A worker gives a message up even if the store goes away while the task runs."""
    rig.task(body)
    message = rig.send(chord=rig.app.signature("sum"))
    run = rig.begin()
    store.is_away = True
    rig.fail_results()
    run.finish()
    rig.pass_time(1)
    assert (message.fate, message.record.reason) == ("dead letter", reason)


def test_undo_that_cannot_be_sent(rig, order):
    """If ``take_back`` cannot be sent, a rejected message comes back, so the worker tries again."""
    message = order(then=raises(Reject("no")))
    run = rig.begin()
    rig.fault("SendMessage", "AccessDenied", times=5)
    run.finish()
    rig.pass_time(1)
    assert (message.fate, message.delay) == ("hidden", 30)


def test_queue_with_prefix():
    """``take_back`` goes to the queue of its message, also with a ``queue_name_prefix``."""
    with Rig(broker_transport_options={"queue_name_prefix": "prod-"}) as rig:
        rig.app.conf.sqs_backoff = {"store": Store(clock=rig.timeline)}
        url = rig.queue("prod-q")
        rig.task(raises(NonRetryable("no")), base=WorkflowTask)
        rig.send()
        rig.run()
        rig.pass_time(1)
        assert rig.published == ["mail", TAKE_BACK]
        assert {call.arguments["QueueUrl"] for call in rig.calls("SendMessage")} == {url}


def test_soft_limit_while_judging(rig, order, monkeypatch):
    """A workflow is undone even if a soft time limit comes while the failure is classified."""
    limits = [SoftTimeLimitExceeded(1)]

    def classify(exc):
        if isinstance(exc, TimeoutError) and limits:
            raise limits.pop()

    message = order(then=raises(TimeoutError()), classify=classify)
    rig.run()
    assert (message.fate, rig.published) == ("dead letter", ["mail", TAKE_BACK])


def test_next_run_in_workflow(rig, store):
    """If a run loses its workflow to the next run of the same message, no step is undone."""
    runs = []

    def body(self):
        runs.append(1)
        with self.workflow("order:7", lease=5) as order:
            order.step("pay", str, 7, undo=refund.s())
            if len(runs) == 1:
                first.freeze(60)
                second.runs[0].finish()
            order.step("release", str, 7)

    refund = rig.task(lambda self, done: None, name="refund")
    rig.task(body, base=WorkflowTask, backoff=Schedule([7]))
    first, second = rig.start_worker(), rig.start_worker()
    rig.send()
    rig.pass_time(1)
    first.runs[0].finish()
    rig.pass_time(60)
    for worker in rig.workers:
        for run in list(worker.runs):
            run.finish()
    rig.pass_time(60)
    assert "refund" not in rig.published


@pytest.mark.parametrize("kind", ["chord", "alone"])
def test_refused_and_not_counted(rig, store, kind):
    """If a guard refuses a message and its chord cannot be told, the message is a dead letter.

    Without a chord, the message is deleted.
    """
    options = {"chord": rig.app.signature("sum")} if kind == "chord" else {}
    rig.task(raises(Refused({"refused": "another message has passed"})))
    message = rig.send(**options)
    rig.fail_results()
    rig.run()
    if kind == "alone":
        assert message.fate == "deleted"
    else:
        assert message.record.reason == NOT_HANDED_ON
        assert message.record.exception_type == "builtins.ConnectionError"


@pytest.mark.parametrize("throw", [True, False])
@pytest.mark.parametrize("cause", [TimeoutError("the answer was lost"), Retryable("down")])
def test_copy_refused(rig, monkeypatch, cause, throw):
    """If a retry with new arguments cannot be published, the message becomes a dead letter."""

    def body(self):
        try:
            raise cause.with_traceback(None)
        except type(cause) as exc:
            raise self.retry(args=(7,), exc=exc, throw=throw) from exc

    def refuse(*args, **options):
        raise EncodeError("not JSON")

    rig.app.conf.sqs_backoff = {"store": MemoryStore()}
    rig.task(body, on_not_processed=lambda *_: None)
    message = rig.send()
    monkeypatch.setattr(Signature, "apply_async", refuse)
    rig.run()
    assert message.fate == "dead letter"
