"""A process that writes durable calls, or sends those that are left, until it is killed.

``python -m tests.integration.safe_outbox write|send DATABASE FILE SEED``. The broker is the file:
each call that is sent is a line of its order and its task ID.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_sqs_backoff import SQSBackoffTask

from .django_app import project


def app_with(send: Callable[..., Any]) -> Celery:
    """Return an app whose task ``mail`` is sent by a function."""
    app = Celery("outbox", broker="memory://", set_as_current=False)
    app.finalize()

    @app.task(shared=False, base=SQSBackoffTask, name="mail")
    def mail(order: Any, template: str = "welcome") -> None: ...

    type(app.tasks["mail"]).apply_async = lambda _, *args, **options: send(*args, **options)
    return app


def _main(role: str, database: str, path: str, seed: str) -> None:
    project.add_database("default", json.loads(database))
    from django.db import DatabaseError, InterfaceError, connection, connections, transaction
    from django.utils import timezone

    from celery_sqs_backoff.contrib.django.models import Record
    from celery_sqs_backoff.contrib.django.outbox import send_left_calls

    if hasattr(connections._connections, "default"):
        del connections["default"]  # of no database
    rng = random.Random(int(seed))
    broker = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def send(args: Any, kwargs: Any, task_id: str, **options: Any) -> None:
        if rng.random() < 0.2:
            raise ConnectionError("the broker is away")
        os.write(broker, f"{args[0]} {task_id}\n".encode())

    app = app_with(send)
    number = 0
    while True:
        try:
            if role == "send":
                send_left_calls(app)
                continue
            number += 1
            with transaction.atomic():
                order = f"order-{seed}-{number}"
                Record.objects.create(key=order, value="", digest="", expires_at=timezone.now())
                app.tasks["mail"].delay_on_commit(order, durable=True)
                transaction.set_rollback(rng.random() < 0.2)
        except (DatabaseError, InterfaceError):
            connection.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
