"""The store goes away, or a lock is held, after a run has begun: nothing is done twice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

from celery_sqs_backoff import Guard, NonRetryable, Outcome, Retryable, SQSBackoffTask
from celery_sqs_backoff.safe import StoreLost, StoreUnavailable, hooks, shared
from celery_sqs_backoff.store.memory import MemoryStore
from tests.support.processes import eventually

#: SQS's id of a message, its task's name and task id.
MESSAGE = ("m", "mail", "task-id")


class FickleStore(MemoryStore):
    """Answers until ``is_away``; then each method raises."""

    is_away = False
    on_failure: Callable[[], object] = staticmethod(lambda: None)
    secret = "redis://:hunter2@host"  # in the text of what a client library raises

    def __getattribute__(self, name: str) -> Any:
        if name in ("add", "get", "replace", "delete") and self.is_away:
            self.on_failure()
            raise StoreUnavailable(self.secret) from ConnectionError(self.secret)
        return super().__getattribute__(name)


@pytest.fixture
def store() -> FickleStore:
    return FickleStore()


@pytest.fixture
def app(store: FickleStore) -> Iterator[Celery]:
    app = Celery("midway", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.sqs_backoff = {"store": store}
    yield app
    app.close()


@pytest.fixture
def charged() -> list[int]:
    return []


def delivered(task: Any, **request: Any) -> Any:
    """As if a worker ran a message from a broker that is not SQS."""
    if task.request_stack.top is not None:
        task.request_stack.pop()
    task.push_request(
        **{"id": "message", "called_directly": False, "is_eager": False, "retries": 0}
        | {"args": (), "kwargs": {}}
        | request
    )
    return task


@pytest.mark.parametrize("part", ["guarded", "exclusive"])
def test_a_charge_is_not_repeated_when_the_store_goes_away_after_it(
    app: Celery, store: FickleStore, charged: list[int], part: str
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay", max_retries=3)
    def pay(self: Any, order: int) -> None:
        charged.append(order)
        store.is_away = True
        with self.guarded("mail", window=60) if part == "guarded" else self.exclusive("account"):
            pytest.fail("it must not run")

    ended = pay.apply((1,))
    assert isinstance(ended.result, StoreLost)
    assert charged == [1]


@pytest.mark.parametrize("part", ["guarded", "exclusive"])
def test_a_store_that_is_away_before_the_run_costs_a_retry_and_does_nothing(
    app: Celery, store: FickleStore, charged: list[int], part: str
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay", max_retries=3)
    def pay(self: Any, order: int) -> None:
        charged.append(order)
        with self.guarded("mail", window=60) if part == "guarded" else self.exclusive("account"):
            pass

    store.is_away = True
    with pytest.raises(Retry):
        delivered(pay, args=(1,)).run(1)
    assert charged == []


def ask(task: Any) -> None:
    with task.exclusive("account"):
        pass


def test_a_task_whose_helper_asks_is_learned_from_its_first_run(
    app: Celery, store: FickleStore, charged: list[int]
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay", max_retries=3)
    def pay(self: Any, order: int) -> None:
        charged.append(order)
        ask(self)

    store.is_away = True
    with pytest.raises(StoreLost):  # the first run: it is not known yet that it will ask
        delivered(pay, args=(1,)).run(1)
    with pytest.raises(Retry):
        delivered(pay, args=(2,)).run(2)
    assert charged == [1]


def test_a_direct_call_does_not_ask_at_the_door(app: Celery, store: FickleStore) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="mail")
    def mail(self: Any) -> str:
        with self.guarded("mail", window=60):
            return "sent"

    store.is_away = True
    assert mail() == "sent"


def test_what_a_step_has_done_before_a_busy_lock_is_not_repeated(
    app: Celery, charged: list[int]
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay")
    def pay(self: Any) -> str:
        self.step("charge", charged.append, 1)
        with self.exclusive("account"):
            return "done"

    task = delivered(pay)
    with task.exclusive("account"), pytest.raises(Retry):
        task.run()
    assert delivered(pay).run() == "done"
    assert charged == [1]


@pytest.mark.parametrize("retries", [0, 3])
def test_a_task_without_a_workflow_is_given_up_although_the_store_is_away(
    app: Celery, store: FickleStore, charged: list[int], retries: int
) -> None:
    """Kept for a workflow that it does not have, it would charge once more."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay", max_retries=3)
    def pay(self: Any) -> None:
        charged.append(1)
        raise TimeoutError

    store.is_away = True
    assert delivered(pay, retries=retries)._compensate_given_up(may_run_again=True)


