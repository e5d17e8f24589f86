"""A workflow holds its lock, knows its steps, and is taken back when its message is given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_sqs_backoff import Guard, NonRetryable, Retryable, SQSBackoffTask
from celery_sqs_backoff.safe import (
    Busy,
    Compensated,
    LockLost,
    NotDispatched,
    Refused,
    StepNotRecorded,
    StoreUnavailable,
    Workflow,
    hooks,
    steps,
)
from celery_sqs_backoff.safe.guard import Run
from celery_sqs_backoff.safe.lock import DEFAULT_LEASE_SECONDS, Lock, busy_delay
from celery_sqs_backoff.safe.message_end import compensate_scopes_of
from celery_sqs_backoff.safe.scope import Scope
from celery_sqs_backoff.safe.shared import compensate_given_up
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.protocol import key_of
from celery_sqs_backoff.store.settings import vault_of


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def app(now: list[float]) -> Iterator[Celery]:
    app = Celery("workflows", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.task_always_eager = True
    app.conf.sqs_backoff = {"store": MemoryStore(clock=lambda: now[0])}
    yield app
    app.close()


class Bank:
    """What was done, in order; and what it answers."""

    def __init__(self, app: Celery) -> None:
        self.log: list[Any] = []
        self.answers: dict[str, list[BaseException]] = {}

        @app.task(shared=False, base=SQSBackoffTask, name="take_back")
        def take_back(done: object, name: str) -> None:
            self.log.append(("undo", name, done))

        @app.task(shared=False, base=SQSBackoffTask, name="confirm")
        def confirm(done: object) -> None:
            self.log.append(("confirm", done))

        self.take_back, self.confirm = take_back, confirm

    def do(self, name: str, *, key: str = "") -> str:
        if self.answers.get(name):
            answer = self.answers[name].pop(0)
            if not isinstance(answer, Retryable | NonRetryable):
                self.log.append(name)  # done, and the answer lost
            raise answer
        self.log.append(name)
        return f"{name} done"


@pytest.fixture
def bank(app: Celery) -> Bank:
    return Bank(app)


@pytest.fixture
def fund(app: Celery, bank: Bank) -> Any:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="fund")
    def fund(self: Any, names: list[str]) -> list[str]:
        with self.workflow("order:7") as order:
            return [
                order.step(
                    name,
                    bank.do,
                    name,
                    key=order.key(name),
                    undo=bank.take_back.s(name),
                    confirm=bank.confirm.s(),
                )
                for name in names
            ]

    return fund


def lock_of(app: Celery) -> str:
    """The record of the lock of workflow ``order:7``."""
    return vault_of(app).get(key_of("lock", "scope:order:7")) or ""


def apply(task: Any, *args: Any, task_id: str = "message 1") -> Any:
    return task.apply(args, task_id=task_id)


def test_a_workflow_goes_on_where_it_stopped(fund: Any, bank: Bank) -> None:
    bank.answers["b"] = [KeyboardInterrupt()]  # the process ends there
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b", "c"])
    assert apply(fund, ["a", "b", "c"]).get() == ["a done", "b done", "c done"]
    done = [entry for entry in bank.log if isinstance(entry, str)]
    assert done == ["a", "b", "b", "c"]
    assert bank.log.count(("confirm", "a done")) == 1


@pytest.mark.parametrize(
    "failure", [NonRetryable("refused"), NonRetryable("no", True), ValueError()]
)
def test_it_is_taken_back_in_reverse_when_the_message_is_given_up(
    fund: Any, bank: Bank, failure: Exception
) -> None:
    bank.answers["c"] = [failure]
    assert apply(fund, ["a", "b", "c"]).state == "FAILURE"
    undone = [entry[1:] for entry in bank.log if entry[0] == "undo"]
    in_doubt = [("c", None)] if isinstance(failure, ValueError) else []
    if isinstance(failure, NonRetryable) and not failure.safe_to_undo:
        in_doubt = [("c", None)]
    assert undone == [*in_doubt, ("b", "b done"), ("a", "a done")]
    assert isinstance(apply(fund, ["a", "b", "c"]).result, Compensated)
    assert len([entry for entry in bank.log if entry[0] == "undo"]) == len(undone)


def test_it_is_taken_back_when_the_retries_are_used_up(fund: Any, bank: Bank) -> None:
    bank.answers["b"] = [Retryable("down")]
    assert apply(fund, ["a", "b"]).state == "FAILURE"  # eagerly there is no retry
    assert bank.log[-1] == ("undo", "a", "a done")


def test_the_main_process_takes_it_back_for_a_run_that_was_lost(
    app: Celery, fund: Any, bank: Bank
) -> None:
    """The crash budget is used up. The killed run's lock is still there, and its step in doubt."""
    vault = vault_of(app)
    release, Lock.release = Lock.release, lambda self: None  # type: ignore[method-assign]
    try:
        bank.answers["b"] = [KeyboardInterrupt()]
        with pytest.raises(KeyboardInterrupt):
            apply(fund, ["a", "b"])
    finally:
        Lock.release = release  # type: ignore[method-assign]
    for _ in range(2):
        assert compensate_given_up(app, "fund", "message 1")
    assert bank.log[-2:] == [("undo", "b", None), ("undo", "a", "a done")]
    assert vault.get("lock:nothing") is None


