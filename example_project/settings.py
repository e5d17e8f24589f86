"""Django settings: Celery on SQS, and how often and how long a failed mail is retried."""

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

# The broker and the queue. On AWS the broker URL is "sqs://", and the queue has its real URL. boto3
# finds the credentials.
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

# The options of all tasks, unless a task has its own. For the demo, the delays are a few seconds.
# In production use delays of up to an hour. With short delays, a long outage would need more
# receives of a message than SQS's maxReceiveCount allows.
CELERY_SQS_BACKOFF = {
    "backoff": FullJitter(base=4, cap=12),
    "retry_for": timedelta(hours=1),
    "store": "django",  # guards, steps, locks and idempotency keys are recorded in the database
}

# While the provider is down, its mails wait, and the worker tries one now and then. The demo also
# runs a worker without this.
MAIL_PROVIDER = (
    Provider("mails", probe_interval=2)
    if os.environ.get("MAILS_PROVIDER", "yes") == "yes"
    else None
)
MAIL_PROVIDER_URL = os.environ.get("MAIL_PROVIDER_URL", "http://127.0.0.1:8025")
BANK_URL = os.environ.get("BANK_URL", "http://127.0.0.1:8026")