@pytest.mark.parametrize(
    ("error", "goes"),
    [(TimeoutError(), True), (Retryable("down"), False), (NonRetryable("no", True), False)],
    ids=lambda value: type(value).__name__,
)
def test_a_workflow_whose_store_is_away_runs_again_only_if_that_repeats_nothing(
    app: Celery,
    store: FickleStore,
    error: Exception,
    goes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "_PAUSES", (0.0,))

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay", max_retries=0)
    def pay(self: Any) -> None:
        with self.workflow("order:7"):
            pass

    task = delivered(pay)
    task.run()
    store.is_away = True
    verdict = task._judge(error)
    may_run_again = verdict.wants_retry or verdict.nothing_was_processed
    assert verdict.outcome is Outcome.UNKNOWN or may_run_again
    assert task._compensate_given_up(may_run_again=may_run_again) is goes


def test_a_workflow_that_goes_for_good_is_taken_back_after_the_stores_hiccup(
    app: Celery, store: FickleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message may not run again, so no later run would find it."""
    undone: list[object] = []
    app.conf.task_always_eager = True

    @app.task(shared=False, name="undo")
    def undo(result: object) -> None:
        undone.append(result)

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay")
    def pay(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("charge", lambda: "charged", undo=undo.s())
            store.is_away = True
            raise TimeoutError

    monkeypatch.setattr(hooks, "time", Clock(on_sleep=lambda: setattr(store, "is_away", False)))
    with pytest.raises(TimeoutError):
        delivered(pay).run()
    assert undone == ["charged"]


@pytest.mark.parametrize("retries", [0, 1])
def test_what_an_earlier_run_has_begun_is_taken_back_after_the_stores_hiccup(
    app: Celery, store: FickleStore, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """The last run has not come to the workflow. A redriven message has no retries."""
    undone: list[object] = []
    app.conf.task_always_eager = True

    @app.task(shared=False, name="undo")
    def undo(result: object) -> None:
        undone.append(result)

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay")
    def pay(self: Any) -> None:
        if store.is_away:
            raise NonRetryable("the customer is gone")
        with self.workflow("order:7") as order:
            order.step("charge", lambda: "charged", undo=undo.s())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delivered(pay).run()
    store.is_away = True
    again = delivered(pay, retries=retries)
    assert not again._compensate_given_up(may_run_again=True), "the message comes back"
    monkeypatch.setattr(hooks, "time", Clock(on_sleep=lambda: setattr(store, "is_away", False)))
    with pytest.raises(NonRetryable):
        again.run()
    assert undone == ["charged"]


def test_no_log_line_holds_the_text_of_an_exception(
    app: Celery, store: FickleStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It may quote a task's arguments, or the URL of a store with its password."""
    guard = Guard(key="mail:{customer}", window=3600)

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="mail", guard=guard)
    def mail(self: Any, customer: int) -> None:
        store.is_away = True
        if customer == 8:
            raise NonRetryable("hunter2", safe_to_undo=True)

    with caplog.at_level(logging.INFO):
        for customer in (7, 8):
            store.is_away = False
            mail.apply((customer,))
        shared.count_crash(app, *MESSAGE)
        shared.compensate_given_up(app, "mail", "m")
    ours = [r for r in caplog.records if r.name.startswith("celery_sqs_backoff")]
    events = {r.getMessage().partition(":")[0] for r in ours}
    assert events >= {
        "sqs_backoff.guard_not_finished",
        "sqs_backoff.guard_not_unset",
        "sqs_backoff.not_counted",
        "sqs_backoff.not_compensated",
    }
    for record in ours:
        assert record.exc_info is None
        assert "hunter2" not in record.getMessage()


