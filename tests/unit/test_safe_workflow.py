"""Workflows, and the task ``take_back`` that undoes their steps when a message is given up.

W1 to W7 are rows of tests/field-stories.md.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore, ImproperlyConfigured, Reject

from celery_sqs_backoff import Guard, NonRetryable, Retryable, SQSBackoffTask, WorkflowTask
from celery_sqs_backoff.safe import Compensated, NotDispatched, NotUndone, Refused, take_back
from celery_sqs_backoff.safe.document import Document
from celery_sqs_backoff.safe.hooks import message_digest
from celery_sqs_backoff.safe.lock import Lock
from celery_sqs_backoff.store.settings import records_of
from tests.support.fake_sqs import Clock

from .safe_app import CountedStore, bare_app, make_app, store_of


class Bank:
    """Records the steps that were done and undone. ``ends`` says how the next steps end."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.undone: list[tuple[str, Any]] = []
        self.ends: list[Any] = []

    def do(self, name: str) -> str:
        end = self.ends.pop(0) if self.ends else None
        if isinstance(end, NonRetryable | KeyboardInterrupt):
            raise end
        self.done.append(name)
        if isinstance(end, BaseException):
            raise end
        return f"{name} is done"


@pytest.fixture
def app():
    return make_app()


@pytest.fixture
def bank():
    return Bank()


@pytest.fixture
def fund(app, bank):
    """Return a task with a workflow of three steps, which end as ``bank.ends`` says."""

    @app.task(name="undo")
    def undo(result, name):
        bank.undone.append((name, result))

    @app.task(base=WorkflowTask, bind=True, name="fund", max_retries=0)
    def fund(self, end=None, steps="abc"):
        with self.workflow("order:7") as order:
            for name in steps:
                order.step(name, bank.do, name, undo=undo.s(name))
            if end is not None:
                raise end
        return "done"

    return fund


REFUSED = NonRetryable("refused", not_processed=True)


def test_w1_resume(fund, bank):
    """A rerun continues the workflow at the step at which the last run stopped."""
    bank.ends = [None, KeyboardInterrupt()]  # like a kill in the second step
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")
    assert fund.apply(task_id="A").result == "done"
    assert bank.done == ["a", "b", "c"]
    assert bank.undone == []


def test_cost_of_three_steps(fund, app):
    """A workflow of three steps makes at most 16 calls to the store."""
    fund.apply(task_id="A")
    assert store_of(app).calls.total() <= 16


@pytest.mark.parametrize("end", [REFUSED, ValueError(), Retryable("down")], ids=lambda e: type(e))
def test_w2_taken_back(app, fund, bank, end):
    """When a workflow's message is given up, its steps are undone, the last step first.

    The ``undo`` task of each step gets the step's result.
    """
    fund.apply((end,), task_id="A")
    assert bank.undone == [(name, f"{name} is done") for name in "cba"]
    assert Document(records_of(app), "scope", "order:7").fields["state"] == "closed"
    assert isinstance(fund.apply(task_id="A").result, Compensated)
    assert bank.done == ["a", "b", "c"]


def test_message_of_weeks(app, fund, bank):
    """If a message is given up after weeks, the steps of all its runs are undone.

    The store keeps the list of a message's workflows for 30 days after its last run.
    """
    clock = Clock()
    app.conf.sqs_backoff["store"] = CountedStore(clock=clock.time)
    for ends, days in (([None, KeyboardInterrupt()], 26), ([KeyboardInterrupt()], 5)):
        bank.ends = list(ends)  # like a kill in the last of these steps
        with pytest.raises(KeyboardInterrupt):
            fund.apply(task_id="A")
        clock.now += days * 24 * 3600.0
    run_take_back(app, "A", task_id="1")
    assert [name for name, _ in bank.undone] == ["b", "a"]


def test_w3_failed_run(app, fund, bank):
    """If a run fails, it raises its error, the recorded steps stay done, and the lock is free."""
    bank.ends = [None, ConnectionError("down")]
    with pytest.raises(ConnectionError):
        fund()
    assert list(Document(records_of(app), "scope", "order:7").fields["steps"]) == ["a", "b"]
    assert fund() == "done"
    assert bank.done == ["a", "b", "b", "c"]


