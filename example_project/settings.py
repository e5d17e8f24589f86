"""Django settings: Celery on SQS, and how long and how often a failed mail is tried again."""

import os
from datetime import timedelta
from pathlib import Path

from celery_sqs_backoff import FullJitter, Provider

SECRET_KEY = "an example has nothing to hide"
INSTALLED_APPS = [
    "example_project.mails",
    "example_project.payments",
    "celery_sqs_backoff.contrib.django",
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE", Path(__file__).with_name("db.sqlite3")),
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# The queue. On AWS this is "sqs://", and the URL of the real queue. boto3 finds the credentials.
CELERY_BROKER_URL = os.environ.get("BROKER_URL", "sqs://local:local@127.0.0.1:4566")
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "region": "us-east-1",
    "is_secure": False,  # plain HTTP to the SQS on this machine
    "predefined_queues": {
        "mails": {
            "url": os.environ.get("MAILS_QUEUE_URL", "http://127.0.0.1:4566/000000000000/mails"),
        },
    },
}
CELERY_TASK_DEFAULT_QUEUE = "mails"

# The options of all tasks that do not say otherwise. The delays are seconds, for a demo. A real
# provider's outage needs up to an hour, or a message would have more receives than SQS counts.
CELERY_SQS_BACKOFF = {
    "backoff": FullJitter(base=4, cap=12),
    "retry_for": timedelta(hours=1),
    "store": "django",  # where guards, steps, locks and renewed keys are recorded
}

# While the provider is down its mails wait, and one is tried now and then. The demo also shows a
# worker without it.
MAIL_PROVIDER = (
    Provider("mails", probe_interval=2)
    if os.environ.get("MAILS_PROVIDER", "yes") == "yes"
    else None
)
MAIL_PROVIDER_URL = os.environ.get("MAIL_PROVIDER_URL", "http://127.0.0.1:8025")
BANK_URL = os.environ.get("BANK_URL", "http://127.0.0.1:8026")
