"""Make an app for ``sqs-doctor`` to check. The app's task needs at most 21 receives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery

from celery_sqs_backoff import Schedule, SQSBackoffTask


@contextmanager
def doctored_app() -> Iterator[Celery]:
    """Yield the app. Its task is retried every 30 seconds for ten minutes."""
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
    # Modules of other tests may share their tasks with all apps.
    for name in set(app.tasks) - {"shop.send_mail"}:
        del app.tasks[name]
    yield app
    app.close()