def test_step_in_doubt(fund, bank):
    """A step that may or may not have been done is undone too. Its ``undo`` task gets None."""
    bank.ends = [None, TimeoutError()]
    fund.apply(task_id="A")
    assert bank.undone == [("b", None), ("a", "a is done")]


def test_refused_step(fund, bank):
    """A step that surely did nothing is not undone."""
    bank.ends = [None, REFUSED]
    fund.apply(task_id="A")
    assert bank.undone == [("a", "a is done")]


def test_step_without_undo(app, fund, bank):
    """A step without an ``undo`` task is passed over when the others are undone."""

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:8") as order:
            order.step("a", bank.do, "a")
            order.step("b", bank.do, "b", undo=app.tasks["undo"].s("b"))
            raise REFUSED

    work.apply(task_id="A")
    assert [name for name, _ in bank.undone] == ["b"]


def test_order_of_undoing(app, fund, bank, monkeypatch):
    """An ``undo`` task is sent when the one before it has ended well.

    If one fails, the next ones wait, even if the message is given up a second time.
    """
    failing = [True]

    def undo(result, name):
        if name == "b" and failing:
            raise ValueError
        bank.undone.append((name, result))

    monkeypatch.setattr(app.tasks["undo"], "run", undo)
    fund.apply((REFUSED,), task_id="A")
    assert [name for name, _ in bank.undone] == ["c"]
    failing.clear()
    run_take_back(app, "A")
    assert [name for name, _ in bank.undone] == ["c"]
    run_take_back(app, "A", task_id=Document(records_of(app), "scope", "order:7").fields["by"])
    assert [name for name, _ in bank.undone] == ["c", "b", "a"]


def run_take_back(app: Celery, message: str, **facts: Any) -> None:
    """Run the task ``take_back`` for a message, as if the message's worker had been killed."""
    digest = message_digest(app, "fund", message)
    given = {"run": "lost", "began": 9e9, "task_id": None} | facts
    args = (digest, given["run"], given["began"])
    app.tasks[take_back.NAME].apply(args, task_id=given["task_id"], throw=True)


@pytest.mark.parametrize("end", [Ignore(), None])
def test_ignored_block(fund, bank, end):
    """If a workflow's block ends by Celery's ``Ignore``, it has succeeded. Nothing is undone."""
    fund.apply((end,), task_id="A")
    assert bank.undone == []


def test_workflow_in_helper(app, fund, bank):
    """If a helper function entered a workflow, it is undone when the message is given up.

    The run that gives the message up does not call the helper.
    """
    helped = [True]

    def helper(task):
        with task.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=app.tasks["undo"].s("a"))
            raise KeyboardInterrupt

    @app.task(base=WorkflowTask, bind=True, name="helped")
    def work(self):
        if not helped:
            raise NonRetryable("no")
        helper(self)

    with pytest.raises(KeyboardInterrupt):
        work.apply(task_id="A")
    helped.clear()
    work.apply(task_id="A")
    assert [name for name, _ in bank.undone] == ["a"]


def test_plain_task(app):
    """A task without guard, lock, step or workflow makes no call to the store."""
    store_of(app).is_away = True

    @app.task(bind=True, name="plain")
    def plain(self):
        order = {"workflow": "shipped", "exclusive": self.name}
        raise NonRetryable(order["workflow"])

    plain.apply(task_id="A")
    assert store_of(app).calls.total() == 0


def test_broker_away(app, fund, monkeypatch, caplog):
    """If ``take_back`` cannot be sent, ``given_up`` returns False, so the worker tries again.

    The log has the type of the error, but not its text.
    """

    def away(*_, **__):
        raise ConnectionError("password=hunter2")

    monkeypatch.setattr(type(app.tasks[take_back.NAME]), "apply_async", away)
    assert not fund.extension.given_up(fund, "A", run="run", began=0.0, queue="q")
    assert "sqs_backoff.not_taken_back: task fund[A]: builtins.ConnectionError" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("queue", ["funds", "funds.fifo"])
def test_queue_of_take_back(app, fund, monkeypatch, queue):
    """The task ``take_back`` is sent to the queue of the message that was given up.

    The workers of this queue know the app's tasks. On a FIFO queue, ``take_back`` has a group of
    its own, so it holds up no other message.
    """
    sent = []
    task = app.tasks[take_back.NAME]
    monkeypatch.setattr(type(task), "apply_async", lambda _, args, **o: sent.append((args, o)))
    assert fund.extension.given_up(fund, "A", run="run", began=7.0, queue=queue)
    digest = message_digest(app, "fund", "A")
    group = {"MessageGroupId": digest} if queue == "funds.fifo" else {}
    assert sent == [((digest, "run", 7.0, queue), {"queue": queue} | group)]


