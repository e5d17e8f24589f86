"""The same task as a Celery user writes it without the package, for the demo's comparison.

``celery -A example_project.stock worker``: no task of ours is imported, so this is stock Celery.
"""

import os
from typing import Any
from urllib.error import HTTPError, URLError

from celery import Celery, Task

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

app = Celery("stock")
app.config_from_object("django.conf:settings", namespace="CELERY")
# The fastest that we have found for stock Celery on SQS.
app.conf.broker_transport_options = {**app.conf.broker_transport_options, "polling_interval": 0}


@app.task(
    bind=True,
    name="example_project.mails.tasks.send_mail",
    autoretry_for=(HTTPError, URLError),
    retry_backoff=4,
    retry_backoff_max=12,
    max_retries=None,
)
def send_mail(self: "Task[Any, Any]", mail_id: int) -> None:
    from .mails.delivery import deliver  # not before Django is set up

    deliver(mail_id)
