"""Calls of tasks that are written with the data they are about, and sent after its commit.

A call is a row in the same transaction::

    (no row) --write--> claimed --send--> sent --delete--> (no row)
                         ^   |
                         +---+ by another, when the claim has ended

It is sent by the process that wrote it, right after the commit, and deleted then; what a crash or a
broker outage has left is sent by a worker's housekeeping, or by ``manage.py sqs_backoff_outbox``.
Who sends holds the claim. A call may be sent twice, if a process ends or is stopped between sending
and deleting, always under the same task id.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_task_logger
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps, loads

from ..sqs.errors import Operation, failure_of
from ..store import statements
from ..store.connections import open_transactions
from ..text import error_site, printable
from .commit import after_commit, refuse_manual_transaction

__all__ = ["CLAIM_SECONDS", "Round", "send_left_calls", "send_on_commit", "use_autocommit"]

logger = get_task_logger(__name__)

T = TypeVar("T")

#: How long a process has for itself to send a call that it has written or claimed.
CLAIM_SECONDS = 60.0

#: Calls that are looked up in one go.
_BATCH = 100

#: So many in a row that did not reach the broker mean that it is away: the others wait.
_MAX_FAILED = 10


class Round(NamedTuple):
    """How many calls one round over the outbox has sent, and how many it could not send."""

    sent: int
    unsent: int


class _TakenOver(Exception):
    """Somebody else sends the call."""


def send_on_commit(
    task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> None:
    """Write a call into the outbox of the open transaction.

    Outside a transaction it is written, sent and deleted at once. That it could not be sent is
    logged: it is sent later.

    Raises:
        ImproperlyConfigured: ``celery_sqs_backoff.contrib.django`` is not installed, or the open
            transaction is on another database than the outbox.
        django.db.transaction.TransactionManagementError: autocommit is off, outside ``atomic()``.
        TypeError: the arguments are not the task's, or they or the options are not JSON.
    """
    calls, now = _calls()
    alias = calls.db
    _connect(alias)
    refuse_manual_transaction()
    others = set(open_transactions()) - {alias}
    if others and alias not in open_transactions():
        raise ImproperlyConfigured(
            f"a durable call is written in the transaction that is open, but that is on"
            f" {', '.join(sorted(map(repr, others)))}, and the outbox is on {alias!r}: route the"
            " model OutboxCall of celery_sqs_backoff there by DATABASE_ROUTERS, and migrate it"
        )
    if task.typing and hasattr(task, "__header__"):  # as Celery does, but only when it sends
        task.__header__(*args, **kwargs)
    # For a sender that does not have the task. (A queue or exchange may be an object: its name.)
    own = {name: getattr(it, "name", it) for name, it in task._get_exec_options().items()}
    seconds = options.get("expires", own.get("expires"))
    if isinstance(seconds, int | float):  # from now, not from the sending
        options["expires"] = task.app.now() + timedelta(seconds=seconds)
    # A chosen one stays among the options: two calls may have the same, and each is a row.
    task_id, chosen = str(uuid4()), options.pop("task_id", None)
    if chosen:
        options["task_id"] = str(chosen)
    try:
        call = dumps({"args": list(args), "kwargs": kwargs, "options": options, "own": own})
        loads(call)  # a dict with "__type__" is read as kombu's own
    except Exception as exc:  # whatever JSON's hooks raise
        raise TypeError(f"a durable call of {task.name} needs arguments that are JSON") from exc
    claim = uuid4().hex
    calls.create(
        task_id=task_id,
        task=task.name,
        call=call,
        claim=claim,
        claimed_until=now + timedelta(seconds=CLAIM_SECONDS),
        created_at=now,
    )
    after_commit(partial(_send_own, task.app, calls, task_id, claim))


def send_left_calls(app: Any, *, between: Callable[[], object] = lambda: None) -> Round:
    """Send the calls that nobody has sent in time.

    Each is claimed first, so of several workers one sends it. What cannot be sent waits for the
    next round, behind the others: a round tries no call twice.

    Arguments:
        between: called before each call; what it raises ends the round, and nothing is lost.

    Raises:
        StoreInTransaction: the outbox's database is inside a transaction. A rollback would bring
            back what has been sent, to be sent again.
    """
    calls, now = _calls()
    sent = unsent = failed = 0
    tried: set[str] = set()
    while failed < _MAX_FAILED:
        due = calls.filter(claimed_until__lte=now).order_by("claimed_until")
        rows = due.values_list("task_id", "claim")[:_BATCH]
        found: list[tuple[str, str]] = _make(calls, partial(list, rows))
        if not found or found[0][0] in tried:
            break
        for task_id, claim in found:
            if task_id in tried:
                continue
            tried.add(task_id)
            between()
            mine = uuid4().hex
            if not _take_over(calls, task_id, claim, mine):
                continue  # somebody else was quicker
            failure = _send(app, calls, task_id, mine)
            if failure is None:
                sent, failed = sent + 1, 0
            elif not isinstance(failure, _TakenOver):
                unsent += 1
                failed += _is_of_the_broker(failure)
            if failed >= _MAX_FAILED:
                break
    return Round(sent, unsent)


def _send_own(app: Any, calls: Any, task_id: str, claim: str) -> None:
    """After the commit, in the process that wrote the call. Does not raise: it is committed."""
    try:
        # The transaction may have taken longer than the claim: somebody else may be sending.
        if _take_over(calls, task_id, claim, mine := uuid4().hex):
            _send(app, calls, task_id, mine)
    except Exception as exc:  # noqa: BLE001  # whatever the database's library raises
        logger.error("sqs_backoff.outbox_not_sent: %s: %s", printable(task_id), error_site(exc))


def _take_over(calls: Any, task_id: str, claim: str, mine: str) -> bool:
    _, now = _calls()
    end = now + timedelta(seconds=CLAIM_SECONDS)
    # Made again, the statement may find our own claim.
    rows = calls.filter(task_id=task_id, claim__in=[claim, mine])
    take = partial(rows.update, claim=mine, claimed_until=end)
    return bool(_make(calls, take))


def _send(app: Any, calls: Any, task_id: str, claim: str) -> Exception | None:
    """Send and delete a call; return what has kept it from being sent."""
    own = calls.filter(task_id=task_id, claim=claim)
    row = _make(calls, own.values_list("task", "call").first)
    if row is None:
        return _TakenOver()
    name, sent_as = row[0], task_id
    try:
        call = loads(row[1])
        args, options = tuple(call["args"]), call["options"]
        sent_as = options.setdefault("task_id", task_id)
        if name in app.tasks:
            app.tasks[name].apply_async(args, call["kwargs"], **options)
        else:  # a task of another service
            app.send_task(name, args, call["kwargs"], **{**call.get("own", {}), **options})
    except Exception as exc:  # noqa: BLE001  # whatever the broker's library raises; the row stays
        logger.error(
            "sqs_backoff.outbox_not_sent: %s[%s]: %s",
            *(printable(name), printable(sent_as), _why(exc)),
        )
        return exc
    try:
        _make(calls, partial(own._raw_delete, calls.db))
    except Exception as exc:  # noqa: BLE001  # whatever the database's library raises
        logger.error(
            "sqs_backoff.outbox_not_deleted: %s[%s]: %s",
            *(printable(name), printable(sent_as), error_site(exc)),
        )
    return None


def _is_of_the_broker(failure: Exception) -> bool:
    """Whether other calls would fail too: the broker is away, or asks for fewer of them.

    A queue that is missing, a right that a worker lacks or a call that is too large is the call's.
    """
    is_away = isinstance(failure, OperationalError | OSError)  # kombu's, of all brokers
    return is_away or failure_of(failure, Operation.SEND).is_transient


def _why(failure: Exception) -> str:
    cause = failure.__cause__ if isinstance(failure, OperationalError) else None
    code = failure_of(cause or failure, Operation.SEND).code
    return f"{printable(code)}: {error_site(cause or failure)}"


def _connect(alias: str) -> None:
    """Open the connection, if it is not: whether autocommit is off shows only then."""
    from django.db import connections  # type: ignore[import-untyped]

    connections[alias].ensure_connection()


def use_autocommit() -> None:
    """Leave a setting ``AUTOCOMMIT`` of ``False``: for a thread whose connection is its own."""
    from django.db import connections

    connection = connections[_calls()[0].db]
    if not connection.in_atomic_block and not connection.get_autocommit():
        connection.set_autocommit(True)


def _make(calls: Any, statement: Callable[[], T]) -> T:
    refusal = (
        f"The outbox's database alias {calls.db!r} is inside a transaction, whose rollback would"
        " bring back what has been sent: leave the atomic block first, or switch autocommit on"
    )
    return statements.make(calls.db, statement, refusal=refusal)


def _calls() -> tuple[Any, Any]:
    """The table, in the database to which it is routed, and that database's now."""
    from django.apps import apps  # type: ignore[import-untyped]

    if not apps.is_installed("celery_sqs_backoff.contrib.django"):
        raise ImproperlyConfigured(
            "a durable call needs 'celery_sqs_backoff.contrib.django' in INSTALLED_APPS"
        )
    from django.db import router

    from ..contrib.django.models import OutboxCall, UTCNow

    return OutboxCall.objects.using(router.db_for_write(OutboxCall)), UTCNow()
