"""An app for the doctor to look at: one task that needs 21 receives at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery

from celery_sqs_backoff import Schedule, SQSBackoffTask


@contextmanager
def doctored_app() -> Iterator[Celery]:
    """Make the app. Its task is retried each 30 seconds, for ten minutes."""
    app = Celery("doctored", set_as_current=False)

    @app.task(
        base=SQSBackoffTask,
        shared=False,
        name="shop.send_mail",
        backoff=Schedule([30]),
        retry_for=600,
    )
    def send_mail() -> None: ...

    app.finalize()
    for name in set(app.tasks) - {"shop.send_mail"}:  # shared tasks of other tests' modules
        del app.tasks[name]
    yield app
    app.close()
