"""The methods of a task that make its retry safe, on Celery's own task class."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, chain, chord, group
from celery.exceptions import ImproperlyConfigured, Retry, SoftTimeLimitExceeded

from celery_sqs_backoff import NonRetryable, Retryable, SQSBackoffTask
from celery_sqs_backoff.retry.outcomes import judge
from celery_sqs_backoff.safe import (
    Busy,
    Compensated,
    Guard,
    NotDispatched,
    OtherInput,
    OutsideRun,
    Refused,
    SafeTask,
    StepNotRecorded,
    StoreUnavailable,
)
from celery_sqs_backoff.store.memory import MemoryStore


class Host(SafeTask, Task):  # type: ignore[misc]
    abstract = True

    def _judge(self, exc: Exception) -> Any:
        return judge(exc.exc or Retryable() if isinstance(exc, Retry) else exc)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def app(store: MemoryStore) -> Iterator[Celery]:
    app = Celery("safe", broker="memory://", set_as_current=False)
    app.finalize()  # other tests' shared tasks are bound to it too, with options of their own
    app.conf.sqs_backoff = {"store": store}
    yield app
    app.close()


class Workflow:
    """A task that is inside a run of a message; each ``run`` is another delivery of it."""

    def __init__(self, app: Celery) -> None:
        self.sent: list[tuple[str, tuple[Any, ...], str]] = []
        self.all: list[tuple[Any, ...]] = []
        self.broker_is_down = False

        @app.task(shared=False, base=Host, bind=True, name="workflow")
        def workflow(task: Any) -> None: ...

        @app.task(shared=False, base=Host, name="confirm")
        def confirm(*args: Any) -> None: ...

        @app.task(shared=False, base=Host, name="undo")
        def undo(*args: Any) -> None: ...

        self.task, self.confirm, self.undo = workflow, confirm, undo
        for other in (confirm, undo):
            type(other).apply_async = self._sending(other.name)

    def _sending(self, name: str) -> Any:
        def apply_async(_: Any, args: Any = (), kwargs: Any = None, **options: Any) -> None:
            if self.broker_is_down:
                raise ConnectionError
            self.sent.append((name, tuple(args), options["task_id"]))
            self.all.append((*self.sent[-1], options.get("chain")))

        return apply_async

    def deliver(self, task_id: str = "message 1") -> Any:
        self.task.request_stack.pop() if self.task.request_stack.top else None
        self.task.push_request(id=task_id, called_directly=False)
        return self.task

    def undone(self) -> list[tuple[Any, ...]]:
        """Arguments of the undoing tasks, in the order in which they run."""
        chained = [task for _, _, _, chain in self.all if chain for task in reversed(chain)]
        first = [args for name, args, _, _ in self.all if name == "undo"]
        return first + [tuple(task["args"]) for task in chained]

    def names(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [(name, args) for name, args, _ in self.sent]


@pytest.fixture
def workflow(app: Celery) -> Workflow:
    return Workflow(app)


# Steps


def test_a_step_is_done_once_and_gives_the_same_result_again(workflow: Workflow) -> None:
    done: list[int] = []

    def open_account(customer_id: int) -> dict[str, int]:
        done.append(customer_id)
        return {"account": 12}

    for _ in range(3):
        assert workflow.deliver().step("account", open_account, 7) == {"account": 12}
    assert done == [7]
    workflow.deliver("message 2").step("account", open_account, 8)
    assert done == [7, 8], "another message's steps are its own"


def test_messages_that_name_the_same_scope_share_its_steps(workflow: Workflow) -> None:
    done: list[int] = []
    for message in ("message 1", "message 2"):
        workflow.deliver(message).step("account", lambda: done.append(1), scope="customer:7")
    assert done == [1]


def test_a_step_that_fails_is_not_recorded(workflow: Workflow) -> None:
    with pytest.raises(ZeroDivisionError):
        workflow.deliver().step("a", lambda: 1 / 0)
    assert workflow.deliver().step("a", lambda: "done") == "done"


def test_a_step_without_a_result_is_recorded_too(workflow: Workflow) -> None:
    done: list[int] = []
    for _ in range(2):
        assert workflow.deliver().step("a", lambda: done.append(1)) is None
    assert done == [1]


def test_the_first_run_gets_what_a_rerun_will_get(workflow: Workflow) -> None:
    """Else a difference would show only after a crash."""
    results = [
        workflow.deliver().step(
            "a", lambda: (1, Decimal("1.10"), datetime.date(2026, 1, 1), "é"), scope="s"
        )
        for _ in range(2)
    ]
    assert results[0] == results[1]
    assert results[0][:2] == [1, Decimal("1.10")]


def test_a_result_that_is_not_json_is_said_at_once(workflow: Workflow) -> None:
    with pytest.raises(StepNotRecorded, match="not JSON"):
        workflow.deliver().step("a", object)


def test_an_async_step_is_refused_before_it_is_begun(workflow: Workflow) -> None:
    """Its coroutine, which nobody awaits, was called a step that was done."""

    async def charge() -> str:
        return "charged"

    with pytest.raises(TypeError, match="the step 'a' is an async function"):
        workflow.deliver().step("a", charge)
    assert workflow.deliver().step("a", lambda: "done") == "done"


def test_a_step_that_could_not_be_recorded_is_not_taken_for_undone(
    workflow: Workflow, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "replace", away)
    with pytest.raises(StepNotRecorded):
        workflow.deliver().step("a", lambda: 1)
    monkeypatch.setattr(store, "add", away)
    with pytest.raises(StoreUnavailable):
        workflow.deliver().step("b", lambda: pytest.fail("nothing may be done"))


def test_a_step_whose_recording_is_cut_short_is_done_and_not_recorded(
    workflow: Workflow, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft time limit between the two must not be judged by ``autoretry_for=(Exception,)``."""

    def cut_short(*_: object) -> bool:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(store, "replace", cut_short)
    with pytest.raises(StepNotRecorded):
        workflow.deliver().step("charge", lambda: "charged")


