"""Steps, which a message does once, and idempotency keys, which are the same in all its runs.

Messages that name the same ``scope`` share steps and keys. W1, W5, W6, W7 and R2 are rows of
tests/field-stories.md.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, chain, group

from celery_sqs_backoff import Guard, NonRetryable
from celery_sqs_backoff.safe import NotDispatched, OtherInput, OutsideRun, StepNotRecorded
from celery_sqs_backoff.safe.names import NAMESPACE, input_of
from tests.support.fake_sqs import Clock

from .safe_app import CountedStore, make_app, store_of

DAY = 24 * 3600.0

Color = Enum("Color", "RED BLUE")


@pytest.fixture
def app():
    return make_app()


@pytest.fixture
def confirmed(app):
    """Define a task ``confirm``, and return the list of its calls: arguments and task ID."""
    calls = []

    @app.task(bind=True, name="confirm")
    def confirm(self, *args):
        calls.append((args, self.request.id))

    return calls


def run(app: Celery, body: Any, *, message: str = "A", throw: bool = True) -> Any:
    """Run a task named ``work`` with the given body for one message, and return its result."""
    app.tasks.pop("work", None)

    @app.task(bind=True, name="work", max_retries=0)
    def work(self: Any) -> Any:
        return body(self)

    return work.apply(task_id=message, throw=throw).result


def test_w1_once_per_message(app):
    """A step runs once per message.

    A rerun gets the recorded result. The first run gets its result through JSON too, so both are
    equal.
    """
    done = []

    def charge(name):
        done.append(name)
        return {"at": date(2026, 1, 2), "sum": Decimal("1.10"), "parts": (1, 2)}

    results = [run(app, lambda self: self.step("charge", charge, "a")) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["parts"] == [1, 2]
    assert done == ["a"]
    run(app, lambda self: self.step("charge", charge, "a"), message="B")
    assert done == ["a", "a"]


def test_failed_step(app):
    """A step that failed can be called again, even in the same run."""
    ends = [ConnectionError(), "done"]

    def charge():
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def body(self):
        with pytest.raises(ConnectionError):
            self.step("charge", charge)
        return self.step("charge", charge)

    assert run(app, body) == "done"


def test_other_arguments(app):
    """If a message has done a step, a later call with other arguments is refused."""
    run(app, lambda self: self.step("charge", str, 7))
    with pytest.raises(OtherInput, match="charge"):
        run(app, lambda self: self.step("charge", str, 8))


class Customer:
    """Like an object of a Django model: its class and primary key identify it."""

    def __init__(self, pk: int) -> None:
        self.pk = pk


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, "1"),
        (None, False),
        (Decimal("1.0"), Decimal("1.1")),
        (date(2026, 1, 2), date(2026, 1, 3)),
        (b"a", b"b"),
        ([1], [2]),
        ({"a": 1}, {"a": 2}),
        ({1}, {2}),
        (Color.RED, Color.BLUE),
        (Customer(1), Customer(2)),
        (Customer(1), object()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_inputs(one, other):
    """Two arguments of a step are different if their types or values are."""
    assert input_of(str, (one,), {}) != input_of(str, (other,), {})
    assert input_of(str, (), {"a": [one]}) != input_of(str, (), {"a": [other]})
    assert input_of(str, (one,), {}) == input_of(partial(str, one), (), {})


def test_same_inputs():
    """Arguments are the same if only the order of keys, or objects without a key, differ."""
    same = [{"a": 1, "b": object()}, {"b": object(), "a": 1}]
    assert len({input_of(str, (each,), {}) for each in same}) == 1


async def not_awaited() -> None: ...


@pytest.mark.parametrize(
    ("names", "function", "why"),
    [
        # If all steps of a loop had one name, the first would be done and the others skipped.
        pytest.param(["charge", "charge"], str, "name of its own", id="one name twice"),
        pytest.param([7, "7"], str, "name of its own", id="one name twice, as a number"),
        *(pytest.param([name], str, "name", id=repr(name)) for name in (None, "", True)),
        pytest.param(["x" * 300], str, "name", id="300 characters"),
        pytest.param(range(201), str, "at most 200", id="201 steps"),
        pytest.param(["charge"], not_awaited, "async", id="async"),
    ],
)
def test_invalid_step(app, names, function, why):
    """A step with an invalid name or function is refused."""
    with pytest.raises((TypeError, ValueError), match=why):
        run(app, lambda self: [self.step(name, function) for name in names])


def test_result_not_json(app):
    """A step whose result is not JSON raises StepNotRecorded, which is not retried."""
    assert isinstance(
        run(app, lambda self: self.step("charge", object), throw=False), StepNotRecorded
    )


def test_store_away_in_step(app):
    """If the store goes away while a step runs, the task fails and is not retried."""

    def charge():
        store_of(app).is_away = True

    result = run(app, lambda self: self.step("charge", charge), throw=False)
    assert isinstance(result, StepNotRecorded)


def test_confirm(app, confirmed):
    """A step sends its ``confirm`` task once, however often the message runs.

    The task gets the step's result as its first argument, unless its signature is immutable.
    """
    confirm = app.tasks["confirm"]
    for _ in range(2):
        run(app, lambda self: self.step("a", str, 7, confirm=confirm.s("x")))
        run(app, lambda self: self.step("b", str, 8, confirm=confirm.si("y")))
    assert [args for args, _ in confirmed] == [("7", "x"), ("y",)]


def test_w6_confirm_not_sent(app, confirmed, monkeypatch):
    """If a ``confirm`` task could not be sent, the next run sends it. The step is not repeated."""
    confirm, done = app.tasks["confirm"], list[int]()

    def away(*_, **__):
        raise ConnectionError

    def body(self):
        self.step("a", done.append, 7, confirm=confirm.s())

    with monkeypatch.context() as patch:
        patch.setattr(type(confirm), "apply_async", away)
        assert isinstance(run(app, body, throw=False), NotDispatched)
    run(app, body)
    assert (done, len(confirmed)) == ([7], 1)


def test_confirm_sent_twice(app, confirmed):
    """If a ``confirm`` task is sent twice, it has the same task ID."""
    confirm, store = app.tasks["confirm"], store_of(app)

    def lose(*_):
        confirmed.append(())
        store.is_away = {"replace"}

    sent = app.tasks["confirm"].run
    app.tasks["confirm"].run = lambda *args: (sent(*args), lose())
    run(app, lambda self: self.step("a", str, 7, confirm=confirm.s()), throw=False)
    store.is_away = False
    run(app, lambda self: self.step("a", str, 7, confirm=confirm.s()), throw=False)
    ids = {call[1] for call in confirmed if call}
    assert len(ids) == 1


@pytest.mark.parametrize("kind", ["text", "chain", "group", "no JSON"])
def test_invalid_confirm(app, confirmed, kind):
    """If ``confirm`` is not a single task with JSON arguments, the step is refused and not run."""
    confirm = app.tasks["confirm"]
    given = {
        "text": "confirm",
        "chain": chain(confirm.s(), confirm.s()),
        "group": group([confirm.s()]),
        "no JSON": confirm.s(object()),
    }[kind]
    with pytest.raises(TypeError, match="invalid confirm"):
        run(app, lambda self: self.step("a", pytest.fail, confirm=given))


def test_w5_r2_key_per_message(app):
    """An idempotency key is the same in each run of a message.

    Another message, name or version has another key.
    """

    def keys(self):
        return [self.idempotency_key("a"), self.idempotency_key("b")]

    first = run(app, keys)
    assert first == run(app, keys)
    assert len({*first, *run(app, keys, message="B")}) == 4
    assert run(app, lambda self: self.idempotency_key("a", version=2)) not in first
    assert UUID(first[0]).version == 5


def test_w7_outlive_provider_key():
    """Steps and guards last longer than a provider remembers an idempotency key.

    A provider may forget a key after a day. After two days the step is still done, and the guard
    still refuses another message.
    """
    clock, provider = Clock(), list[str]()
    app = make_app(store=CountedStore(clock=clock.time))
    ends = [KeyboardInterrupt(), "done"]

    @app.task(bind=True, guard=Guard(key="7", window=3 * DAY))
    def charge(self):
        self.step("charge", provider.append, self.idempotency_key("charge"))
        end = ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end

    with pytest.raises(KeyboardInterrupt):  # like a kill, it leaves the run without an end
        charge.apply(task_id="A")
    clock.now += 2 * DAY
    assert charge.apply(task_id="B").state == "IGNORED"
    assert charge.apply(task_id="A").result == "done"
    assert len(provider) == 1


def test_key_without_store(app):
    """``idempotency_key`` makes no call to the store."""
    run(app, lambda self: self.idempotency_key("a"))
    assert store_of(app).calls.total() == 0


def test_keys_never_change(app):
    """All releases make the same idempotency keys.

    Under another key, the provider would do a call again that it has done.
    """
    assert str(NAMESPACE) == "52c2d7a4-55a3-5c5c-8a4e-4f4f8ab0a9a1"
    key = run(app, lambda self: self.idempotency_key("charge", scope="order:7"))
    assert key == "39f0ff1d-3cf1-5ac5-b5d5-d829feb8cb32"


def test_outside_run(app):
    """Outside a run, an idempotency key needs a scope.

    A task that another task calls as a function is outside a run too.
    """

    @app.task(bind=True)
    def inner(self, **options):
        return str(self.idempotency_key("a", **options))

    with pytest.raises(OutsideRun, match="scope="):
        inner()
    assert isinstance(run(app, lambda self: inner(), throw=False), OutsideRun)
    assert inner(scope="order:7") == run(app, lambda self: inner(scope="order:7"))


def test_forget_refused_step(app):
    """If a step surely did nothing, it may be called again with other arguments."""

    def refuse(amount):
        raise NonRetryable("refused", not_processed=True)

    run(app, lambda self: self.step("charge", refuse, 7), throw=False)
    assert run(app, lambda self: self.step("charge", str, 8)) == "8"


def test_step_done_by_other_message(app):
    """If a step fails while another message of its scope does the step, the step is done.

    Two messages may do the same step of a scope at the same time, because a scope has no lock.
    """
    done = []

    def charge():
        if not done:
            done.append("B")
            run(app, body, message="B")
            raise NonRetryable("no such card", not_processed=True)
        done.append("later")

    def body(self):
        self.step("charge", charge, scope="order:7")

    run(app, body, throw=False)
    run(app, body, message="C")
    assert done == ["B", "later"], "message B has done the step, so message C skips it"


def test_store_shows_no_secrets(app):
    """The store's records show neither message IDs nor arguments."""
    run(app, lambda self: self.step("charge", len, "secret"), message="task-id-7")
    text = str(store_of(app)._records)
    assert "secret" not in text
    assert "task-id-7" not in text
