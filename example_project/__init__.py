"""An outage of a mail provider: a small Django project that sends mail with Celery on SQS."""

from .celery import app as celery_app

__all__ = ["celery_app"]
