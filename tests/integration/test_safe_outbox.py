"""A call with ``durable=True`` is sent if its transaction commits, even if the process then dies.

The call is a row in the outbox, a table in the same database. A sender *claims* a row for some time
before it sends the call.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from celery import Celery

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.contrib.django import outbox
from celery_sqs_backoff.contrib.django.outbox import send_left_calls
from celery_sqs_backoff.safe import StoreInTransaction

from .django_app import project


class Broker:
    """A broker that keeps the calls it gets. While ``is_down``, it raises an error."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.is_down = False

    def send(self, args: Any = None, kwargs: Any = None, task_id: str = "", **options: Any) -> None:
        if self.is_down:
            raise ConnectionError("password=hunter2")
        self.sent.append((task_id, tuple(args or ()), {**(kwargs or {}), **options}))


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    with default_database(project.sqlite(tmp_path_factory.mktemp("outbox") / "outbox.sqlite3")):
        yield


class default_database:  # noqa: N801  # a context manager
    """During the block, Django's default database is this one, with our tables."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        project.set_up()
        from django.db import connections

        self._before = connections.settings.get("default")
        project.add_database("default", self._settings)
        if hasattr(connections._connections, "default"):
            del connections["default"]
        project.migrate("default")

    def __exit__(self, *_: object) -> None:
        from django.db import connections

        project.close("default")
        del connections["default"]
        if self._before is not None:
            connections.settings["default"] = self._before


def app_with(send: Callable[..., Any]) -> Celery:
    """Return an app whose task ``mail`` is sent with this function."""
    app = Celery("outbox", broker="memory://", set_as_current=False)
    app.finalize()

    @app.task(shared=False, base=SQSBackoffTask, name="mail")
    def mail(order: Any, template: str = "welcome") -> None: ...

    type(app.tasks["mail"]).apply_async = lambda _, *args, **options: send(*args, **options)
    return app


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def mail(database, broker):
    from celery_sqs_backoff.contrib.django.models import OutboxCall

    OutboxCall.objects.all().delete()
    return app_with(broker.send).tasks["mail"]


def left() -> int:
    from celery_sqs_backoff.contrib.django.models import OutboxCall

    return int(OutboxCall.objects.count())


def let_claims_end() -> None:
    from django.db.models import F

    from celery_sqs_backoff.contrib.django.models import OutboxCall

    OutboxCall.objects.update(send_at=F("send_at") - timedelta(minutes=2))


def write(mail: Any, broker: Broker, *calls: int) -> None:
    """Commit calls while the broker is down, and let their claims end."""
    from django.db import transaction

    broker.is_down = True
    with transaction.atomic():
        for call in calls:
            mail.delay_on_commit(call, durable=True)
    broker.is_down = False
    let_claims_end()


@pytest.mark.story("W4")
@pytest.mark.parametrize("durable", [False, True])
def test_sent_after_commit(mail, broker, durable):
    """A call is sent after the commit, and its row is deleted."""
    from django.db import transaction

    with transaction.atomic():
        mail.delay_on_commit(7, template="bill", durable=durable)
        mail.apply_async_on_commit((8,), durable=durable, countdown=5)
        assert (broker.sent, left()) == ([], 2 * durable)
    assert [args for _, args, _ in broker.sent] == [(7,), (8,)]
    assert broker.sent[0][2]["template"] == "bill"
    assert broker.sent[1][2]["countdown"] == 5
    assert left() == 0


@pytest.mark.parametrize("durable", [False, True])
def test_rollback(mail, broker, durable):
    """A call is not sent after a rollback."""
    from django.db import transaction

    with transaction.atomic():
        mail.delay_on_commit(7, durable=durable)
        transaction.set_rollback(True)
    let_claims_end()
    assert (send_left_calls(mail.app), broker.sent, left()) == ((0, 0), [], 0)


def test_left_call(mail, broker):
    """``send_left_calls`` sends a call that is still in the outbox, once."""
    write(mail, broker, 7)
    assert [send_left_calls(mail.app) for _ in range(2)] == [(1, 0), (0, 0)]
    assert [args for _, args, _ in broker.sent] == [(7,)]
    assert left() == 0


def test_call_not_deleted(mail, broker, caplog):
    """If the row of a call cannot be deleted after it was sent, the call is sent again.

    Both have the same task ID. The caller gets no error, because its data is committed.
    """
    from django.db import DatabaseError, connection

    def refuse(execute, sql, *arguments):
        if sql.startswith("DELETE"):
            raise DatabaseError("password=hunter2")
        return execute(sql, *arguments)

    with connection.execute_wrapper(refuse):
        mail.delay_on_commit(7, durable=True)
    assert "sqs_backoff.outbox_not_deleted" in caplog.text
    assert "hunter2" not in caplog.text
    let_claims_end()
    assert send_left_calls(mail.app) == (1, 0)
    assert broker.sent[0] == broker.sent[1]


def test_two_senders(mail, broker):
    """Only one of two senders sends a call.

    This also holds if the second has read the row before the first has claimed it.
    """
    from celery_sqs_backoff.contrib.django.models import OutboxCall

    write(mail, broker, 7)
    (listed,) = OutboxCall.objects.values_list("pk", "claims")
    others = []

    def send_while_others_send(_, *args, **options):
        others.append(send_left_calls(mail.app))
        others.append(outbox._send(mail.app, OutboxCall.objects, *listed))
        broker.send(*args, **options)

    type(mail).apply_async = send_while_others_send
    assert send_left_calls(mail.app) == (1, 0)
    assert (others, len(broker.sent)) == ([(0, 0), None], 1)


def test_long_transaction(mail, broker):
    """A call is sent once even if its transaction takes longer than the first claim."""
    from django.db import transaction

    with transaction.atomic():
        mail.delay_on_commit(7, durable=True)
        let_claims_end()
        transaction.on_commit(lambda: send_left_calls(mail.app))
    assert (len(broker.sent), left()) == (1, 0)


def test_unsendable_call(mail, broker, caplog):
    """A call that cannot be sent does not hold up other calls. It goes to the end of the line.

    For example, a release of the project may have changed the task's arguments.
    """
    write(mail, broker, *[0] * 12, 7)
    send = type(mail).apply_async

    def refuse(_, args, kwargs, **options):
        if args == [0]:
            raise TypeError("hunter2")
        broker.send(args, kwargs, **options)

    type(mail).apply_async = refuse
    assert send_left_calls(mail.app) == (0, outbox.MOST_FAILURES), "the broker may be away"
    assert "hunter2" not in caplog.text
    assert send_left_calls(mail.app)[0] == 1
    assert [args for _, args, _ in broker.sent] == [(7,)]
    type(mail).apply_async = send


@pytest.mark.parametrize(
    "order",
    [object(), {"__type__": "uuid", "__value__": "x"}],
    ids=["an object", "a dict that kombu reads as its own"],
)
def test_arguments_not_json(mail, order):
    """A durable call whose arguments cannot be written as JSON raises an error at once."""
    with pytest.raises(TypeError, match="JSON"):
        mail.delay_on_commit(order, durable=True)
    assert left() == 0


def test_wrong_arguments(mail):
    """A durable call with an unknown argument raises an error at once.

    After the commit, no caller would get the error.
    """
    with pytest.raises(TypeError):
        mail.delay_on_commit(7, customr=8, durable=True)
    assert left() == 0


def test_other_database(mail, broker, tmp_path):
    """A durable call inside a transaction of another database raises an error.

    A rollback of that transaction would not remove the call from the outbox.
    """
    from celery.exceptions import ImproperlyConfigured
    from django.db import transaction

    project.add_database("orders", project.sqlite(tmp_path / "orders.sqlite3"))
    try:
        with (
            transaction.atomic(using="orders"),
            pytest.raises(
                ImproperlyConfigured, match="'orders' and the outbox table is on 'default'"
            ),
        ):
            mail.delay_on_commit(7, durable=True)
        assert (broker.sent, left()) == ([], 0)
    finally:
        project.close("orders")


def test_expires(mail, broker):
    """``expires`` counts from the call, and not from the time at which a sender sends it."""
    from django.db import transaction

    broker.is_down = True
    before = mail.app.now()
    with transaction.atomic():
        mail.apply_async_on_commit((7,), expires=60, durable=True)
    broker.is_down = False
    let_claims_end()
    send_left_calls(mail.app)
    late = broker.sent[0][2]["expires"] - before - timedelta(seconds=60)
    assert timedelta(0) <= late < timedelta(seconds=30)


def test_sender_without_task(mail, broker):
    """A sender that has not imported the task still uses the task's queue and priority.

    Otherwise the call would go to the default queue, whose workers may not know the task.
    """
    mail.queue, mail.priority = "mails", 3
    write(mail, broker, 7)
    sent = []
    other = Celery("other", broker="memory://", set_as_current=False)
    other.send_task = lambda name, args, kwargs, **options: sent.append(options)
    assert send_left_calls(other) == (1, 0)
    assert (sent[0]["queue"], sent[0]["priority"]) == ("mails", 3)


def test_send_in_transaction(mail, broker):
    """``send_left_calls`` raises an error inside a transaction.

    A rollback would bring back the rows of calls that were already sent.
    """
    from django.db import transaction

    write(mail, broker, 7)
    with pytest.raises(StoreInTransaction), transaction.atomic():
        send_left_calls(mail.app)
    assert (broker.sent, left()) == ([], 1)


def test_command(mail, broker):
    """``manage.py sqs_backoff_outbox`` sends the calls that are still in the outbox.

    It ends with an error if it could not send a call. A task for beat does the same.
    """
    from django.core.management import CommandError, call_command

    from celery_sqs_backoff.contrib.django.tasks import send_outbox

    mail.app.set_current()
    write(mail, broker, 7)
    broker.is_down = True
    out = StringIO()
    with pytest.raises(CommandError, match="1 could not be sent"):
        call_command("sqs_backoff_outbox", stdout=out)
    broker.is_down = False
    let_claims_end()
    call_command("sqs_backoff_outbox", stdout=out)
    assert (out.getvalue(), left()) == ("0 sent\n1 sent\n", 0)
    write(mail, broker, 8)
    assert send_outbox.name == "sqs_backoff_outbox"
    send_outbox()
    assert (len(broker.sent), left()) == (2, 0)