def test_undo_not_sent(app, fund, bank, monkeypatch):
    """If ``take_back`` cannot send an ``undo`` task, its next run sends it."""
    bank.ends = [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")

    def away(*_, **__):
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(type(app.tasks["undo"]), "apply_async", away)
        with pytest.raises(NotDispatched):
            run_take_back(app, "A", task_id="1")
    run_take_back(app, "A", task_id="1")
    assert [name for name, _ in bank.undone] == ["b", "a"]


def test_step_outside_block(app):
    """A step after the end of its workflow's ``with`` block is an error."""

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            pass
        order.step("a", pytest.fail)

    with pytest.raises(RuntimeError, match="with block"):
        work.apply(task_id="A", throw=True)


def test_w5_shared_keys(app):
    """Two messages that enter the same workflow get the same idempotency keys from it."""

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            return [order.key("a"), order.key("b")]

    first, second = (work.apply(task_id=message).result for message in "AB")
    assert first == second
    assert first[0] != first[1]


def test_workflow_in_other_task(app, fund):
    """If a task that is no ``WorkflowTask`` calls one as a function, its workflow is refused.

    If the message of the calling task were given up, the steps would not be undone.
    """

    @app.task()
    def outer():
        fund.run()

    with pytest.raises(RuntimeError, match="WorkflowTask"):
        outer.apply(task_id="A", throw=True)


def test_undo_refused_by_guard(app, bank):
    """If its own guard refuses an ``undo`` task, the task fails and becomes a dead letter.

    Its step is not undone. The user can redrive the dead letter when the guard's window is over.
    """
    ended = []

    class Guarded(SQSBackoffTask):
        abstract = True

        def on_failure(self, exc, *_):
            ended.append(type(exc))

    @app.task(base=Guarded, guard=Guard(key="undo", window=60))
    def undo(result):
        bank.undone.append((result, None))

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            for name in "ab":
                order.step(name, bank.do, name, undo=undo.s())
            raise REFUSED

    work.apply(task_id="A")
    assert bank.undone == [("b is done", None)]
    assert ended == [NotUndone]


@pytest.mark.parametrize(
    ("base", "options", "sent"),
    [
        (SQSBackoffTask, {"on_give_up": "fail"}, {}),
        (SQSBackoffTask, {"expires": 60}, {}),
        (SQSBackoffTask, {}, {"expires": 60}),
        (Task, {}, {}),
    ],
    ids=["deleted when it fails", "expires", "sent with expires", "without our base class"],
)
def test_unfit_undo_task(app, base, options, sent):
    """A task that may expire, or is deleted when it fails, is refused as an ``undo`` task.

    If it disappeared, the earlier steps would never be undone.
    """

    @app.task(base=base, name="plain", **options)
    def plain(result): ...

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            order.step("a", pytest.fail, undo=plain.s().set(**sent))

    with pytest.raises(TypeError, match="invalid undo"):
        work.apply(task_id="A", throw=True)


def test_called_as_function(app, fund, bank):
    """If a run was killed and the user calls the task as a function, the workflow goes on."""
    bank.ends = [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")
    assert fund() == "done"
    assert bank.done == ["a", "b", "c"]


def test_refused_message(app, fund, bank):
    """If a guard refuses a later run of a message, the steps of the earlier run are undone.

    Between the two runs, the guard's window has ended and another message has passed.
    """
    guard = Guard(key="k", window=60)

    @app.task(base=WorkflowTask, bind=True, guard=guard)
    def work(self, name):
        with self.workflow(f"order:{name}") as order:
            order.step("a", bank.do, name, undo=app.tasks["undo"].s(name))
            raise KeyboardInterrupt

    for message in "AB":
        with pytest.raises(KeyboardInterrupt):
            work.apply((message,), task_id=message)
        records = store_of(app)._records
        if message == "A":
            records.pop(next(key for key in records if key.startswith("guard:")))
    work.apply(("A",), task_id="A")
    assert [name for name, _ in bank.undone] == ["A"]


def test_refused_before_workflow(app, fund, monkeypatch):
    """If a guard refuses a message that has entered no workflow, nothing is sent to undo it."""
    sent = []

    @app.task(base=WorkflowTask, bind=True, guard=Guard(key="k", window=60))
    def work(self): ...

    monkeypatch.setattr(
        type(app.tasks[take_back.NAME]), "apply_async", lambda *a, **o: sent.append(a)
    )
    for message in "AB":
        work.apply(task_id=message)
    assert sent == []


def test_refusal_inside_workflow(app, bank):
    """If a task goes on after ``self.guarded`` has refused its block, its workflow goes on, too."""

    @app.task(name="undo")
    def undo(result, name):
        bank.undone.append((name, result))

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow(f"order:{self.request.id}") as order:
            order.step("a", bank.do, "a", undo=undo.s("a"))
            with suppress(Refused), self.guarded("newsletter", window=60):
                pass
        return "done"

    assert [work.apply(task_id=message).result for message in "AB"] == ["done", "done"]
    assert bank.undone == []


def test_app_wide_options():
    """App-wide limits do not end the task ``take_back``, which may have to wait for a lease."""
    app = make_app(max_retries=2, retry_for=20, on_give_up="fail", crash_budget=1, provider="x")

    @app.task(base=WorkflowTask)
    def work(): ...

    options = app.tasks[take_back.NAME].backoff_options
    assert (options.max_retries, options.retry_for) == (None, 36 * 3600)
    assert (options.crash_budget, options.on_give_up, options.provider) == (3, "dead-letter", None)


def test_nothing_to_undo(fund, bank):
    """If no step of a given-up message was done, the next message can use the workflow."""
    bank.ends = [REFUSED]
    fund.apply(task_id="A")
    assert fund.apply(task_id="B").result == "done"


def test_callback_of_undo(app, bank):
    """An ``undo`` signature keeps its own callbacks."""
    called = []

    @app.task(name="told")
    def told(result):
        called.append(result)

    @app.task(name="undo")
    def undo(result, name):
        bank.undone.append((name, result))
        return name

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            for name in "ab":
                order.step(name, bank.do, name, undo=undo.s(name).set(link=told.s()))
            raise REFUSED

    work.apply(task_id="A")
    assert [name for name, _ in bank.undone] == ["b", "a"]
    assert called == ["b", "a"]


def test_two_workflows(app, bank):
    """If one workflow of a message is busy, the steps of the other one are undone once."""

    @app.task(name="undo")
    def undo(result, name):
        bank.undone.append((name, result))

    @app.task(base=WorkflowTask, bind=True, name="fund")
    def work(self):
        for scope in ("order:1", "order:2"):
            with self.workflow(scope) as order:
                order.step("a", bank.do, scope, undo=undo.s(scope))
                if scope == "order:1":
                    continue
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.apply(task_id="A")
    with Lock(records_of(app), "order:1", lease=60):
        run_take_back(app, "A")
    assert [name for name, _ in bank.undone] == ["order:2"]


def test_rejected(app, bank):
    """If a guarded task rejects its message, it may have done the work, so the guard stays."""
    runs = []

    @app.task(bind=True, guard=Guard(key="k", window=60))
    def work(self):
        runs.append(self.request.id)
        raise Reject("could not store the receipt", requeue=False)

    for message in "AB":
        work.apply(task_id=message)
    assert runs == ["A"]


def test_shared_store_secret(monkeypatch):
    """If other processes can use the store, a workflow needs a secret to sign its records."""
    monkeypatch.delitem(sys.modules, "django.conf", raising=False)  # Django's secret would be used
    app = bare_app("unsigned")
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:1/0"}

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        self.workflow("order:7")

    with pytest.raises(ImproperlyConfigured, match="secret"):
        work()


def test_planted_record(app, fund, bank):
    """If somebody changes a workflow's record in the store, no ``undo`` task is sent.

    The record names the ``undo`` tasks, so it is signed.
    """
    bank.ends = [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")
    store = store_of(app)
    for key, (text, end) in list(store._records.items()):
        store._records[key] = (text.replace("undo", "evil"), end)
    with pytest.raises(Exception, match="not signed"):
        run_take_back(app, "A")
    assert bank.undone == []
