"""The same task without the package, as the demo's comparison with stock Celery.

``celery -A example_project.stock worker`` imports none of our tasks, so it is a stock worker.
"""

import os
from typing import Any
from urllib.error import HTTPError, URLError

from celery import Celery, Task

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

app = Celery("stock")
app.config_from_object("django.conf:settings", namespace="CELERY")
# With this setting, stock Celery on SQS is fastest.
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
    from .mails.delivery import deliver  # Django must be set up before this import

    deliver(mail_id)
