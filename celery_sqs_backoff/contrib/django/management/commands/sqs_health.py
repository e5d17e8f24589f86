"""``manage.py sqs_health``: ``celery sqs-health`` on the project's Celery app."""

from celery_sqs_backoff.commands.health import sqs_health

from ...shell import manage_command

Command = manage_command(sqs_health)