def test_what_undoes_a_done_step_is_what_the_last_run_has_named(app: Celery, bank: Bank) -> None:
    """A release adds or changes an undo while workflows are under way; then a process is lost."""
    undo: list[Any] = [None, bank.take_back.s("by the release before")]

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="released")
    def released(self: Any) -> None:
        with self.workflow("order:7") as order:
            for name, task in zip("abc", undo, strict=False):
                order.step(name, bank.do, name, undo=task)

    undo.append(None)
    bank.answers["c"] = [KeyboardInterrupt(), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(released)
    undo[:] = [bank.take_back.s("a"), bank.take_back.s("b"), bank.take_back.s("c")]
    with pytest.raises(KeyboardInterrupt):
        apply(released)
    assert compensate_given_up(app, "released", "message 1")
    assert bank.log[-3:] == [("undo", "c", None), ("undo", "b", "b done"), ("undo", "a", "a done")]


def test_an_eager_run_that_finds_a_killed_runs_lock_takes_nothing_back(
    fund: Any, bank: Bank, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank.answers["b"] = [KeyboardInterrupt()]
    with monkeypatch.context() as patch:
        patch.setattr(Lock, "release", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            apply(fund, ["a", "b"])
    assert isinstance(apply(fund, ["a", "b"]).result, Busy)
    now[0] += DEFAULT_LEASE_SECONDS
    assert apply(fund, ["a", "b"]).get() == ["a done", "b done"]
    assert not [entry for entry in bank.log if entry[0] == "undo"]


def test_what_another_message_goes_on_with_is_not_taken_back(
    app: Celery, fund: Any, bank: Bank
) -> None:
    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b"])
    assert apply(fund, ["a", "b"], task_id="message 2").state == "SUCCESS"
    assert compensate_given_up(app, "fund", "message 1")
    assert not [entry for entry in bank.log if entry[0] == "undo"]


def test_a_workflow_that_has_ended_is_not_taken_back(app: Celery, bank: Bank) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="later")
    def later(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
        raise ValueError("after the workflow")

    assert apply(later).state == "FAILURE"
    assert bank.log == ["a"]


def test_a_step_that_was_taken_back_by_hand_closes_the_workflow(app: Celery, bank: Bank) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="by_hand")
    def by_hand(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            order.compensate()
            order.step("b", bank.do, "b")

    assert isinstance(apply(by_hand).result, Compensated)
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_two_runs_are_not_in_one_workflow(app: Celery, fund: Any, bank: Bank) -> None:
    with Lock(vault_of(app), "scope:order:7"):
        assert isinstance(apply(fund, ["a"]).result, Busy)
    assert bank.log == []
    assert apply(fund, ["a"]).state == "SUCCESS"


def test_each_step_renews_the_lock_first(app: Celery, bank: Bank, now: list[float]) -> None:
    """A run that was paused for longer than its lease does no further step."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="paused")
    def paused(self: Any, seconds: float) -> None:
        with self.workflow("order:7", lease=10) as order:
            for name in ("a", "b", "c"):
                order.step(name, bank.do, name)
                now[0] += seconds

    assert apply(paused, 9).state == "SUCCESS"
    now[0] += 60
    assert isinstance(apply(paused, 11, task_id="message 2").result, LockLost)


@pytest.mark.parametrize("fails", ["at its next step", "in its step"])
def test_a_run_that_outlived_its_lease_takes_nothing_back_of_the_messages_next_run(
    app: Celery, bank: Bank, now: list[float], fails: str
) -> None:
    """Its machine was suspended, so SQS has delivered the message again; that run goes on."""
    run = Run.of(vault_of(app), "paused", "message 1", "the next run")
    following = Workflow(vault_of(app), "scope:order:7", app, run, lease=10, namespace="")

    def wake_up_late() -> None:
        now[0] += 11
        following.__enter__()
        if fails == "in its step":
            raise NonRetryable("no")

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="paused")
    def paused(self: Any) -> None:
        with self.workflow("order:7", lease=10) as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            order.step("pause", wake_up_late)
            order.step("b", bank.do, "b", undo=bank.take_back.s("b"))

    expected = NonRetryable if fails == "in its step" else LockLost
    assert isinstance(apply(paused).result, expected)
    following.step("a", bank.do, "a", undo=bank.take_back.s("a"))
    following.step("b", bank.do, "b", undo=bank.take_back.s("b"))
    following.__exit__(None, None, None)
    assert bank.log == ["a", "b"]


@pytest.mark.parametrize(
    "giver", ["last receive", "main process", "main process, for a lost run", "store away"]
)
def test_a_step_under_way_ends_before_it_is_undone(
    app: Celery, bank: Bank, monkeypatch: pytest.MonkeyPatch, giver: str
) -> None:
    """SQS has delivered its message again, whose last receive finds the lock held.

    Or that receive is too late (``expires``); or its process is lost before it comes to the
    workflow; or the store goes away once the lock is stolen.
    """
    sent: list[Any] = []
    app.conf.task_always_eager = False
    monkeypatch.setattr(type(bank.take_back), "apply_async", lambda *_, **o: sent.append(o))

    def away(_: Lock) -> None:
        raise StoreUnavailable("away")

    def give_up() -> None:
        run = Run.of(vault_of(app), "slow", "message 1", "the last receive's")
        if giver.startswith("main process"):
            lost_run = "the last receive's" if giver.endswith("lost run") else ""
            assert compensate_given_up(app, "slow", "message 1", lost_run=lost_run)
        if giver == "store away":
            with monkeypatch.context() as patch:
                patch.setattr(Lock, "acquire", away)
                compensate_scopes_of(vault_of(app), app, run, opened={})
        compensate_scopes_of(vault_of(app), app, run, opened={})
        bank.log.append("a")

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="slow")
    def slow(self: Any) -> None:
        with self.workflow("order:7", lease=100) as order:
            order.step("a", give_up, undo=bank.take_back.s("a"))
            order.step("b", bank.do, "b")

    assert isinstance(apply(slow).result, LockLost)
    [options] = sent
    assert options["countdown"] == pytest.approx(100, abs=10)
    assert bank.log == ["a"]


def test_the_steps_of_a_run_that_was_lost_are_undone_before_its_lease_is_over(
    app: Celery, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    app.conf.task_always_eager = False
    monkeypatch.setattr(type(bank.take_back), "apply_async", lambda *_, **o: sent.append(o))
    run = Run.of(vault_of(app), "fund", "message 1", "its run")
    lost = Workflow(vault_of(app), "scope:order:7", app, run, lease=100, namespace="").__enter__()
    lost.step("a", bank.do, "a", undo=bank.take_back.s("a"))
    assert compensate_given_up(app, "fund", "message 1", lost_run="its run")
    [options] = sent
    assert "countdown" not in options


def test_a_task_that_is_called_as_a_function_may_take_its_callers_steps_back(
    app: Celery, bank: Bank
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="cancel")
    def cancel(self: Any) -> None:
        self.compensate(scope="order:7")

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="asks")
    def asks(self: Any) -> str:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            cancel()
        return "cancelled"

    assert apply(asks).result == "cancelled"
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_a_step_that_is_taken_back_while_the_store_is_away_is_owed(
    app: Celery, fund: Any, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = app.conf.sqs_backoff["store"]

    def away(*_: object) -> None:
        raise StoreUnavailable("away")

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(store, "get", away)
        assert not compensate_given_up(app, "fund", "message 1")
    assert compensate_given_up(app, "fund", "message 1")
    assert bank.log[-1] == ("undo", "a", "a done")


def test_a_step_needs_a_name_of_its_own(app: Celery, fund: Any) -> None:
    assert isinstance(apply(fund, ["a", "a"]).result, ValueError)


def test_a_run_that_enters_again_needs_other_names_too(app: Celery) -> None:
    """Else the second charge is taken for the first, and never made."""
    charged: list[int] = []

    class Charge:  # of such an input only the class counts
        def __init__(self, amount: int) -> None:
            self.amount = amount

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="charge")
    def charge(self: Any) -> None:
        for amount in (1, 2):
            with self.workflow("order:7") as order:
                order.step("charge", lambda it: charged.append(it.amount), Charge(amount))

    with pytest.raises(ValueError, match="has had a step of that name"):
        apply(charge).get()
    assert charged == [1]


def test_the_undoing_tasks_run_one_after_the_other(app: Celery, fund: Any, bank: Bank) -> None:
    """One message with a chain: the next is sent when the one before it has ended well."""
    sent: list[Any] = []
    app.conf.task_always_eager = False
    bank.answers["c"] = [NonRetryable("refused", safe_to_undo=True)]
    type(bank.confirm).apply_async = lambda *_, **__: None
    type(bank.take_back).apply_async = lambda _, args=(), kwargs=None, **o: sent.append((args, o))
    apply(fund, ["a", "b", "c"])
    [(args, options)] = sent
    assert tuple(args) == ("b done", "b")
    [then] = options["chain"]
    assert tuple(then["args"]) == ("a done", "a")
    assert then["immutable"]
    assert issubclass(type(bank.take_back), Task)


@pytest.mark.parametrize("lease", [30.0, 300.0, 3600.0, 12 * 3600.0])
def test_a_killed_holder_is_outlasted_within_the_queues_receives(lease: float) -> None:
    """However long its lease, against a ``maxReceiveCount`` of 10, in each of 1,000 histories."""
    from random import Random

    rng, receives = Random(1), []
    for _ in range(1000):
        left, times = lease, 0
        while left > 0:
            times += 1
            left -= max(1.0, busy_delay(times, left, rng))
        receives.append(times)
    assert max(receives) < 10


@pytest.mark.parametrize("time_left", [20.0, 120.0, 3000.0])
def test_a_holder_is_waited_for_until_retry_for_is_nearly_over(time_left: float) -> None:
    """Its lease may end after that. The message was given up at its fourth run, in seconds."""
    from random import Random

    for seed in range(100):
        rng, left, times = Random(seed), time_left, 0
        while True:
            times += 1
            delay = busy_delay(times, 3600 - (time_left - left), rng, time_left=left)
            if delay >= left:
                break
            left -= max(1.0, delay)
        assert times < 10
        assert left <= time_left / 5 + 2


def test_another_message_that_does_nothing_takes_nothing_back_of_what_has_ended_well(
    app: Celery, fund: Any, bank: Bank
) -> None:
    """A second click: the order is paid and confirmed, and only then a run fails."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="late")
    def late(self: Any, names: list[str]) -> None:
        with self.workflow("order:7") as order:
            for name in names:
                undo = bank.take_back.s(name)
                order.step(name, bank.do, name, key=order.key(name), undo=undo)
            raise ValueError("after the last step")

    assert apply(fund, ["a"]).get() == ["a done"]
    assert apply(late, ["a"], task_id="message 2").state == "FAILURE"
    assert [entry for entry in bank.log if entry[0] == "undo"] == []
    # Once it is gone on with, all of it is the next message's.
    assert apply(late, ["a", "b"], task_id="message 3").state == "FAILURE"
    assert [entry[1] for entry in bank.log if entry[0] == "undo"] == ["b", "a"]


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("amount", [12, 0])
def test_a_message_that_is_given_up_before_a_step_of_its_own_takes_nothing_back(
    app: Celery, bank: Bank, amount: int, is_lost: bool
) -> None:
    """A second click, with another amount or with none, while the first waits for its retry."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay")
    def pay(self: Any, amount: int) -> str:
        with self.workflow("order:7") as order:
            if not amount:
                raise KeyboardInterrupt if is_lost else ValueError
            order.step("a", lambda: (amount, bank.do("a")), undo=bank.take_back.s("a"))
            order.step("b", bank.do, "b", undo=bank.take_back.s("b"))
        return "done"

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(pay, 10)
    with suppress(KeyboardInterrupt):
        assert apply(pay, amount, task_id="message 2").state == "FAILURE"
    assert compensate_given_up(app, "pay", "message 2")
    assert bank.log == ["a", "b"]
    if is_lost and not amount:
        Lock(vault_of(app), "scope:order:7").steal(lock_of(app))
    assert apply(pay, 10).result == "done"
    assert bank.log == ["a", "b", "b"]


@pytest.mark.parametrize("first", ["waits", "was given up"])
def test_a_message_that_has_begun_a_step_of_another_is_taken_back_with_it(
    app: Celery, bank: Bank, first: str
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay")
    def pay(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="look")
    def look(self: Any) -> None:
        with self.workflow("order:7"):
            assert compensate_given_up(app, "pay", "message 1")
            raise ValueError

    bank.answers["a"] = [KeyboardInterrupt(), ValueError()]
    with pytest.raises(KeyboardInterrupt):
        apply(pay)
    again = pay if first == "waits" else look
    assert apply(again, task_id="message 2").state == "FAILURE"
    assert bank.log[-1] == ("undo", "a", None)


def test_a_message_that_was_given_up_after_the_end_is_not_gone_back_to(
    app: Celery, bank: Bank
) -> None:
    """It would be taken for one that goes on with the workflow, and nobody would take it back."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay")
    def pay(self: Any, *names: str) -> None:
        with self.workflow("order:7") as order:
            for name in names:
                order.step(name, bank.do, name, undo=bank.take_back.s(name))
            if self.request.id != "message 1":
                raise ValueError

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="look")
    def look(self: Any) -> None:
        with self.workflow("order:7"):
            assert compensate_given_up(app, "pay", "message 3")
            raise ValueError

    apply(pay, "a")
    assert apply(pay, "a", task_id="message 2").state == "FAILURE"
    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(pay, "a", "b", task_id="message 3")
    assert apply(look, task_id="message 4").state == "FAILURE"
    assert bank.log[-2:] == [("undo", "b", None), ("undo", "a", "a done")]


def test_a_message_that_ended_late_is_not_gone_back_to(app: Celery, bank: Bank) -> None:
    """It had outlived its lease, and another message was in the workflow when it ended."""
    vault = vault_of(app)

    def workflow(message: str) -> Workflow:
        run = Run.of(vault, "fund", message, message)
        return Workflow(vault, "scope:order:7", app, run, lease=60, namespace="")

    late, next_one = workflow("message 1").__enter__(), workflow("message 2")
    Lock(vault, "scope:order:7").steal(lock_of(app))
    next_one.__enter__().step("b", bank.do, "b", undo=bank.take_back.s("b"))
    late.__exit__(None, None, None)
    next_one.__exit__(ValueError, ValueError(), None)
    third = workflow("message 3").__enter__()
    assert compensate_given_up(app, "fund", "message 2")
    third.__exit__(ValueError, ValueError(), None)
    assert compensate_given_up(app, "fund", "message 3")
    assert bank.log == ["b", ("undo", "b", "b done")]


def test_what_a_message_takes_back_by_hand_is_taken_back_although_it_is_anothers(
    app: Celery, fund: Any, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="cancel")
    def cancel(self: Any) -> None:
        with self.workflow("order:7") as order, monkeypatch.context() as patch:
            patch.setattr(steps, "_send", _away)
            order.compensate()

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b"])
    assert apply(cancel, task_id="message 2").state == "FAILURE"
    assert bank.log[-2:] == [("undo", "b", None), ("undo", "a", "a done")]


def _away(task: object, what: str, **options: object) -> None:
    raise NotDispatched("the broker is away")


def test_a_step_that_had_failed_when_the_workflow_ended_is_gone_on_with(
    app: Celery, bank: Bank
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="lenient")
    def lenient(self: Any, fails: bool) -> None:
        with self.workflow("order:7") as order:
            try:
                order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            except NonRetryable:
                return
            if fails:
                raise ValueError

    bank.answers["a"] = [NonRetryable("refused", safe_to_undo=True)]
    assert apply(lenient, False).state == "SUCCESS"
    assert apply(lenient, True, task_id="message 2").state == "FAILURE"
    assert bank.log[-1] == ("undo", "a", "a done")


def test_a_message_that_is_refused_after_its_guards_window_is_taken_back(
    app: Celery, bank: Bank, now: list[float]
) -> None:
    """It was retried for longer than the window, and another message has passed meanwhile."""

    @app.task(
        shared=False,
        base=SQSBackoffTask,
        bind=True,
        name="guarded",
        guard=Guard(key="customer:7", window=60),
    )
    def guarded(self: Any, order_id: int) -> None:
        with self.workflow(f"order:{order_id}") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            if order_id == 7:
                raise KeyboardInterrupt  # the process ends there

    with pytest.raises(KeyboardInterrupt):
        apply(guarded, 7)
    now[0] += 61
    assert apply(guarded, 8, task_id="message 2").state == "SUCCESS"
    again = guarded.apply((7,), task_id="message 1", retries=1)
    assert again.state == "IGNORED"
    assert [entry for entry in bank.log if entry[0] == "undo"] == [("undo", "a", "a done")]


@pytest.mark.parametrize("fails_in", ["the block", "a step"])
def test_a_refused_message_that_has_done_nothing_leaves_the_workflow_to_the_one_that_passed(
    app: Celery, bank: Bank, fails_in: str
) -> None:
    """Two clicks on one order. The provider was down for the first; the second is not there yet."""
    guard = Guard(key="order:7", window=60)
    app.conf.task_always_eager = False

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay", guard=guard)
    def pay(self: Any) -> None:
        if self.request.id == "message 2" and not self.request.retries:
            raise KeyboardInterrupt  # the process ends there
        with self.workflow("order:7") as order:
            if self.request.id == "message 1" and fails_in == "the block":
                raise Retryable("down")
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))

    bank.answers["a"] = [Retryable("down")] if fails_in == "a step" else []
    pay.push_request(id="message 1", called_directly=False)
    with pytest.raises(Retry):
        pay.run()
    pay.pop_request()
    with pytest.raises(KeyboardInterrupt):
        apply(pay, task_id="message 2")
    assert pay.apply(task_id="message 1", retries=1).state == "IGNORED"
    assert pay.apply(task_id="message 2", retries=1).state == "SUCCESS"
    assert bank.log == ["a"]


