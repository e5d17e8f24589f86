"""A durable call is sent once its data is committed, also if the process ends in between."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from celery import Celery, Task, _state
from celery.exceptions import ImproperlyConfigured
from kombu.exceptions import OperationalError
from kombu.transport.SQS import UndefinedQueueException

from celery_sqs_backoff.safe import SafeTask, StoreInTransaction, outbox
from celery_sqs_backoff.safe.outbox import send_left_calls

from .django_app import project


class Host(SafeTask, Task):  # type: ignore[misc]
    abstract = True


class Broker:
    """What was sent, by task id; and whether it takes anything."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.is_down = False

    def send(self, args: Any = None, kwargs: Any = None, task_id: str = "", **options: Any) -> None:
        if self.is_down:
            raise ConnectionError
        self.sent.append((task_id, tuple(args or ()), {**(kwargs or {}), **options}))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from django.db import connections

    path = tmp_path_factory.mktemp("outbox") / "outbox.sqlite3"
    project.set_up()
    before = connections.settings.get("default")
    project.add_database("default", project.sqlite(path))
    if hasattr(connections._connections, "default"):
        del connections["default"]
    project.migrate("default")
    yield
    project.close("default")
    del connections["default"]
    if before is not None:
        connections.settings["default"] = before


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def mail(database: None, broker: Broker) -> Any:
    from celery_sqs_backoff.contrib.django.models import OutboxCall

    OutboxCall.objects.all().delete()
    app = Celery("outbox", broker="memory://", set_as_current=False)
    app.finalize()

    @app.task(shared=False, base=Host, name="mail")
    def mail(customer: int, template: str = "welcome") -> None: ...

    type(mail).apply_async = lambda _, *args, **options: broker.send(*args, **options)
    return app.tasks["mail"]


def left() -> int:
    from celery_sqs_backoff.contrib.django.models import OutboxCall

    return int(OutboxCall.objects.count())


def let_claims_end() -> None:
    from django.db.models import F

    from celery_sqs_backoff.contrib.django.models import OutboxCall

    OutboxCall.objects.update(claimed_until=F("claimed_until") - timedelta(minutes=2))


def test_it_is_sent_after_the_commit_and_leaves_nothing(mail: Any, broker: Broker) -> None:
    from django.db import transaction

    with transaction.atomic():
        mail.delay_on_commit(7, template="bill", durable=True)
        mail.apply_async_on_commit((8,), durable=True, countdown=5)
        assert (broker.sent, left()) == ([], 2)
    assert [sent[1:] for sent in broker.sent] == [
        ((7,), {"template": "bill"}),
        ((8,), {"countdown": 5}),
    ]
    assert left() == 0


def test_after_a_rollback_nothing_is_sent_or_left(mail: Any, broker: Broker) -> None:
    from django.db import transaction

    with transaction.atomic():
        mail.delay_on_commit(7, durable=True)
        transaction.set_rollback(True)
    let_claims_end()
    assert (send_left_calls(mail.app), broker.sent, left()) == ((0, 0), [], 0)


