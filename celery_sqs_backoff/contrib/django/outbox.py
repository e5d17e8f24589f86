"""Commit calls of tasks in the same transaction as their data, and send them after the commit.

A durable call of a task is a row in the outbox, a table. The caller's transaction writes the row.
After the commit, the same process sends the call and deletes the row. If a crash or an outage
prevents this, ``manage.py sqs_backoff_outbox``, or the task ``sqs_backoff_outbox`` in beat, sends
the call later. Before a process sends a call, it claims the call: it sets ``send_at`` to a minute
from now. Until then, no other process sends the call. If the process dies after sending the call
and before deleting the row, the call is sent again with the same task ID.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_task_logger
from kombu.utils.json import dumps, loads

from celery_sqs_backoff.store.connections import is_in_transaction
from celery_sqs_backoff.store.errors import StoreInTransaction
from celery_sqs_backoff.text import error_site

logger = get_task_logger(__name__)

CLAIM_SECONDS = 60.0  # Duration of a claim. Sending a call takes less time.
MOST_FAILURES = 10  # After this number of failures in a row, the broker counts as down.


class OnCommit:
    """A mixin with the methods of Celery's ``DjangoTask``, and the option ``durable``."""

    apply_async: Callable[..., Any]

    def delay_on_commit(self, *args: Any, durable: bool = False, **kwargs: Any) -> None:
        """Call ``delay`` after the commit. For ``durable`` see :meth:`apply_async_on_commit`."""
        self.apply_async_on_commit(args, kwargs, durable=durable)

    def apply_async_on_commit(
        self, args: Any = None, kwargs: Any = None, *, durable: bool = False, **options: Any
    ) -> None:
        """Call ``apply_async`` after the commit, with Django's ``on_commit``.

        After a rollback the task is not called.

        Arguments:
            durable: ``True`` = also write the call into the database, in the same transaction. If
                the process dies before it sends the call, or the broker is down, the call is sent
                later with the same task ID. Needs ``celery_sqs_backoff.contrib.django``, and
                arguments that are JSON. Default ``False``.

        Raises:
            TransactionManagementError: (of Django) autocommit is off, outside an atomic block.
            ImproperlyConfigured: (if durable) the Django app is not installed, or the open
                transaction is on another database than the outbox.
            TypeError: (if durable) the arguments are not JSON, or do not fit the task.
        """
        from django.db import transaction  # type: ignore[import-untyped]

        if durable:
            _write(self, tuple(args or ()), dict(kwargs or {}), options)
        else:
            transaction.on_commit(partial(self.apply_async, args, kwargs, **options))


def send_left_calls(app: Any) -> tuple[int, int]:
    """Send the unsent calls that no process claims. Return the numbers of sent and failed calls.

    The process that writes a call has the first claim, which ends after a minute. Each call is
    tried once. After ten failures in a row, the broker counts as down, and the function stops.

    Raises:
        StoreInTransaction: a transaction is open. Its rollback would restore the rows of sent
            calls, which would then be sent again.
    """
    from django.db import connections

    calls, now = _calls()
    connections[calls.db].ensure_connection()
    if is_in_transaction(connections[calls.db]):
        raise StoreInTransaction(f"a transaction is open on {calls.db!r}: leave it first")
    due = calls.filter(send_at__lte=now).order_by("send_at", "pk").values_list("pk", "claims")
    ended: list[bool | None] = []
    for pk, claims in list(due):
        if ended[-MOST_FAILURES:] == [False] * MOST_FAILURES:
            break
        ended.append(_send(app, calls, pk, claims))
    return ended.count(True), ended.count(False)


def _write(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Any) -> None:
    from django.db import connections, transaction

    calls, now = _calls()
    is_outside = not connections[calls.db].in_atomic_block
    for other in connections.all(initialized_only=True):
        if is_outside and other.in_atomic_block:
            raise ImproperlyConfigured(
                "a durable call must be written in the open transaction, but that transaction is on"
                f" {other.alias!r} and the outbox table is on {calls.db!r}: route the model"
                f" OutboxCall of celery_sqs_backoff to {other.alias!r} by DATABASE_ROUTERS"
            )
    transaction.on_commit(lambda: None, using=calls.db)  # Raises if Django runs no hooks here.
    if task.typing and hasattr(task, "__header__"):
        task.__header__(*args, **kwargs)  # Refuses wrong arguments, as ``apply_async`` does.
    # Store the task's options, because the process that sends the call may lack the task. A queue
    # or an exchange may be an object, so store its name.
    own = {name: getattr(it, "name", it) for name, it in task._get_exec_options().items()}
    options = {"task_id": str(uuid4()), **own, **options}
    if isinstance(seconds := options.get("expires"), int | float):
        # The seconds count from now, and not from the time at which the message is sent.
        options["expires"] = task.app.now() + timedelta(seconds=seconds)
    try:
        # Also decode the text. kombu may fail to decode {"__type__": ..., "__value__": ...}.
        loads(call := dumps([args, kwargs, options]))
    except Exception as exc:  # JSON's hooks may raise any exception
        raise TypeError(f"a durable call of {task.name} needs arguments that are JSON") from exc
    row = calls.create(task=task.name, call=call, send_at=now + timedelta(seconds=CLAIM_SECONDS))
    transaction.on_commit(partial(_send, task.app, calls, row.pk, 0), using=calls.db)


def _send(app: Any, calls: Any, pk: int, claims: int) -> bool | None:
    """Claim a call, send it, and delete its row. Return whether it was sent.

    ``None`` = another process has claimed or sent the call. Failures are logged and never raised,
    because the transaction that wrote the row is already committed.

    Arguments:
        claims: number of claims that the row had when it was read.
    """
    try:
        until = _calls()[1] + timedelta(seconds=CLAIM_SECONDS)
        if not calls.filter(pk=pk, claims=claims).update(claims=claims + 1, send_at=until):
            return None
        name, call = calls.values_list("task", "call").get(pk=pk)
        args, kwargs, options = loads(call)
        task = app.tasks.get(name)
        send = partial(app.send_task, name) if task is None else task.apply_async
        send(args, kwargs, **options)
    except Exception as exc:  # noqa: BLE001  # broker and database may raise any exception
        logger.error("sqs_backoff.outbox_not_sent: %s: %s", pk, error_site(exc.__cause__ or exc))
        return False
    try:
        calls.filter(pk=pk).delete()
    except Exception as exc:  # noqa: BLE001  # the database's library may raise any exception
        logger.error("sqs_backoff.outbox_not_deleted: %s: %s", pk, error_site(exc.__cause__ or exc))
    return True


def _calls() -> tuple[Any, Any]:
    """Return the manager of the outbox's table, and the expression for its database's clock."""
    from django.apps import apps  # type: ignore[import-untyped]

    if not apps.is_installed("celery_sqs_backoff.contrib.django"):
        raise ImproperlyConfigured(
            "a durable call needs 'celery_sqs_backoff.contrib.django' in INSTALLED_APPS"
        )
    from django.db import router

    from .models import OutboxCall, UTCNow

    return OutboxCall.objects.using(router.db_for_write(OutboxCall)), UTCNow()
