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


def test_w1_a_rerun_goes_on_where_it_stopped(fund, bank):
    bank.ends = [None, KeyboardInterrupt()]  # as SIGKILL would
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")
    assert fund.apply(task_id="A").result == "done"
    assert bank.done == ["a", "b", "c"]
    assert bank.undone == []


def test_a_workflow_of_three_steps_costs_at_most_16_calls(fund, app):
    fund.apply(task_id="A")
    assert store_of(app).calls.total() <= 16


@pytest.mark.parametrize("end", [REFUSED, ValueError(), Retryable("down")], ids=lambda e: type(e))
def test_w2_it_is_taken_back_when_the_message_is_given_up(app, fund, bank, end):
    """The last step's task first, each with the step's result."""
    fund.apply((end,), task_id="A")
    assert bank.undone == [(name, f"{name} is done") for name in "cba"]
    assert Document(records_of(app), "scope", "order:7").fields["state"] == "closed"
    assert isinstance(fund.apply(task_id="A").result, Compensated)
    assert bank.done == ["a", "b", "c"]


def test_a_message_that_goes_on_for_weeks_is_taken_back(app, fund, bank):
    """Each run renews the list of what the message has entered, also if it is given up unrun."""
    clock = Clock()
    app.conf.sqs_backoff["store"] = CountedStore(clock=clock.time)
    for ends, days in (([None, KeyboardInterrupt()], 26), ([KeyboardInterrupt()], 5)):
        bank.ends = list(ends)  # as SIGKILL would
        with pytest.raises(KeyboardInterrupt):
            fund.apply(task_id="A")
        clock.now += days * 24 * 3600.0
    taken_back(app, "A", task_id="1")
    assert [name for name, _ in bank.undone] == ["b", "a"]


def test_w3_what_was_recorded_stays_and_the_error_is_raised(app, fund, bank):
    """The lock is free then."""
    bank.ends = [None, ConnectionError("down")]
    with pytest.raises(ConnectionError):
        fund()
    assert list(Document(records_of(app), "scope", "order:7").fields["steps"]) == ["a", "b"]
    assert fund() == "done"
    assert bank.done == ["a", "b", "b", "c"]


def test_a_step_in_doubt_is_taken_back_too(fund, bank):
    """Without a result."""
    bank.ends = [None, TimeoutError()]
    fund.apply(task_id="A")
    assert bank.undone == [("b", None), ("a", "a is done")]


def test_a_step_that_certainly_did_nothing_is_not_taken_back(fund, bank):
    bank.ends = [None, REFUSED]
    fund.apply(task_id="A")
    assert bank.undone == [("a", "a is done")]


def test_a_step_without_undo_stands(app, fund, bank):
    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:8") as order:
            order.step("a", bank.do, "a")
            order.step("b", bank.do, "b", undo=app.tasks["undo"].s("b"))
            raise REFUSED

    work.apply(task_id="A")
    assert [name for name, _ in bank.undone] == ["b"]


def test_each_undoing_task_waits_for_the_one_before(app, fund, bank, monkeypatch):
    """If one fails, the rest waits for it, also if the given-up message is given up again."""
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
def test_a_block_that_ends_by_ignore_has_ended_well(fund, bank, end):
    fund.apply((end,), task_id="A")
    assert bank.undone == []


def test_a_workflow_entered_in_a_helper_is_taken_back(app, fund, bank):
    """A fresh process gives the message up before it gets there."""
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


def test_other_tasks_send_and_ask_nothing(app):
    """Tasks without guard, lock, step or workflow never touch the store."""
    store_of(app).is_away = True

    @app.task(bind=True, name="plain")
    def plain(self):
        order = {"workflow": "shipped", "exclusive": self.name}
        raise NonRetryable(order["workflow"])

    plain.apply(task_id="A")
    assert store_of(app).calls.total() == 0


def test_a_broker_that_is_away_is_asked_again_by_the_settler(app, fund, monkeypatch, caplog):
    def away(*_, **__):
        raise ConnectionError("password=hunter2")

    monkeypatch.setattr(type(app.tasks[take_back.NAME]), "apply_async", away)
    assert not fund.extension.given_up(fund, "A", run="run", began=0.0, queue="q")
    assert "sqs_backoff.not_taken_back: task fund[A]: builtins.ConnectionError" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("queue", ["funds", "funds.fifo"])
def test_the_task_goes_to_the_queue_of_the_message(app, fund, monkeypatch, queue):
    """A worker of that queue knows the app's tasks. On a FIFO queue it holds up no other one."""
    sent = []
    task = app.tasks[take_back.NAME]
    monkeypatch.setattr(type(task), "apply_async", lambda _, args, **o: sent.append((args, o)))
    assert fund.extension.given_up(fund, "A", run="run", began=7.0, queue=queue)
    digest = message_digest(app, "fund", "A")
    group = {"MessageGroupId": digest} if queue == "funds.fifo" else {}
    assert sent == [((digest, "run", 7.0, queue), {"queue": queue} | group)]


def test_undoing_tasks_that_could_not_be_sent_are_retried(app, fund, bank, monkeypatch):
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


def test_a_step_is_inside_its_block(app):
    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            pass
        order.step("a", pytest.fail)

    with pytest.raises(RuntimeError, match="with block"):
        work.apply(task_id="A", throw=True)


def test_w5_two_messages_share_the_keys_of_a_workflow(app):
    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            return [order.key("a"), order.key("b")]

    first, second = (work.apply(task_id=message).result for message in "AB")
    assert first == second
    assert first[0] != first[1]


def test_a_workflow_needs_a_task_that_is_given_up_for(app, fund):
    """In a message of another task nobody would take its steps back."""

    @app.task()
    def outer():
        fund.run()

    with pytest.raises(RuntimeError, match="WorkflowTask"):
        outer.apply(task_id="A", throw=True)


def test_an_undoing_task_that_its_guard_refuses_is_a_dead_letter(app, bank):
    """Its step stands. It is redriven when the guard's window is over."""
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
def test_a_task_that_may_end_unnoticed_undoes_nothing(app, base, options, sent):
    """If it did, the other steps would stand."""

    @app.task(base=base, name="plain", **options)
    def plain(result): ...

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        with self.workflow("order:7") as order:
            order.step("a", pytest.fail, undo=plain.s().set(**sent))

    with pytest.raises(TypeError, match="invalid undo"):
        work.apply(task_id="A", throw=True)


def test_a_call_as_a_function_goes_on_and_answers_for_nothing(app, fund, bank):
    bank.ends = [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")
    assert fund() == "done"
    assert bank.done == ["a", "b", "c"]


def test_a_refused_message_takes_back_what_its_earlier_runs_have_done(app, fund, bank):
    """Its guard's window has ended, and another message has passed."""
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


def test_a_shared_store_needs_a_secret(monkeypatch):
    monkeypatch.delitem(sys.modules, "django.conf", raising=False)  # it has a secret
    app = bare_app("unsigned")
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:1/0"}

    @app.task(base=WorkflowTask, bind=True)
    def work(self):
        self.workflow("order:7")

    with pytest.raises(ImproperlyConfigured, match="secret"):
        work()


def test_a_planted_record_sends_no_task(app, fund, bank):
    """Records say which task undoes a step, so they are signed."""
    bank.ends = [None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        fund.apply(task_id="A")
    store = store_of(app)
    for key, (text, end) in list(store._records.items()):
        store._records[key] = (text.replace("undo", "evil"), end)
    with pytest.raises(Exception, match="not signed"):
        taken_back(app, "A")
    assert bank.undone == []