@pytest.mark.parametrize("how", ["the process ended after the commit", "the broker was down"])
def test_what_was_left_is_sent_once_by_the_housekeeping(
    mail: Any, broker: Broker, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import transaction

    broker.is_down = how == "the broker was down"
    with monkeypatch.context() as patch, transaction.atomic():
        if not broker.is_down:
            patch.setattr(transaction, "on_commit", lambda *_, **__: None)
        mail.delay_on_commit(7, durable=True)
    assert (broker.sent, left()) == ([], 1)
    assert send_left_calls(mail.app).sent == 0, "it is still its writer's"
    let_claims_end()
    broker.is_down = False
    assert [send_left_calls(mail.app).sent for _ in range(2)] == [1, 0]
    assert [sent[1] for sent in broker.sent] == [(7,)]
    assert left() == 0


def test_what_was_sent_and_not_deleted_is_sent_again_under_the_same_id(
    mail: Any, broker: Broker
) -> None:
    from django.db import transaction

    class Ended(BaseException):
        pass

    def send_and_end(*args: Any, **options: Any) -> None:
        broker.send(*args, **options)
        raise Ended

    type(mail).apply_async = lambda _, *args, **options: send_and_end(*args, **options)
    with pytest.raises(Ended), transaction.atomic():
        mail.delay_on_commit(7, durable=True)
    type(mail).apply_async = lambda _, *args, **options: broker.send(*args, **options)
    let_claims_end()
    assert send_left_calls(mail.app).sent == 1
    [first, second] = broker.sent
    assert first == second


def test_of_two_workers_one_sends(mail: Any, broker: Broker) -> None:
    from django.db import transaction

    broker.is_down = True
    with transaction.atomic():
        mail.delay_on_commit(7, durable=True)
    broker.is_down = False
    let_claims_end()
    nested: list[tuple[int, int]] = []
    assert send_left_calls(mail.app, between=lambda: nested.append(send_left_calls(mail.app))) == (
        0,
        0,
    )
    assert nested == [(1, 0)]
    assert len(broker.sent) == 1


def test_the_app_can_make_all_calls_durable(mail: Any, broker: Broker) -> None:
    from django.db import transaction

    mail.app.conf.sqs_backoff = {"outbox": True}
    with transaction.atomic():
        mail.delay_on_commit(7)
        assert left() == 1
        mail.delay_on_commit(8, durable=False)
        assert left() == 1
    assert len(broker.sent) == 2


@pytest.mark.parametrize(
    "customer",
    [object(), {"__type__": "uuid", "__value__": "x"}],
    ids=["object", "dict"],
)
def test_arguments_that_are_not_json_are_refused_before_anything_is_written(
    mail: Any, customer: object
) -> None:
    """Also what kombu could write and not read again: the call could never be sent."""
    with pytest.raises(TypeError, match="JSON"):
        mail.delay_on_commit(customer, durable=True)
    assert left() == 0


def test_a_transaction_that_takes_longer_than_its_claim_sends_once(
    mail: Any, broker: Broker
) -> None:
    """Another worker has taken the call over by the time that the writer would send it."""
    from django.db import transaction

    hooks: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, transaction.atomic():
        patch.setattr(transaction, "on_commit", lambda hook, using=None: hooks.append(hook))
        mail.delay_on_commit(7, durable=True)
    let_claims_end()

    def send_while_the_writer_wakes_up(_: Any, *args: Any, **options: Any) -> None:
        if hooks:
            hooks.pop()()
        broker.send(*args, **options)

    type(mail).apply_async = send_while_the_writer_wakes_up
    assert send_left_calls(mail.app).sent == 1
    assert (hooks, len(broker.sent), left()) == ([], 1, 0)


def test_a_second_call_under_a_chosen_task_id_is_written_and_sent_too(
    mail: Any, broker: Broker
) -> None:
    """As Celery does. A step that is done again would fail on what its first run has written."""
    from django.db import transaction

    broker.is_down = True
    chosen = "order 7: " + "x" * 200
    for template in ("welcome", "bill"):
        with transaction.atomic():
            mail.apply_async_on_commit((7, template), task_id=chosen, durable=True)
    assert left() == 2
    broker.is_down = False
    let_claims_end()
    assert send_left_calls(mail.app).sent == 2
    assert sorted(broker.sent) == [(chosen, (7, "bill"), {}), (chosen, (7, "welcome"), {})]
    assert left() == 0


def test_calls_that_cannot_be_sent_do_not_hold_up_the_others(
    mail: Any, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one look-up finds, of a task whose route is gone; one that is well comes last."""
    from celery_sqs_backoff.contrib.django.models import OutboxCall, UTCNow

    def send(_: Any, args: Any, kwargs: Any, task_id: str, **options: Any) -> None:
        if task_id.startswith("bad"):
            raise ValueError("no route")
        broker.send(args, kwargs, task_id=task_id, **options)

    type(mail).apply_async = send
    monkeypatch.setattr(outbox, "_BATCH", 4)
    for task_id in [f"bad {n}" for n in range(6)] + ["good"]:
        OutboxCall.objects.create(
            task_id=task_id,
            task="mail",
            call='{"args": [7], "kwargs": {}, "options": {}}',
            claim="",
            claimed_until=UTCNow() - timedelta(seconds=1),
            created_at=UTCNow(),
        )
    send_left_calls(mail.app)
    assert [task_id for task_id, _, _ in broker.sent] == ["good"]
    assert left() == 6


def test_more_calls_than_one_look_up_finds_are_all_sent_in_one_round(
    mail: Any, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import transaction

    monkeypatch.setattr(outbox, "_BATCH", 2)
    broker.is_down = True
    with transaction.atomic():
        for number in range(5):
            mail.delay_on_commit(number, durable=True)
    broker.is_down = False
    let_claims_end()
    assert send_left_calls(mail.app).sent == 5
    assert left() == 0


def test_a_call_in_a_transaction_of_another_database_is_refused(
    mail: Any, broker: Broker, tmp_path: Path
) -> None:
    """It would be sent at once, whatever becomes of that transaction."""
    from django.db import transaction

    project.add_database("orders", project.sqlite(tmp_path / "orders.sqlite3"))
    try:
        with (
            transaction.atomic(using="orders"),
            pytest.raises(ImproperlyConfigured, match="'orders', and the outbox is on 'default'"),
        ):
            mail.delay_on_commit(7, durable=True)
        assert (broker.sent, left()) == ([], 0)
        with transaction.atomic(using="orders"):
            with transaction.atomic():
                mail.delay_on_commit(7, durable=True)
            assert broker.sent == [], "the other transaction is still open"
        assert len(broker.sent) == 1
    finally:
        project.close("orders")


def test_a_database_that_goes_away_after_the_commit_does_not_fail_the_caller(
    mail: Any, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its data is committed. A web request that failed now would be made again."""
    from django.db import DatabaseError, transaction
    from django.db.models import QuerySet

    def away(*_: object, **__: object) -> None:
        raise DatabaseError("password=hunter2")

    with monkeypatch.context() as patch:
        with transaction.atomic():
            mail.delay_on_commit(7, durable=True)
            patch.setattr(QuerySet, "_raw_delete", away)
        assert len(broker.sent) == 1
    assert "sqs_backoff.outbox_not_deleted" in caplog.text
    assert "outbox_not_sent" not in caplog.text, "it was"
    assert "hunter2" not in caplog.text
    let_claims_end()
    assert send_left_calls(mail.app).sent == 1
    assert broker.sent[0] == broker.sent[1]


@pytest.mark.parametrize("who", ["the writer", "the housekeeping"])
@pytest.mark.parametrize("verb", ["UPDATE", "SELECT", "DELETE"])
def test_a_statement_that_the_database_takes_back_is_made_again(
    mail: Any, broker: Broker, verb: str, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL's SERIALIZABLE does it to one writer in ten; the calls waited for two minutes."""
    from django.db import OperationalError as DatabaseConflict
    from django.db import connection, transaction
    from psycopg.errors import SerializationFailure

    refused: list[str] = []

    def refuse_once(execute: Any, sql: str, *arguments: Any) -> Any:
        if sql.startswith(verb) and not refused and not connection.in_atomic_block:
            refused.append(sql)
            raise DatabaseConflict("could not serialize access") from SerializationFailure()
        return execute(sql, *arguments)

    broker.is_down = who == "the housekeeping"
    if broker.is_down:
        mail.delay_on_commit(7, durable=True)
        broker.is_down = False
        let_claims_end()
    caplog.clear()
    with connection.execute_wrapper(refuse_once):
        if who == "the writer":
            with transaction.atomic():
                mail.delay_on_commit(7, durable=True)
        else:
            assert send_left_calls(mail.app).sent == 1
    assert (len(refused), len(broker.sent), left(), caplog.text) == (1, 1, 0, "")


def test_the_command_sends_what_is_left(mail: Any, broker: Broker, tmp_path: Path) -> None:
    from django.core.management import call_command
    from django.db import transaction

    broker.is_down = True
    with transaction.atomic():
        mail.delay_on_commit(7, durable=True)
    broker.is_down = False
    let_claims_end()
    mail.app.set_current()
    out = tmp_path / "out"
    with out.open("w") as stdout:
        call_command("sqs_backoff_outbox", stdout=stdout)
    assert out.read_text() == "1 sent\n"


def test_the_command_fails_while_the_broker_is_away(mail: Any, broker: Broker) -> None:
    """A job that runs it saw "0 sent", and success."""
    from django.core.management import CommandError, call_command
    from django.db import transaction

    broker.is_down = True
    with transaction.atomic():
        mail.delay_on_commit(7, durable=True)
    let_claims_end()
    mail.app.set_current()
    out = StringIO()
    with pytest.raises(CommandError, match="1 could not be sent"):
        call_command("sqs_backoff_outbox", stdout=out)
    assert (out.getvalue(), left()) == ("0 sent\n", 1)


def test_the_command_says_in_a_line_that_the_database_is_away(mail: Any) -> None:
    from django.core.management import CommandError, call_command
    from django.db import OperationalError as Away
    from django.db import connection

    def away(*_: Any) -> Any:
        raise Away("server at 10.0.0.7, user payments")

    mail.app.set_current()
    with (
        pytest.raises(CommandError, match="the database did not answer") as caught,
        connection.execute_wrapper(away),
    ):
        call_command("sqs_backoff_outbox", stdout=StringIO())
    assert "payments" not in str(caught.value)


def test_without_the_projects_app_nothing_is_sent_to_the_broker_of_another(
    mail: Any, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery makes an app up where the project has imported none: another broker, or queue."""
    from django.core.management import CommandError, call_command
    from django.db import transaction

    from celery_sqs_backoff.contrib.django.checks import check_app

    monkeypatch.setattr(_state._tls, "current_app", None)
    monkeypatch.setattr(_state, "default_app", None)
    monkeypatch.setenv("CELERY_BROKER_URL", "memory://")
    broker.is_down = True
    with transaction.atomic():
        mail.delay_on_commit(7, durable=True)
    let_claims_end()
    with pytest.raises(CommandError, match="__init__"):
        call_command("sqs_backoff_outbox", stdout=StringIO())
    assert left() == 1
    assert [message.id for message in check_app(None)] == ["celery_sqs_backoff.W035"]


def test_inside_a_transaction_nothing_is_sent_that_a_rollback_would_bring_back(
    mail: Any, broker: Broker
) -> None:
    from django.db import transaction

    broker.is_down = True
    with transaction.atomic():
        mail.delay_on_commit(7, durable=True)
    broker.is_down = False
    let_claims_end()
    with pytest.raises(StoreInTransaction), transaction.atomic():
        send_left_calls(mail.app)
    assert (broker.sent, left()) == ([], 1)


def test_with_autocommit_off_what_was_left_is_sent_once(mail: Any, broker: Broker) -> None:
    """Unless the deletion is committed, each round would send the call again."""
    from django.core.management import call_command
    from django.db import connection, connections, transaction

    broker.is_down = True
    with transaction.atomic():
        mail.delay_on_commit(7, durable=True)
    broker.is_down = False
    let_claims_end()
    before = _state._tls.current_app
    mail.app.set_current()
    connections.close_all()
    connection.settings_dict["AUTOCOMMIT"] = False
    try:
        for _ in range(2):  # a process each
            call_command("sqs_backoff_outbox", stdout=StringIO())
            connections.close_all()
    finally:
        _state._tls.current_app = before
        connection.settings_dict["AUTOCOMMIT"] = True
        connections.close_all()
    assert (len(broker.sent), left()) == (1, 0)


@pytest.mark.parametrize("verb", ["UPDATE", "DELETE"])
def test_with_autocommit_off_a_statement_that_fails_sends_nothing_twice(
    mail: Any, broker: Broker, verb: str
) -> None:
    """It closed the connection. The next had autocommit off again: nothing was committed."""
    from django.db import OperationalError as Lost
    from django.db import connection, connections

    broker.is_down = True
    for customer in range(3):
        mail.delay_on_commit(customer, durable=True)
    broker.is_down = False
    let_claims_end()
    refused: list[str] = []

    def lose_one(execute: Any, sql: str, *arguments: Any) -> Any:
        if sql.startswith(verb) and not refused:
            refused.append(sql)
            raise Lost(2013, "Lost connection to server during query")
        return execute(sql, *arguments)

    connections.close_all()
    connection.settings_dict["AUTOCOMMIT"] = False
    try:
        for _ in range(2):  # a round each
            outbox.use_autocommit()
            with connection.execute_wrapper(lose_one):
                send_left_calls(mail.app)
            connections.close_all()
    finally:
        connection.settings_dict["AUTOCOMMIT"] = True
        connections.close_all()
    assert (len(refused), len(broker.sent), left()) == (1, 3, 0)


REFUSED = ("AccessDenied", "QueueDoesNotExist", "InvalidParameterValue")


@pytest.mark.parametrize("failure", [TypeError, UndefinedQueueException, *REFUSED])
def test_many_calls_that_are_refused_do_not_end_a_round(
    mail: Any,
    broker: Broker,
    failure: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A release has changed the task's arguments, or its queue; SQS answers, and says no."""
    from django.db import transaction

    def send(_: Any, args: Any, kwargs: Any, **options: Any) -> None:
        if tuple(args) == (0,):
            if isinstance(failure, str):
                raise ClientError({"Error": {"Code": failure, "Message": "hunter2"}}, "SendMessage")
            raise failure("hunter2")
        broker.send(args, kwargs, **options)

    monkeypatch.setattr(outbox, "_MAX_FAILED", 3)
    broker.is_down = True
    with transaction.atomic():
        for number in [0] * 9 + [7]:
            mail.delay_on_commit(number, durable=True)
    broker.is_down = False
    type(mail).apply_async = send
    let_claims_end()
    caplog.clear()
    assert send_left_calls(mail.app).sent == 1
    assert left() == 9
    assert (failure if isinstance(failure, str) else failure.__name__) in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("failure", ["refused", "throttled", "kombu's"])
def test_a_broker_that_is_away_ends_a_round(
    mail: Any,
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from django.db import transaction

    tried: list[str] = []

    def send(_: Any, args: Any, kwargs: Any, task_id: str, **options: Any) -> None:
        tried.append(task_id)
        if failure == "throttled":
            raise ClientError({"Error": {"Code": "RequestThrottled"}}, "SendMessage")
        if failure == "refused":
            raise ConnectionRefusedError
        raise OperationalError from EndpointConnectionError(endpoint_url="http://hunter2")

    monkeypatch.setattr(outbox, "_MAX_FAILED", 3)
    type(mail).apply_async = send
    with transaction.atomic():
        for number in range(5):
            mail.delay_on_commit(number, durable=True)
    let_claims_end()
    tried.clear()
    caplog.clear()
    assert send_left_calls(mail.app).sent == 0
    assert len(tried) == 3
    if failure == "kombu's":
        assert "EndpointConnectionError" in caplog.text
        assert "hunter2" not in caplog.text


def test_arguments_that_the_task_does_not_take_are_refused_at_once(mail: Any) -> None:
    """After the commit nobody would hear of it, and the call could never be sent."""
    with pytest.raises(TypeError):
        mail.delay_on_commit(7, customr=8, durable=True)
    assert left() == 0


def test_a_call_that_is_sent_late_expires_when_it_was_to(mail: Any, broker: Broker) -> None:
    from django.db import transaction

    broker.is_down = True
    before = mail.app.now()
    with transaction.atomic():
        mail.apply_async_on_commit((7,), expires=60, durable=True)
    broker.is_down = False
    let_claims_end()
    assert send_left_calls(mail.app).sent == 1
    [(_, _, options)] = broker.sent
    late = options["expires"] - before - timedelta(seconds=60)
    assert timedelta(0) <= late < timedelta(seconds=30)


def test_with_autocommit_off_a_call_that_is_refused_is_not_written(
    mail: Any, broker: Broker
) -> None:
    """Who catches the error and commits has not called it."""
    from django.db import connection, connections, transaction

    connections.close_all()
    connection.settings_dict["AUTOCOMMIT"] = False
    try:
        with pytest.raises(transaction.TransactionManagementError):
            mail.delay_on_commit(7, durable=True)
        connection.commit()
    finally:
        connection.settings_dict["AUTOCOMMIT"] = True
        connections.close_all()
    assert (broker.sent, left()) == ([], 0)


def test_a_sender_without_the_task_sends_it_as_the_task_says(mail: Any, broker: Broker) -> None:
    """Else it would go to the default queue, where no worker knows it."""
    from django.db import transaction

    mail.queue, mail.priority, mail.expires = "mails", 3, 60
    broker.is_down = True
    before = mail.app.now()
    with transaction.atomic():
        mail.apply_async_on_commit((7,), durable=True, priority=5)
    let_claims_end()
    sent: list[dict[str, Any]] = []
    other = Celery("other", broker="memory://", set_as_current=False)
    other.send_task = lambda name, args, kwargs, **options: sent.append(options)
    assert send_left_calls(other).sent == 1
    [options] = sent
    assert (options["queue"], options["priority"]) == ("mails", 5)
    assert timedelta(seconds=59) < options["expires"] - before < timedelta(seconds=90)


def test_a_round_tries_each_call_once(
    mail: Any, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong calls whose claims end before the round does would keep it going for ever."""
    from django.db import transaction

    broker.is_down = True
    with transaction.atomic():
        for number in range(3):
            mail.delay_on_commit(number, durable=True)
    let_claims_end()
    tried: list[str] = []

    def refuse(_: Any, args: Any, kwargs: Any, task_id: str, **options: Any) -> None:
        tried.append(task_id)
        assert len(tried) < 10, "the round does not end"
        raise TypeError("the task's arguments were changed by a deployment")

    type(mail).apply_async = refuse
    monkeypatch.setattr(outbox, "CLAIM_SECONDS", -1.0)
    assert send_left_calls(mail.app).sent == 0
    assert len(tried) == len(set(tried)) == 3