@pytest.mark.parametrize("planted", ["made up", "", "7"])
def test_a_planted_counter_or_lock_stops_no_worker(
    app: Celery, store: FickleStore, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a store without signatures anybody may write anything."""
    from celery_sqs_backoff.safe import Busy, shared
    from celery_sqs_backoff.safe.lock import Lock
    from celery_sqs_backoff.store.settings import vault_of

    monkeypatch.setattr("celery_sqs_backoff.store.settings._django_secrets", lambda: ())
    assert shared.count_crash(app, *MESSAGE) == 1
    Lock(vault_of(app), "account").acquire()
    for key, (_, end) in list(store._records.items()):
        store._records[key] = (f"s0::{planted}", end)
    assert shared.count_crash(app, *MESSAGE) in (0, 8)
    with pytest.raises(Busy):
        Lock(vault_of(app), "account").acquire()


def test_no_module_logs_an_exceptions_text() -> None:
    """``logger.exception`` does, and so does ``exc_info``."""
    from pathlib import Path

    import celery_sqs_backoff

    root = Path(celery_sqs_backoff.__file__).parent
    found = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "logger.exception(" in (text := path.read_text()) or "exc_info=True" in text
    ]
    assert found == []


def test_a_store_that_hangs_is_left_alone_for_a_while(
    app: Celery, store: FickleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call would stand in Celery's event loop until the client's timeout."""
    clock = Clock()
    monkeypatch.setattr(shared, "time", clock)
    store.is_away, store.on_failure = True, lambda: clock.sleep(5.0)
    assert shared.count_crash(app, *MESSAGE) == 0
    assert shared.busy_receives(app, "m") is None
    assert not shared.compensate_given_up(app, "mail", "m"), "the message comes back"
    assert clock.now == 5.0, "one call"
    clock.sleep(30.0)
    assert not shared.compensate_given_up(app, "mail", "m")
    assert shared.count_crash(app, *MESSAGE) == 0
    assert clock.now == 40.0, "one more"
    store.is_away = False
    clock.sleep(30.0)
    assert shared.count_crash(app, *MESSAGE) == 1


def test_while_a_call_hangs_the_store_is_not_asked_again(
    app: Celery, store: FickleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread each would hang, for as long as the network is silent."""
    monkeypatch.setattr(shared, "_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(shared, "_LEFT_ALONE_SECONDS", 0.0)
    asked: list[str] = []
    goes_on = threading.Event()

    def hang() -> str:
        asked.append("once")
        goes_on.wait(10)
        return "answer"

    for _ in range(2):
        assert shared.in_time(app, hang, otherwise="unknown") == "unknown"
    assert asked == ["once"]
    goes_on.set()
    eventually(lambda: shared.in_time(app, hang, otherwise="unknown") == "answer")


def test_a_broker_that_hangs_is_not_taken_for_the_store(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The main process sends the undoing tasks of a lost run in the same call."""
    monkeypatch.setattr(shared, "_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(shared, "_HANGS_SECONDS", 0.0)
    taken = threading.Event()
    with caplog.at_level(logging.WARNING, shared.logger.name):
        shared.in_time(app, partial(taken.wait, 10), otherwise=False)
    taken.set()
    assert "or the broker has not taken undoing tasks" in caplog.text


def test_without_a_thread_left_the_event_loop_does_not_ask_the_store(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would wait for a store that hangs as long as that takes."""
    asked: list[str] = []
    monkeypatch.setattr(shared, "call_in_time", lambda call, seconds: None)
    ask = partial(asked.append, "here")
    with caplog.at_level(logging.WARNING, shared.logger.name):  # a worker may have been started
        assert shared.in_time(app, ask, otherwise=None) is None
    assert not asked
    assert "sqs_backoff.no_thread_left" in caplog.text


def test_a_store_that_refuses_at_once_is_asked_each_time(app: Celery, store: FickleStore) -> None:
    store.is_away = True
    assert shared.count_crash(app, *MESSAGE) == 0
    store.is_away = False
    assert shared.count_crash(app, *MESSAGE) == 1


class Clock:
    """Instead of the module ``time``."""

    now = 0.0

    def __init__(self, on_sleep: Callable[[], object] = lambda: None) -> None:
        self.on_sleep = on_sleep

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()
