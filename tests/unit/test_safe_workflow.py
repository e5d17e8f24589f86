"""Workflows, and the task that takes them back (rows W1 to W7)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, ImproperlyConfigured

from celery_sqs_backoff import Guard, NonRetryable, Retryable, SQSBackoffTask, WorkflowTask
from celery_sqs_backoff.safe import Compensated, NotDispatched, NotUndone, take_back
from celery_sqs_backoff.safe.document import Document
from celery_sqs_backoff.safe.hooks import message_digest
from celery_sqs_backoff.store.settings import records_of
from tests.support.fake_sqs import Clock

from .safe_app import CountedStore, bare_app, make_app, store_of


class Bank:
    """What was done and undone, and how the next runs end."""

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
    """A workflow of three steps, which ends as the bank says."""

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
    bank.ends = [None, KeyboardInterrupt()]  # as SIGKILL would
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
    """The workflow's steps are undone when its message is given up.

    The last step's task runs first, and each task gets its step's result.
    """
    fund.apply((end,), task_id="A")
    assert bank.undone == [(name, f"{name} is done") for name in "cba"]
    assert Document(records_of(app), "scope", "order:7").fields["state"] == "closed"
    assert isinstance(fund.apply(task_id="A").result, Compensated)
    assert bank.done == ["a", "b", "c"]


def test_message_of_weeks(app, fund, bank):
    """A message that is retried for weeks is taken back in full.

    Each run renews the list of scopes that the message has entered. This holds also if the message
    is given up without another run.
    """
    clock = Clock()
    app.conf.sqs_backoff["store"] = CountedStore(clock=clock.time)
    for ends, days in (([None, KeyboardInterrupt()], 26), ([KeyboardInterrupt()], 5)):
        bank.ends = list(ends)  # as SIGKILL would
        with pytest.raises(KeyboardInterrupt):
            fund.apply(task_id="A")
        clock.now += days * 24 * 3600.0
    taken_back(app, "A", task_id="1")
    assert [name for name, _ in bank.undone] == ["b", "a"]


def test_w3_failed_run(app, fund, bank):
    """A failed run raises its error, keeps its recorded steps and frees the lock."""
    bank.ends = [None, ConnectionError("down")]
    with pytest.raises(ConnectionError):
        fund()
    assert list(Document(records_of(app), "scope", "order:7").fields["steps"]) == ["a", "b"]
    assert fund() == "done"
    assert bank.done == ["a", "b", "b", "c"]


def test_step_in_doubt(fund, bank):
    """A step in doubt is undone too, without a result."""
    bank.ends = [None, TimeoutError()]
    fund.apply(task_id="A")
    assert bank.undone == [("b", None), ("a", "a is done")]


def test_refused_step(fund, bank):
    """A step that certainly did nothing is not undone."""
    bank.ends = [None, REFUSED]
    fund.apply(task_id="A")
    assert bank.undone == [("a", "a is done")]


def test_step_without_undo(app, fund, bank):
    """A step without an undoing task is not undone."""

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:8") as order:
            order.step("a", bank.do, "a")
            order.step("b", bank.do, "b", undo=app.tasks["undo"].s("b"))
            raise REFUSED

    work.apply(task_id="A")
    assert [name for name, _ in bank.undone] == ["b"]


def test_order_of_undoing(app, fund, bank, monkeypatch):
    """Each undoing task waits for the one before it.

    If one fails, the rest wait for it, also if the given-up message is given up again.
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
    taken_back(app, "A")
    assert [name for name, _ in bank.undone] == ["c"]
    taken_back(app, "A", task_id=Document(records_of(app), "scope", "order:7").fields["by"])
    assert [name for name, _ in bank.undone] == ["c", "b", "a"]


def taken_back(app: Celery, message: str, **facts: Any) -> None:
    """Run the task that takes a message's workflows back, as if its worker was lost."""
    digest = message_digest(app, "fund", message)
    given = {"run": "lost", "began": 9e9, "task_id": None} | facts
    args = (digest, given["run"], given["began"])
    app.tasks[take_back.NAME].apply(args, task_id=given["task_id"], throw=True)


@pytest.mark.parametrize("end", [Ignore(), None])
def test_ignored_block(fund, bank, end):
    """A workflow block that ends by Ignore has succeeded, so nothing is undone."""
    fund.apply((end,), task_id="A")
    assert bank.undone == []


