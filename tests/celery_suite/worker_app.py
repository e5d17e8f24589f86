"""The Celery app of the worker in Celery's integration tests. ``celery -A`` imports this module."""

from __future__ import annotations

import os

from celery import Celery

from .plugin import BROKER, OPTIONS, TASK_CLASS

if task_class := os.environ.get(TASK_CLASS):
    Celery.task_cls = task_class

app = Celery("celery.tests", broker=os.environ[BROKER], backend=os.environ["TEST_BACKEND"])
app.conf.update(broker_transport_options=OPTIONS, result_extended=True)
app.set_default()
from t.integration import tasks  # noqa: E402  # the current app gets these tasks

if hasattr(tasks, "ClassBasedAutoRetryTask"):
    app.register_task(tasks.ClassBasedAutoRetryTask())
