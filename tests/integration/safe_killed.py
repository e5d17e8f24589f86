"""Deliver messages to processes that are killed at random moments, until each message is done.

``python -m tests.integration.safe_killed URL DATABASE KILLS SEED FILE``: the store, Django's
database for it (JSON; ``null`` = none), how often to kill, and the file to which what takes effect
outside is appended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from celery import Celery

from celery_sqs_backoff import Guard, NonRetryable, SQSBackoffTask, WorkflowTask
from celery_sqs_backoff.safe import TryLater
from tests.support.record import Record

from .django_app import project

ORDERS = range(2)
STEPS = "abc"

TAKE_BACK = "celery_sqs_backoff.take_back"

#: A lease must outlive a step, and the wait for a killed holder's is what this test waits for.
_LEASE_SECONDS = 1.5

#: Of the delivery of all messages, by a process that nobody kills; then it is a hang.
_TIMEOUT_SECONDS = 60.0


def main(url: str, database: str, kills: str, seed: str, path: str) -> None:
    if (settings := json.loads(database)) is not None:
        project.add_database("killed", settings)
        url = "django://killed"
    record, rng = Record(Path(path)), Random(int(seed))
    app = _app(url, record)
    messages = [
        (f"{name} {order} {number}", name, order)
        for order in ORDERS
        for name in ("mail", "fund", "refused")
        # Two mean the same work; what was taken back is over for the second.
        for number in range(1 if name == "refused" else 2)
    ]
    left = int(kills)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while (messages := [m for m in messages if not record.entries(done=m[0])]) or _owed(record):
        assert time.monotonic() < deadline, (messages, _owed(record))
        rng.shuffle(messages)
        pid = os.fork()
        if pid == 0:
            try:
                _deliver(app, messages, record)
            finally:
                os._exit(0)
        if left:
            time.sleep(rng.uniform(0.0, 0.25))
            os.kill(pid, signal.SIGKILL)
            left -= 1
        os.waitpid(pid, 0)


def _owed(record: Record) -> list[list[Any]]:
    """Return the arguments of tasks that take a workflow back, as a broker keeps them."""
    sent = [entry["take_back"] for entry in record.entries() if "take_back" in entry]
    return [args for args in sent if not record.entries(taken_back=args)]


def _deliver(app: Celery, messages: Iterable[tuple[str, str, int]], record: Record) -> None:
    for args in _owed(record):
        _run(app, TAKE_BACK, args, record, task_id=repr(args), taken_back=args)
    for message, name, order in messages:
        _run(app, name, (order,), record, task_id=message, done=message)


def _run(
    app: Celery, name: str, args: Any, record: Record, task_id: str | None = None, **done: Any
) -> None:
    """Run a message. One that is to come back, for a killed holder's lock say, has sent nothing."""
    sent: list[Any] = []
    app.tasks[TAKE_BACK].apply_async = lambda args, *_, **__: sent.append(list(args))
    ended = app.tasks[name].apply(args, task_id=task_id)
    if not isinstance(ended.result, TryLater):
        for take_back in sent:  # a broker keeps it, whatever becomes of the process
            record.append(take_back=take_back)
        record.append(**done)


def _app(url: str, record: Record) -> Celery:
    app = Celery("killed", broker="memory://")
    app.conf.update(task_always_eager=True, sqs_backoff={"store": url, "secret": "secret"})

    def effect(what: str, key: str | None = None, message: str | None = None) -> str:
        record.append(what=what, key=key, message=message)
        time.sleep(0.01)  # the answer is under way
        return what

    @app.task(base=SQSBackoffTask, bind=True, name="mail", guard=Guard(key="m:{order}", window=600))
    def mail(self: Any, order: int) -> None:
        effect(f"mail {order}", message=self.request.id)

    @app.task(base=SQSBackoffTask, bind=True, name="undo")
    def undo(self: Any, _: object, order: int, step: str) -> None:
        record.append(undone=f"refused {order} {step}", id=self.request.id)

    def steps(self: Any, name: str, order: int) -> None:
        with self.workflow(f"{name}:{order}", lease=_LEASE_SECONDS) as workflow:
            for step in STEPS:
                what, key = f"{name} {order} {step}", workflow.key(step)
                workflow.step(step, effect, what, key, undo=undo.s(order, step))
            if name == "refused":
                raise NonRetryable("the last word of the provider")

    @app.task(base=WorkflowTask, bind=True, name="fund")
    def fund(self: Any, order: int) -> None:
        steps(self, "fund", order)

    @app.task(base=WorkflowTask, bind=True, name="refused")
    def refused(self: Any, order: int) -> None:
        steps(self, "refused", order)

    app.finalize()
    return app


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(*sys.argv[1:])