def test_workflow_in_helper(app, fund, bank):
    """A workflow that a helper function entered is undone when the message is given up.

    A fresh process gives the message up before it reaches the helper.
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
    """A task without guard, lock, step or workflow never touches the store."""
    store_of(app).is_away = True

    @app.task(bind=True, name="plain")
    def plain(self):
        order = {"workflow": "shipped", "exclusive": self.name}
        raise NonRetryable(order["workflow"])

    plain.apply(task_id="A")
    assert store_of(app).calls.total() == 0


def test_broker_away(app, fund, monkeypatch, caplog):
    """If the broker is away, ``given_up`` returns False, so the settler asks again.

    The log names the error without its text.
    """

    def away(*_, **__):
        raise ConnectionError("password=hunter2")

    monkeypatch.setattr(type(app.tasks[take_back.NAME]), "apply_async", away)
    assert not fund.extension.given_up(fund, "A", run="run", began=0.0, queue="q")
    assert "sqs_backoff.not_taken_back: task fund[A]: builtins.ConnectionError" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("queue", ["funds", "funds.fifo"])
def test_queue_of_take_back(app, fund, monkeypatch, queue):
    """The task that takes a message back goes to the message's own queue.

    A worker of that queue knows the app's tasks. On a FIFO queue it has a group of its own, so it
    delays no other message.
    """
    sent = []
    task = app.tasks[take_back.NAME]
    monkeypatch.setattr(type(task), "apply_async", lambda _, args, **o: sent.append((args, o)))
    assert fund.extension.given_up(fund, "A", run="run", began=7.0, queue=queue)
    digest = message_digest(app, "fund", "A")
    group = {"MessageGroupId": digest} if queue == "funds.fifo" else {}
    assert sent == [((digest, "run", 7.0, queue), {"queue": queue} | group)]


def test_undo_not_sent(app, fund, bank, monkeypatch):
    """Undoing tasks that could not be sent are sent by the next attempt."""
    bank.ends = [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")

    def away(*_, **__):
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(type(app.tasks["undo"]), "apply_async", away)
        with pytest.raises(NotDispatched):
            taken_back(app, "A", task_id="1")
    taken_back(app, "A", task_id="1")
    assert [name for name, _ in bank.undone] == ["b", "a"]


def test_step_outside_block(app):
    """A step outside its workflow's block is an error."""

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            pass
        order.step("a", pytest.fail)

    with pytest.raises(RuntimeError, match="with block"):
        work.apply(task_id="A", throw=True)


def test_w5_shared_keys(app):
    """Two messages get the same idempotency keys from one workflow."""

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            return [order.key("a"), order.key("b")]

    first, second = (work.apply(task_id=message).result for message in "AB")
    assert first == second
    assert first[0] != first[1]


def test_workflow_in_other_task(app, fund):
    """A workflow raises RuntimeError in the message of a task that is no WorkflowTask.

    If that message were given up, its steps would not be undone.
    """

    @app.task()
    def outer():
        fund.run()

    with pytest.raises(RuntimeError, match="WorkflowTask"):
        outer.apply(task_id="A", throw=True)


def test_undo_refused_by_guard(app, bank):
    """An undoing task that its guard refuses becomes a dead letter.

    Its step stands. You can redrive it when the guard's window is over.
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
    ],
    ids=["deleted when it fails", "expires", "sent with expires"],
)
def test_unfit_undo_task(app, base, options, sent):
    """A task whose end may go unnoticed is refused as an undoing task.

    If it ended unnoticed, the other steps would stand.
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
    """A call as a function continues the workflow."""
    bank.ends = [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")
    assert fund() == "done"
    assert bank.done == ["a", "b", "c"]


def test_refused_message(app, fund, bank):
    """A message that its guard refuses takes back the steps of its earlier runs.

    The guard's window has ended, and another message has passed.
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


def test_shared_store_secret(monkeypatch):
    """A workflow needs a secret on a shared store."""
    monkeypatch.delitem(sys.modules, "django.conf", raising=False)  # it has a secret
    app = bare_app("unsigned")
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:1/0"}

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        self.workflow("order:7")

    with pytest.raises(ImproperlyConfigured, match="secret"):
        work()


def test_planted_record(app, fund, bank):
    """A planted record sends no task.

    Records name the task that undoes a step, so they are signed.
    """
    bank.ends = [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")
    store = store_of(app)
    for key, (text, end) in list(store._records.items()):
        store._records[key] = (text.replace("undo", "evil"), end)
    with pytest.raises(Exception, match="not signed"):
        taken_back(app, "A")
    assert bank.undone == []
