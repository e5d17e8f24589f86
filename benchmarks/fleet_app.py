"""The Celery app of the workers of ``benchmarks.fleet``. Its tasks call a provider."""

from __future__ import annotations

import json
import os
import time

import requests
from celery import Celery

from celery_sqs_backoff import Provider, SQSBackoffTask
from celery_sqs_backoff.classifiers import requests_errors

SETTINGS = json.loads(os.environ.get("FLEET_SETTINGS", "{}"))

app = Celery("fleet")
app.conf.update(SETTINGS.get("celery", {}))


@app.task(
    base=SQSBackoffTask,
    classify=(requests_errors(idempotent=True),),
    provider=Provider("mail", rate=SETTINGS.get("rate")),
)
def mail(number: int) -> None:
    """Send a mail."""
    timeout = SETTINGS["timeout"]
    url = f"{SETTINGS['url']}/{number}?{time.time()}"
    requests.post(url, timeout=timeout).raise_for_status()


@app.task(base=SQSBackoffTask, provider=Provider("other"))
def other(sent_at: float) -> None:
    """Call another provider, which is up, and tell it how long the task has waited."""
    requests.post(f"{SETTINGS['url']}/other?{time.time() - sent_at}", timeout=30)
