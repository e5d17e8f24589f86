"""Run the workflow of ``example_project.payments`` in children that end at a given line.

``python -m tests.integration.safe_workflow DATABASE BANK_URL MODE``: the PostgreSQL database, the
bank, and ``every-line`` or ``refused``. Prints one JSON object per run of the workflow.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.request import urlopen

#: Where the process is ended, line by line: the workflow, and what records its steps.
TRACED = (
    "example_project/payments/workflow.py",
    "example_project/payments/tasks.py",
    "celery_sqs_backoff/safe/steps.py",
    "celery_sqs_backoff/safe/workflow.py",
)

#: Of a line's executions, so many.
_TIMES = 1

_KILLED, _FAILED = 9, 1


def main(database: str, bank_url: str, mode: str) -> None:
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
    run = _workflow()
    if mode == "refused":
        pk = _apply("refused")
        codes = [_in_child(lambda: run(pk)) for _ in range(2)]
        print(json.dumps(_state(pk, bank_url) | {"codes": codes}))  # noqa: T201
        return
    line, where = 0, ""
    while where != "the end":
        line += 1
        pk = _apply(f"customer {line}")
        where = _killed_at(lambda pk=pk: run(pk), line)
        _let_leases_end()
        # Twice: what is done must stay as it is.
        code = _in_child(lambda pk=pk: (run(pk), run(pk)))
        print(json.dumps(_state(pk, bank_url) | {"at": where, "code": code}))  # noqa: T201


def _workflow() -> Callable[[int], None]:
    """One delivery of a message. The steps' own tasks run at once, in this process."""
    from celery import Celery

    app = Celery("payments", broker="memory://")
    app.conf.update(
        task_always_eager=True, task_eager_propagates=True, sqs_backoff={"store": "django"}
    )
    app.set_default()
    from example_project.payments.tasks import fund_account

    app.finalize()

    def run(pk: int) -> None:
        fund_account.apply((pk,), task_id=f"message {pk}")

    return run


def _apply(customer: str) -> int:
    from django.db import connection

    from example_project.payments.models import Application

    application = Application.objects.create(customer=customer)
    for amount in (100, 666 if customer == "refused" else 200):
        application.fundings.create(amount=amount)
    connection.close()
    return int(application.pk)


def _in_child(run: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = _FAILED
        try:
            run()
            code = 0
        except BaseException:  # noqa: BLE001  # the child's end is its exit code
            if os.environ.get("SHOW"):
                traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _killed_at(run: Callable[[], object], line: int) -> str:
    """End a child before the ``line``-th line that it would execute; say where that was."""
    reading, writing = os.pipe()
    left = line
    executed: dict[tuple[str, int], int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        here = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and (seen := executed.get(here, 0)) < _TIMES:
            executed[here] = seen + 1
            left -= 1
            if left == 0:
                at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                os.write(writing, at.encode())
                os._exit(_KILLED)
        return trace

    def traced() -> None:
        sys.settrace(trace)
        run()

    code = _in_child(traced)
    os.close(writing)
    where = os.read(reading, 100).decode()
    os.close(reading)
    if code == 0:
        return "the end"
    assert code == _KILLED, code
    return where


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
    with urlopen(f"{bank_url}/{application.customer.replace(' ', '-')}") as response:
        return state | {"bank": json.load(response)}


if __name__ == "__main__":
    main(*sys.argv[1:])
