"""Run the workflow of ``example_project.payments`` in children that end at a given line.

``python -m tests.integration.safe_workflow DATABASE BANK_URL MODE``: the PostgreSQL database, the
bank, and ``every-change``, ``every-line`` or ``refused``. Prints one JSON object per run of the
workflow.

Between two changes of what is outside, the database and the bank, it makes no difference at which
line a process ends. ``every-change`` ends it once before the first, and once after each of them:
at the next line of ours.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.request import urlopen

#: Where the process is ended, line by line: the workflow, and what records its steps.
TRACED = (
    "example_project/payments/workflow.py",
    "example_project/payments/tasks.py",
    "celery_sqs_backoff/safe/document.py",
    "celery_sqs_backoff/safe/workflow.py",
    "celery_sqs_backoff/safe/take_back.py",
)

#: With ``every-line``: of a line's executions, so many.
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
    if mode == "every-line":
        lines: Iterable[int] = count(1)
        times = _TIMES
    else:
        pk = _apply("who is not killed")
        lines, times = _lines_after_changes(lambda: run(pk)), sys.maxsize
    for line in lines:
        pk = _apply(f"customer {line}")
        where = _killed_at(lambda pk=pk: run(pk), line, times)
        _let_leases_end()
        # Twice: what is done must stay as it is.
        code = _in_child(lambda pk=pk: (run(pk), run(pk)))
        print(json.dumps(_state(pk, bank_url) | {"at": where, "code": code}))  # noqa: T201
        if where == "the end":
            return


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


def _killed_at(run: Callable[[], object], line: int, times: int) -> str:
    """End a child before the ``line``-th line that it would execute; say where that was."""
    reading, writing = os.pipe()
    left = line

    def before(frame: FrameType) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            os.write(writing, at.encode())
            os._exit(_KILLED)

    code = _in_child(_traced(run, before, times))
    os.close(writing)
    where = os.read(reading, 100).decode()
    os.close(reading)
    if code == 0:
        return "the end"
    assert code == _KILLED, code
    return where


def _lines_after_changes(run: Callable[[], object]) -> list[int]:
    """The first line, the one after each change outside, and one more, which is never reached."""
    reading, writing = os.pipe()
    changes = lines = 0
    seen: list[int] = []

    def change() -> None:
        nonlocal changes
        changes += 1

    def before(_: FrameType) -> None:
        nonlocal lines
        lines += 1
        if len(seen) <= changes:
            seen.extend([lines] * (changes + 1 - len(seen)))

    def watched() -> None:
        with _changes_noticed(change):
            _traced(run, before, sys.maxsize)()
            sys.settrace(None)
        os.write(writing, json.dumps([*dict.fromkeys(seen), lines + 1]).encode())

    code = _in_child(watched)
    os.close(writing)
    assert code == 0, code
    with open(reading) as found:
        return list(json.load(found))


@contextmanager
def _changes_noticed(change: Callable[[], None]) -> Iterator[None]:
    """Call ``change`` after each statement that writes, each commit, and each request."""
    from django.db import connection

    from example_project.payments import bank

    def execute(execute: Any, sql: str, *arguments: Any) -> Any:
        result = execute(sql, *arguments)
        if not sql.startswith("SELECT"):
            change()
        return result

    def and_notice(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            change()
            return result

        return wrapped

    bank.urlopen = and_notice(bank.urlopen)
    connection._commit = and_notice(connection._commit)
    with connection.execute_wrapper(execute):
        yield


def _traced(
    run: Callable[[], object], before: Callable[[FrameType], None], times: int
) -> Callable[[], None]:
    """Run it, and call ``before`` at each of the lines, ``times`` times at most."""
    executed: Counter[tuple[str, int]] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        here = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and executed[here] < times:
            executed[here] += 1
            before(frame)
        return trace

    def traced() -> None:
        sys.settrace(trace)
        run()

    return traced


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