def test_a_step_is_confirmed_by_a_task_that_gets_its_result(workflow: Workflow) -> None:
    for _ in range(2):
        workflow.deliver().step("a", lambda: 12, confirm=workflow.confirm.s("posted"))
    assert workflow.names() == [("confirm", (12, "posted"))]


def test_an_immutable_signature_stays_as_it_is(workflow: Workflow) -> None:
    workflow.deliver().step("a", lambda: 12, confirm=workflow.confirm.si("posted"))
    assert workflow.names() == [("confirm", ("posted",))]


def test_a_confirmation_that_could_not_be_sent_is_sent_by_the_next_run(workflow: Workflow) -> None:
    """W6."""
    done: list[int] = []
    workflow.broker_is_down = True
    for _ in range(2):
        with pytest.raises(NotDispatched, match=r"ConnectionError at .* in apply_async$"):
            workflow.deliver().step("a", lambda: done.append(1), confirm=workflow.confirm.s())
    workflow.broker_is_down = False
    for _ in range(2):
        workflow.deliver().step("a", lambda: done.append(1), confirm=workflow.confirm.s())
    assert done == [1]
    assert workflow.names() == [("confirm", (None,))]


def test_what_is_sent_twice_is_sent_under_one_id(
    workflow: Workflow, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends after the sending, before that is recorded."""

    def run() -> None:
        workflow.deliver().step("a", lambda: 12, confirm=workflow.confirm.s())

    real = store.replace
    with monkeypatch.context() as patch:
        patch.setattr(store, "replace", lambda *a: '"done"' not in a[2] and real(*a))
        run()
    run()
    run()
    [first, second] = workflow.sent
    assert first == second


def test_what_is_no_signature_is_refused_before_the_step_is_done(workflow: Workflow) -> None:
    with pytest.raises(TypeError, match="confirm"):
        workflow.deliver().step("a", pytest.fail, confirm=print)


@pytest.mark.parametrize("canvas", [chain, group, chord])
def test_what_would_not_get_the_result_is_refused_before_the_step_is_done(
    workflow: Workflow, canvas: Any
) -> None:
    """Celery drops the arguments of a chain or group, and gives their tasks new ids."""
    tasks = [workflow.confirm.s(), workflow.confirm.s()]
    signature = chord(tasks, workflow.confirm.s()) if canvas is chord else canvas(*tasks)
    with pytest.raises(TypeError, match=r"undo, a .* one task"):
        workflow.deliver().step("a", pytest.fail, undo=signature)


def test_a_signature_that_is_not_json_is_refused_before_the_step_is_done(
    workflow: Workflow,
) -> None:
    with pytest.raises(TypeError, match=r"undo: .* JSON"):
        workflow.deliver().step("a", pytest.fail, undo=workflow.undo.s(object()))


def test_two_steps_of_one_run_do_not_have_one_name(workflow: Workflow) -> None:
    """A loop that gave each funding the same name would release the first only."""
    task = workflow.deliver()
    task.step("release", lambda: 1)
    with pytest.raises(ValueError, match="release"):
        task.step("release", pytest.fail)
    assert task.step("release", lambda: 2, scope="another") == 2
    assert workflow.deliver().step("release", pytest.fail) == 1


def test_a_step_that_failed_may_be_tried_again_in_the_same_run(workflow: Workflow) -> None:
    task = workflow.deliver()
    with pytest.raises(ZeroDivisionError):
        task.step("a", lambda: 1 / 0)
    assert task.step("a", lambda: 1) == 1


# Compensation: one chain, so that each undoing task waits for the one before it


def test_steps_are_taken_back_the_last_first_and_once(workflow: Workflow) -> None:
    task = workflow.deliver()
    task.step("account", lambda: 12, undo=workflow.undo.s("close"))
    task.step("note", lambda: 13)
    task.step("funding", lambda: 14, undo=workflow.undo.s("take back"))
    with pytest.raises(Retryable):
        task.step("fails", refuse, undo=workflow.undo.s("never"))
    for _ in range(2):
        workflow.deliver().compensate()
    assert workflow.undone() == [(14, "take back"), (12, "close")]


def refuse() -> None:
    raise Retryable("connection refused")


def test_a_step_in_doubt_is_taken_back_too(workflow: Workflow) -> None:
    """The bank has done it, and its answer was lost."""
    for error in (TimeoutError(), Retryable()):  # refused later, it is in doubt all the same
        with pytest.raises(type(error)):
            workflow.deliver().step(
                "release", lambda error=error: _raise(error), undo=workflow.undo.s()
            )
    workflow.deliver().compensate()
    assert workflow.undone() == [(None,)]


def _raise(error: Exception) -> None:
    raise error


def test_what_was_taken_back_is_not_done_again(workflow: Workflow) -> None:
    task = workflow.deliver()
    task.step("account", lambda: 12, undo=workflow.undo.s())
    task.compensate()
    for name in ("account", "one that was never begun"):
        with pytest.raises(Compensated):
            workflow.deliver().step(name, pytest.fail, undo=workflow.undo.s())
    assert len(workflow.sent) == 1


def test_undoing_tasks_that_could_not_be_sent_are_sent_by_the_next_run(workflow: Workflow) -> None:
    task = workflow.deliver()
    task.step("account", lambda: 12, undo=workflow.undo.s())
    task.step("funding", lambda: 14, undo=workflow.undo.s())
    workflow.broker_is_down = True
    with pytest.raises(NotDispatched, match=r"ConnectionError at .* in apply_async$"):
        task.compensate()
    workflow.broker_is_down = False
    with pytest.raises(Compensated):
        workflow.deliver().step("account", pytest.fail, undo=workflow.undo.s())
    assert workflow.undone() == [(14,), (12,)]


def test_a_step_that_was_to_be_confirmed_is_taken_back_instead(workflow: Workflow) -> None:
    workflow.broker_is_down = True
    signatures = {"undo": workflow.undo.s(), "confirm": workflow.confirm.s()}
    with pytest.raises(NotDispatched):
        workflow.deliver().step("a", lambda: 1, **signatures)
    workflow.broker_is_down = False
    workflow.deliver().compensate()
    assert workflow.undone() == [(1,)]


def test_steps_with_another_input_are_refused_by_name(workflow: Workflow) -> None:
    def pay(amount: int) -> str:
        return f"paid {amount}"

    assert workflow.deliver().step("charge", pay, 10, scope="order:9") == "paid 10"
    with pytest.raises(OtherInput, match="charge"):
        workflow.deliver("message 2").step("charge", pay, 25, scope="order:9")
    with pytest.raises(OtherInput):
        workflow.deliver("message 2").step("charge", partial(pay, 25), scope="order:9")
    assert workflow.deliver("message 2").step("charge", partial(pay, 10), scope="order:9")


def test_a_deployment_may_change_the_defaults_of_a_steps_function(workflow: Workflow) -> None:
    """A timeout, say, or a new argument: the message of before goes on all the same."""
    for version in ("def post(amount): return amount", "def post(amount, timeout=20): return 0"):
        code: dict[str, Any] = {}
        exec(version, code)  # a module's function, of two releases
        assert workflow.deliver().step("charge", code["post"], 100) == 100


@pytest.mark.parametrize("how", ["lambda", "default"])
def test_what_a_steps_function_encloses_is_its_input_too(workflow: Workflow, how: str) -> None:
    """``lambda: pay(amount)`` is how most people write a step."""
    charged: list[int] = []

    def charge(message: str, amount: int) -> Any:
        def by_default(amount: int = amount) -> str:
            return f"paid {amount}"

        step = (lambda: charged.append(amount) or amount) if how == "lambda" else by_default  # type: ignore[func-returns-value]
        return workflow.deliver(message).step("charge", step, scope="order:9")

    first = charge("message 1", 10)
    assert charge("message 1", 10) == first
    with pytest.raises(OtherInput):
        charge("message 2", 25)
    assert charged in ([10], [])


def test_keyword_arguments_reach_the_steps_function(workflow: Workflow) -> None:
    def release(account: int, *, key: str) -> str:
        return f"{account} {key}"

    assert workflow.deliver().step("release", release, 7, key="k") == "7 k"


# Keys


def test_a_key_is_the_same_on_every_attempt_and_another_for_all_else(workflow: Workflow) -> None:
    key = workflow.deliver().idempotency_key("charge")
    assert workflow.deliver().idempotency_key("charge") == key
    assert workflow.deliver().idempotency_key("refund") != key
    assert workflow.deliver("message 2").idempotency_key("charge") != key


def test_a_renewed_key_stays_renewed(workflow: Workflow) -> None:
    task = workflow.deliver()
    old = task.idempotency_key("charge")
    new = task.renew_idempotency_key("charge")
    assert new != old
    assert workflow.deliver().idempotency_key("charge") == new
    assert workflow.deliver().renew_idempotency_key("charge") not in (old, new)


def test_a_scope_shares_keys_between_messages(workflow: Workflow) -> None:
    key = workflow.deliver().renew_idempotency_key("charge", scope="order:7")
    assert workflow.deliver("message 2").idempotency_key("charge", scope="order:7") == key


def test_a_key_needs_no_store_but_renewing_it_does(app: Celery, workflow: Workflow) -> None:
    key = workflow.deliver().idempotency_key("charge")
    app.conf.sqs_backoff = {}
    assert workflow.deliver().idempotency_key("charge") == key
    with pytest.raises(ImproperlyConfigured, match="store"):
        workflow.deliver().renew_idempotency_key("charge")


def test_a_direct_call_has_one_key_of_its_own(app: Celery) -> None:
    @app.task(shared=False, base=Host, bind=True, name="direct")
    def direct(task: Any) -> list[str]:
        return [task.idempotency_key("charge") for _ in range(2)]

    first, second = direct(), direct()
    assert first[0] == first[1] != second[0]


def test_7_and_its_text_and_a_uuid_are_names_and_nothing_is_not(workflow: Workflow) -> None:
    task, a_uuid = workflow.deliver(), uuid4()
    assert task.idempotency_key(7) == task.idempotency_key("7")
    assert task.idempotency_key(a_uuid) == task.idempotency_key(str(a_uuid))
    assert task.idempotency_key("a", scope=7) == task.idempotency_key("a", scope="7")
    for nothing in (None, "", True, ("a",)):
        with pytest.raises((TypeError, ValueError), match="name"):
            task.idempotency_key(nothing)


def test_two_tasks_that_share_an_id_do_not_share_keys_and_steps(
    app: Celery, workflow: Workflow
) -> None:
    """``self.replace()`` keeps the id; and who sends a message chooses it."""

    @app.task(shared=False, base=Host, bind=True, name="another")
    def another(task: Any) -> None: ...

    another.push_request(id="message 1", called_directly=False)
    task = workflow.deliver("message 1")
    assert task.idempotency_key("charge") != another.idempotency_key("charge")
    assert another.step("charge", lambda: "fake receipt") == "fake receipt"
    assert task.step("charge", lambda: "charged") == "charged"


def test_outside_a_run_a_key_needs_a_scope(app: Celery, workflow: Workflow) -> None:
    """Else two customers would get one key."""
    task = workflow.task
    with pytest.raises(OutsideRun, match="scope="):
        task.idempotency_key("charge")
    assert task.idempotency_key("charge", scope="order:7")


def test_a_task_called_as_a_function_inside_another_belongs_to_its_message(app: Celery) -> None:
    @app.task(shared=False, base=Host, bind=True, name="inner")
    def inner(task: Any, customer: int) -> str:
        return str(task.idempotency_key("charge"))

    @app.task(shared=False, base=Host, bind=True, name="outer")
    def outer(task: Any) -> list[str]:
        return [inner(1), inner(2), inner(1)]

    first, again = (outer.apply(task_id="message 1").get() for _ in range(2))
    assert first == again
    assert len(set(first)) == 3
    assert outer.apply(task_id="message 2").get()[0] not in first


@pytest.mark.parametrize("is_protected", [False, True], ids=["a copy", "the same request"])
def test_a_task_that_calls_itself_as_a_function_is_not_its_message(
    app: Celery, is_protected: bool
) -> None:
    """Celery gives such a call a copy of the message's request; a worker, the first time, the
    request itself. With one key for all, the provider takes all charges but one for repetitions.
    """

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="page")
    def page(task: Any, left: int) -> list[str]:
        key = str(task.idempotency_key("charge"))
        call = task.run if is_protected else task
        return [key, *call(left - 1), *call(left - 1)] if left else [key]

    first, again = (page.apply((2,), task_id="message 1").get() for _ in range(2))
    assert first == again
    assert len(set(first)) == len(first) == 7


def test_the_failure_of_a_call_of_the_task_by_itself_is_not_its_messages(app: Celery) -> None:
    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="tries", retry_on=ValueError)
    def tries(task: Any, inside: bool) -> str:
        if inside:
            raise ValueError("no")
        with pytest.raises(ValueError, match="no"):  # not Retry
            tries(True)
        return "done"

    assert tries.apply((False,), task_id="message 1").get() == "done"


# Lock


def test_two_runs_do_not_hold_the_same_lock(workflow: Workflow) -> None:
    """Not even two of the same message: SQS may hand it out while it runs."""
    with workflow.deliver().exclusive("account:7") as lock:
        assert lock.token
        lock.renew()
        with pytest.raises(Busy), workflow.deliver().exclusive("account:7"):
            pass


# Guard


def test_a_guarded_block_does_not_ask_when_the_task_is_called_as_a_function(app: Celery) -> None:
    app.conf.sqs_backoff = {}

    @app.task(shared=False, base=Host, bind=True, name="direct")
    def direct(task: Any) -> str:
        with task.guarded("mail:7", window=3600):
            return "sent"

    assert [direct(), direct()] == ["sent", "sent"]


def test_a_second_guarded_block_in_one_run_takes_nothing_of_the_first_back(app: Celery) -> None:
    """Two reminders of one customer in a message: the second is refused, the first is sent."""
    sent: list[str] = []

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="remind", max_retries=0)
    def remind(self: Any, refuses: bool) -> None:
        with self.guarded("customer:7", window=3600):
            sent.append(self.request.id)
        with self.guarded("customer:7", window=3600):
            if refuses:
                raise Retryable("refused")

    remind.apply((True,), task_id="message 1")
    remind.apply((False,), task_id="message 2")
    assert sent == ["message 1"]


def test_a_guarded_block_passes_its_own_message_only(workflow: Workflow) -> None:
    for _ in range(2):
        with workflow.deliver().guarded("mail:7", window=3600):
            pass
    with (
        pytest.raises(Refused),
        workflow.deliver("message 2").guarded("mail:7", window=3600),
    ):
        pytest.fail("it must not run")


@pytest.mark.parametrize(
    ("failure", "passes"),
    [
        (Retryable(), True),
        (NonRetryable(safe_to_undo=True), True),
        (Retry(), True),
        (NonRetryable(), False),
        (ValueError(), False),
        (Busy(), False),
        (Refused({"refused": "by another guard"}), False),
        (Retry(exc=TimeoutError()), False),
        (Retry(exc=Retryable()), True),
        (SystemExit(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_another_message_passes_only_if_nothing_was_processed(
    workflow: Workflow, failure: BaseException, passes: bool
) -> None:
    with (
        pytest.raises(type(failure)),
        workflow.deliver().guarded("mail:7", window=3600),
    ):
        raise failure
    second = workflow.deliver("message 2").guarded("mail:7", window=3600)
    if passes:
        with second:
            pass
    else:
        with pytest.raises(Refused), second:
            pytest.fail("it must not run")


def test_the_option_guards_by_the_arguments_of_bound_and_unbound_tasks(app: Celery) -> None:
    guard = Guard(key="mail:{customer_id}", window=3600)

    @app.task(shared=False, base=Host, name="unbound", guard=guard)
    def unbound(customer_id: int, template: str) -> None: ...

    @app.task(shared=False, base=Host, name="bound", bind=True, guard=guard)
    def bound(task: Any, customer_id: int, template: str) -> None: ...

    class Written(Host):  # type: ignore[misc, valid-type]
        name = "written"
        guard = Guard(key="mail:{customer_id}", window=3600)

        def run(self, customer_id: int, template: str) -> None: ...

    written = app.register_task(Written())
    for task in (unbound, bound, written):
        task._check_guard()
        task.push_request(id=str(uuid4()), called_directly=False)
    unbound._pass_guard((7, "welcome"), {})
    unbound._pass_guard((7, "welcome"), {})
    for task in (bound, written):
        with pytest.raises(Refused):
            task._pass_guard((), {"customer_id": 7, "template": "bill"})
        task._unset_guard((7, "bill"), {})
        with pytest.raises(Refused):
            task._pass_guard((7, "bill"), {})
    unbound._unset_guard((7, "welcome"), {})
    bound._pass_guard((7, "bill"), {})


def test_a_guard_with_an_argument_that_the_task_does_not_have_is_refused(app: Celery) -> None:
    @app.task(shared=False, base=Host, name="misspelt", guard=Guard(key="{costumer_id}", window=1))
    def misspelt(customer_id: int) -> None: ...

    with pytest.raises(ImproperlyConfigured, match="costumer_id"):
        misspelt._check_guard()


def test_what_is_no_guard_is_refused(app: Celery) -> None:
    @app.task(shared=False, base=Host, name="none", guard="mail:{customer_id}")
    def none(customer_id: int) -> None: ...

    with pytest.raises(ImproperlyConfigured, match="Guard"):
        none._check_guard()


def test_a_store_that_is_away_does_not_hide_why_the_task_failed(
    app: Celery, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(shared=False, base=Host, name="guarded", guard=Guard(key="a", window=1))
    def guarded() -> None: ...

    def away(*_: object) -> bool:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store, "delete", away)
    guarded.push_request(id="message 1", called_directly=False)
    guarded._unset_guard((), {})


@pytest.mark.parametrize("kind", [staticmethod, classmethod, lambda run: run])
def test_a_class_based_task_of_any_kind_is_guarded(app: Celery, kind: Any) -> None:
    """The check at binding passed, and each message was a dead letter that had not run."""
    sent: list[int] = []

    def of_class(cls: Any, order: int) -> None:
        sent.append(order)

    def of_none(order: int) -> None:
        sent.append(order)

    class Mail(SQSBackoffTask):
        name = "mail"
        guard = Guard(key="{order}", window=3600)
        run = kind(of_none if kind is staticmethod else of_class)

    task = app.register_task(Mail())
    for message in ("message 1", "message 2"):
        task.apply((7,), task_id=message)
    assert sent == [7]


def test_a_direct_call_is_not_guarded(app: Celery) -> None:
    @app.task(shared=False, base=SQSBackoffTask, name="free", guard=Guard(key="a", window=1))
    def free() -> str:
        return "done"

    assert [free() for _ in range(2)] == ["done"] * 2
    assert free.apply().get() == "done", "and passes for nobody"