@pytest.mark.parametrize("ends_first", ["the refused", "the other"])
def test_no_workflow_is_left_half_done_to_a_message_that_a_guard_refuses_in_it(
    app: Celery, bank: Bank, now: list[float], ends_first: str
) -> None:
    """A run has outlived its lease, and what waited for the lock has entered meanwhile."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="once")
    def once(self: Any, is_second: bool = False) -> None:
        with self.workflow("order:7") as order:
            if is_second and ends_first == "the other":
                assert compensate_given_up(app, "once", "message 1")
            with self.guarded("order:7", window=3600):
                order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
                now[0] += DEFAULT_LEASE_SECONDS + 1
                assert apply(once, True, task_id="message 2").state == "IGNORED"
                order.step("b", bank.do, "b", undo=bank.take_back.s("b"))

    assert isinstance(apply(once).result, LockLost)
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_a_refused_message_takes_nothing_back_of_what_another_one_goes_on_with(
    app: Celery, bank: Bank
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="once")
    def once(self: Any) -> str:
        with self.workflow("order:7") as order, self.guarded("order:7", window=3600):
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            order.step("b", bank.do, "b", undo=bank.take_back.s("b"))
        return "done"

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(once)
    assert apply(once, task_id="message 2").state == "IGNORED"
    assert apply(once).result == "done"
    assert apply(once, task_id="message 3").state == "IGNORED"
    assert compensate_given_up(app, "once", "message 1")
    assert bank.log == ["a", "b", "b"]


def test_a_message_that_is_given_up_is_taken_back_after_another_was_refused_in_its_workflow(
    app: Celery, bank: Bank
) -> None:
    """It was retried for too long, revoked, or killed: no run of it has entered again."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="once")
    def once(self: Any) -> None:
        with self.workflow("order:7") as order, self.guarded("order:7", window=3600):
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply(once)
    assert apply(once, task_id="message 2").state == "IGNORED"
    assert compensate_given_up(app, "once", "message 1")
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_what_enters_while_a_message_is_given_up_takes_it_back_when_it_is_refused(
    app: Celery, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="once")
    def once(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply(once)
    vault, entered = vault_of(app), list[Workflow]()
    run = Run.of(vault, "once", "message 2", "its run")
    other = Workflow(vault, "scope:order:7", app, run, lease=60, namespace="")

    def enter(lock: Lock, text: str) -> None:
        if not entered:
            entered.append(other.__enter__())

    monkeypatch.setattr(Lock, "lease_end", enter)
    assert compensate_given_up(app, "once", "message 1")
    assert bank.log == ["a"]
    other.__exit__(Refused, Refused({"refused": "another message has passed"}), None)
    assert bank.log == ["a", ("undo", "a", "a done")]


@pytest.mark.parametrize("next_one_enters", [False, True])
def test_what_another_delivery_ends_while_the_message_is_given_up_is_not_taken_back(
    app: Celery, bank: Bank, monkeypatch: pytest.MonkeyPatch, next_one_enters: bool
) -> None:
    vault = vault_of(app)

    def workflow(message: str) -> Workflow:
        run = Run.of(vault, "fund", message, "its run")
        return Workflow(vault, "scope:order:7", app, run, lease=60, namespace="")

    ending, next_one = workflow("message 1").__enter__(), Lock(vault, "scope:order:7", lease=60)
    ending.step("a", bank.do, "a", undo=bank.take_back.s("a"))

    def end_first(lock: Lock, text: str) -> None:
        ending.__exit__(None, None, None)
        if next_one_enters:
            next_one.acquire()

    monkeypatch.setattr(Lock, "lease_end", end_first)
    assert compensate_given_up(app, "fund", "message 1")
    monkeypatch.undo()
    if next_one_enters:
        next_one.release()
    with workflow("message 2"):
        pass
    assert bank.log == ["a"]


@pytest.mark.parametrize("other", ["message 1", "message 2"])
def test_a_run_whose_steps_are_taken_back_before_it_ends_does_not_succeed(
    app: Celery, bank: Bank, other: str
) -> None:
    """Another delivery of the message was given up, or, after a long pause, another message."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="fund")
    def fund(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            if other != self.request.id:
                Lock(vault_of(app), "scope:order:7").steal(order._lock.text)
                vault = vault_of(app)
                run = Run.of(vault, "fund", other, "its run")
                next_one = Workflow(vault, "scope:order:7", app, run, lease=60, namespace="")
                next_one.__enter__().step("b", bank.do, "b")
            assert compensate_given_up(app, "fund", other)

    ended = apply(fund)
    assert isinstance(ended.result, Compensated)
    assert [entry for entry in bank.log if entry != "b"] == ["a", ("undo", "a", "a done")]


@pytest.mark.parametrize("by_the_workflow", [True, False])
def test_a_run_that_takes_its_own_steps_back_may_end_well(
    app: Celery, bank: Bank, by_the_workflow: bool
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="fund")
    def fund(self: Any) -> str:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            if by_the_workflow:
                order.compensate()
            else:
                self.compensate(scope="order:7")
        return "taken back"

    assert apply(fund).result == "taken back"
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_what_ends_by_ignore_has_ended_well(app: Celery, bank: Bank) -> None:
    """The message is deleted as one that is done: nobody else's failure takes its steps back."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="fund")
    def fund(self: Any, fails: bool) -> None:
        with self.workflow("order:7") as order:
            if fails:
                raise NonRetryable("before a step of its own")
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            raise Ignore

    assert apply(fund, False).state == "IGNORED"
    assert apply(fund, True, task_id="message 2").state == "FAILURE"
    assert bank.log == ["a"]


def test_a_message_under_way_when_the_secret_is_changed_stays_itself(
    app: Celery, bank: Bank
) -> None:
    """Its guard and its steps know it, and what it has done is taken back."""
    store = app.conf.sqs_backoff["store"]

    @app.task(
        shared=False,
        base=SQSBackoffTask,
        bind=True,
        name="guarded",
        guard=Guard(key="customer:7", window=60),
    )
    def guarded(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", key="k", undo=bank.take_back.s("a"))
            raise KeyboardInterrupt  # the process ends there

    app.conf.sqs_backoff = {"store": store, "secret": "old"}
    with pytest.raises(KeyboardInterrupt):
        apply(guarded)
    app.conf.sqs_backoff = {"store": store, "secret": ["new", "old"]}
    with pytest.raises(KeyboardInterrupt):
        apply(guarded)
    assert apply(guarded, task_id="message 2").state == "IGNORED"
    assert bank.log == ["a"]
    assert compensate_given_up(app, "guarded", "message 1")
    assert bank.log == ["a", ("undo", "a", "a done")]


@pytest.mark.parametrize("called", ["another", "itself", "that it inherits from"])
def test_the_workflow_of_a_task_that_is_called_as_a_function_is_its_messages(
    app: Celery, bank: Bank, fund: Any, called: str
) -> None:
    bank.answers["b"] = [NonRetryable("refused")]
    base = type(fund) if called == "that it inherits from" else SQSBackoffTask

    @app.task(shared=False, base=base, bind=True, name="outer")
    def outer(self: Any, is_inner: bool = False) -> Any:
        if called == "itself" and not is_inner:
            return outer(is_inner=True)
        if called != "itself":
            return fund(["a", "b"])
        with self.workflow("order:7") as order:
            for name in ("a", "b"):
                order.step(name, bank.do, name, undo=bank.take_back.s(name))

    assert apply(outer).state == "FAILURE"
    assert ("undo", "a", "a done") in bank.log


def test_the_workflow_of_a_task_called_as_a_function_is_taken_back_after_a_crash(
    app: Celery, bank: Bank, fund: Any
) -> None:
    bank.answers["b"] = [KeyboardInterrupt()]

    @app.task(shared=False, base=SQSBackoffTask, name="outer")
    def outer() -> Any:
        return fund(["a", "b"])

    with pytest.raises(KeyboardInterrupt):
        apply(outer)
    assert compensate_given_up(app, "outer", "message 1")
    assert ("undo", "a", "a done") in bank.log


def test_a_store_that_is_away_before_a_step_costs_a_retry(
    app: Celery, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step has begun, and those before it are recorded: nothing would be done twice."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="fund", max_retries=1)
    def fund(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            if bank.log == ["a"]:
                with monkeypatch.context() as patch:
                    patch.setattr(MemoryStore, "replace", away)
                    order.step("b", bank.do, "b")
            order.step("b", bank.do, "b")

    def away(*_: object) -> bool:
        bank.log.append("away")
        raise StoreUnavailable

    assert apply(fund).state == "SUCCESS"
    assert bank.log == ["a", "away", "b"]


def test_a_redriven_message_that_fails_before_its_workflow_is_taken_back(
    app: Celery, bank: Bank
) -> None:
    """SQS had moved it after a crash, and counts its receives anew: this is no retry."""
    is_there = [True]

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="fund")
    def fund(self: Any) -> None:
        if not is_there[0]:
            raise NonRetryable("the order is gone")
        with self.workflow("order:7") as order:
            for name in ("a", "b"):
                order.step(name, bank.do, name, undo=bank.take_back.s(name))

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund)
    is_there[0] = False
    assert apply(fund).state == "FAILURE"
    assert [entry[1] for entry in bank.log if entry[0] == "undo"] == ["b", "a"]


def test_an_answer_that_json_cannot_give_back_does_not_keep_the_others_from_being_taken_back(
    app: Celery, bank: Bank
) -> None:
    """The provider's, with the two fields by which kombu marks what it has encoded."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="odd")
    def odd(self: Any) -> None:
        with self.workflow("order:7") as order:
            for name, answer in (("a", "done"), ("b", {"__type__": "card", "__value__": 1})):
                answers = [answer]  # what the provider answers is no input
                order.step(name, lambda: answers[0], undo=bank.take_back.s(name))  # noqa: B023

    assert isinstance(apply(odd).result, StepNotRecorded)
    assert bank.log == [("undo", "b", None), ("undo", "a", "done")]


def test_a_result_that_json_cannot_give_back_does_not_fail_a_message_that_is_done(
    app: Celery,
) -> None:
    @app.task(
        shared=False, base=SQSBackoffTask, name="odd", guard=Guard(key="customer:7", window=60)
    )
    def odd() -> Any:
        return {"__type__": "card", "__value__": 1}

    assert [apply(odd).state for _ in range(2)] == ["SUCCESS", "IGNORED"]


@pytest.mark.parametrize("ended_well", [False, True])
def test_steps_that_the_store_has_forgotten_are_named_for_a_person(
    app: Celery, bank: Bank, caplog: pytest.LogCaptureFixture, ended_well: bool
) -> None:
    """A Redis that does not persist is restarted: nothing says any more what is to be undone."""
    forget: Any = vault_of(app).store

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="forgotten")
    def forgotten(self: Any) -> None:
        with self.workflow("order:9") as order:
            order.step("account", str, 7, undo=app.tasks["forgotten"].si())
            if not ended_well:
                forget._records.clear()
                order.step("release", str, 8)
        forget._records.clear()
        raise NonRetryable("later")

    result = apply(forgotten).result
    said = [r.getMessage() for r in caplog.records if "undo_by_hand" in r.getMessage()]
    assert ["account" in text for text in said] == ([] if ended_well else [True])
    assert isinstance(result, NonRetryable if ended_well else LockLost)
    assert ended_well or "before its lease was over" in str(result)


def test_a_store_that_is_away_when_a_message_is_given_up_is_asked_once(
    app: Celery, bank: Bank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_PAUSES", ())

    def away(*_: object) -> None:
        raise StoreUnavailable

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="fund")
    def fund(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            monkeypatch.setattr(MemoryStore, "get", away)
            raise NonRetryable("refused")

    assert isinstance(apply(fund).result, NonRetryable)
    assert sum("not_compensated" in record.getMessage() for record in caplog.records) == 1


@pytest.fixture
def blunder(app: Celery, bank: Bank) -> Any:
    """A task that does a step of ``order:7`` if it is to, and then fails in the workflow."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="blunder")
    def blunder(self: Any, does_a_step: bool) -> None:
        with self.workflow("order:7") as order:
            if does_a_step:
                order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            raise ValueError

    return blunder


@pytest.mark.parametrize("by", ["a person", "a task without our base class"])
def test_what_nobody_gives_up_is_not_waited_for(
    app: Celery, blunder: Any, bank: Bank, by: str
) -> None:
    """A call as a function that has failed. The next message takes back what is half done."""

    @app.task(shared=False, name="stock")
    def stock() -> None:
        blunder(True)

    if by == "a person":
        with pytest.raises(ValueError):  # noqa: PT011  # the task's
            blunder(True)
    else:
        assert isinstance(apply(stock, task_id="stock 1").result, ValueError)
    assert apply(blunder, False, task_id="message 2").state == "FAILURE"
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_what_one_of_celerys_own_tasks_has_begun_is_not_waited_for() -> None:
    """With ``task_cls`` it has our base class, and still nobody gives its message up."""
    app = Celery("mapped", broker="memory://", set_as_current=False, task_cls=SQSBackoffTask)
    app.finalize()
    app.conf.task_always_eager = True
    app.conf.sqs_backoff = {"store": MemoryStore()}
    bank = Bank(app)

    @app.task(shared=False, bind=True, name="blunder")
    def blunder(self: Any, does_a_step: bool) -> None:
        with self.workflow("order:7") as order:
            if does_a_step:
                order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            raise ValueError

    assert isinstance(blunder.map([True]).apply().result, ValueError)
    assert apply(blunder, False, task_id="message 2").state == "FAILURE"
    assert bank.log == ["a", ("undo", "a", "a done")]
    app.close()


def test_a_person_who_tries_in_vain_leaves_the_workflow_to_its_message(
    app: Celery, fund: Any, blunder: Any, bank: Bank
) -> None:
    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b"])
    with pytest.raises(ValueError):  # noqa: PT011  # the task's
        blunder(False)
    assert compensate_given_up(app, "fund", "message 1")
    assert [entry[1] for entry in bank.log if entry[0] == "undo"] == ["b", "a"]


def test_a_message_that_a_guard_has_refused_is_not_waited_for(
    app: Celery, blunder: Any, bank: Bank
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="once")
    def once(self: Any) -> None:
        with self.workflow("order:7") as order, self.guarded("customer:1", window=3600):
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="other")
    def other(self: Any) -> None:
        with self.guarded("customer:1", window=3600):
            pass

    with pytest.raises(ValueError):  # noqa: PT011  # the task's
        blunder(True)
    assert apply(other).state == "SUCCESS"
    assert apply(once, task_id="message 2").state == "IGNORED"
    assert apply(blunder, False, task_id="message 3").state == "FAILURE"
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_a_step_outside_its_block_is_refused_by_what_it_is(app: Celery, bank: Bank) -> None:
    """It said that the lock had been freed: true of no lock that anybody had taken."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="outside")
    def outside(self: Any, is_after: bool) -> None:
        order = self.workflow("order:7")
        if is_after:
            with order:
                pass
        order.step("a", bank.do, "a")

    for is_after in (False, True):
        with pytest.raises(RuntimeError, match="outside its workflow's with block"):
            outside(is_after)
    assert bank.log == []


@pytest.mark.parametrize("enters", ["at once", "once its giver is killed"])
def test_what_enters_while_a_message_is_given_up_does_no_step_that_is_under_way(
    app: Celery, bank: Bank, monkeypatch: pytest.MonkeyPatch, enters: str
) -> None:
    """Nor are steps undone before that one ends. The message's worker is cut off from SQS."""
    sent: list[Any] = []
    app.conf.task_always_eager = False
    monkeypatch.setattr(type(bank.take_back), "apply_async", lambda *_, **o: sent.append(o))
    vault, steal = vault_of(app), Lock.steal

    def workflow(message: str) -> Workflow:
        run = Run.of(vault, "fund", message, "its run")
        return Workflow(vault, "scope:order:7", app, run, lease=100, namespace="")

    def enter(lock: Lock, text: str) -> bool:
        monkeypatch.setattr(Lock, "steal", steal)
        stolen = steal(lock, text)
        with pytest.raises(Compensated):
            workflow("message 2").__enter__()
        if enters == "once its giver is killed":
            raise KeyboardInterrupt
        return stolen

    def give_up() -> None:
        monkeypatch.setattr(Lock, "steal", enter)
        with suppress(KeyboardInterrupt):
            assert compensate_given_up(app, "fund", "message 1")
        assert compensate_given_up(app, "fund", "message 2")
        assert compensate_given_up(app, "fund", "message 1")

    cut_off = workflow("message 1").__enter__()
    cut_off.step("a", give_up, undo=bank.take_back.s("a"))
    [options] = sent
    assert options["countdown"] == pytest.approx(100, abs=10)


@pytest.mark.parametrize("by", ["a person", "a task without our base class"])
def test_a_call_that_was_killed_leaves_the_workflow_to_its_message(
    app: Celery, fund: Any, blunder: Any, bank: Bank, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell that was closed: nobody takes the call back, and the message does not come in."""

    @app.task(shared=False, name="stock")
    def stock() -> None:
        blunder(False)

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b"])
    with monkeypatch.context() as killed:
        killed.setattr(Workflow, "__exit__", lambda *_: None)
        with suppress(ValueError):
            blunder(False) if by == "a person" else apply(stock, task_id="stock 1")
    until = float(lock_of(app).rpartition(" ")[2])
    assert compensate_given_up(app, "fund", "message 1")
    assert Scope(vault_of(app), "scope:order:7").read()["undo_at"] == until  # it may be in a step
    assert [entry[1] for entry in bank.log if entry[0] == "undo"] == ["b", "a"]


@pytest.mark.parametrize("how", ["returns", "is ignored", "returns later"])
@pytest.mark.parametrize("last", ["waits", "is given up meanwhile"])
def test_a_message_that_ends_well_without_the_workflows_end_is_not_waited_for(
    app: Celery, fund: Any, bank: Bank, how: str, last: str
) -> None:
    """A second click, whose task catches what fails in the workflow."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="careful")
    def careful(self: Any) -> str:
        if self.request.retries:
            return "never mind"
        try:
            with self.workflow("order:7"):
                if last != "waits":
                    assert compensate_given_up(app, "fund", "message 1")
                raise ValueError
        except ValueError:
            if how == "returns later":
                raise KeyboardInterrupt from None
            if how == "is ignored":
                raise Ignore from None
            return "never mind"

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b"])
    with suppress(KeyboardInterrupt):
        apply(careful, task_id="message 2")
    if how == "returns later":
        assert careful.apply(task_id="message 2", retries=1).result == "never mind"
    assert compensate_given_up(app, "fund", "message 1")
    assert [entry[1] for entry in bank.log if entry[0] == "undo"] == ["b", "a"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_given_up_run_could_not_send_is_sent_also_if_the_next_one_ends_well(
    app: Celery, bank: Bank, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """It comes back for that, and finds the order cancelled: it does not enter the workflow."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="pay")
    def pay(self: Any) -> None:
        if self.request.retries and elsewhere:
            with self.workflow("cancellation:7"):
                return
        if self.request.retries:
            return
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            raise ValueError

    with monkeypatch.context() as patch:
        patch.setattr(steps, "_send", _away)
        assert apply(pay).state == "FAILURE"
    assert pay.apply(task_id="message 1", retries=1).successful()
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_a_message_that_is_the_last_to_end_takes_back_also_after_a_call_was_killed(
    app: Celery, fund: Any, blunder: Any, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its first message has done is owed: that one was given up while another was in."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="second")
    def second(self: Any) -> None:
        if not self.request.retries:
            with self.workflow("order:7"):
                raise KeyboardInterrupt

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b"])
    with pytest.raises(KeyboardInterrupt):
        apply(second, task_id="message 2")
    assert compensate_given_up(app, "fund", "message 1")
    with monkeypatch.context() as killed, suppress(ValueError):
        killed.setattr(Workflow, "__exit__", lambda *_: None)
        blunder(False)
    assert second.apply(task_id="message 2", retries=1).successful()
    assert [entry[1] for entry in bank.log if entry[0] == "undo"] == ["b", "a"]


def test_a_message_that_ends_before_its_call_of_a_workflows_task_is_not_waited_for(
    app: Celery, blunder: Any, bank: Bank
) -> None:
    """Its own code names no workflow."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="inner")
    def inner(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            raise KeyboardInterrupt

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="outer")
    def outer(self: Any) -> None:
        if not self.request.retries:
            inner()

    with pytest.raises(KeyboardInterrupt):
        apply(outer)
    assert outer.apply(task_id="message 1", retries=1).successful()
    assert apply(blunder, False, task_id="message 2").state == "FAILURE"
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_a_step_that_a_call_goes_on_with_stays_its_messages(
    app: Celery, blunder: Any, bank: Bank
) -> None:
    """It is given up before its next step, while another message waits for its own retry."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="first")
    def first(self: Any) -> None:
        with self.workflow("order:7") as order:
            if self.request.retries:
                raise ValueError
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="second")
    def second(self: Any) -> None:
        with self.workflow("order:7"):
            raise KeyboardInterrupt

    bank.answers["a"] = [KeyboardInterrupt()]
    for task, task_id in (second, "message 2"), (first, "message 1"):
        with pytest.raises(KeyboardInterrupt):
            apply(task, task_id=task_id)
    with suppress(ValueError):
        blunder(True)
    assert first.apply(task_id="message 1", retries=1).state == "FAILURE"
    assert bank.log == ["a", "a", ("undo", "a", "a done")]


def test_a_workflow_that_is_entered_again_has_not_ended(
    app: Celery, blunder: Any, bank: Bank
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="twice")
    def twice(self: Any) -> None:
        order = self.workflow("order:7")
        with order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
        with suppress(ValueError), order:
            order.step("b", bank.do, "b", undo=bank.take_back.s("b"))
            raise ValueError

    assert apply(twice).successful()
    assert apply(blunder, False, task_id="message 2").state == "FAILURE"
    assert [entry[1] for entry in bank.log if entry[0] == "undo"] == ["b", "a"]


@pytest.mark.parametrize("end", [Reject("no"), MemoryError()])
def test_it_is_taken_back_where_celery_itself_ends_the_message(
    app: Celery, bank: Bank, end: Exception
) -> None:
    """Not on SQS, where a message that is rejected, or has no memory, is judged later."""

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="ending")
    def ending(self: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("a", bank.do, "a", undo=bank.take_back.s("a"))
            raise end

    apply(ending)
    assert bank.log == ["a", ("undo", "a", "a done")]


def test_a_message_that_catches_a_failure_ends_what_has_ended(
    app: Celery, fund: Any, bank: Bank
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="careful")
    def careful(self: Any) -> None:
        with suppress(ValueError), self.workflow("order:7"):
            raise ValueError

    assert apply(fund, ["a"]).successful()
    assert apply(careful, task_id="message 2").successful()
    assert compensate_given_up(app, "fund", "message 1")
    assert compensate_given_up(app, "careful", "message 2")
    assert bank.log == ["a", ("confirm", "a done")]


@pytest.mark.parametrize("outcome", [ValueError(), NonRetryable("refused")])
@pytest.mark.parametrize("at", ["the first look", "the closing", "a pause"])
def test_a_soft_time_limit_that_comes_late_does_not_lose_what_is_owed(
    app: Celery,
    fund: Any,
    bank: Bank,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Exception,
    at: str,
) -> None:
    """It comes once, wherever the run is: here while the message is being given up."""
    store = app.conf.sqs_backoff["store"]
    get, fails = store.get, list[Exception]()
    monkeypatch.setattr(hooks, "_PAUSES", (0.0, 0.0))

    def failing(key: str) -> Any:
        if fails and (at != "the closing" or key.startswith("scope:")):
            raise fails.pop(0)
        return get(key)

    def sleep(_: float) -> None:
        if at == "a pause" and not waited:
            waited.append(True)
            raise SoftTimeLimitExceeded

    def refuse(name: str, *, key: str) -> str:
        if name == "b":
            fails.append(StoreUnavailable() if at == "a pause" else SoftTimeLimitExceeded())
            raise outcome
        return f"{name} done"

    waited = list[bool]()
    monkeypatch.setattr(store, "get", failing)
    monkeypatch.setattr(hooks.time, "sleep", sleep)
    monkeypatch.setattr(bank, "do", refuse)
    apply(fund, ["a", "b"])
    assert ("undo", "a", "a done") in bank.log


def test_an_eager_run_that_finds_a_lock_held_is_not_waited_for(
    app: Celery, fund: Any, bank: Bank
) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="second")
    def second(self: Any) -> None:
        with self.workflow("order:7"), self.exclusive("account:1"):
            pass

    bank.answers["b"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        apply(fund, ["a", "b"])
    with Lock(vault_of(app), "account:1"):
        assert isinstance(apply(second, task_id="message 2").result, Busy)
    assert compensate_given_up(app, "fund", "message 1")
    assert bank.log[-1] == ("undo", "a", "a done")
