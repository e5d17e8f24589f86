"""Run the workflow of ``example_project.payments`` in processes that are killed during it.

``python -m tests.integration.safe_workflow DATABASE BANK_URL CUSTOMER`` takes the name of a
PostgreSQL database, the URL of the bank, and ``killed`` or ``refused``. The first process is killed
after its first change outside, which is a request to the bank or a write to the database. The
second is killed after its second change, and so on. Then another process runs the same message. The
program prints one JSON object per workflow.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from urllib.request import urlopen

_KILLED = 9


def main(database: str, bank_url: str, customer: str) -> None:
    import django
    from django.conf import settings

    from .django_app import project

    settings.configure(
        INSTALLED_APPS=["celery_sqs_backoff.contrib.django", "example_project.payments"],
        DATABASES={"default": project.postgresql(database)},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
        SECRET_KEY="test",
        BANK_URL=bank_url,
    )
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    deliver = _delivery()
    for changes in count(1):
        pk = _apply(f"{customer}-{changes}", last_amount=666 if customer == "refused" else 200)
        code = _in_child(lambda pk=pk: deliver(pk), changes)
        _let_leases_end()
        # Deliver the message twice, because the second run must change nothing.
        last = _in_child(lambda pk=pk: deliver(pk) and deliver(pk))
        print(json.dumps(_state(pk, bank_url) | {"code": last}))  # noqa: T201
        if code != _KILLED:
            return


def _delivery() -> Callable[[int], bool]:
    """Return a function that delivers a message, and returns whether its run has ended well.

    Tasks that a step sends run at once, in the same process.
    """
    from celery import Celery

    app = Celery("payments", broker="memory://")
    app.conf.update(task_always_eager=True, sqs_backoff={"store": "django"})
    app.set_default()
    from example_project.payments.tasks import fund_account

    app.finalize()
    # SQS delivers a task again if its process was killed. The task has the same ID then.
    task = app.tasks["celery_sqs_backoff.take_back"]
    task.apply_async = partial(task.apply_async, task_id="take back")

    def deliver(pk: int) -> bool:
        return bool(fund_account.apply((pk,), task_id=f"message {pk}").successful())

    return deliver


def _apply(customer: str, *, last_amount: int) -> int:
    from django.db import connection

    from example_project.payments.models import Application

    application = Application.objects.create(customer=customer)
    for amount in (100, last_amount):
        application.fundings.create(amount=amount)
    connection.close()
    return int(application.pk)


def _in_child(run: Callable[[], bool], changes: int | None = None) -> int:
    """Run a function in a child process and return its exit code.

    The child is killed after ``changes`` changes outside. None means that it is not killed.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if changes is not None:
                _end_after(changes)
            code = 0 if run() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_after(changes: int) -> None:
    """Let this process end after this many writes, commits and requests to the bank."""
    from django.db import connection

    from example_project.payments import bank

    left = changes

    def and_end(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            result = function(*arguments, **options)
            left -= 1
            if not left:
                os._exit(_KILLED)
            return result

        return wrapped

    def execute(execute: Any, sql: str, *arguments: Any) -> Any:
        return (execute if sql.startswith("SELECT") else and_end(execute))(sql, *arguments)

    bank.urlopen = and_end(bank.urlopen)
    connection._commit = and_end(connection._commit)
    connection.execute_wrappers.append(execute)


def _let_leases_end() -> None:
    from django.db import connection
    from django.db.models.functions import Now

    from celery_sqs_backoff.contrib.django.models import Record

    Record.objects.filter(key__startswith="lock:").update(expires_at=Now())
    connection.close()


def _state(pk: int, bank_url: str) -> dict[str, Any]:
    from django.db import connection

    from example_project.payments.models import Application, LedgerEntry

    application = Application.objects.get(pk=pk)
    entries = LedgerEntry.objects.filter(funding__application=pk).order_by("funding")
    state = {
        "account": application.account,
        "entries": list(entries.values_list("state", flat=True)),
    }
    connection.close()
    with urlopen(f"{bank_url}/{application.customer}") as response:
        return state | {"bank": json.load(response)}


if __name__ == "__main__":
    main(*sys.argv[1:])
